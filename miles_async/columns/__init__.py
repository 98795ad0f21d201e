"""Per-token data of samples: one class per column declares what it contains (see `column.py`)."""

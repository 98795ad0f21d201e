"""The wire formats of the endpoint, one file each; `miles_async/wire_formats.py` says what a format provides."""

"""Model plug-ins: one class per model type, found by entry point. `plugin.py` defines what a plug-in provides."""

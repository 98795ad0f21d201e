"""Model plug-ins: one class per model type. `plugin.py` defines what a plug-in provides."""

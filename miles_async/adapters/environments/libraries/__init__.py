"""The libraries of environments, one file each; `miles_async/environments.py` says what a library provides."""

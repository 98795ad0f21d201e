"""The weight transports, one file each; `miles_async/transports.py` says what a transport provides."""

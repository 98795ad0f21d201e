"""The wire formats of the endpoint, one module each; `format.py` says what a module has to provide."""

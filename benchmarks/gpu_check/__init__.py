"""Acceptance on one machine with a GPU: `make gpu-check`. `__main__.py` has the command line."""

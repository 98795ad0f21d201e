"""Measurements of the project: `make bench`, `make study`, `make gpu-check`."""

from miles_async import cpu_compat

cpu_compat.install()

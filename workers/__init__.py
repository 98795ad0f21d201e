"""One file per process of a run, and the modules that compose the processes."""

from miles_async import cpu_compat

# The driver and each of Ray's workers import this package before they import anything else of a run.
cpu_compat.install()

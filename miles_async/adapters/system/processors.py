"""How busy the processors of this machine are."""

from __future__ import annotations

import psutil


class Processors:
    """Measures the use of the processors between two calls."""

    def __init__(self) -> None:
        psutil.cpu_percent()

    def in_use(self) -> float:
        """Return the fraction of the processors' time that was used since the last call, from 0 to 1."""
        return float(psutil.cpu_percent()) / 100

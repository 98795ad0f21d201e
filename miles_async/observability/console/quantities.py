"""Short numbers for people: three significant digits and a unit, in a bounded number of characters."""

from __future__ import annotations

import math

DURATION_WIDTH = 7
"""Most characters of a duration, up to 999 hours."""
RATE_WIDTH = 5
"""Most characters of a rate, up to 999 thousand million."""


def duration(seconds: float) -> str:
    """Return a duration such as `310 ms`, `1.31 s`, `32.1 s`, `12 min` or `3.5 h`."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 600:
        return f"{_three_digits(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{_three_digits(seconds / 3600)} h"


def rate(number: float) -> str:
    """Return a number such as `0.12`, `56.6`, `821`, `8.17k` or `1.20M`; `-` if it is not finite."""
    if not math.isfinite(number):
        return "-"
    for factor, suffix in ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        if abs(number) < 999.5 * factor:
            return _three_digits(number / factor) + suffix
    return f"{number:.0e}"


def _three_digits(number: float) -> str:
    """Return the number with three significant digits, but with at most two decimals."""
    for decimals, limit in ((2, 9.995), (1, 99.95)):
        if abs(number) < limit:
            return f"{number:.{decimals}f}"
    return f"{number:.0f}"

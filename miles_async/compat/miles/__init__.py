"""Miles (https://github.com/radixark/miles), a fork of slime that has slime's flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.guests import Guest


class Miles(Guest):
    """Gives `--preset miles` its meaning."""

    name = "miles"

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.miles.defaults import DEFAULTS

        return DEFAULTS

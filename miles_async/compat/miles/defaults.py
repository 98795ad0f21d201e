"""The defaults of Miles, by the names of our settings.

Commit 31f1ca96 resolves the settings that it shares with slime as slime does, but leaves the router as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.slime.defaults import DEFAULTS as OF_SLIME

DEFAULTS: Mapping[str, Any] = {
    **OF_SLIME,
    "sglang_router_args": {"balance_abs_threshold": 64, "balance_rel_threshold": 1.5},
    "pause_generation_mode": "retract",
    # `--async-unused-samples-handler drop`.
    "max_attempts": 1,
}

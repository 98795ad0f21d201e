"""The defaults of Miles, by the names of our settings, and the function that one of them depends on.

Commit 31f1ca96 resolves the settings that it shares with slime as slime does, but leaves the router as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.slime.defaults import DEFAULTS as OF_SLIME

FULLY_ASYNC = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
"""Miles' name of the rollout function that `--fully-async` selects. It stands for ours."""
DEFAULTS: Mapping[str, Any] = {
    **OF_SLIME,
    "sglang_router_args": {"balance_abs_threshold": 64, "balance_rel_threshold": 1.5},
    "pause_generation_mode": "retract",
    # `--async-unused-samples-handler drop`.
    "max_attempts": 1,
}

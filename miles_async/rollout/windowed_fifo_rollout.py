"""The batch rollout function under the windowed-FIFO rule (seed `windowed-fifo`).

The window is part of the pipeline's one way to collect a group, so this is the batch function by another name: naming
it, or setting `--windowed-fifo-ratio` and naming none, says that the batch should keep close to queue order.
"""

from __future__ import annotations

from miles_async.rollout.sglang_rollout import generate_rollout

__all__ = ["generate_rollout"]

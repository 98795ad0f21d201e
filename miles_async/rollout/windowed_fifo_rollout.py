"""The batch rollout function under the windowed-FIFO rule (MiniMax Forge, arXiv 2605.26494, section 6.2.4).

The pipeline applies the window itself, so this is the batch function under another name. Selecting it, by name or by
setting only `--windowed-fifo-ratio`, tells the run to keep each batch close to queue order. `WindowedFIFOCollector` is
the window itself, in pure Python.
"""

from miles_async.compat.tutorial.windowed_fifo import WindowedFIFOCollector
from miles_async.rollout.batch_rollout import generate_windowed_rollout as generate_rollout

__all__ = ["WindowedFIFOCollector", "generate_rollout"]

"""Which prompts over-sampling keeps: the experiment of MiniMax Forge (arXiv 2605.26494, 6.2.4).

256 prompts, half easy and half hard, where hard ones finish later; the first 128 collected are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from miles_async.compat.tutorial.windowed_fifo import WindowedFIFOCollector
from miles_async.scheduling.bounds import window_size

GENERATED, KEPT, HARD = 256, 128, 0.6
RATIOS = (1.0, 0.5, 0.3, 0.0)
TAIL = 100.0
"""In the long-tailed reading the hardest prompt takes this many times as long as the easiest."""


@dataclass(frozen=True, kw_only=True)
class Bias:
    ratio: float
    hard: float
    """Share of hard prompts (difficulty above 0.6) in the kept batch."""
    population: float
    fill: float
    """Returns when the batch is full if the latency of a prompt is its difficulty (0 to 1)."""
    fill_long_tail: float
    """The same order of finishing, with times that grow exponentially."""


def kept_batch(ratio: float, seed: int) -> Bias:
    rng = np.random.default_rng(seed)
    easy_or_hard = rng.random(GENERATED) < 0.5
    difficulty = np.where(easy_or_hard, rng.beta(2, 5, GENERATED), rng.beta(5, 2, GENERATED))
    finished = difficulty + 0.03 * rng.normal(0, 1, GENERATED)
    collector = WindowedFIFOCollector[int](total=GENERATED, window_size=window_size(ratio, GENERATED))
    kept: list[int] = []
    last = 0
    for position in np.argsort(finished):
        last = int(position)
        collector.mark_completed(last, last)
        kept += collector.drain()
        if len(kept) >= KEPT:
            break
    return Bias(
        ratio=ratio,
        hard=float((difficulty[kept[:KEPT]] > HARD).mean()),
        population=float((difficulty > HARD).mean()),
        fill=float(finished[last]),
        fill_long_tail=float(TAIL ** finished[last]),
    )


def experiment(seeds: int, ratios: Iterable[float] = RATIOS) -> list[Bias]:
    """One row per ratio, means over all seeds."""
    rows = []
    for ratio in ratios:
        runs = [kept_batch(ratio, seed) for seed in range(seeds)]
        names = ("hard", "population", "fill", "fill_long_tail")
        means = {name: float(np.mean([getattr(run, name) for run in runs])) for name in names}
        rows.append(Bias(ratio=ratio, **means))
    return rows

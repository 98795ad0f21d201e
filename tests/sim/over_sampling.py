"""What a batch costs with over-sampling and a dynamic filter, by the rule that starts prompts during the batch.

`replace`, the rule of this project, starts one prompt for each group that the filter drops. `refill`, the rule of
slime, starts `over_sampling_batch_size` prompts whenever fewer groups are kept and in progress than the batch needs.
Print the table with `python -m tests.sim.over_sampling`.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from statistics import mean

BATCHES = 4000


@dataclass(frozen=True, slots=True)
class Batch:
    seconds: float
    """Until the batch was full; the median prompt takes one second."""
    started: int
    """Prompts whose generation was started."""
    aborted: int
    """Those of them that were in progress when the batch was full."""


def generate(rule: str, *, needed: int, over_sampling: int, dropped: float, rng: random.Random) -> Batch:
    """Generate until `needed` groups are kept; the filter drops a group with the probability `dropped`."""
    now, kept, started = 0.0, 0, 0
    ends: list[float] = []

    def start(prompts: int) -> None:
        nonlocal started
        started += prompts
        for _ in range(prompts):
            heapq.heappush(ends, now + rng.lognormvariate(0.0, 1.0))

    start(over_sampling)
    while kept < needed:
        now = heapq.heappop(ends)
        if rng.random() >= dropped:
            kept += 1
        elif rule == "replace":
            start(1)
        elif len(ends) + kept < needed:
            start(over_sampling)
    return Batch(now, started, len(ends))


def average(rule: str, *, needed: int, over_sampling: int, dropped: float) -> tuple[float, float, float]:
    """Means over batches: seconds, prompts started and prompts aborted."""
    rng = random.Random(0)
    batches = [
        generate(rule, needed=needed, over_sampling=over_sampling, dropped=dropped, rng=rng) for _ in range(BATCHES)
    ]
    return mean(b.seconds for b in batches), mean(b.started for b in batches), mean(b.aborted for b in batches)


def main() -> None:
    print(
        "| groups needed | over-sampling | dropped | rule | time | started | aborted |\n|---|---|---|---|---|---|---|"
    )
    for needed, over_sampling in ((16, 32), (32, 32)):
        for dropped in (0.25, 0.5, 0.75):
            for rule in ("replace", "refill"):
                seconds, started, aborted = average(rule, needed=needed, over_sampling=over_sampling, dropped=dropped)
                cells = f"{dropped:.0%} | {rule} | {seconds:.1f} | {started:.0f} | {aborted:.0f}"
                print(f"| {needed} | {over_sampling} | {cells} |")


if __name__ == "__main__":
    main()

"""Hands hostile values to simulated runs for some minutes, at every place where users, clients and data hand in values.

    python -m tests.fuzz_values [--minutes 10] [--seed 0]

Each example is a simulated run with the real store and real checkpoints (`tests/sim/hostile.py`). The values are those
of `tests/sim/test_hostile_values.py`. Prints the number of examples, and each place of the code at which a run failed,
with the first example. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hypothesis
import structlog
from hypothesis import HealthCheck, Phase, given, settings

from miles_async.scheduling.bounds import Schedule
from tests.sim.hostile import Attack
from tests.sim.test_hostile_values import RUNS, check_run

ROOT = Path(__file__).parents[1]
PER_ROUND = 200
"""Examples that hypothesis draws with one seed."""


class Findings:
    """Counts the examples and the values that were handed in, and keeps one failed example for each place."""

    def __init__(self) -> None:
        self.examples = self.values = 0
        self.found: set[str] = set()

    def play(self, attacks: list[Attack], seed: int, schedule: Schedule) -> None:
        self.examples += 1
        try:
            self.values += check_run(attacks, seed, schedule)
        except Exception as error:
            # A run may fail with any error.
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-3:]))
            if where not in self.found:
                self.found.add(where)
                print(f"{where}: {error!a:.300}\n    {attacks!a:.1000}, seed={seed}, {schedule}", flush=True)


def main() -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_values", description=description)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long new examples are drawn (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first examples (default: 0)")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    findings, end, seed = Findings(), time.monotonic() + 60.0 * options.minutes, options.seed

    def play(**drawn: Any) -> None:
        if time.monotonic() < end:
            findings.play(**drawn)

    while time.monotonic() < end:
        drawn = settings(
            max_examples=PER_ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(**RUNS)(play))
        hypothesis.seed(seed)(drawn)()
        seed += 1
    print(f"{findings.examples} examples with {findings.values} values: {len(findings.found)} findings")
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())

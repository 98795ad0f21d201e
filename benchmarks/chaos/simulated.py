"""`make chaos-sim`: simulated runs that lose rollout workers and learners at drawn calls, by the thousand.

    python -m benchmarks.chaos.simulated [--adapters | --several-adapters] [--runs 20000] [--seed 0] [--first 0]

Run N of a series draws its settings, its losses and its other faults from the seed of the series and N. To play it
again: `--first N --runs 1`. Prints totals, and each run that lost a prompt, trained a prompt twice or too late, or did
not come to its end. The exit code is 1 if there is such a run.

With `--adapters`, the runs train an adapter. They also lose engines, and engines refuse to load adapters. An engine
that lacks the adapter of a request, or that holds more adapters than the bound allows, is a violation. With
`--several-adapters`, each run trains three adapters, one of which has slow groups.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from miles_async.events import LearnerRestored, WriteFailed
from miles_async.scheduling.bounds import Schedule
from tests.audit import Audit
from tests.sim import test_several_adapters as several_adapters
from tests.sim.adapters import AdapterEngines, AdapterLostWorkers, check_hostile
from tests.sim.lost_workers import SURVIVED_FAULTS, FaultyLostWorkers
from tests.sim.test_adapters import hostile_run
from tests.sim.test_lost_workers import check_restored, config

CHUNK = 20
"""Runs that a process plays before it reports."""


def draw(seed: int, number: int, listed: Path) -> FaultyLostWorkers:
    """Draw run `number` of the series `seed`."""
    rng = random.Random(f"simulated chaos {seed} {number}")
    faults = [{"within": 200, **fault} for fault in rng.sample(SURVIVED_FAULTS, rng.choice((0, 0, 1, 2, 3)))]
    limit, off_lineage = rng.choice((1, 2, 3, 4)), rng.choice(("recycle", "train"))
    settings = config(
        save="anywhere",
        save_interval=rng.choice((1, 2, 4, 5)),
        max_weight_staleness=limit,
        update_weights_interval=rng.choice((1, 1, 2)) if limit > 1 else 1,
        off_lineage=off_lineage,
        inject_faults=faults,
        fault_seed=number,
    )
    run = FaultyLostWorkers(
        config=settings,
        schedule=rng.choice(list(Schedule)),
        kills=rng.choice((0, 2, 4, 6)),
        longest_life=rng.choice((100, 500, 2000)),
        learner_kills=rng.choice((0, 0, 2, 4)),
        longest_learner_life=rng.choice((20.0, 60.0, 120.0)),
        train_seconds=rng.choice((0.5, 5.0, 20.0)),
        seed=rng.randrange(1 << 30),
        listed=listed,
    )
    run.audit = Audit(limit, trains_off_lineage=off_lineage == "train")
    return run


def draw_with_adapter(seed: int, number: int) -> AdapterLostWorkers:
    """Draw run `number` of the series `seed`, which trains an adapter."""
    rng = random.Random(f"simulated chaos {seed} {number}")
    return hostile_run(rng, rng.choice(list(Schedule)), rng.randrange(1 << 30))


def draw_with_several_adapters(seed: int, number: int) -> AdapterLostWorkers:
    """Draw run `number` of the series `seed`, which trains three adapters."""
    rng = random.Random(f"simulated chaos {seed} {number}")
    return several_adapters.hostile_run(rng, rng.randrange(1 << 30))


def play(seed: int, number: int, adapters: bool = False, several: bool = False) -> tuple[Counter[str], str | None]:
    """Play one run. Returns what happened in it, and what is wrong with it, if anything."""
    with TemporaryDirectory() as folder:
        listed = Path(folder, "faults.jsonl")
        run: FaultyLostWorkers | AdapterLostWorkers
        if several:
            run = draw_with_several_adapters(seed, number)
        else:
            run = draw_with_adapter(seed, number) if adapters else draw(seed, number, listed)
        failure = None
        try:
            run.run()
            if isinstance(run, AdapterLostWorkers):
                check_hostile(run)
            else:
                check_restored(run)
        except Exception:
            # The check is a chain of assertions, and the run itself may raise any error.
            failure = f"run {number}: {traceback.format_exc(limit=-2)}"
        faults = len(listed.read_text().splitlines()) if listed.exists() else 0
    lost = Counter(rollout_workers=run.lives - 1, learners=len(run.trace.of(LearnerRestored)), faults=faults)
    if isinstance(run.fleet, AdapterEngines):
        lost += Counter(engines=len(run.fleet.starts), loads=len(run.trace.of(WriteFailed)))
    gc.collect()
    return Counter(runs=1, trained=run.audit.trained) + lost, failure


def play_chunk(seed: int, adapters: bool, several: bool, numbers: range) -> list[tuple[Counter[str], str | None]]:
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    # The tasks of a worker that is killed do not end in an orderly way.
    warnings.simplefilter("ignore", RuntimeWarning)
    # `play` collects what a run leaves behind, and need not look at the modules.
    gc.freeze()
    return [play(seed, number, adapters, several) for number in numbers]


def main() -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.simulated", description=description)
    parser.add_argument("--adapters", action="store_true", help="play runs that train an adapter")
    parser.add_argument("--several-adapters", action="store_true", help="play runs that train three adapters")
    parser.add_argument("--runs", type=int, default=20_000, help="number of runs (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the series (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="runs played at the same time (default: 2)")
    options = parser.parse_args()
    began, total, failures = time.monotonic(), Counter[str](), 0
    end = options.first + options.runs
    chunks = [range(first, min(first + CHUNK, end)) for first in range(options.first, end, CHUNK)]
    with ProcessPoolExecutor(options.processes) as pool:
        for outcomes in pool.map(partial(play_chunk, options.seed, options.adapters, options.several_adapters), chunks):
            for happened, failure in outcomes:
                total += happened
                if failure is not None:
                    failures += 1
                    print(failure, flush=True)
            if sys.stdout.isatty():
                print(f"\r{total['runs']} of {options.runs} runs", end="", flush=True)
    print(
        f"{total['runs']} runs: {failures} with a violation; {total['rollout_workers']} rollout workers, "
        f"{total['learners']} learners and {total['engines']} engines lost, {total['loads']} writes to engines failed, "
        f"{total['faults']} other faults, {total['trained']} groups trained; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

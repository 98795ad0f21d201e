"""Measures how long a driver that continues a run takes until it shows the run, with its snapshot and without.

    python -m benchmarks.continued_driver [--groups 100000]

Simulates the real pipeline in virtual time. A driver passes the events to all subscribers, which write the event log
and a snapshot after each part of it. Then two further drivers continue the run: one from the snapshot, the other from
the event log alone. Prints the results, with the size of the event log, and writes
benchmarks/results/continued-driver.json.
"""

from __future__ import annotations

import argparse
import gzip
import os
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.records import record
from miles_async.config.schema import RunConfig
from miles_async.events import Event, EventsReceived, RunStarted
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.snapshot import read_snapshot, write_snapshot
from miles_async.observability.subscribers import EventSubscribers
from tests.sim.latency import log_normal
from tests.sim.world import Trace, World

BATCH, EVENTS_PER_DELIVERY = 64, 100


class Driver:
    """An event sink that receives events in batches, as the driver of a run does."""

    def __init__(self, subscribers: EventSubscribers) -> None:
        self._subscribers = subscribers
        self.events = 0

    def emit(self, event: Event) -> None:
        self._subscribers.emit(event)
        self.events += 1
        if self.events % EVENTS_PER_DELIVERY == 0:
            self._subscribers.emit(EventsReceived(time=event.time, number=self.events))


def configuration(folder: Path, groups: int) -> RunConfig:
    settings = {
        "num_rollout": groups // BATCH,
        "rollout_batch_size": BATCH,
        "over_sampling_batch_size": 2 * BATCH,
        "n_samples_per_prompt": 8,
        "max_weight_staleness": 2,
    }
    observability = {"run_dir": str(folder), "log_format": "json"}
    return RunConfig.model_validate({"rollout": settings, "observability": observability})


def seconds_to_continue(config: RunConfig, folder: RunFolder) -> float:
    began = time.perf_counter()
    with EventSubscribers(config, folder, continued=True):
        return time.perf_counter() - began


def measure(groups: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w") as null:
        config = configuration(Path(name), groups)
        folder = RunFolder.create(config)
        with redirect_stdout(null), redirect_stderr(null):
            with EventSubscribers(config, folder) as subscribers:
                driver = Driver(subscribers)
                World(
                    config=config,
                    latency=log_normal(mean=15.0, sigma=0.7),
                    train_seconds=10.0,
                    sinks=(driver,),
                    trace=Trace(RunStarted),
                    keeps_batches=False,
                ).run()
            with_snapshot = seconds_to_continue(config, folder)
            snapshot = read_snapshot(folder.snapshot)
            assert snapshot is not None, "the event log was rotated"
            began = time.perf_counter()
            write_snapshot(folder.snapshot, snapshot)
            writing = time.perf_counter() - began
            size = folder.snapshot.stat().st_size
            folder.snapshot.unlink()
            without = seconds_to_continue(config, folder)
        compressed = sum(part.stat().st_size for part in folder.path.glob("events-*.gz"))
        rest = compressed_size(folder.events)
    return {
        "events": driver.events,
        "events_per_group": driver.events / groups,
        "seconds_from_the_whole_log": without,
        "microseconds_per_event": 1e6 * without / driver.events,
        "seconds_from_the_snapshot": with_snapshot,
        "snapshot_kb": size / 1e3,
        "seconds_to_write_a_snapshot": writing,
        "compressed_log_bytes_per_group": (compressed + rest) / groups,
    }


def compressed_size(file: Path) -> int:
    return len(gzip.compress(file.read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000, help="groups of the simulated run (default: 100000)")
    figures = measure(parser.parse_args().groups)
    for name, value in figures.items():
        print(f"{name:<32}{value:>14,.3f}")
    record("continued-driver", figures)


if __name__ == "__main__":
    main()

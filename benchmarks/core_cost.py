"""Measures the CPU time that the scheduler takes per group: admission, window, queue and ledger.

    python -m benchmarks.core_cost [--groups 200000]

Events, tasks and engines are not part of the measurement. Prints microseconds of CPU time per group (median of five
repetitions) and writes benchmarks/results/core-cost.json. Exits with 1 if a group takes 20 microseconds or more in all.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from statistics import median

from benchmarks.records import record
from miles_async.scheduling.admission import Admission
from miles_async.scheduling.bounds import Bounds
from miles_async.scheduling.ledger import GroupState, Ledger
from miles_async.scheduling.queue import GroupQueue
from miles_async.scheduling.window import WindowedFIFOCollector

LIMIT_MICROSECONDS = 20.0
REPEATS = 5
BOUNDS = Bounds.derive(
    rollout_batch_size=32, over_sampling_batch_size=64, windowed_fifo_ratio=0.3, max_weight_staleness=2
)


def whole_lifecycle(order: list[int]) -> None:
    """Take every group from admission to published weights. `order` selects which group in flight finishes next."""
    ledger, queue = Ledger(), GroupQueue[int](BOUNDS.room)
    window = WindowedFIFOCollector[int](None, BOUNDS.window)
    admission = Admission(max_in_flight=BOUNDS.generation_batch, room=BOUNDS.room, slots=BOUNDS.slots)
    in_flight: list[int] = []
    trained = 0
    for choice in order:
        while trained < len(order) and admission.blocked_by(ledger) is None:
            sequence = ledger.feed().sequence
            ledger.advance(sequence, GroupState.IN_FLIGHT)
            in_flight.append(sequence)
        sequence = in_flight.pop(choice % len(in_flight))
        ledger.advance(sequence, GroupState.FINISHED)
        window.mark_completed(sequence, sequence)
        for collected in window.drain():
            queue.put(collected)
            ledger.advance(collected, GroupState.QUEUED)
        while len(queue) >= BOUNDS.publish_groups:
            batch = [queue.get() for _ in range(BOUNDS.publish_groups)]
            for state in (GroupState.LEASED, GroupState.TRAINED, GroupState.PUBLISHED):
                for group in batch:
                    ledger.advance(group, state)
            trained += len(batch)


def window_alone(order: list[int]) -> None:
    window = WindowedFIFOCollector[int](None, BOUNDS.window)
    in_flight = list(range(BOUNDS.generation_batch))
    for admitted, choice in enumerate(order, start=BOUNDS.generation_batch):
        index = choice % len(in_flight)
        sequence, in_flight[index] = in_flight[index], admitted
        window.mark_completed(sequence, sequence)
        for _ in window.drain():
            pass


def queue_alone(order: list[int]) -> None:
    queue = GroupQueue[int](BOUNDS.room)
    for group in order:
        queue.put(group)
        queue.get()


def ledger_alone(order: list[int]) -> None:
    ledger = Ledger()
    lifecycle = (
        GroupState.IN_FLIGHT,
        GroupState.FINISHED,
        GroupState.QUEUED,
        GroupState.LEASED,
        GroupState.TRAINED,
        GroupState.PUBLISHED,
    )
    for _ in order:
        sequence = ledger.feed().sequence
        for state in lifecycle:
            ledger.advance(sequence, state)


def admission_alone(order: list[int]) -> None:
    ledger = Ledger()
    admission = Admission(max_in_flight=BOUNDS.generation_batch, room=BOUNDS.room, slots=BOUNDS.slots)
    for _ in order:
        admission.blocked_by(ledger)


PARTS: dict[str, Callable[[list[int]], None]] = {
    "admission": admission_alone,
    "window": window_alone,
    "queue": queue_alone,
    "ledger": ledger_alone,
    "whole lifecycle": whole_lifecycle,
}


def microseconds(work: Callable[[list[int]], None], order: list[int]) -> float:
    """Return the CPU time per group, which other load on the machine hardly affects."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work(order)
        times.append(time.process_time() - began)
    return median(times) / len(order) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200_000, help="number of groups (default: 200000)")
    groups: int = parser.parse_args().groups
    rng = random.Random(0)
    # The oldest groups mostly finish first, as with response times of moderate spread.
    order = [int(rng.expovariate(0.2)) for _ in range(groups)]
    costs = {name: microseconds(work, order) for name, work in PARTS.items()}
    for name, cost in costs.items():
        print(f"{name:<16}{cost:8.2f} µs per group")
    content = {"groups": groups, "repeats": REPEATS, "limit_microseconds": LIMIT_MICROSECONDS, "microseconds": costs}
    record("core-cost", content)
    return 0 if costs["whole lifecycle"] < LIMIT_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measures the CPU time that the scheduler takes per group, and whether other costs grow with the size of a run.

    python -m benchmarks.core_cost [--groups 200000]

The first table has admission, window, queue and ledger, without events, tasks and engines, in microseconds of CPU time
per group (median of five repetitions). The second table has the cost of one action at two sizes of the run, the second
one ten times the first, and their ratio.

Writes benchmarks/results/core-cost.json. Exits with 1 if a group takes 20 microseconds or more in all, or if a cost
grows by a factor of three or more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.records import record
from miles_async.adapters.datasets.buffer import Buffer, pop_first
from miles_async.adapters.datasets.feed import Feed, FeedSettings
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.adapters.system.clock import SystemClock
from miles_async.events import EngineBusy, GroupGenerated, LoopLag, Pulse, encode
from miles_async.pipeline.run_state import RunState
from miles_async.recording import Recording
from miles_async.scheduling.admission import Admission
from miles_async.scheduling.bounds import Bounds
from miles_async.scheduling.ledger import GroupState, Ledger
from miles_async.scheduling.queue import GroupQueue
from miles_async.scheduling.window import FIFOWindow
from miles_async.types import Group, Prompt, Sample
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Trace, World, held_prompts_of

LIMIT_MICROSECONDS = 20.0
LIMIT_GROWTH = 3.0
LEAST_COST = 0.01
"""Less than ten microseconds are too little to be compared."""
GROWTH = 10
"""Factor between the two sizes of a run."""
REPEATS = 5
BOUNDS = Bounds.derive(
    rollout_batch_size=32, over_sampling_batch_size=64, windowed_fifo_ratio=0.3, max_weight_staleness=2
)


def whole_lifecycle(order: list[int]) -> None:
    """Take every group from admission to published weights. `order` selects which group in flight finishes next."""
    ledger, queue = Ledger(), GroupQueue[int](BOUNDS.room)
    window = FIFOWindow[int](BOUNDS.window)
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
    window = FIFOWindow[int](BOUNDS.window)
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


def groups_of(count: int, samples: int = 1) -> list[Group]:
    """New groups, named as those of the data source."""
    return [
        Group([Sample(index=n * samples + i) for i in range(samples)], feed_index=f"sample_0_{n}") for n in range(count)
    ]


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of one call of `work`."""
    began = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - began) / repeats * 1e3


def take_returned_group(size: int) -> float:
    buffer = Buffer(pop_first, None, lambda reason, sentence: None)
    buffer.add(groups_of(size))
    return milliseconds(lambda: buffer.take(1), 100)


def return_taken_group(size: int) -> float:
    held = held_prompts_of(RunState(SystemClock(), DirectJournal(Trace())))
    taken = groups_of(size, samples=64)
    held.record_taken(taken)
    remaining = iter(taken)
    return milliseconds(lambda: held.record_returned([next(remaining)]), 50)


def store_position(size: int) -> float:
    feed = Feed(
        "",
        [],
        held_out=[],
        warm_start=[],
        settings=FeedSettings(shuffle=False, seed=0, content=""),
        render=lambda problem: "",
        report=lambda reason, sentence: None,
        warn=lambda sentence: None,
    )
    buffer = Buffer(pop_first, None, lambda reason, sentence: None)
    source = BufferedSource([feed], n_samples_per_prompt=1, buffer=buffer)
    source.metadata.update({f"sample_0_{n}": 0.5 for n in range(size)})
    source.position()
    return milliseconds(source.position, 20)


def save_recording(size: int) -> float:
    with TemporaryDirectory() as folder:
        for step in range(size):
            (Path(folder) / str(step)).mkdir()
        store, steps = RecordingStore(Path(folder)), count(size)
        store.save(next(steps), Recording(), {})
        return milliseconds(lambda: store.save(next(steps), Recording(), {}), 20)


def abort_requests(samples: int) -> float:
    """Requests to one engine that abort a group whose request ends 50 ms after the first of them."""

    async def abort() -> float:
        received = 0
        aborted, begun = asyncio.Event(), asyncio.Event()

        async def generate(http: web.Request) -> web.Response:
            begun.set()
            await aborted.wait()
            await asyncio.sleep(0.05)
            return web.json_response([], status=503)

        async def end(http: web.Request) -> web.Response:
            nonlocal received
            received += 1
            aborted.set()
            return web.json_response({})

        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/abort_request", end)])
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            generator = SGLangGenerator(
                url,
                NoTokenizer(),
                SamplingParams(max_new_tokens=9),
                limit=lambda: samples,
                engines=lambda: [EngineInfo("engine", url, 0, 1)],
            )
            group = Group([Sample(tokens=[1]) for _ in range(samples)])
            generating = asyncio.create_task(generator.generate(group))
            await begun.wait()
            await generator.abort(group)
            await asyncio.gather(generating, return_exceptions=True)
            await generator.close()
        return received

    return asyncio.run(abort())


class NoTokenizer:
    """The samples have tokens."""

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        raise AssertionError("nothing is encoded")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        raise AssertionError("nothing is decoded")


def logged_bytes(rollouts: int) -> float:
    """Bytes of the event log per group, without those that are written twice a second."""
    config = run_config(rollout_batch_size=32, num_rollout=rollouts, n_samples_per_prompt=8)
    trace = World(config=config).run().trace
    lines = [encode(event) for event in trace.events if not isinstance(event, Pulse | EngineBusy | LoopLag)]
    return sum(map(len, lines)) / len(trace.of(GroupGenerated))


GROWING: dict[str, tuple[Callable[[int], float], int, str]] = {
    "take a returned group": (take_returned_group, 1000, "ms at {} returned groups"),
    "return a taken group": (return_taken_group, 100, "ms at {} held groups of 64 samples"),
    "store the position": (store_position, 10_000, "ms at {} entries of metadata"),
    "save a recording": (save_recording, 1000, "ms at {} recordings"),
    "abort a group": (abort_requests, 8, "requests to each engine at {} samples"),
    "event log": (logged_bytes, 5, "bytes per group at {} rollouts"),
}
"""The cost of one action at a size of the run, the smaller size, and the unit."""


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
    growing: dict[str, list[float]] = {}
    for name, (measure, size, unit) in GROWING.items():
        small, large = growing[name] = [measure(size), measure(size * GROWTH)]
        sizes = unit.format(f"{size} and {size * GROWTH}")
        print(f"{name:<24}{small:10.3f}{large:10.3f}   x {large / small:5.2f}   {sizes}")
    content = {
        "groups": groups,
        "repeats": REPEATS,
        "limit_microseconds": LIMIT_MICROSECONDS,
        "microseconds": costs,
        "limit_growth": LIMIT_GROWTH,
        "growing": growing,
    }
    record("core-cost", content)
    grows = any(large >= LIMIT_GROWTH * max(small, LEAST_COST) for small, large in growing.values())
    return 0 if costs["whole lifecycle"] < LIMIT_MICROSECONDS and not grows else 1


if __name__ == "__main__":
    sys.exit(main())

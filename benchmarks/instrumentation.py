"""Measures the cost of observability: groups per second of the rollout worker with and without subscribers.

    python -m benchmarks.instrumentation [--seconds 3] [--rounds 12]

Runs the rollout worker of `benchmarks.rollout_worker` with 512 samples in flight against the 50 ms engine, and sends
its events to different destinations:

    nowhere         Events are dropped. This is the baseline.
    to the driver   As in a run: events are collected, serialised like Ray does, and sent to another process on the same
                    cores, which passes them to all subscribers (event log, metrics, verdict, page, summary, …).
    same process    Events are passed to all subscribers in the process of the rollout worker, which no run does.

The destinations are measured alternately, because two measurements of the same destination differ by up to 10 % on a
laptop. `cost` is the median over the rounds of the loss against the baseline of the same round. Prints a table and
writes benchmarks/results/instrumentation.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from multiprocessing.connection import Connection
from statistics import median

import uvloop

from benchmarks.records import record
from benchmarks.rollout_worker import fake_engine, measure, wait_until_healthy
from miles_async.adapters.system.memory import tune_memory
from miles_async.config.schema import Observability, RunConfig
from miles_async.events import Event
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.pipeline.journal import EventOutbox
from workers.driver import run_started
from workers.rollout import Outbox


class NullOutbox:
    received = 0

    def put(self, number: int, events: Sequence[Event]) -> None: ...


class SubscriberOutbox:
    """Passes events to subscribers in this process."""

    received = 0

    def __init__(self, subscribers: EventSubscribers) -> None:
        self._subscribers = subscribers

    def put(self, number: int, events: Sequence[Event]) -> None:
        self._subscribers.emit(*events)


@asynccontextmanager
async def nowhere() -> AsyncIterator[EventOutbox]:
    yield NullOutbox()


@asynccontextmanager
async def to_the_driver() -> AsyncIterator[EventOutbox]:
    outbox = Outbox()
    pipe, driver_pipe = multiprocessing.Pipe()
    driver = multiprocessing.get_context("spawn").Process(target=run_driver, args=(driver_pipe,))
    driver.start()
    await asyncio.to_thread(pipe.recv)  # until the driver is ready

    async def send() -> None:
        received = 0
        while True:
            for number, events in await outbox.take(received, 0.5):
                pipe.send_bytes(pickle.dumps(events, protocol=5))
                received = number

    sending = asyncio.create_task(send())
    try:
        yield outbox
    finally:
        sending.cancel()
        pipe.send_bytes(pickle.dumps(None))
        await asyncio.to_thread(driver.join)


def run_driver(rollout_worker: Connection) -> None:
    """Receive events and pass them to all subscribers, like the driver of a run."""
    with all_subscribers() as subscribers:
        rollout_worker.send("ready")
        while True:
            if rollout_worker.poll(0.25):
                events = pickle.loads(rollout_worker.recv_bytes())
                if events is None:
                    return
                subscribers.emit(*events)
            subscribers.tick(time.monotonic())


@contextmanager
def all_subscribers() -> Iterator[EventSubscribers]:
    """Yield all subscribers of a run, with a temporary run folder. Their output is discarded."""
    with tempfile.TemporaryDirectory() as runs, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        configure_logging("console")
        config = RunConfig(observability=Observability(run_dir=runs, progress_bar=False))
        folder = RunFolder.create(config)
        with EventSubscribers(config, folder) as subscribers:
            subscribers.emit(run_started(config, folder, "train_async.py", "a model"))
            yield subscribers


@asynccontextmanager
async def same_process() -> AsyncIterator[EventOutbox]:
    with all_subscribers() as subscribers:

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.25)
                subscribers.tick(time.monotonic())

        ticking = asyncio.create_task(tick())
        try:
            yield SubscriberOutbox(subscribers)
        finally:
            ticking.cancel()


DESTINATIONS: dict[str, Callable[[], AbstractAsyncContextManager[EventOutbox]]] = {
    "nowhere": nowhere,
    "to the driver": to_the_driver,
    "same process": same_process,
}


async def play(url: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    await wait_until_healthy(url)
    tune_memory()
    rates: dict[str, list[float]] = {name: [] for name in DESTINATIONS}
    for _ in range(rounds):
        for name, destination in DESTINATIONS.items():
            async with destination() as outbox:
                rates[name].append((await measure(url, 512, 0.05, 0.0, seconds, outbox=outbox)).groups_per_second)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=12, help="measurements per destination (default: 12)")
    arguments = parser.parse_args()
    with fake_engine() as url:
        rates = uvloop.run(play(url, arguments.seconds, arguments.rounds))
    rows = {
        name: {
            "groups_per_second": median(each),
            "cost": median(1 - rate / baseline for rate, baseline in zip(each, rates["nowhere"], strict=True)),
            "rounds": each,
        }
        for name, each in rates.items()
    }
    print(f"{'events go':16}{'groups/s':>10}{'cost':>8}")
    for name, row in rows.items():
        print(f"{name:16}{row['groups_per_second']:10.1f}{row['cost']:8.1%}")
    record("instrumentation", rows)


if __name__ == "__main__":
    main()

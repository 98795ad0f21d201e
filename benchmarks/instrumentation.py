"""What looking on costs: groups per second of the rollout worker, with and without all instrumentation.

    python -m benchmarks.instrumentation [--seconds 3] [--rounds 12]

The rollout worker of `benchmarks.rollout_worker` with 512 samples in flight against the 50 ms engine, its events going

    nowhere         to nobody: what there would be without any onlooker
    to the driver   as in a run: collected, serialized as Ray does it, and sent to another process on the same two
                    cores that shows them to every onlooker (trace, metrics, verdict, page, stall report, summary, …)
    all here        to every onlooker in the same process, which no run does

in turns, one after the other, again and again. `cost` is the median over the rounds, each compared with itself: two
stretches differ by 10 % on a laptop. Prints a table and writes benchmarks/results/instrumentation.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
from benchmarks.rollout_worker import measure, until_healthy
from miles_async.adapters.system.garbage_collection import tune_garbage_collection
from miles_async.adapters.system.network_ports import free_port
from miles_async.config.schema import Observability, RunConfig
from miles_async.events import Event, EventSink
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from workers.driver import run_started
from workers.rollout import Outbox


class Nobody:
    def emit(self, event: Event) -> None: ...


@asynccontextmanager
async def nowhere() -> AsyncIterator[EventSink]:
    yield Nobody()


@asynccontextmanager
async def to_the_driver() -> AsyncIterator[EventSink]:
    outbox = Outbox()
    ours, theirs = multiprocessing.Pipe()
    driver = multiprocessing.get_context("spawn").Process(target=drive, args=(theirs,))
    driver.start()
    await asyncio.to_thread(ours.recv)  # it is ready

    async def send() -> None:
        while True:
            ours.send_bytes(pickle.dumps(await outbox.take(0.5), protocol=5))

    sending = asyncio.create_task(send())
    try:
        yield outbox
    finally:
        sending.cancel()
        ours.send_bytes(pickle.dumps(None))
        await asyncio.to_thread(driver.join)


def drive(rollout_worker: Connection) -> None:
    """What the driver does with a run's events."""
    with looking_on() as subscribers:
        rollout_worker.send("ready")
        while True:
            if rollout_worker.poll(0.25):
                events = pickle.loads(rollout_worker.recv_bytes())
                if events is None:
                    return
                subscribers.emit(*events)
            subscribers.tick(time.time())


@contextmanager
def looking_on() -> Iterator[EventSubscribers]:
    """Every onlooker of a run, in a folder of its own; what they print is thrown away."""
    with tempfile.TemporaryDirectory() as runs, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        configure_logging("console")
        config = RunConfig(observability=Observability(run_dir=runs, progress_bar=False))
        folder = RunFolder.create(config)
        with EventSubscribers(config, folder) as subscribers:
            subscribers.emit(run_started(config, folder, "train_async.py"))
            yield subscribers


@asynccontextmanager
async def all_here() -> AsyncIterator[EventSink]:
    with looking_on() as subscribers:

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.25)
                subscribers.tick(time.time())

        ticking = asyncio.create_task(tick())
        try:
            yield subscribers
        finally:
            ticking.cancel()


WAYS: dict[str, Callable[[], AbstractAsyncContextManager[EventSink]]] = {
    "nowhere": nowhere,
    "to the driver": to_the_driver,
    "all here": all_here,
}


async def play(url: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    await until_healthy(url)
    tune_garbage_collection()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, opened in WAYS.items():
            async with opened() as sink:
                rates[way].append((await measure(url, 512, 0.05, 0.0, seconds, sink)).groups_per_second)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    port = free_port()
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_engine", "--port", str(port)])
    try:
        rates = uvloop.run(play(f"http://127.0.0.1:{port}", arguments.seconds, arguments.rounds))
    finally:
        engine.terminate()
        engine.wait()
    rows = {
        way: {
            "groups_per_second": median(each),
            "cost": median(1 - this / without for this, without in zip(each, rates["nowhere"], strict=True)),
            "rounds": each,
        }
        for way, each in rates.items()
    }
    print(f"{'events go':16}{'groups/s':>10}{'cost':>8}")
    for way, row in rows.items():
        print(f"{way:16}{row['groups_per_second']:10.1f}{row['cost']:8.1%}")
    record("instrumentation", rows)


if __name__ == "__main__":
    main()

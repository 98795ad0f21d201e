"""Measures the memory that the tokens of finished groups take in a rollout worker.

    python -m benchmarks.token_memory [--groups 1000] [--samples 64] [--tokens 8192] [--only queue|group]

The pipeline of `pipeline/service.py` runs with the real generator, reward and run store, and with a fake engine that
answers with four characters of text per token.

- `queue`: the learner never ends its first step, until the queue contains so many groups. Printed are the growth of the
  process per token, its peak memory, and the event-loop lag.
- `group`: a single group of 64 samples of 131,072 tokens is generated, scored, stored, read from the store and packed.
  Printed are the growth of the process's peak memory, and the time in which the event loop could not run.

Writes benchmarks/results/token-memory.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Thread
from typing import Any

import psutil
import uvloop

from benchmarks.records import machine_load, record, recorded
from benchmarks.rollout_worker import GroupTimes, Instant, fake_engine, set_latency, wait_until_healthy, watch, worker
from benchmarks.run_store import changes
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.memory import tune_memory
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Algorithm, Learner, Rollout, RunConfig
from miles_async.types import Group, Sample, StepReport

TEXT = "abc "
"""The text of each token."""
LONG_SAMPLES, LONG = 64, 131_072
MIB = 1 << 20


class NeverTrains(Instant):
    """A learner whose first step takes forever, so that finished groups stay in the queue."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        await asyncio.Event().wait()
        raise AssertionError


class PeakMemory:
    """The greatest resident memory of this process while the block runs, in bytes above the memory before."""

    def __enter__(self) -> PeakMemory:
        self.peak = 0
        self._process, self._ended = psutil.Process(), ThreadEvent()
        self._before = self._process.memory_info().rss
        self._thread = Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._process.memory_info().rss - self._before)


async def fill_queue(url: str, groups: int, samples: int, tokens: int, folder: Path) -> dict[str, float]:
    """Fill the queue with `groups` groups."""
    await wait_until_healthy(url)
    await set_latency(url, 1.0, 0.5)
    finished = GroupTimes()
    lags: list[float] = []
    with closing(SqliteRunStore(folder, "benchmark")) as store, PeakMemory() as memory:
        process, learner = psutil.Process(), NeverTrains()
        before = process.memory_info().rss
        service, generator = worker(
            url, 8 * samples, finished, group=samples, tokens=tokens, store=store, outside=learner
        )
        run, watching = asyncio.create_task(service.run()), asyncio.create_task(watch(lags, [], generator))
        began = time.monotonic()
        await finished.reached(groups)
        seconds = time.monotonic() - began
        await asyncio.sleep(2)
        count, after = len(finished.times), process.memory_info().rss
        run.cancel()
        watching.cancel()
        await asyncio.gather(run, watching, return_exceptions=True)
        await generator.close()
    lags.sort()
    return {
        "queue_groups": count,
        "queue_seconds": seconds,
        "queue_bytes_per_token": (after - before) / (count * samples * tokens),
        "queue_peak_gb": memory.peak / 1e9,
        "queue_lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
    }


def score(group: Group) -> None:
    for sample in group:
        sample.reward = float((sample.index or 0) % 2)


async def follow_group(url: str, folder: Path) -> dict[str, float]:
    """Generate, score, store, restore and pack one group."""
    await wait_until_healthy(url)
    # Responses of this length never end at the same moment.
    await set_latency(url, 20.0, 0.9)
    _, generator = worker(url, LONG_SAMPLES, GroupTimes(), group=LONG_SAMPLES, tokens=LONG)
    config = RunConfig(
        algorithm=Algorithm(loss_aggregation="token_mean"),
        rollout=Rollout(rollout_batch_size=1, n_samples_per_prompt=LONG_SAMPLES, rollout_max_response_len=LONG),
        learner=Learner(max_tokens_per_gpu=2 * LONG),
    )
    group = Group([Sample(index=i, prompt="7", label="7") for i in range(LONG_SAMPLES)], sequence=0)
    lags: list[float] = []
    with closing(SqliteRunStore(folder, "benchmark")) as store, PeakMemory() as memory:
        watching = asyncio.create_task(watch(lags, [], generator))
        await generator.generate(group)
        score(group)
        await store.write(changes(1, [group]))
        # Another rollout worker would read the group.
        del group
        restored = Group(await store.load(0))
        batches = await asyncio.to_thread(rank_batches, [restored], config, 1)
        watching.cancel()
    tokens = sum(len(batch.tokens) for step in batches[0] for batch in step.micro_batches)
    await generator.close()
    return {
        "group_tokens": tokens,
        "group_peak_mib": memory.peak / MIB,
        # Lags of a few milliseconds are those of the timer and of threads that run at the same time.
        "group_blocked_seconds": sum(lag for lag in lags if lag > 0.01),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000, help="groups in the queue (default: 1000)")
    parser.add_argument("--samples", type=int, default=64, help="samples per group (default: 64)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per sample (default: 8192)")
    parser.add_argument("--only", choices=["queue", "group"], help="default: both")
    options = parser.parse_args()
    load, found = machine_load(), recorded("token-memory")
    tune_memory()
    with tempfile.TemporaryDirectory() as scratch:
        if options.only != "group":
            with fake_engine("--tokens", str(options.tokens), "--token-text", TEXT) as url:
                queue: Any = fill_queue(url, options.groups, options.samples, options.tokens, Path(scratch, "queue"))
                found |= uvloop.run(queue)
        if options.only != "queue":
            with fake_engine("--tokens", str(LONG), "--token-text", TEXT) as url:
                found |= uvloop.run(follow_group(url, Path(scratch, "group")))
    for name, value in found.items():
        if isinstance(value, int | float):
            print(f"{name:<24}{value:14.3f}")
    record("token-memory", {**found, "load_before": load})


if __name__ == "__main__":
    main()

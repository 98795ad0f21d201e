"""Measures what it costs to store the state of a run, and how long reading it back takes.

    python -m benchmarks.run_store [--folder FOLDER]

Writes groups of 8 samples with 256 response tokens: first as fast as possible, then 500 groups per second in ten
batches per second. An event loop that wakes up every millisecond measures how late it does, with and without the store
beside it. Then counts the bytes that are written for each group, to the log and to the file, if ten small groups (of 8
samples with 256 tokens) or one large group (of 64 samples with 8,192 tokens) finish per batch. Then a new process reads
the state of 1,000 groups of 8 samples with 8,192 tokens, and loads 32 of them. Last, runs the rollout worker of
`benchmarks.rollout_worker` alternately with and without the store, at its greatest rate and against engines that make
500 groups per second: the costs are medians over the rounds of the loss of groups per second. Needs 2 GiB of disk
space. Writes benchmarks/results/run-store.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import psutil
import uvloop

from benchmarks.records import machine_load, record
from benchmarks.rollout_worker import fake_engine, measure, wait_until_healthy
from miles_async.adapters.storage.run_store import FILE, SqliteRunStore
from miles_async.adapters.system.memory import tune_memory
from miles_async.events import QueueChanged
from miles_async.sample_schema import accept_group
from miles_async.sampling_mask import SamplingMask
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, GroupChange
from miles_async.types import Group, Sample, SampleStatus, VersionSpan

SAMPLES, TOKENS, GROUPS_PER_SECOND, BATCHES_PER_SECOND = 8, 256, 500, 10
GROUPS_PER_BATCH = GROUPS_PER_SECOND // BATCHES_PER_SECOND
LIVE = 400
"""Groups that are stored at the same time."""
LARGE_GROUPS, LARGE_TOKENS = 1000, 8192
VOCABULARY = 150_000
ROUNDS = 8
"""Pairs of runs of the rollout worker."""
READ = """
import asyncio, json, resource, sys, time
from contextlib import closing
from pathlib import Path
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.memory import tune_memory

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

async def read():
    found, before = {}, peak()
    began = time.perf_counter()
    with closing(SqliteRunStore(Path(sys.argv[1]), "benchmark")) as store:
        stored = await store.read()
        found["read_seconds"] = time.perf_counter() - began
        found["read_groups"] = len(stored.groups)
        found["read_growth_gib"] = peak() - before
        began = time.perf_counter()
        batch = [await store.load(group.sequence) for group in stored.groups[:32]]
        found["load_seconds_per_group"] = (time.perf_counter() - began) / len(batch)
        found["loaded_tokens_per_group"] = sum(len(sample.tokens) for group in batch for sample in group) / len(batch)
        found["read_peak_gib"] = peak()
    return found

tune_memory()  # as the rollout worker does
found = asyncio.run(read())
print(json.dumps({**found, "read_process_cpu_seconds": time.process_time()}))
"""


def token(draw: random.Random) -> int:
    """A token id. The frequencies follow Zipf's law, as in texts."""
    return int(VOCABULARY ** draw.random())


def group(draw: random.Random, tokens: int, samples: int = SAMPLES, *, masked: bool = True) -> Group:
    finished = Group(sample(draw, index, tokens, masked) for index in range(samples))
    accept_group(finished)
    return finished


def sample(draw: random.Random, index: int, tokens: int, masked: bool) -> Sample:
    ids = [token(draw) for _ in range(tokens + 20)]
    return Sample(
        index=index,
        prompt=[{"role": "user", "content": "What is 17 + 25? Think step by step."}],
        label="42",
        metadata={"feed_index": "sample_0_0", "difficulty": 0.25, "tags": ["addition", "two digits"]},
        tokens=ids,
        response=" ".join(f"{token:x}" for token in ids[-tokens:]),
        response_length=tokens,
        loss_mask=[1] * tokens,
        # SGLang's log-probabilities are float32.
        rollout_log_probs=np.log(1 - np.random.default_rng(index).random(tokens, np.float32)).tolist(),
        sampling_mask=SamplingMask.from_rows([[one, one + 1] for one in ids[-tokens:]]) if masked else None,
        spans=[VersionSpan(3, 0, tokens // 2), VersionSpan(4, tokens // 2, tokens)],
        reward=draw.random(),
        status=SampleStatus.COMPLETED,
    )


def changes(number: int, groups: Sequence[Group], live: int = LIVE) -> Changes:
    """A batch in which these groups finish, the groups of the previous batch are queued, and old ones are trained."""
    first = (number - 1) * len(groups)
    states = {
        GroupState.QUEUED: range(max(0, first - len(groups)), first),
        GroupState.FINISHED: range(first, first + len(groups)),
    }
    ended = range(first - live, first - live + len(groups))
    return Changes(
        number=number,
        groups={
            sequence: GroupChange(
                feed_index=f"sample_0_{sequence}",
                attempt=0,
                state=state,
                order=sequence,
                content=groups[sequence - first] if state is GroupState.FINISHED else None,
            )
            for state, sequences in states.items()
            for sequence in sequences
        }
        | dict.fromkeys(ended),
        prompts={f"sample_0_{first + position}": one.prompt_dict() for position, one in enumerate(groups)}
        | {f"sample_0_{sequence}": None for sequence in ended},
        progress={"data": {"epoch": 0, "position": first}, "version": number},
        events=[QueueChanged(time=time.time(), depth=depth, blocked=0) for depth in range(5 * len(groups))],
        delivered=number - 1,
    )


def writer_seconds() -> float:
    """CPU seconds of the thread of the store so far."""
    [thread] = [one for one in threading.enumerate() if one.name.startswith("run store")]
    [times] = [one for one in psutil.Process().threads() if one.id == thread.native_id]
    return times.user_time + times.system_time


@asynccontextmanager
async def measured_delays(delays: list[float]) -> AsyncIterator[None]:
    """Append how late the event loop wakes up, once per millisecond, inside the block."""

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - began - 0.001)

    ticking = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        ticking.cancel()


async def measure_writes(folder: Path, seconds: float) -> dict[str, float]:
    draw = random.Random(0)
    groups = [group(draw, TOKENS) for _ in range(GROUPS_PER_BATCH)]
    found: dict[str, float] = {}
    with closing(SqliteRunStore(folder, "benchmark")) as store:
        number, began, cpu = 0, time.perf_counter(), writer_seconds()
        while time.perf_counter() - began < seconds:
            number += 1
            await store.write(changes(number, groups))
        elapsed = time.perf_counter() - began
        found["batches_per_second"] = number / elapsed
        found["groups_per_second"] = number * len(groups) / elapsed
        found["writer_cpu_seconds_per_1000_groups"] = (writer_seconds() - cpu) / (number * len(groups)) * 1000
        found["file_mib"] = (folder / FILE).stat().st_size / 2**20

        delays: list[float] = []
        async with measured_delays(delays):
            await asyncio.sleep(seconds)
        found["delay_p99_ms_without_store"] = quantiles(delays, n=100)[-1] * 1000
        delays.clear()
        slept = 0.0
        async with measured_delays(delays):
            for _ in range(round(seconds * BATCHES_PER_SECOND)):
                number, due = number + 1, time.perf_counter() + 1 / BATCHES_PER_SECOND
                await store.write(changes(number, groups))
                pause = max(0.0, due - time.perf_counter())
                slept += pause
                await asyncio.sleep(pause)
        found["delay_p99_ms"] = quantiles(delays, n=100)[-1] * 1000
        found["delay_max_ms"] = max(delays) * 1000
        found["writing_share"] = 1 - slept / seconds
    return found


async def measure_bytes(folder: Path) -> dict[str, float]:
    """Bytes that the store passes to the operating system for each group, and CPU seconds of its thread."""
    draw = random.Random(0)
    found: dict[str, float] = {}
    for name, samples, tokens, per_batch, batches in (("small", SAMPLES, TOKENS, 10, 400), ("large", 64, 8192, 1, 24)):
        groups = [group(draw, tokens, samples, masked=False) for _ in range(per_batch)]
        before = psutil.Process().io_counters().write_chars
        with closing(SqliteRunStore(folder / f"{name}-groups", "benchmark")) as store:
            for number in range(1, batches + 1):
                await store.write(changes(number, groups, live=8 * per_batch))
            found[f"writer_cpu_ms_per_{name}_group"] = writer_seconds() / (per_batch * batches) * 1000
        written = psutil.Process().io_counters().write_chars - before
        found[f"kb_written_per_{name}_group"] = written / (per_batch * batches) / 1000
    return found


async def write_large(folder: Path) -> None:
    draw = random.Random(0)
    groups = [group(draw, LARGE_TOKENS) for _ in range(10)]
    with closing(SqliteRunStore(folder, "benchmark")) as store:
        for number in range(1, LARGE_GROUPS // len(groups) + 1):
            batch = changes(number, groups)
            batch.groups = {sequence: change for sequence, change in batch.groups.items() if change is not None}
            batch.prompts = {name: prompt for name, prompt in batch.prompts.items() if prompt is not None}
            await store.write(batch)


def measure_read(folder: Path) -> dict[str, float]:
    asyncio.run(write_large(folder))
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


async def measure_worker(url: str, scratch: Path, seconds: float) -> dict[str, float]:
    """Groups per second with and without the store, at the greatest rate and when engines make 500 per second."""
    await wait_until_healthy(url)
    tune_memory()
    found: dict[str, float] = {}
    for name, in_flight, latency in (("greatest", 512, 0.05), ("paced", SAMPLES * GROUPS_PER_SECOND, 1.0)):
        without: list[float] = []
        stored: list[float] = []
        for number in range(ROUNDS):
            without.append((await measure(url, in_flight, latency, 0.5, seconds)).groups_per_second)
            with closing(SqliteRunStore(scratch / f"{name}-{number}", "benchmark")) as store:
                stored.append((await measure(url, in_flight, latency, 0.5, seconds, store=store)).groups_per_second)
        found[f"{name}_groups_per_second_without_store"] = median(without)
        found[f"{name}_groups_per_second"] = median(stored)
        found[f"{name}_cost"] = median(1 - after / before for before, after in zip(without, stored, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement (default: 10)")
    arguments = parser.parse_args()
    load = machine_load()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        found = asyncio.run(measure_writes(Path(scratch) / "small", arguments.seconds))
        found |= asyncio.run(measure_bytes(Path(scratch)))
        found |= measure_read(Path(scratch) / "large")
        with fake_engine() as url:
            found |= uvloop.run(measure_worker(url, Path(scratch), arguments.seconds / 3))
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<36}{value:14.5g}")
    record("run-store", {**found, "load_before": load})


if __name__ == "__main__":
    main()

"""Measures what recording and replaying rollouts cost: time compared with generation, and event-loop lag.

    python -m benchmarks.skip_replay [--megabytes 1 10 100] [--tokens-per-second 2000]

Saves and loads batches of the given sizes through an annotated function, like the service, while another task measures
the event-loop lag every millisecond. The lag is then measured for the same time without any work, to show how much of
it the machine itself causes. The time for generation is computed from the response tokens of the batch and the given
rate. Prints a table and writes benchmarks/results/skip-replay.json. Exits with 1 if saving and loading take more than
5 % of the time for generation, or if the lag exceeds 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.records import record
from miles_async.adapters.system.memory import tune_memory
from miles_async.config.schema import RunConfig, Skip, SkipRollout
from miles_async.recording import GroupRecord, Recording
from miles_async.skip import SkipManager
from miles_async.types import Sample, SampleStatus, VersionSpan

FRACTION_LIMIT, LAG_LIMIT_MS = 0.05, 20.0
RESPONSE_TOKENS, PROMPT_TOKENS, SAMPLES = 2048, 256, 8
BYTES_PER_SAMPLE = 4 * (RESPONSE_TOKENS + PROMPT_TOKENS) + 8 * RESPONSE_TOKENS + 4 * RESPONSE_TOKENS


def batch(megabytes: float) -> Recording:
    groups = []
    for number in range(max(1, round(megabytes * 1e6 / BYTES_PER_SAMPLE / SAMPLES))):
        samples = [
            Sample(
                index=number * SAMPLES + member,
                prompt="question " * 20,
                tokens=[(number * member + i) % 50_000 for i in range(PROMPT_TOKENS + RESPONSE_TOKENS)],
                response="answer " * (RESPONSE_TOKENS // 2),
                response_length=RESPONSE_TOKENS,
                rollout_log_probs=[-i / 7 for i in range(RESPONSE_TOKENS)],
                spans=[VersionSpan(3, 0, RESPONSE_TOKENS)],
                status=SampleStatus.COMPLETED,
            )
            for member in range(SAMPLES)
        ]
        record = GroupRecord(feed_index=f"sample_0_{number}", prompt="hash", version=3, seconds=1.0, samples=samples)
        groups.append(record)
    return Recording(groups=groups, seconds=1.0)


async def measure_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - before - 0.001)


async def measure(megabytes: float, tokens_per_second: float, folder: Path) -> dict[str, float]:
    recording = batch(megabytes)
    # In a run, the samples of a batch arrive over minutes and have reached the oldest generation of the garbage
    # collector. Without this collection, the collections of young objects would walk all of them.
    gc.collect()
    role = SkipRollout(enable=True, steps=[1], dump_dir=str(folder / str(megabytes)))
    SkipManager.init(RunConfig(skip=Skip(rollout=role)))
    SkipManager.set_step(1)

    @SkipManager.annotate(role="rollout")
    async def generate() -> Recording:
        return recording

    lags: list[float] = []
    measuring = asyncio.create_task(measure_lag(lags))
    began = time.perf_counter()
    assert (await generate()).replayed_from is None
    saved = time.perf_counter()
    replayed = await generate()
    loaded = time.perf_counter()
    measuring.cancel()
    idle: list[float] = []
    measuring = asyncio.create_task(measure_lag(idle))
    await asyncio.sleep(loaded - began)
    measuring.cancel()
    assert replayed.groups == recording.groups
    generation = sum(len(group.samples) for group in recording.groups) * RESPONSE_TOKENS / tokens_per_second
    return {
        "megabytes": sum(path.stat().st_size for path in (folder / str(megabytes)).rglob("*.*")) / 1e6,
        "save_seconds": saved - began,
        "load_seconds": loaded - saved,
        "generation_seconds": generation,
        "share": (loaded - saved) / generation,
        "lag_ms": max(lags) * 1e3,
        "idle_lag_ms": max(idle) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100], help="sizes of the batches")
    parser.add_argument(
        "--tokens-per-second", type=float, default=2000.0, help="assumed rate of generation (default: 2000)"
    )
    arguments = parser.parse_args()
    print(f"{'MB':>8}{'save s':>9}{'load s':>9}{'generate s':>12}{'share':>9}{'loop lag ms':>13}{'idle':>8}")
    rows = []
    tune_memory()  # as the rollout worker does
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in arguments.megabytes:
            row = asyncio.run(measure(megabytes, arguments.tokens_per_second, Path(folder)))
            rows.append(row)
            times = f"{row['save_seconds']:9.3f}{row['load_seconds']:9.3f}{row['generation_seconds']:12.1f}"
            print(
                f"{row['megabytes']:8.1f}{times}{row['share']:9.2%}{row['lag_ms']:13.1f}{row['idle_lag_ms']:8.1f}",
                flush=True,
            )
    content = {"tokens_per_second": arguments.tokens_per_second, "rows": rows}
    record("skip-replay", content)
    return int(any(row["share"] > FRACTION_LIMIT or row["lag_ms"] > LAG_LIMIT_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())

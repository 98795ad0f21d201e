"""Measures the rollout workers of this project, slime and Miles while the samples of a job wait for a tool.

    python -m benchmarks.peers.waits PROJECT CHECKOUT URL LIMIT SEED SECONDS

Each sample is a turn of 16 tokens, a tool call of `examples/slow_sandbox.py`, and another turn. Groups have 4 samples,
and batches have 16 groups. The fake engine answers after 50 ms and reports the weight version. The learner takes 0.5 s
for a batch and then publishes. All workers may have the same number of samples in progress. For a limit of 2 the number
is one batch, which is the default here and in Miles, and for a limit of 8 it is four batches.

Other settings are defaults, and the code of slime and Miles is unchanged. In their runs, the next batch is collected
during a step and before its publish, as in their `train_async.py`. slime has no limit of staleness. Its setting
`sglang_server_concurrency` limits samples in progress and, with the same number, the groups that it has taken and those
that wait for the learner.

Prints the result of the worker as JSON. `seconds per turn` shows whether the machine was idle enough: a turn takes
little more than 50 ms unless the worker or the engine waits for a processor, and the other figures are then too low.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import uvloop

from benchmarks.peers.workers import EndlessPrompts, peer_settings
from benchmarks.rollout_worker import FixedTokenizer, GroupTimes, Instant, fake_engine, worker
from examples.slow_sandbox import seconds_of_call
from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.system.memory import tune_memory
from miles_async.rollout.generate import FunctionGenerator
from miles_async.types import StepReport

GROUP, BATCH, TURN_TOKENS = 4, 16, 16
Collect = Callable[[int], Awaitable[Any]]
"""Returns the batch with a number."""
IN_PROGRESS = {2: 64, 8: 256}
"""Samples in progress by staleness limit."""
STEP_SECONDS, WARM_UP_SECONDS, SECONDS = 0.5, 15.0, 30.0


class Step(NamedTuple):
    """What is known when a step begins. Times are in seconds, ages in weight versions."""

    at: float
    ages: Sequence[int]
    """Versions that the learner has made since the first request of each group began."""
    calls: Sequence[float]
    """Durations of the samples' tool calls."""
    discarded: int
    """Groups that the worker has discarded so far."""
    busy: float
    """Sum of the time that all samples have been in progress so far."""


class Job(Instant):
    """The learner and its versions, and what they see of the groups of any project."""

    def __init__(self, url: str, seed: int) -> None:
        self.trainer = self.live = 0
        """The versions of the learner and of the engine."""
        self.steps: list[Step] = []
        self.discarded: Callable[[], int] = lambda: 0
        self.seed = seed
        self.turns: list[float] = []
        """Seconds that each turn took: those of the engine, unless the worker had too little of the processors."""
        self._url, self._client = url, JsonClient()
        self._began: dict[int, int] = {}
        """The live version when a sample began, by the index of the sample."""
        self._running, self._busy, self._changed = 0, 0.0, time.perf_counter()

    def began(self, sample: Any) -> None:
        self._began[sample.index] = self.live
        self.count(1)

    def count(self, change: int) -> None:
        now = time.perf_counter()
        self._busy, self._changed = self._busy + self._running * (now - self._changed), now
        self._running += change

    async def train(self, rollout_id: int, groups: Sequence[Sequence[Any]]) -> StepReport:
        now = time.perf_counter()
        ages = [self.trainer - min(self._began[sample.index] for sample in group) for group in groups]
        calls = [seconds_of_call(self.seed, sample.index, 0) for group in groups for sample in group]
        busy = self._busy + self._running * (now - self._changed)
        self.steps.append(Step(now, ages, calls, self.discarded(), busy))
        await asyncio.sleep(STEP_SECONDS)
        return StepReport(seconds=STEP_SECONDS, tokens=0, finite=True)

    async def stage(self, version: int, adapter: str = "", lineage: Any = None) -> None:
        self.trainer = version

    async def commit(self, engine: str, version: int) -> None:
        await self._client.post(f"{self._url}/update_weight_version", {"new_version": str(version)}, within=10)
        self.live = version


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The generate function of all projects; `args.turn` is what they have for one turn."""
    args.job.began(sample)
    try:
        await _turn(args, sample, sampling_params, TURN_TOKENS)
        await asyncio.sleep(seconds_of_call(args.job.seed, sample.index, 0))
        sample.status = sample.Status.PENDING
        await _turn(args, sample, sampling_params, 2 * TURN_TOKENS)
    finally:
        args.job.count(-1)
    return sample


async def _turn(args: Any, sample: Any, sampling_params: dict[str, Any], tokens: int) -> None:
    began = time.perf_counter()
    await args.turn(sample, {**sampling_params, "max_new_tokens": tokens})
    args.job.turns.append(time.perf_counter() - began)


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """The figures of a run between the beginnings of its first and its last step."""
    first, *rest = steps
    last, ages = rest[-1], [age for step in rest for age in step.ages]
    return {
        "groups per second": len(ages) / (last.at - first.at),
        "mean age": fmean(ages),
        "greatest age": max(ages),
        "discarded per trained group": (last.discarded - first.discarded) / len(ages),
        "samples in progress": (last.busy - first.busy) / (last.at - first.at),
        "seconds per trained call": fmean(seconds for step in rest for seconds in step.calls),
    }


async def run_ours(job: Job, url: str, limit: int) -> None:
    def with_tool(engine: SGLangGenerator) -> FunctionGenerator:
        tokenizer: Any = FixedTokenizer()  # it needs no text of turns here
        turns = MultiTurnSampler(engine, tokenizer)
        args: Any = Namespace(job=job, turn=turns.sample)
        return FunctionGenerator(
            generate,
            args,
            SamplingParams(max_new_tokens=2 * TURN_TOKENS),
            engine,
            turns,
            live_version=lambda: job.live,
            timeout_seconds=600,
            max_attempts=3,
        )

    tune_memory()
    service, _ = worker(
        url,
        IN_PROGRESS[limit],
        GroupTimes(),
        group=GROUP,
        tokens=2 * TURN_TOKENS,
        outside=job,
        generator_of=with_tool,
        batch=BATCH,
        staleness=limit,
    )
    job.discarded = lambda: service.lifecycle.recycled
    await service.run()


async def run_peer(project: str, job: Job, args: Namespace) -> None:
    """Train in the order of `train_async.py` of slime and Miles."""
    args.job = job
    importlib.import_module(f"{project}.utils.http_utils").init_http_client(args)
    source = EndlessPrompts(importlib.import_module(f"{project}.utils.types").Sample, GROUP)
    rollouts = importlib.import_module(f"{project}.rollout.fully_async_rollout")
    collect = (_slime if project == "slime" else _miles)(rollouts, source, args)
    await job.commit("fake", 0)
    batch = await collect(0)
    for rollout in itertools.count(1):
        following = asyncio.ensure_future(collect(rollout))
        await job.train(rollout - 1, batch)
        batch = await following
        await job.stage(rollout)
        await job.commit("fake", rollout)


def _slime(rollouts: Any, source: EndlessPrompts, args: Namespace) -> Collect:
    args.turn = partial(importlib.import_module("slime.rollout.sglang_rollout").generate, args)
    return lambda rollout: asyncio.to_thread(rollouts.generate_rollout_fully_async, args, rollout, source)


def _miles(rollouts: Any, source: EndlessPrompts, args: Namespace) -> Collect:
    types = importlib.import_module("miles.rollout.base_types")
    one_turn = importlib.import_module("miles.rollout.generate_hub.single_turn").generate
    worker = rollouts.FullyAsyncRolloutFn(types.RolloutFnConstructorInput(args=args, data_source=source))
    discarded: list[int] = []

    async def collect(rollout: int) -> Any:
        output = await worker(types.RolloutFnTrainInput(rollout_id=rollout, weight_version=args.job.live))
        discarded.append(output.metrics["rollout/fully_async/stale_groups_filtered"])
        return output.samples

    args.turn = lambda sample, params: one_turn(types.GenerateFnInput(worker.state, sample, params, evaluation=False))
    args.job.discarded = lambda: sum(discarded)
    return collect


async def measure(project: str, args: Namespace, url: str, limit: int, seed: int, seconds: float) -> dict[str, float]:
    job, measured_from = Job(url, seed), time.perf_counter() + WARM_UP_SECONDS
    with suppress(TimeoutError):
        async with asyncio.timeout(WARM_UP_SECONDS + seconds):
            await (run_ours(job, url, limit) if project == "ours" else run_peer(project, job, args))
    figures = summary([step for step in job.steps if step.at >= measured_from])
    return figures | {"seconds per turn": fmean(job.turns)}


def measure_waits(checkouts: dict[str, Path], seeds: int) -> dict[str, list[dict[str, float]]]:
    """The figures of each worker under each limit, for each seed; prints their means and ranges."""
    results: dict[str, list[dict[str, float]]] = {}
    workers = [("ours", Path()), *((name.lower(), path) for name, path in checkouts.items())]
    with fake_engine("--latency", "0.05", "--tokens", str(TURN_TOKENS)) as url:
        # All workers with one seed after the other, so that other load on the machine affects them alike.
        for seed, limit, (project, checkout) in itertools.product(range(seeds), IN_PROGRESS, workers):
            runs = results.setdefault(f"{project}, limit {limit}", [])
            runs.append(_run(project, str(checkout), url, limit, seed))
    for name, runs in results.items():
        for figure in runs[0]:
            values = [run[figure] for run in runs]
            print(f"{name}: {figure} {fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    return results


def _run(project: str, checkout: str, url: str, limit: int, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, project, checkout, url, str(limit), str(seed), str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the worker of {project} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    project, checkout, url, limit, seed, seconds = sys.argv[1:]
    with peer_settings(checkout, url) as args:
        args.sglang_server_concurrency = args.async_max_concurrent_samples = IN_PROGRESS[int(limit)]
        args.rollout_batch_size, args.n_samples_per_prompt = BATCH, GROUP
        args.rollout_max_response_len, args.max_weight_staleness = 2 * TURN_TOKENS, int(limit)
        args.custom_generate_function_path = f"benchmarks.peers.waits.{generate.__name__}"
        run = uvloop.run if project == "ours" else asyncio.run
        print(json.dumps(run(measure(project, args, url, int(limit), int(seed), float(seconds)))), flush=True)
    # slime's worker thread still waits for answers, and ending the interpreter under it can abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()

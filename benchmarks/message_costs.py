"""Measures what one message costs each process that a large cluster has only once.

    python -m benchmarks.message_costs [--seconds 4]

    rollout worker   CPU time per group, per sample and per token, from three sizes of groups and a fake engine; per
                     request to an engine; per call of a Ray actor; per token and byte of a batch for the learner
    store            CPU time of the writing thread per sample and per token
    driver           CPU time per group: reading its events and passing them to all subscribers
    router           CPU time of sglang-router per request and per token

CPU times depend less on what else runs on the machine than times do. Prints microseconds, and writes
benchmarks/results/message-costs.json. Takes about a minute. `tests/sim/cluster_model.py` computes with the results.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import uvloop

from benchmarks.instrumentation import all_subscribers
from benchmarks.records import machine_load, record
from benchmarks.rollout_worker import cpu_seconds, fake_engine, measure, wait_until_healthy
from benchmarks.run_store import SAMPLES, changes, group, writer_seconds
from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.memory import tune_memory
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Algorithm, Learner, Rollout, RunConfig
from miles_async.events import Event, GroupGenerated
from miles_async.types import Group, SendOutcome
from workers.specs import ray_arguments

IN_FLIGHT = 512
GROUP_SIZES = ((4, 256), (32, 256), (4, 4096))
"""Samples per group and tokens per sample of the three runs of the rollout worker."""
REQUESTS, AT_ONCE = 2000, 64
ROUTED, ROUTED_AT_ONCE = 400, 8
BATCH_GROUPS, LONG, SHORT = 16, 2048, 256
SENT_BYTES = 64 << 20


class Recorder:
    """An outbox that keeps the batches of events as they would be sent to the driver."""

    received = 0

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.groups = 0

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.batches.append(pickle.dumps(events, protocol=5))
        self.groups += sum(isinstance(event, GroupGenerated) for event in events)


class EmptyActor:
    """Has the calls of a learner rank that send weights and batches, and does nothing."""

    async def send(self, version: int, engine: str, transport: str) -> SendOutcome:
        return SendOutcome(engine=engine, seconds=0.0, bytes=0)

    async def train(self, batch: Any) -> None: ...


async def measure_worker(seconds: float, recorder: Recorder) -> dict[str, float]:
    """Solve for the CPU seconds per group, sample and token."""
    rows, costs = [], []
    for samples, tokens in GROUP_SIZES:
        with fake_engine("--tokens", str(tokens)) as url:
            await wait_until_healthy(url)
            load = await measure(url, IN_FLIGHT, 0.05, 0.0, seconds, group=samples, tokens=tokens, outbox=recorder)
        rows.append((1.0, samples, samples * tokens))
        costs.append(samples * load.cpu_ms_per_sample / 1e3)
    per_group, per_sample, per_token = np.linalg.solve(np.array(rows), np.array(costs)).tolist()
    return {"worker_per_group": per_group, "worker_per_sample": per_sample, "worker_per_token": per_token}


async def measure_requests() -> float:
    """CPU seconds of the rollout worker per request to an engine that answers with a small object."""
    client, body = JsonClient(), {"seconds": 0.05, "spread": 0.0}
    with fake_engine() as url:
        await wait_until_healthy(url)
        began = cpu_seconds()
        for _ in range(REQUESTS // AT_ONCE):
            await asyncio.gather(*(client.post(f"{url}/latency", body, within=10) for _ in range(AT_ONCE)))
        cost = (cpu_seconds() - began) / (REQUESTS // AT_ONCE * AT_ONCE)
    await client.close()
    return cost


async def measure_router(folder: Path) -> dict[str, float]:
    """CPU seconds of sglang-router per request of a group, and per token of the answers."""
    costs = []
    for tokens in (SHORT, LONG):
        with fake_engine("--tokens", str(tokens), "--latency", "0.01") as url:
            await wait_until_healthy(url)
            router = RouterServer(RouterSpec(log_path=folder / "router.log"))
            router.start()
            fleet, client = SGLangFleet(router.url, router_key=router.spec.key), JsonClient()
            try:
                fleet.register_engine(EngineInfo("stand-in", url, 0, 1))
                await fleet.admit("stand-in")
                body = {"input_ids": [list(range(64))] * SAMPLES, "sampling_params": {}, "return_logprob": True}
                generate, key, began = f"{router.url}/generate", router.spec.key, _process_seconds(router.pid())
                for _ in range(ROUTED // ROUTED_AT_ONCE):
                    posts = [client.post(generate, body, key=key, within=60) for _ in range(ROUTED_AT_ONCE)]
                    await asyncio.gather(*posts)
                costs.append((_process_seconds(router.pid()) - began) / ROUTED)
            finally:
                await client.close()
                await fleet.close()
                router.stop()
    per_token = (costs[1] - costs[0]) / (SAMPLES * (LONG - SHORT))
    return {"router_per_request": costs[0] - SAMPLES * SHORT * per_token, "router_per_token": per_token}


def _process_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure_store(folder: Path) -> dict[str, float]:
    """CPU seconds of the thread that writes the store, per sample and per token."""
    draw, costs = random.Random(0), []
    for tokens in (SHORT, LONG):
        groups = [group(draw, tokens) for _ in range(10)]
        with closing(SqliteRunStore(folder / str(tokens), "benchmark")) as store:
            await store.write(changes(1, groups))
            began = writer_seconds()
            for number in range(2, 32):
                await store.write(changes(number, groups))
            costs.append((writer_seconds() - began) / (30 * len(groups)))
    per_token = (costs[1] - costs[0]) / (SAMPLES * (LONG - SHORT))
    return {"store_per_sample": costs[0] / SAMPLES - SHORT * per_token, "store_per_token": per_token}


def measure_driver(recorder: Recorder) -> float:
    """CPU seconds of the driver per group."""
    with all_subscribers() as subscribers:
        began = time.process_time()
        for batch in recorder.batches:
            subscribers.emit(*pickle.loads(batch))
            subscribers.tick(time.monotonic())
        return (time.process_time() - began) / recorder.groups


def measure_packing() -> dict[str, float]:
    """CPU seconds and bytes per token of a batch, until it can be sent to the ranks."""
    draw = random.Random(0)
    config = RunConfig(
        algorithm=Algorithm(loss_aggregation="token_mean"),
        rollout=Rollout(rollout_batch_size=BATCH_GROUPS, n_samples_per_prompt=SAMPLES, rollout_max_response_len=LONG),
        learner=Learner(max_tokens_per_gpu=4 * LONG),
    )
    groups = []
    for _ in range(BATCH_GROUPS):
        one = group(draw, LONG)
        for sample in one:
            sample.sampling_mask = None
        groups.append(Group(list(one)))
    tokens = sum(len(sample.tokens) for one in groups for sample in one)
    began = time.process_time()
    batches = rank_batches(groups, config, 4)
    seconds = time.process_time() - began
    return {"pack_per_token": seconds / tokens, "bytes_per_token": len(pickle.dumps(batches, protocol=5)) / tokens}


async def measure_ray() -> dict[str, float]:
    """CPU seconds per call, of the calling thread and of all threads, and elapsed seconds per byte of an argument."""
    ray.init(**ray_arguments(RunConfig()))
    try:
        actors: list[Any] = [ray.remote(EmptyActor).remote() for _ in range(2)]
        await asyncio.gather(*(actor.send.remote(0, "engine", "p2p") for actor in actors))
        thread, process = time.thread_time(), cpu_seconds()
        await asyncio.gather(*(actors[i % 2].send.remote(i, "engine-0", "p2p") for i in range(REQUESTS)))
        thread, process = time.thread_time() - thread, cpu_seconds() - process
        batch = np.ones(SENT_BYTES, dtype=np.uint8)
        await actors[0].train.remote(batch)
        sending = []
        for _ in range(5):
            began = time.perf_counter()
            call = actors[0].train.remote(batch)
            sending.append(time.perf_counter() - began)
            await call
    finally:
        ray.shutdown()
    return {
        "ray_per_call": thread / REQUESTS,
        "ray_per_call_all_threads": process / REQUESTS,
        "ray_per_byte": min(sending) / SENT_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each run of the worker (default: 4)")
    arguments = parser.parse_args()
    load, recorder = machine_load(), Recorder()
    tune_memory()
    with tempfile.TemporaryDirectory() as scratch:
        found = uvloop.run(measure_worker(arguments.seconds, recorder))
        found["request"] = uvloop.run(measure_requests())
        found |= uvloop.run(measure_router(Path(scratch)))
        found |= uvloop.run(measure_store(Path(scratch)))
        found["driver_per_group"] = measure_driver(recorder)
        found |= measure_packing()
        found |= uvloop.run(measure_ray())
    for name, value in found.items():
        scale = 1.0 if name == "bytes_per_token" else 1e6
        print(f"{name:<28}{scale * value:12.4f}{'' if scale == 1 else ' µs'}")
    record("message-costs", {**found, "load_before": load})


if __name__ == "__main__":
    main()

"""Runs the fully asynchronous rollout worker of slime or Miles against the fake engine, in its own process.

    python -m benchmarks.peers.workers slime CHECKOUT URL SECONDS

Their code is imported from the checkout. Only `pylatexenc` is replaced by an empty module, because their graders of
mathematics import it and none of them is used here. Prints the number of groups per second.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.fake_engine import TOKENS
from benchmarks.rollout_worker import BATCH, GROUP, PROMPT, measure, wait_until_healthy
from miles_async.adapters.system.memory import tune_memory
from miles_async.adapters.system.network_ports import free_port

IN_FLIGHT = 512
LATENCY = 0.05
WARM_UP_SECONDS = 3.0


def measure_workers(checkouts: dict[str, Path], seconds: float) -> dict[str, float]:
    """Groups per second of this project's worker and of those in `checkouts`, one after the other."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.fake_engine", "--port", str(port), "--latency", str(LATENCY)]
    # A worker that ends leaves requests open, and the engine would print a traceback for each of them.
    engine = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        rates = {"ours": uvloop.run(_ours(url, seconds))}
        for project, checkout in checkouts.items():
            worker = [sys.executable, "-m", "benchmarks.peers.workers", project, str(checkout), url, str(seconds)]
            done = subprocess.run(worker, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"the worker of {project} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            rates[project] = float(done.stdout.splitlines()[-1])
    finally:
        engine.terminate()
        engine.wait()
    return rates


async def _ours(url: str, seconds: float) -> float:
    await wait_until_healthy(url)
    tune_memory()
    load = await measure(url, IN_FLIGHT, LATENCY, 0.0, seconds)
    return load.groups_per_second


async def exact(args: Any, sample: Any) -> float:
    """The reward, in the form that both projects call."""
    return float(sample.response.strip() == sample.label.strip())


class EndlessPrompts:
    """A data source of the peer's samples that never ends."""

    def __init__(self, sample_class: type[Any], group: int = GROUP) -> None:
        self._sample = sample_class
        self._group_size = group
        self._fed = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        return [self._group() for _ in range(num_samples)]

    def add_samples(self, samples: Sequence[list[Any]]) -> None:
        raise AssertionError("this engine never aborts a request")

    def _group(self) -> list[Any]:
        self._fed += 1
        first = self._fed * self._group_size
        return [
            self._sample(group_index=self._fed, index=first + i, prompt="7" * len(PROMPT), label="7" * TOKENS)
            for i in range(self._group_size)
        ]


def settings(url: str, model: str) -> Namespace:
    """The settings that the workers read, with the defaults of their command lines where the job does not set them."""
    address = urlsplit(url)
    return Namespace(
        hf_checkpoint=model,
        chat_template_path=None,
        ci_test=False,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        sglang_router_policy=None,
        sglang_server_concurrency=IN_FLIGHT,
        sglang_dp_size=1,
        sglang_speculative_algorithm=None,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        eval_num_gpus=0,
        use_distributed_post=False,
        rollout_global_dataset=True,
        rollout_batch_size=BATCH,
        n_samples_per_prompt=GROUP,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=TOKENS,
        rollout_max_context_len=None,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_sample_filter_path=None,
        rollout_submission_granularity=None,
        dynamic_sampling_filter_path=None,
        custom_generate_function_path=None,
        custom_async_data_buffer_path=None,
        custom_rm_path=f"{EndlessPrompts.__module__}.exact",
        group_rm=False,
        reward_key=None,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        use_rollout_routing_replay=False,
        use_rollout_indexer_replay=False,
        async_max_concurrent_samples=IN_FLIGHT,
        async_data_buffer_capacity_factor=2.0,
        async_unused_samples_handler="drop",
        max_weight_staleness=None,
        lora_rank=0,
        lora_adapter_path=None,
    )


class Meter:
    """Counts groups per second over the rollouts of `seconds`, after a warm-up that does not count."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._measured_from = self._began + WARM_UP_SECONDS
        self._seconds = seconds
        self.groups = 0
        """Groups since the warm-up; the caller adds those of each rollout."""

    def rollouts(self) -> Iterator[int]:
        """Yield the numbers of the rollouts to run until the time is over."""
        for rollout in itertools.count():
            now = time.perf_counter()
            if now >= self._measured_from + self._seconds:
                return
            if now < self._measured_from:
                self.groups, self._began = 0, now
            yield rollout

    @property
    def rate(self) -> float:
        return self.groups / (time.perf_counter() - self._began)


def slime_rate(args: Namespace, seconds: float) -> float:
    worker = importlib.import_module("slime.rollout.fully_async_rollout")
    importlib.import_module("slime.utils.http_utils").init_http_client(args)
    source = EndlessPrompts(importlib.import_module("slime.utils.types").Sample)
    meter = Meter(seconds)
    for rollout in meter.rollouts():
        meter.groups += len(worker.generate_rollout_fully_async(args, rollout, source))
    return meter.rate


async def miles_rate(args: Namespace, seconds: float) -> float:
    worker = importlib.import_module("miles.rollout.fully_async_rollout")
    types = importlib.import_module("miles.rollout.base_types")
    importlib.import_module("miles.utils.http_utils").init_http_client(args)
    source = EndlessPrompts(importlib.import_module("miles.utils.types").Sample)
    generate = worker.FullyAsyncRolloutFn(types.RolloutFnConstructorInput(args=args, data_source=source))
    meter = Meter(seconds)
    for rollout in meter.rollouts():
        meter.groups += len((await generate(types.RolloutFnTrainInput(rollout_id=rollout))).samples)
    return meter.rate


@contextmanager
def peer_settings(checkout: str, url: str) -> Iterator[Namespace]:
    """Let the peer's packages be imported from `checkout`, and yield its settings with a tiny model."""
    from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
    from miles_async.config.schema import TinyModel

    sys.path.insert(0, checkout)
    latex = ModuleType("pylatexenc")
    latex.latex2text = ModuleType("pylatexenc.latex2text")  # type: ignore[attr-defined]
    sys.modules["pylatexenc"] = latex
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        create_tiny_model(TinyModel(num_layers=1, hidden_size=64, ffn_hidden_size=64), Path(model), seed=0)
        yield settings(url, model)


def main() -> None:
    project, checkout, url, seconds = sys.argv[1:]
    with peer_settings(checkout, url) as args:
        rate = slime_rate(args, float(seconds)) if project == "slime" else asyncio.run(miles_rate(args, float(seconds)))
    print(rate, flush=True)
    # slime's worker thread still waits for answers, and ending the interpreter under it can abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()

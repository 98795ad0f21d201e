"""Measures how fast an engine generates on this machine's CPU: plain SGLang, and SGLang with this project's plugin.

    python -m benchmarks.engine_attention [--rounds 5] [--only SmolLM2-135M|tiny]

Both engines use SGLang's `torch_native` attention backend. They run at the same time and take turns, so that other
programs slow down both. Every round sends new prompts. There are two models, with random weights:

    SmolLM2-135M   The shape of SmolLM2-135M. 8 prompts of 44 tokens, 8 samples each, responses of 12 tokens.
    tiny           The model of `configs/arithmetic-cpu.yaml`. 240 prompts of 11 tokens, 4 samples each, responses of 3
                   tokens, 192 samples in flight.

`CPU seconds` is the CPU time of all processes of the engine. All results are medians over the rounds. Prints a table
and writes benchmarks/results/engine_attention.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learner_step import SMOLLM2_SHAPE
from benchmarks.records import record, recorded
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer, create_tiny_model
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.server_key import authorization
from miles_async.config.schema import TinyModel

ENGINES: dict[str, dict[str, str]] = {"plain SGLang": {"SGLANG_PLUGINS": "none"}, "with the plugin": {}}
"""Environment variables of each engine. SGLang loads only the plugins that `SGLANG_PLUGINS` names."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    prompts: int
    samples: int
    """Samples per prompt."""
    prompt_tokens: int
    new_tokens: int
    in_flight: int
    """Maximum number of samples at the engine at once."""
    server_args: Mapping[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "SmolLM2-135M": Workload(prompts=8, samples=8, prompt_tokens=44, new_tokens=12, in_flight=64),
    "tiny": Workload(
        prompts=240, samples=4, prompt_tokens=11, new_tokens=3, in_flight=192, server_args={"disable_radix_cache": True}
    ),
}


def create_model(name: str, path: Path) -> None:
    if name == "tiny":
        create_tiny_model(TinyModel(num_layers=2, hidden_size=192, ffn_hidden_size=512), path, seed=1)
        return
    config = LlamaConfig(
        **SMOLLM2_SHAPE, max_position_embeddings=2048, architectures=["LlamaForCausalLM"], dtype="float32"
    )
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


@contextmanager
def started_engines(name: str, workload: Workload, folder: Path) -> Iterator[dict[str, EngineInfo]]:
    create_model(name, folder / "model")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = {}
        for engine, variables in ENGINES.items():
            spec = EngineSpec(
                name=engine,
                model_path=str(folder / "model"),
                log_path=folder / f"{engine}.log",
                concurrency=workload.in_flight,
                p2p=False,
                # Other programs, such as the other engine, take memory while this one measures what is left.
                server_args={"mem_fraction_static": 0.5, **workload.server_args},
                env_vars=variables,
                start_timeout=900,
            )
            servers[engine] = EngineServer(spec)
            stack.callback(servers[engine].stop)
        starting = {engine: pool.submit(server.start) for engine, server in servers.items()}
        yield {engine: future.result() for engine, future in starting.items()}


async def generate(engine: EngineInfo, workload: Workload) -> None:
    """Generate all samples of new prompts, one request per prompt."""
    free = asyncio.Semaphore(workload.in_flight // workload.samples)
    sampling = {"max_new_tokens": workload.new_tokens, "ignore_eos": True, "temperature": 1.0}

    async def send(http: aiohttp.ClientSession) -> None:
        prompt = [random.randrange(3, 250) for _ in range(workload.prompt_tokens)]
        body = {"input_ids": [prompt] * workload.samples, "sampling_params": sampling, "return_logprob": True}
        async with free, http.post(f"{engine.url}/generate", json=body) as answer:
            answer.raise_for_status()
            for sample in await answer.json():
                if len(sample["output_ids"]) != workload.new_tokens:
                    raise RuntimeError(f"{engine.name} answered {len(sample['output_ids'])} tokens")

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=authorization(engine.key), timeout=timeout) as http:
        await asyncio.gather(*[send(http) for _ in range(workload.prompts)])


def cpu_seconds(engine: EngineInfo) -> float:
    server = psutil.Process(engine.pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    workload = WORKLOADS[name]
    tokens = workload.prompts * workload.samples * workload.new_tokens
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    cpu: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder, started_engines(name, workload, Path(folder)) as engines:
        for number in range(rounds + 1):
            for engine, info in engines.items():
                began, cpu_before = time.perf_counter(), cpu_seconds(info)
                await generate(info, workload)
                if number:  # the first round is the warm-up
                    seconds[engine].append(time.perf_counter() - began)
                    cpu[engine].append(cpu_seconds(info) - cpu_before)
    return {
        engine: {
            "seconds": median(seconds[engine]),
            "CPU seconds": median(cpu[engine]),
            "tokens/s": tokens / median(seconds[engine]),
            "groups/s": workload.prompts / median(seconds[engine]),
        }
        for engine in ENGINES
    }


def print_table(name: str, result: Mapping[str, Mapping[str, float]]) -> None:
    columns = ("seconds", "CPU seconds", "tokens/s", "groups/s")
    print(f"\n{name}\n{'':18}" + "".join(f"{column:>13}" for column in columns))
    for engine, values in result.items():
        print(f"{engine:18}" + "".join(f"{values[column]:13.2f}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements per engine (default: 5)")
    parser.add_argument("--only", choices=list(WORKLOADS), help="measure only this model")
    arguments = parser.parse_args()
    results = recorded("engine_attention")
    for name in [arguments.only] if arguments.only else WORKLOADS:
        results[name] = asyncio.run(measure(name, arguments.rounds))
        print_table(name, results[name])
    record("engine_attention", results)


if __name__ == "__main__":
    main()

"""Publishes weights under load to two real engines while transfers fail and engines are killed.

    python -m benchmarks.weight_faults [--publishes 50] [--kills 1] [--seed 0]

Transfers are delayed, lost, torn or refused at random. In the pause mode `retract`, every token must nevertheless be
sampled from the weight version that its span names. To check this, the Hugging Face model computes the log-probability
of every token with the weights of that version. Prints the injected faults, the reactions to them and the largest
difference, and writes benchmarks/results/weight-faults.json. Exits with 1 if a log-probability differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.records import record
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.config.schema import TinyModel
from tests.stack.engine_stack import Stack
from tests.stack.weight_faults import Outcome, publish_under_load


class RandomFaults:
    """An endless random sequence of faults, with the number of each."""

    def __init__(self, seed: int, kills: int, publishes: int) -> None:
        self._draw = random.Random(seed)
        self._writes = 0
        # A publish consists of at least two transfers, one per engine.
        self._kill_at = {2 * publishes * (number + 1) // (kills + 1) for number in range(kills)}
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[str | None]:
        while True:
            self._writes += 1
            fault = self._draw.choices(["lost", "torn", "refused", "slow", None], [0.08, 0.08, 0.06, 0.15, 0.63])[0]
            if self._writes in self._kill_at:
                fault = "killed"
            self.counts[fault or "none"] += 1
            yield fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=50, help="number of publishes (default: 50)")
    parser.add_argument("--kills", type=int, default=1, help="number of times an engine is killed (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults (default: 0)")
    arguments = parser.parse_args()
    faults = RandomFaults(arguments.seed, arguments.kills, arguments.publishes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_tiny_model(TinyModel(), folder / "tiny", seed=1)
        servers = {
            f"e{i}": EngineServer(
                EngineSpec(name=f"e{i}", model_path=str(folder / "tiny"), log_path=folder / f"e{i}.log")
            )
            for i in range(2)
        }
        router = RouterServer(RouterSpec(log_path=folder / "router.log"))
        infos: dict[str, EngineInfo] = {}

        def kill(engine: str) -> None:
            servers[engine].stop()

        def repair(engine: str) -> EngineInfo:
            if not servers[engine].alive():
                infos[engine] = servers[engine].start()
            return infos[engine]

        async def publish() -> Outcome:
            async with stack.admitted() as (fleet, generator):
                fleet.register_engine(infos["e1"])
                await fleet.commit("e1", 0)
                await fleet.admit("e1")
                return await publish_under_load(
                    stack,
                    fleet,
                    generator,
                    folder / "weights",
                    engines=list(infos.values()),
                    faults=iter(faults),
                    publishes=arguments.publishes,
                    streams=6,
                    new_tokens=120,
                    kill=kill,
                    repair=repair,
                )

        try:
            with ThreadPoolExecutor(3) as pool:
                starting = pool.submit(router.start)
                infos.update(zip(servers, pool.map(EngineServer.start, servers.values()), strict=True))
            model = Qwen3ForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
            stack = Stack(infos["e0"], starting.result(), router.spec.key, folder, folder / "tiny", model)
            outcome = asyncio.run(publish())
        finally:
            router.stop()
            for server in servers.values():
                server.stop()
    errors = outcome.errors(stack)
    result = {
        "publishes": arguments.publishes,
        "writes": dict(faults.counts),
        "steps": dict(Counter(step.then for step in outcome.steps)),
        "requests lost with an engine": outcome.lost_requests,
        "samples": len(outcome.samples),
        "tokens": sum(sample.response_length for sample in outcome.samples),
        "spans": len(errors),
        "samples over several versions": sum(len(sample.spans) > 1 for sample in outcome.samples),
        "largest difference of a log-probability": max(errors),
    }
    for key, value in result.items():
        print(f"{key:40} {value}")
    record("weight-faults", result)
    if max(errors) > 1e-4:
        raise SystemExit("a token was not sampled from the weight version that its span names")


if __name__ == "__main__":
    main()

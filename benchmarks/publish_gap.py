"""Measures how publishes delay requests in flight: the gaps between tokens with and without publishes.

    python -m benchmarks.publish_gap [--publishes 20] [--streams 32] [--new-tokens 32] [--mode retract] [--every 0.5]

Streams requests for a tiny model from a real SGLang server behind a real router, once for each weight transport, and
without publishes before and after. A publish has the steps of the pipeline: stage, pause, send, commit, resume. After a
pause in the mode `retract`, the engine computes the keys and values of all requests again, so the gap grows with the
number of their tokens. Prints a table in milliseconds and writes benchmarks/results/publish-gap.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import aiohttp
import orjson
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.records import record
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import TinyModel, Weights

TRANSPORTS = ("memory", "p2p", "broadcast", "disk")


@dataclass(frozen=True)
class Load:
    streams: int
    new_tokens: int
    mode: str
    every: float
    """Seconds between the end of a publish and the start of the next one."""


class Bench:
    """An engine that serves streaming requests while weights are published. Create it inside a running event loop."""

    def __init__(self, engine: EngineInfo, router: RouterServer, checkpoint: Path, folder: Path, load: Load) -> None:
        self._engine = engine
        self._router = router
        self._load = load
        self._fleet = SGLangFleet(router.url, router_key=router.spec.key)
        model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
        named = describe(self._weights)
        self._source = WeightSource(named, folder, Weights())
        self._source.connect([engine], {})
        self._version = 0

    async def ready(self) -> None:
        self._fleet.register_engine(self._engine)
        await self._fleet.commit(self._engine.name, 0)
        await self._fleet.admit(self._engine.name)

    async def close(self) -> None:
        self._source.close()
        await self._fleet.close()

    async def play(self, transport: str | None, publishes: int) -> dict[str, float]:
        """Stream during `publishes` publishes, or for the same time without any, and return gaps in milliseconds."""
        gaps: list[float] = []
        pauses: list[float] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            over = asyncio.Event()
            streams = [asyncio.create_task(self._stream(session, k, gaps, over)) for k in range(self._load.streams)]
            await asyncio.sleep(1.0)
            gaps.clear()
            for _ in range(publishes):
                if transport is not None:
                    pauses.append(await self._publish(transport))
                await asyncio.sleep(self._load.every)
            over.set()
            seen = list(gaps)
            await asyncio.gather(*streams)
        percentiles = quantiles(seen, n=100)
        return {
            "gaps": len(seen),
            "p50": 1e3 * median(seen),
            "p95": 1e3 * percentiles[94],
            "p99": 1e3 * percentiles[98],
            "max": 1e3 * max(seen),
            "pause": 1e3 * median(pauses) if pauses else 0.0,
        }

    async def _publish(self, transport: str) -> float:
        """Seconds in which the engine stood still."""
        self._version += 1
        await asyncio.to_thread(self._source.stage, self._version, self._weights, [transport])
        began = time.perf_counter()
        await self._fleet.pause(self._load.mode)
        outcome = await asyncio.to_thread(self._source.send, self._version, self._engine.name, transport)
        if outcome.error is not None:
            raise SystemExit(outcome.error)
        await self._fleet.commit(self._engine.name, self._version)
        await self._fleet.resume()
        return time.perf_counter() - began

    async def _stream(self, session: aiohttp.ClientSession, k: int, gaps: list[float], over: asyncio.Event) -> None:
        """Send one request after the other, and append the seconds between any two tokens to `gaps`."""
        request = {
            "input_ids": [(3 * k + i) % 250 for i in range(12)],
            "sampling_params": {"max_new_tokens": self._load.new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        headers = {"content-type": "application/json", **authorization(self._router.spec.key)}
        while not over.is_set():
            last = None
            url = f"{self._router.url}/generate"
            async with session.post(url, data=orjson.dumps(request), headers=headers) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(now - last)
                        last = now


async def measure(
    make_bench: Callable[[], Bench], transports: Sequence[str], publishes: int
) -> dict[str, dict[str, float]]:
    bench = make_bench()
    await bench.ready()
    try:
        results = {"no publishes": await bench.play(None, publishes)}
        for transport in transports:
            results[transport] = await bench.play(transport, publishes)
        results["no publishes, again"] = await bench.play(None, publishes)
        return results
    finally:
        await bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=20, help="publishes per transport (default: 20)")
    parser.add_argument("--streams", type=int, default=32, help="concurrent requests (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens per response (default: 32)")
    parser.add_argument("--mode", choices=("retract", "in_place"), default="retract", help="how SGLang pauses requests")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two publishes (default: 0.5)")
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="transports to measure (default: all)"
    )
    arguments = parser.parse_args()
    load = Load(arguments.streams, arguments.new_tokens, arguments.mode, arguments.every)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, logs = Path(folder) / "tiny", Path(folder)
        create_tiny_model(TinyModel(), checkpoint, seed=1)
        engine = EngineServer(EngineSpec(name="engine-0", model_path=str(checkpoint), log_path=logs / "engine.log"))
        router = RouterServer(RouterSpec(log_path=logs / "router.log"))
        try:
            router.start()
            make_bench = partial(Bench, engine.start(), router, checkpoint, logs / "weights", load)
            results = asyncio.run(measure(make_bench, arguments.transports, arguments.publishes))
        finally:
            engine.stop()
            router.stop()
    columns = list(next(iter(results.values())))
    print(f"{'milliseconds':22}" + "".join(f"{column:>10}" for column in columns))
    for name, row in results.items():
        print(f"{name:22}" + "".join(f"{row[column]:10.1f}" for column in columns))
    record("publish-gap", {**asdict(load), "runs": results})


if __name__ == "__main__":
    main()

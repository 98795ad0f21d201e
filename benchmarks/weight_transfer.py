"""Measures the weight transports from one process to two real SGLang engines on this machine.

    python -m benchmarks.weight_transfer --megabytes 100 [--few-tensors] [--rounds 20] [--only bare|transports|pause]

Transfers a model of the given size, with 200 tensors or with nearly all bytes in one tensor, and measures:

- bare: the throughput of the p2p transport compared with Mooncake's `batch_transfer_sync_write` between the same
  processes;
- transports: the time of each transport, and how close the transport that `auto` selects comes to the fastest one, with
  one engine and with two;
- pause: how long a publish pauses decoding, compared with 1.2 times the transfer plus one decode step plus 20 ms.

All results are medians of interleaved rounds. Prints tables and updates benchmarks/results/weight-transfer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.records import record, recorded
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.weights.channel import by_preference
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import Staging, describe
from miles_async.adapters.weights.transports.p2p import P2PTransport
from miles_async.config.schema import Weights

TRANSPORTS = ("memory", "p2p", "broadcast")
STREAMS = 4
NEW_TOKENS = 32
TITLES = {
    "bare": "GB/s to one engine",
    "transports": "milliseconds for a verified transfer to all engines at once",
    "pause": "milliseconds of a publish under load to one engine",
}


def create_model(path: Path, megabytes: int, *, few_tensors: bool) -> None:
    """Create a model of 18 layers and 200 tensors, or one whose large embedding has nearly all of the bytes."""
    size = megabytes * 1_000_000 // 4
    width = 64 if few_tensors else max(32, round((size / (16 * 18)) ** 0.5 / 16) * 16)
    config = Qwen3Config(
        vocab_size=max(320, size // width // 64 * 64) if few_tensors else 320,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1 if few_tensors else 18,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Bench:
    def __init__(self, engines: Sequence[EngineInfo], checkpoint: Path, folder: Path, rounds: int) -> None:
        model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
        self._engines = engines
        self._rounds = rounds
        named = describe(self._weights)
        self._source = WeightSource(named, folder, Weights())
        self._version = 0
        for transport in TRANSPORTS:
            self._source.connect(engines, {engine.name: transport for engine in engines})
        self._stage()
        self.bytes = self._staging.buffer.numel()

    @property
    def _staging(self) -> Staging:
        assert self._source._staging is not None, "the first version was staged"
        return self._source._staging

    def _stage(self) -> None:
        self._version += 1
        self._source.stage(self._version, self._weights, TRANSPORTS)

    def _write(self, transport: str, engines: Sequence[EngineInfo]) -> None:
        """Transfer to all engines at once and verify the result, like the learner."""
        with ThreadPoolExecutor(len(engines)) as pool:
            outcomes = list(pool.map(lambda engine: self._source.send(self._version, engine.name, transport), engines))
        for outcome in outcomes:
            if outcome.error:
                raise SystemExit(outcome.error)

    def against_bare(self) -> dict[str, float]:
        """Return GB/s to one engine for Mooncake's own call, the p2p transport, and p2p with verification."""
        transport = self._source._transports["p2p"]
        assert isinstance(transport, P2PTransport)
        staging, engine = self._staging, self._source._engines[self._engines[0].name]
        pieces = list(staging.segments(staging.plans, 0))
        regions, here = engine.ranks[0].regions, staging.buffer.data_ptr()
        arguments = (
            transport._sessions[engine.name][0],
            [here + source for source, _, _, _ in pieces],
            [regions[parameter].address + target for _, parameter, target, _ in pieces],
            [size for _, _, _, size in pieces],
        )
        calls: dict[str, Callable[[], Any]] = {
            "bare": lambda: transport._engine.batch_transfer_sync_write(*arguments),
            "p2p": lambda: transport.send(staging, engine),
            "p2p, checked": lambda: self._write("p2p", self._engines[:1]),
        }
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self._rounds):
            for name, call in calls.items():
                took[name].append(seconds(call))
        rates = {name: self.bytes / median(values) / 1e9 for name, values in took.items()}
        return {"tensors": len(pieces), **rates, "p2p / bare": rates["p2p"] / rates["bare"]}

    def transports(self, engines: Sequence[EngineInfo]) -> dict[str, Any]:
        """Return milliseconds per transport, and the transport that `auto` selects after its two trial transfers."""
        tried = {}
        for transport in TRANSPORTS:
            self._write(transport, engines)
            tried[transport] = seconds(partial(self._write, transport, engines))
        chosen = by_preference(tried)[0]
        without_memory = min(("p2p", "broadcast"), key=tried.__getitem__)
        took: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
        for _ in range(self._rounds):
            for transport in TRANSPORTS:
                took[transport].append(seconds(partial(self._write, transport, engines)))
        medians = {transport: 1e3 * median(values) for transport, values in took.items()}
        return {
            "engines": len(engines),
            **medians,
            "auto": chosen,
            "auto / best": medians[chosen] / min(medians.values()),
            "auto of two": without_memory,
            "auto of two / better": medians[without_memory] / min(medians["p2p"], medians["broadcast"]),
        }

    async def pauses(self, router_url: str, router_key: str) -> list[dict[str, Any]]:
        fleet = SGLangFleet(router_url, router_key=router_key)
        engine = self._engines[0]
        fleet.register_engine(engine)
        await fleet.commit(engine.name, self._version)
        await fleet.admit(engine.name)
        rows = []
        async with aiohttp.ClientSession() as session:
            over = asyncio.Event()
            gaps: asyncio.Queue[float] = asyncio.Queue()
            streams = [asyncio.create_task(stream(session, engine, k, gaps, over)) for k in range(STREAMS)]
            step = median([await gaps.get() for _ in range(20 * STREAMS)])
            paused: dict[str, list[tuple[float, ...]]] = {transport: [] for transport in TRANSPORTS}
            for _ in range(self._rounds):
                for transport in TRANSPORTS:
                    paused[transport].append(await self._publish(fleet, engine, transport))
                    # Retracted requests are prefilled again, during which the engine runs one long step. Wait until
                    # all streams decode normally.
                    while not gaps.empty():
                        gaps.get_nowait()
                    for _ in range(2 * STREAMS):
                        await gaps.get()
            over.set()
            await asyncio.gather(*streams)
        await fleet.close()
        for transport, phases in paused.items():
            pause, stop, write, commit = (median(values) for values in zip(*phases, strict=True))
            allowed = 1.2 * write + step + 0.020
            rows.append(
                {
                    "transport": transport,
                    "pause": 1e3 * pause,
                    "stop": 1e3 * stop,
                    "write": 1e3 * write,
                    "commit": 1e3 * commit,
                    "decode step": 1e3 * step,
                    "allowed": 1e3 * allowed,
                    "pause / allowed": pause / allowed,
                }
            )
        return rows

    async def _publish(self, fleet: SGLangFleet, engine: EngineInfo, transport: str) -> tuple[float, ...]:
        """Publish once, and return the seconds of the whole pause, of stopping, of the transfer and of the commit."""
        await asyncio.to_thread(self._stage)
        began = time.perf_counter()
        await fleet.pause("retract")
        stopped = time.perf_counter()
        outcome = await asyncio.to_thread(self._source.send, self._version, engine.name, transport)
        if outcome.error:
            raise SystemExit(outcome.error)
        written = time.perf_counter()
        await fleet.commit(engine.name, self._version)
        committed = time.perf_counter()
        await fleet.resume()
        return time.perf_counter() - began, stopped - began, written - stopped, committed - written


async def stream(
    session: aiohttp.ClientSession, engine: EngineInfo, k: int, gaps: asyncio.Queue[float], over: asyncio.Event
) -> None:
    """Send one streaming request after the other, and put the seconds between any two tokens into `gaps`."""
    request = {
        "input_ids": [(3 * k + i) % 250 for i in range(12)],
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    while not over.is_set():
        last = None
        url, headers = f"{engine.url}/generate", authorization(engine.key)
        async with session.post(url, json=request, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.put_nowait(now - last)
                    last = now


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(title)
    print("  " + "".join(f"{name:>22}" for name in rows[0]))
    for row in rows:
        print(
            "  " + "".join(f"{value:22.2f}" if isinstance(value, float) else f"{value:>22}" for value in row.values())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the model (default: 100)")
    parser.add_argument("--few-tensors", action="store_true", help="put nearly all bytes into one tensor")
    parser.add_argument("--rounds", type=int, default=20, help="transfers per measurement (default: 20)")
    parser.add_argument("--only", choices=["bare", "transports", "pause"], help="run only one of the measurements")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = folder / "model"
        create_model(checkpoint, arguments.megabytes, few_tensors=arguments.few_tensors)
        servers = [
            EngineServer(EngineSpec(name=f"e{i}", model_path=str(checkpoint), log_path=folder / f"e{i}.log"))
            for i in range(2)
        ]
        router = RouterServer(RouterSpec(log_path=folder / "router.log"))
        try:
            with ThreadPoolExecutor(3) as pool:
                starting = pool.submit(router.start)
                engines = list(pool.map(EngineServer.start, servers))
            bench = Bench(engines, checkpoint, folder / "weights", arguments.rounds)
            measurements: dict[str, Callable[[], list[dict[str, Any]]]] = {
                "bare": lambda: [bench.against_bare()],
                "transports": lambda: [bench.transports(engines[:1]), bench.transports(engines)],
                "pause": lambda: asyncio.run(bench.pauses(starting.result(), router.spec.key)),
            }
            result = {name: run() for name, run in measurements.items() if arguments.only in (None, name)}
        finally:
            router.stop()
            for server in servers:
                server.stop()
    print(f"{bench.bytes:,} bytes")
    for name, rows in result.items():
        show(TITLES[name], rows)
    known = recorded("weight-transfer")
    known.setdefault(f"{arguments.megabytes} MB{', one tensor' if arguments.few_tensors else ''}", {}).update(result)
    record("weight-transfer", known)


if __name__ == "__main__":
    main()

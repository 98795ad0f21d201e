"""Measures how publishes delay requests in flight: the gaps between tokens with and without publishes.

    python -m benchmarks.publish_gap [--publishes 20] [--streams 32] [--new-tokens 32] [--mode retract] [--every 0.5]
    python -m benchmarks.publish_gap --max-kv-staleness 0 1 2 -1 [--new-tokens 256] [--change 0.01]
    python -m benchmarks.publish_gap --adapter 32 [--publishes 50] [--hf-checkpoint FOLDER]

Streams requests for a tiny model from a real SGLang server behind a real router, once for each weight transport, and
without publishes before and after. A publish has the steps of the pipeline: stage, pause, send, commit, resume. After a
pause in the mode `retract`, the engine computes the keys and values of all requests again, so the gap grows with the
number of their tokens. Prints a table in milliseconds and writes benchmarks/results/publish-gap.json.

With `--max-kv-staleness`, the weights change at each publish, and an engine with each of these limits is measured with
the transport `memory`, in milliseconds, tokens per publish and nats:

    computed   tokens of prompts and of requests in flight that the engine computed, without those that it sampled
    reused     tokens whose keys and values of older versions it did not compute again
    gap        mean difference between the log-probability of a token that was sampled after a publish and the one that
               the weights of its version compute without older keys

It writes benchmarks/results/kv-staleness.json.

With `--adapter`, publishes of an adapter of this rank on all linear layers are compared with those of all weights over
p2p. No engine pauses then. All requests have different prompts, as in training: an engine has no cached prefixes for a
new version, and with equal prompts it would have them in the rounds without publishes alone. Rounds with and without
publishes of the adapter alternate and last equally long, because a longer round has a longer longest gap. It writes
benchmarks/results/adapter-gap.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles

import aiohttp
import orjson
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.records import record
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.response import extend
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.weights.adapters import AdapterSource
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import TinyModel, Weights
from miles_async.models.lora import AdapterConfig, tensor_names
from miles_async.models.lora_layers import MODULES
from miles_async.transports import ADAPTER
from miles_async.types import Sample, VersionSpan

TRANSPORTS = ("memory", "p2p", "broadcast", "disk")
RESIDENT = 4
"""Versions of an adapter that the engine holds."""
START_SECONDS = 5.0
"""Before gaps count: the first prompts of all streams arrive at once."""
ROUNDS = 3
"""Rounds with publishes of an adapter, and as many without."""

Plays = Sequence[tuple[str, str | None]]
"""Rounds in their order: the name of the row that they belong to, and the transport; None for no publishes."""


@dataclass(frozen=True)
class Load:
    streams: int
    new_tokens: int
    mode: str
    every: float
    """Seconds between the end of a publish and the start of the next one."""
    prompt_tokens: int = 12
    change: float = 0.0
    """How far weights move at a publish, in standard deviations of their tensor."""
    rank: int = 0
    """Of an adapter that is published in place of the weights."""
    new_prompts: bool = False
    """Whether all requests have different prompts, as in training. Otherwise the engine has cached the prefixes."""


@dataclass
class Round:
    """What was seen while requests streamed."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between any two tokens of a request."""
    pauses: list[float] = field(default_factory=list)
    """Seconds in which the engine stood still, by publish."""
    publishes: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes of each publish."""
    retractions: int = 0
    seconds: float = 0.0
    per_publish: dict[str, float] = field(default_factory=dict)
    """What is only measured if weights change."""

    def add(self, other: Round) -> None:
        """Count the gaps and publishes of another round as those of this one."""
        self.gaps += other.gaps
        self.pauses += other.pauses
        self.publishes += other.publishes
        self.retractions += other.retractions
        self.seconds += other.seconds

    def row(self) -> dict[str, float]:
        """The columns of the table. Times are in milliseconds."""
        percentiles = quantiles(self.gaps, n=100)
        return {
            "gaps": len(self.gaps),
            "p50": 1e3 * median(self.gaps),
            "p95": 1e3 * percentiles[94],
            "p99": 1e3 * percentiles[98],
            "max": 1e3 * max(self.gaps),
            "pause": 1e3 * median(self.pauses) if self.pauses else 0.0,
            "publish": 1e3 * median(taken for taken, _ in self.publishes) if self.publishes else 0.0,
            "bytes": fmean(size for _, size in self.publishes) if self.publishes else 0.0,
            "tokens/s": len(self.gaps) / self.seconds,
            "retracted": self.retractions,
            **self.per_publish,
        }


class Bench:
    """An engine that serves streaming requests while weights are published. Create it inside a running event loop."""

    def __init__(self, engine: EngineInfo, router: RouterServer, checkpoint: Path, folder: Path, load: Load) -> None:
        self._engine = engine
        self._router = router
        self.load = load
        self._fleet = SGLangFleet(router.url, router_key=router.spec.key, adapters=load.rank > 0)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._weights = [(name, parameter.data) for name, parameter in self._model.named_parameters()]
        self._versions = {0: [weight.clone() for _, weight in self._weights]}
        self._answers: list[Sample] = []
        self._source: WeightSource | AdapterSource
        if load.rank:
            self._adapter = self._random_adapter()
            adapter = AdapterConfig(load.rank, 1.0, MODULES)
            self._source = AdapterSource(folder, adapter, Weights(), rank=0, resident=RESIDENT)
        else:
            self._source = WeightSource(describe(self._weights), folder, Weights())
        self._source.connect([engine], {})
        self._version = 0

    async def ready(self) -> None:
        self._fleet.register_engine(self._engine)
        if self.load.rank:
            self._source.stage(0, self._adapter, [])
            self._source.send(0, self._engine.name, ADAPTER)
        await self._fleet.commit(self._engine.name, 0)
        await self._fleet.admit(self._engine.name)

    async def close(self) -> None:
        self._source.close()
        await self._fleet.close()

    async def play(self, transport: str | None, publishes: int, seconds: float) -> Round:
        """Stream requests during `publishes` publishes, or for so many `seconds` without any."""
        self._round = played = Round()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            over = asyncio.Event()
            streams = [asyncio.create_task(self._stream(session, k, over)) for k in range(self.load.streams)]
            await asyncio.sleep(START_SECONDS)
            played.gaps.clear()
            self._answers.clear()
            computed, began = await self._computed_tokens(session), time.perf_counter()
            if transport is None:
                await asyncio.sleep(seconds)
            else:
                for _ in range(publishes):
                    await self._publish(transport)
                    await asyncio.sleep(self.load.every)
            computed = await self._computed_tokens(session) - computed
            over.set()
            seen, played.seconds = list(played.gaps), time.perf_counter() - began
            await asyncio.gather(*streams)
        played.gaps = seen
        if self.load.change:
            played.per_publish = {"computed": computed / publishes, **self._reuse(publishes)}
        return played

    async def _computed_tokens(self, session: aiohttp.ClientSession) -> int:
        """Tokens that the engine has computed in prefills since its start."""
        async with session.get(f"{self._engine.url}/metrics", headers=authorization(self._engine.key)) as response:
            lines = (await response.text()).splitlines()
        counters = [line for line in lines if line.startswith("sglang:realtime_tokens_total")]
        return round(sum(float(line.rsplit(maxsplit=1)[1]) for line in counters if "prefill_compute" in line))

    def _reuse(self, publishes: int) -> dict[str, float]:
        """Reused tokens per publish, and the mean gap in nats over tokens that followed a publish in their request."""
        spans = [(sample, span) for sample in self._answers for span in sample.spans]
        gaps: list[float] = []
        model = deepcopy(self._model)
        for version in {span.version for _, span in spans}:
            for parameter, then in zip(model.parameters(), self._versions[version], strict=True):
                parameter.data.copy_(then)
            for sample, span in spans:
                if span.version == version and span is not sample.spans[0]:
                    gaps += gaps_of(model, sample, span)
        return {"reused": sum(span.reused for _, span in spans) / publishes, "gap": fmean(gaps) if gaps else 0.0}

    async def _publish(self, transport: str) -> None:
        self._version += 1
        started = time.perf_counter()
        if self.load.rank:
            await asyncio.to_thread(self._source.stage, self._version, self._adapter, [])
            outcome = await asyncio.to_thread(self._source.send, self._version, self._engine.name, transport)
            if outcome.error is not None:
                raise SystemExit(outcome.error)
            await self._fleet.commit(self._engine.name, self._version)
            self._round.publishes.append((time.perf_counter() - started, outcome.bytes))
            await asyncio.to_thread(self._source.drop, self._engine.name)
            return
        if self.load.change:
            for _, weight in self._weights:
                weight.add_(self.load.change * weight.std() * torch.randn_like(weight))
            self._versions[self._version] = [weight.clone() for _, weight in self._weights]
        await asyncio.to_thread(self._source.stage, self._version, self._weights, [transport])
        began = time.perf_counter()
        await self._fleet.pause(self.load.mode)
        outcome = await asyncio.to_thread(self._source.send, self._version, self._engine.name, transport)
        if outcome.error is not None:
            raise SystemExit(outcome.error)
        await self._fleet.commit(self._engine.name, self._version)
        await self._fleet.resume()
        self._round.publishes.append((time.perf_counter() - started, outcome.bytes))
        self._round.pauses.append(time.perf_counter() - began)

    def _random_adapter(self) -> list[tuple[str, torch.Tensor]]:
        """A small adapter. All versions have its numbers: drawing new ones would take time from the engine."""
        named = [(name.removesuffix(".weight"), weight) for name, weight in self._weights]
        adapted = [(name, weight) for name, weight in named if name.rpartition(".")[2] in MODULES]
        rank, tensors = self.load.rank, []
        for name, weight in adapted:
            of_a, of_b = tensor_names(name)
            tensors.append((of_a, 0.01 * torch.randn(rank, weight.shape[1])))
            tensors.append((of_b, 0.01 * torch.randn(weight.shape[0], rank)))
        return tensors

    async def _stream(self, session: aiohttp.ClientSession, k: int, over: asyncio.Event) -> None:
        """Send one request after the other, and note the seconds between any two tokens."""
        numbers = random.Random(k)
        prompt: list[int] = []
        request: dict[str, object] = {
            "sampling_params": {"max_new_tokens": self.load.new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        headers = {"content-type": "application/json", **authorization(self._router.spec.key)}
        while not over.is_set():
            last, answer = None, b""
            if not prompt or self.load.new_prompts:
                prompt = [numbers.randrange(250) for _ in range(self.load.prompt_tokens)]
            request["input_ids"] = prompt
            url = f"{self._router.url}/generate"
            async with session.post(url, data=orjson.dumps(request), headers=headers) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self._round.gaps.append(now - last)
                        last, answer = now, line
            self._round.retractions += orjson.loads(answer.removeprefix(b"data: "))["meta_info"]["num_retractions"]
            if self.load.change:
                sample = Sample(tokens=list(prompt))
                extend(sample, orjson.loads(answer.removeprefix(b"data: ")), lambda _: "")
                self._answers.append(sample)


@torch.no_grad()
def gaps_of(model: PreTrainedModel, sample: Sample, span: VersionSpan) -> list[float]:
    """Differences in nats between the model's log-probabilities of the span's tokens and the reported ones."""
    first, end = (sample.prompt_length + position for position in (span.start, span.end))
    tokens = torch.tensor(list(sample.tokens[:end]))
    logits = model(tokens[None]).logits[0, first - 1 : end - 1].log_softmax(-1)
    computed = logits.gather(-1, tokens[first:, None])[:, 0]
    reported = torch.tensor(list(sample.rollout_log_probs[span.start : span.end]))
    return [float(gap) for gap in (computed - reported).abs()]


async def measure(make_bench: Callable[[], Bench], plays: Plays, publishes: int) -> dict[str, dict[str, float]]:
    bench, rounds = make_bench(), dict[str, Round]()
    await bench.ready()
    try:
        seconds = publishes * bench.load.every
        for name, transport in plays:
            played = await bench.play(transport, publishes, seconds)
            seconds = played.seconds
            if name in rounds:
                rounds[name].add(played)
            else:
                rounds[name] = played
    finally:
        await bench.close()
    return {name: played.row() for name, played in rounds.items()}


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
    parser.add_argument("--prompt-tokens", type=int, default=12, help="tokens per prompt (default: 12)")
    parser.add_argument("--max-kv-staleness", type=int, nargs="+", help="limits to compare; -1 is no limit")
    parser.add_argument(
        "--change", type=float, default=0.01, help="of the weights, in standard deviations (default: 0.01)"
    )
    parser.add_argument("--adapter", type=int, default=0, help="rank of an adapter to publish")
    parser.add_argument("--hf-checkpoint", type=Path, help="model to serve (default: a tiny one)")
    arguments = parser.parse_args()
    load = Load(arguments.streams, arguments.new_tokens, arguments.mode, arguments.every, arguments.prompt_tokens)
    name, results, quiet = "publish-gap", {}, ("no publishes", None)
    if arguments.adapter:
        name, model, publishes = "adapter-gap", arguments.hf_checkpoint, arguments.publishes
        load = replace(load, new_prompts=True)
        results = run(load, 0, [("all weights", "p2p")], publishes, model)
        load = replace(load, rank=arguments.adapter)
        plays: Plays = [("adapter", ADAPTER), quiet] * ROUNDS
        results |= run(load, 0, plays, publishes // ROUNDS, model)
    elif arguments.max_kv_staleness is None:
        plays = [quiet, *((one, one) for one in arguments.transports), quiet]
        results = run(load, 0, plays, arguments.publishes)
    else:
        name, load = "kv-staleness", replace(load, change=arguments.change)
        for limit in arguments.max_kv_staleness:
            paused = replace(load, mode=Weights(max_kv_staleness=limit).engine_pause)
            results |= run(paused, limit, [(f"K = {limit}", "memory")], arguments.publishes)
    columns = list(dict.fromkeys(column for row in results.values() for column in row))
    print(f"{'':30}" + "".join(f"{column:>10}" for column in columns))
    for label, row in results.items():
        print(f"{label:30}" + "".join(f"{row[column]:10.4g}" for column in columns))
    record(name, {**asdict(load), "runs": results})


def run(load: Load, limit: int, plays: Plays, publishes: int, model: Path | None = None) -> dict[str, dict[str, float]]:
    """Measure transports with an engine of `--max-kv-staleness` `limit`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, logs = model or Path(folder) / "tiny", Path(folder)
        if model is None:
            create_tiny_model(TinyModel(), checkpoint, seed=1)
        spec = EngineSpec(
            name="engine-0",
            model_path=str(checkpoint),
            log_path=logs / "engine.log",
            max_kv_staleness=limit,
            lora_rank=load.rank,
            lora_modules=MODULES,
            lora_versions=RESIDENT,
        )
        engine, router = EngineServer(spec), RouterServer(RouterSpec(log_path=logs / "router.log"))
        try:
            router.start()
            make_bench = partial(Bench, engine.start(), router, checkpoint, logs / "weights", load)
            return asyncio.run(measure(make_bench, plays, publishes))
        finally:
            engine.stop()
            router.stop()


if __name__ == "__main__":
    main()

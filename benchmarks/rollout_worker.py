"""Measures how many requests one rollout worker can handle, with the real pipeline and a fake engine.

    python -m benchmarks.rollout_worker [--seconds 10] [--rm-type math]

The pipeline of `pipeline/service.py` runs with the real generator and reward. The engine only waits before it answers,
and the learner takes no time. Each sample has 256 tokens with log-probabilities, and each group has 8 samples. There
are two measurements:

- the capacity, with 512 samples in flight and responses after 50 ms;
- the event-loop lag at 70 % of this capacity, with 5,000 samples in flight and response times between 0.5 and 1.5 times
  their mean.

With `--rm-type math`, the engine answers with a short derivation, and real grader processes score it. They, and not the
rollout worker, then limit the capacity.

Prints a table and writes benchmarks/results/rollout_worker.json.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import uvloop

from benchmarks.fake_engine import EOS_ID, TOKENS
from benchmarks.records import record
from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.system.memory import tune_memory
from miles_async.adapters.system.network_ports import free_port
from miles_async.adapters.system.processors import Processors
from miles_async.config.generation import bounds_of
from miles_async.config.schema import Rollout, RunConfig
from miles_async.errors import EngineLostError
from miles_async.events import Event, GroupGenerated
from miles_async.modes.shipped import Stream
from miles_async.pipeline.journal import EventOutbox, Journal
from miles_async.pipeline.run_ports import Ports
from miles_async.pipeline.service import Service
from miles_async.ports import RunStore
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.functions.exact import Exact
from miles_async.rewards.rewarder import Rewarder
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.lineage import Lineage
from miles_async.types import DropReason, EngineLoad, Group, Prompt, Sample, SendOutcome, StepReport, Verdict
from tests.sim.world import NullStore

GROUP = 8
BATCH = 32
PROMPT = list(range(64))
LOAD = 0.7
ANSWER = "\\frac{7}{12}"
DERIVATION = (
    f"The sum of one third and one quarter has the denominator 12. Therefore, the answer is \\boxed{{{ANSWER}}}."
)
LAG_TICK_SECONDS = 0.005


class FixedTokenizer:
    """Encodes every prompt as the same 64 tokens."""

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        return list(PROMPT)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token != EOS_ID).decode()


class EndlessPrompts:
    """A data source that never ends. `answer` is the right answer to every prompt."""

    def __init__(self, group: int, answer: str) -> None:
        self._group = group
        self._answer = answer
        self._fed = 0
        self._returned: list[Group] = []
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int, adapter: str = "") -> list[Group]:
        return [self._returned.pop() if self._returned else self._next() for _ in range(num_samples)]

    def add_samples(self, samples: Sequence[Group]) -> None:
        self._returned.extend(samples)

    def _next(self) -> Group:
        self._fed += 1
        first = self._fed * self._group
        samples = [Sample(index=first + i, prompt="7", label=self._answer) for i in range(self._group)]
        return Group(samples, feed_index=f"sample_0_{self._fed}")

    def metadata_changed(self) -> None:
        """No position contains metadata."""

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: Mapping[str, Any]) -> None:
        raise NotImplementedError("this benchmark cannot be resumed")

    def returned(self) -> Sequence[Group]:
        return self._returned


class Instant:
    """Stand-in for learner, weight channel, fleet and dead letters. All calls return at once."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        return StepReport(seconds=0.0, tokens=0, finite=True)

    async def work_seconds(self) -> float:
        return 0.0

    async def stage(self, version: int, adapter: str, lineage: Lineage | None) -> None: ...

    async def send(self, version: int, engine: str) -> SendOutcome:
        return SendOutcome(engine=engine, seconds=0, bytes=0)

    async def compare(self, engine: str) -> None: ...

    def routed(self) -> Sequence[str]:
        return ("fake",)

    def serving(self) -> bool:
        return True

    def members(self) -> Sequence[str]:
        """No engine needs health checks."""
        return ()

    async def check_router(self) -> None: ...

    async def loads(self) -> Sequence[EngineLoad]:
        return []

    async def pause(self, mode: str) -> None: ...

    async def commit(self, engine: str, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def fence(self, engine: str, reason: str) -> None:
        raise SystemExit(f"engine {engine} was fenced: {reason}")

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        raise SystemExit(f"group {group.feed_index} was lost: {error}")


@dataclass
class GroupTimes:
    """An outbox that records when groups are generated and rewarded, and passes all events on to `forward_to`."""

    forward_to: EventOutbox | None = None
    times: list[float] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def received(self) -> int:
        return 0 if self.forward_to is None else self.forward_to.received

    async def reached(self, groups: int) -> None:
        """Wait until so many groups have been generated."""
        while len(self.times) < groups:
            self._more.clear()
            await self._more.wait()

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.times += [event.time for event in events if isinstance(event, GroupGenerated)]
        self._more.set()
        if self.forward_to is not None:
            self.forward_to.put(number, events)


@dataclass(frozen=True)
class Load:
    """The result of one measurement."""

    groups_per_second: float
    cpu_ms_per_sample: float
    lag_p99_ms: float
    in_flight: int
    """Average number of samples at the engine."""


async def measure(
    url: str,
    in_flight: int,
    latency: float,
    spread: float,
    seconds: float,
    *,
    group: int = GROUP,
    tokens: int = TOKENS,
    outbox: EventOutbox | None = None,
    store: RunStore | None = None,
    rewards: RunRewards | None = None,
) -> Load:
    """Measure for `seconds` with `in_flight` samples at the engine, after a warm-up of one second and two latencies.

    `latency` is the mean response time in seconds. Response times vary by up to `spread` times `latency`. `group` is
    the number of samples of a group. The engine at `url` must answer with `tokens` tokens per sample. If
    `rewards` are given, it must answer with `DERIVATION`, which they score.
    """
    await set_latency(url, latency, spread)
    finished = GroupTimes(outbox)
    service, generator = worker(url, in_flight, finished, group=group, tokens=tokens, store=store, rewards=rewards)
    run = asyncio.create_task(service.run())
    await asyncio.sleep(1 + 2 * latency)
    lags: list[float] = []
    in_flight_counts: list[int] = []
    watching = asyncio.create_task(watch(lags, in_flight_counts, generator))
    began, cpu = time.time(), cpu_seconds()
    await asyncio.sleep(seconds)
    ended, cpu = time.time(), cpu_seconds() - cpu
    if run.done():
        run.result()
    watching.cancel()
    run.cancel()
    await asyncio.gather(run, watching, return_exceptions=True)
    wall, groups = ended - began, sum(began <= at < ended for at in finished.times)
    await generator.close()
    lags.sort()
    return Load(
        groups / wall, 1e3 * cpu / (groups * group), 1e3 * lags[int(0.99 * len(lags))], round(mean(in_flight_counts))
    )


async def set_latency(url: str, latency: float, spread: float) -> None:
    """Set the mean response time of the engine in seconds, and the part of it by which response times vary."""
    client = JsonClient()
    await client.post(f"{url}/latency", {"seconds": latency, "spread": spread}, within=10)
    await client.close()


def worker(
    url: str,
    in_flight: int,
    outbox: EventOutbox,
    *,
    group: int = GROUP,
    tokens: int = TOKENS,
    store: RunStore | None = None,
    rewards: RunRewards | None = None,
    outside: Instant | None = None,
    generator_of: Callable[[SGLangGenerator], Any] = lambda engine: engine,
    batch: int = BATCH,
    staleness: int | None = None,
) -> tuple[Service, SGLangGenerator]:
    """The pipeline of a rollout worker with the engine at `url`, and its generator.

    `generator_of` returns the generator of the pipeline, which may call the given one several times for each sample.
    """
    rollout = Rollout(
        rollout_function_path=Stream.function,
        num_rollout=10**6,
        rollout_batch_size=batch,
        n_samples_per_prompt=group,
        over_sampling_batch_size=in_flight // group,
        rollout_max_response_len=tokens,
        max_weight_staleness=staleness,
    )
    config = RunConfig(rollout=rollout)
    sampling = SamplingParams(max_new_tokens=tokens)
    generator = SGLangGenerator(
        url, FixedTokenizer(), sampling, limit=lambda: in_flight, engines=lambda: [EngineInfo("stand-in", url, 0, 1)]
    )
    instant: Any = outside or Instant()  # it has only those calls of the ports that this run makes
    ports = Ports(
        clock=SystemClock(),
        journal=Journal(store or NullStore(), outbox, SystemClock()),
        data=EndlessPrompts(group, ANSWER if rewards else "7" * tokens),
        generator=generator_of(generator),
        rewarder=rewards or Rewarder(Exact().score, None, name="exact", timeout_seconds=60, changes_samples=False),
        learner=instant,
        channel=instant,
        fleet=instant,
        dead_letters=instant,
        dynamic_filter=lambda group: Verdict(True),
        text_of=lambda ids: " ".join(map(str, ids)),
        processors=Processors().in_use,
    )
    return Service(config, bounds_of(config, "train_async.py"), ports, schedule=Schedule.FULLY_ASYNC), generator


async def watch(lags: list[float], in_flight_counts: list[int], generator: SGLangGenerator) -> None:
    """Record event-loop lag and samples in flight until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_TICK_SECONDS)
        lags.append(time.perf_counter() - before - LAG_TICK_SECONDS)
        in_flight_counts.append(generator.requests.in_flight)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def wait_until_healthy(url: str) -> None:
    client = JsonClient()
    for _ in range(200):
        try:
            await client.get(f"{url}/health", within=1)
            return await client.close()
        except EngineLostError:
            await asyncio.sleep(0.05)
    raise SystemExit("the fake engine did not start")


async def start_graders(rewards: RunRewards) -> None:
    """Score more groups at once than there are grader processes, so that all of them have started."""
    groups = [Group([Sample(prompt="7", response=DERIVATION, label=ANSWER)]) for _ in range(64)]
    await asyncio.gather(*map(rewards.score, groups))


async def play(url: str, seconds: float, mathematics: bool) -> dict[str, Load]:
    await wait_until_healthy(url)
    tune_memory()
    if mathematics:
        rewards = RunRewards(RunConfig(rollout=Rollout(rm_type="math")), args=None)
        await start_graders(rewards)
        load = await measure(url, 512, 0.05, 0.0, seconds, rewards=rewards)
        await rewards.close()
        return {"512 in flight, rm_type math": load}
    capacity = await measure(url, 512, 0.05, 0.0, seconds)
    at_70 = capacity.groups_per_second * LOAD
    wide = await measure(url, 5000, 5000 / GROUP / at_70, 0.5, seconds)
    return {"512 in flight, 50 ms engine": capacity, "5,000 in flight, 70% of that": wide}


@contextmanager
def fake_engine(*arguments: str) -> Iterator[str]:
    """Start an engine that answers without a model, and yield its URL."""
    port = free_port()
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_engine", "--port", str(port), *arguments])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        engine.terminate()
        engine.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement (default: 10)")
    parser.add_argument("--rm-type", choices=["exact", "math"], default="exact", help="the reward (default: exact)")
    arguments = parser.parse_args()
    mathematics = arguments.rm_type == "math"
    with fake_engine(*(("--text", DERIVATION) if mathematics else ())) as url:
        loads = uvloop.run(play(url, arguments.seconds, mathematics))
    print(f"{'':30}{'groups/s':>10}{'CPU ms/sample':>15}{'lag p99 ms':>12}{'in flight':>11}")
    for name, load in loads.items():
        figures = f"{load.groups_per_second:10.0f}{load.cpu_ms_per_sample:15.3f}{load.lag_p99_ms:12.1f}"
        print(f"{name:30}{figures}{load.in_flight:11}")
    record(
        "rollout_worker_math" if mathematics else "rollout_worker", {name: vars(load) for name, load in loads.items()}
    )


if __name__ == "__main__":
    main()

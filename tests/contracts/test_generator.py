"""The contract of `ports.Generator`.

SGLang's generator, a user's function and the generator that skips run over HTTP, beside the engines of the simulator.
`tests/stack/test_contracts_of_engines.py` runs the same tests on a real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.system.clock import SystemClock
from miles_async.ports import Generator
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.rollout.recording_generator import RecordingGenerator
from miles_async.rollout.recordings import RecordingContext
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.contracts.engine import WEIGHTS, HttpEngine, http_engine
from tests.sim.engines import EngineModel, Engines
from tests.sim.lost_workers import LastingEngines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Trace
from tests.unit.byte_tokenizer import Bytes


@dataclass
class Case:
    generator: Generator
    hold: Callable[[bool], None]
    """Whether requests end only by an abort."""


async def one_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await args.turns.sample(sample, sampling_params)
    return sample


def simulated(kind: type[Engines]) -> Case:
    seconds = [0.01]
    engines = kind(VirtualClock(), lambda group, rng: seconds[0], EngineModel(), 0)
    engines.version = WEIGHTS

    def hold(held: bool) -> None:
        seconds[0] = 1e9 if held else 0.01

    return Case(engines, hold)


def skipping(live: Case, folder: Path, *, stream: bool) -> Case:
    """A generator that records what `live` generates, and has nothing to replay."""
    prefix = "skip_async_rollout_" if stream else "skip_rollout_"
    settings: dict[str, Any] = {"enable": True, "dump_dir": str(folder), "steps": ["0-"]}
    skips = {f"{prefix}{name}": value for name, value in settings.items()}
    config = run_config(**skips, skip_drain_seconds=0.1)
    context = RecordingContext(identity={}, warn=lambda sentence: None, offload=_at_once)
    generator = RecordingGenerator(
        live.generator,
        config,
        context,
        stream=stream,
        clock=SystemClock(),
        events=Trace(),
        live_version=lambda: WEIGHTS,
    )
    return Case(generator, live.hold)


async def _at_once(work: Any) -> Any:
    return work()


KINDS = ("sglang", "function", "simulated", "simulated that outlives its worker", "skips groups", "skips batches")


@pytest.fixture(params=KINDS)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    if "skips" in request.param:
        async with http_engine() as engine:
            real = over_http(engine, "sglang")
            yield skipping(await anext(real), tmp_path, stream=request.param == "skips groups")
            await anext(real, None)
        return
    if "simulated" in request.param:
        yield simulated(Engines if request.param == "simulated" else LastingEngines)
        return
    async with http_engine() as engine:
        yield await anext(real := over_http(engine, request.param))
        await anext(real, None)


async def over_http(engine: HttpEngine, kind: str) -> AsyncIterator[Case]:
    infos, sampling = [EngineInfo("engine", engine.url, 0, 1)], SamplingParams(max_new_tokens=9)
    sglang = SGLangGenerator(engine.url, Bytes(), sampling, limit=lambda: 8, engines=lambda: infos)

    def hold(held: bool) -> None:
        engine.held = held

    if kind == "sglang":
        yield Case(sglang, hold)
    else:
        turns = MultiTurnSampler(sglang, Bytes())
        args = flat_args(run_config()).with_values(turns=turns)
        yield Case(
            FunctionGenerator(
                one_turn,
                args,
                sampling,
                sglang,
                turns,
                live_version=lambda: WEIGHTS,
                timeout_seconds=60.0,
                max_attempts=1,
            ),
            hold,
        )
    await sglang.close()


def prompts(count: int = 2, number: int = 0) -> Group:
    samples = [Sample(index=number * count + i, prompt="Q") for i in range(count)]
    return Group(samples, feed_index=f"sample_0_{number}", sequence=number)


async def in_flight(generator: Generator) -> None:
    """Return once the generator has a request at the engines."""
    for _ in range(1000):
        if generator.requests.in_flight:
            return
        await asyncio.sleep(0)
    raise AssertionError("no request was sent")


def check_consistent(group: Group) -> None:
    """Tokens, log-probabilities and version spans of every sample cover its response."""
    for sample in group:
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.tokens) - sample.prompt_length
        covered = [position for span in sample.spans for position in range(span.start, span.end)]
        assert covered == list(range(sample.response_length))
        assert {span.version for span in sample.spans} <= {WEIGHTS}


async def test_every_sample_is_finished_and_knows_the_version_of_each_token(case: Case) -> None:
    group = prompts()
    await case.generator.generate(group)
    check_consistent(group)
    assert all(sample.finished and sample.response_length and sample.prompt_length for sample in group)
    requests = case.generator.requests
    assert requests.in_flight == requests.in_line == 0
    assert requests.busy_seconds >= 0


async def test_finished_samples_are_left_as_they_are(case: Case) -> None:
    group = prompts()
    done = group[0]
    done.tokens, done.response_length, done.rollout_log_probs = [5, 6, 7], 2, [-0.1, -0.2]
    done.spans, done.status, done.reward = [VersionSpan(1, 0, 2)], SampleStatus.TRUNCATED, 0.5
    await case.generator.generate(group)
    assert (group[0].tokens, group[0].spans, group[0].rollout_log_probs) == (
        [5, 6, 7],
        [VersionSpan(1, 0, 2)],
        [-0.1, -0.2],
    )
    assert (group[0].status, group[0].reward, group[1].finished) == (SampleStatus.TRUNCATED, 0.5, True)
    before = [(list(sample.tokens), list(sample.spans)) for sample in group]
    await case.generator.generate(group)
    assert [(sample.tokens, sample.spans) for sample in group] == before, "nothing is left to generate"


@pytest.mark.parametrize("everything", [False, True])
async def test_an_aborted_call_returns_with_the_tokens_so_far(case: Case, everything: bool) -> None:
    case.hold(True)
    group = prompts(count=1)
    generating = asyncio.ensure_future(case.generator.generate(group))
    await in_flight(case.generator)
    await case.generator.abort(None if everything else group)
    await generating
    assert [sample.status for sample in group] == [SampleStatus.ABORTED]
    assert case.generator.requests.in_flight == 0
    check_consistent(group)


async def test_an_abort_of_a_group_that_is_not_generated_changes_nothing(case: Case) -> None:
    group, other = prompts(), prompts(number=1)
    await case.generator.abort(group)
    await case.generator.abort()
    await case.generator.generate(group)
    await case.generator.abort(other)
    assert all(sample.finished for sample in group)
    assert other == prompts(number=1)


async def test_a_call_that_is_cancelled_leaves_nothing_in_flight(case: Case) -> None:
    case.hold(True)
    generating = asyncio.ensure_future(case.generator.generate(prompts()))
    await in_flight(case.generator)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert case.generator.requests.in_flight == 0

"""slime's building blocks: users' functions and workers generate through the pipeline's generator and rewarder."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.compat.slime.base_types import RolloutFnTrainOutput
from miles_async.compat.slime.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from miles_async.compat.slime.imports import install_slime_imports
from miles_async.config.schema import RunConfig
from miles_async.config.schema.data import TrainDataset
from miles_async.errors import InfrastructureError, RouterLostError, TrajectoryError, UserError
from miles_async.events import GroupGenerated, StepStarted
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_ports import Ports, RunFunctions
from miles_async.rollout.contract import Arguments, RolloutFunctionAdapter, flat_args
from miles_async.rollout.rm_hub import async_rm, batched_async_rm
from miles_async.rollout.sample_service import SampleService
from miles_async.rollout.sglang_rollout import (
    GenerateState,
    abort,
    generate,
    generate_abortable_samples,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout_async,
    get_rollout_num_engines,
)
from miles_async.scheduling.bounds import Schedule
from miles_async.types import FROM_DATASET, Group, Sample, SampleStatus, Verdict, VersionSpan
from tests.configuration import run_config
from tests.sim.engines import Engines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Judge, World

SAMPLING = SamplingParams(max_new_tokens=16, stop=("</answer>",))


@dataclass
class FakeGenerator:
    """Finishes the unfinished samples of a group; records the loop and the parameters of each call."""

    errors: list[Exception] = field(default_factory=list)
    """Raised by the next calls."""
    loops: list[asyncio.AbstractEventLoop] = field(default_factory=list)
    asked: list[SamplingParams | None] = field(default_factory=list)
    block: asyncio.Event | None = None
    """While it is not set, requests wait."""

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        self.loops.append(asyncio.get_running_loop())
        self.asked.append(sampling)
        if self.errors:
            raise self.errors.pop(0)
        if self.block is not None:
            await self.block.wait()
            for sample in group:
                sample.tokens, sample.response_length, sample.status = [1, 2], 1, SampleStatus.ABORTED
            return
        for sample in group:
            if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
                sample.tokens, sample.response, sample.response_length = [1, 2], "2", 1
                sample.rollout_log_probs, sample.spans = [-0.5], [VersionSpan(3, 0, 1)]
                sample.status = SampleStatus.COMPLETED

    async def abort(self, group: Group | None = None) -> None:
        if self.block is not None:
            self.block.set()


class FakeRewarder:
    """Rewards the response `2` with 1."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.error: str | None = None
        self.failures = 0
        """How often the reward of the first sample still fails for reasons of infrastructure."""

    async def score(self, group: Group) -> None:
        self.sizes.append(len(group))
        if self.error is not None:
            raise TrajectoryError(self.error)
        for sample in group:
            sample.reward = float(sample.response == "2")
        if self.failures:
            self.failures -= 1
            group[0].reward = None
            raise InfrastructureError("the judge is down", group[:1])


@dataclass
class Run:
    """What a user's function receives in a run."""

    generator: FakeGenerator = field(default_factory=FakeGenerator)
    evaluator: FakeGenerator = field(default_factory=FakeGenerator)
    rewarder: FakeRewarder = field(default_factory=FakeRewarder)

    def args(self, **settings: Any) -> Arguments:
        service = SampleService(SAMPLING, max_attempts=3)
        service.connect(generator=self.generator, evaluator=self.evaluator, rewarder=self.rewarder)
        return flat_args(
            run_config(**settings), sample_service=service, tokenizer=SimpleNamespace(transformers="its tokenizer")
        )


def group(size: int = 2) -> list[Sample]:
    return [Sample(index=index, prompt="1+1=", metadata={"feed_index": "sample_0_0"}) for index in range(size)]


async def test_a_group_is_generated_with_versions_and_log_probabilities_and_scored() -> None:
    run = Run()
    args = run.args()
    [first, second] = await generate_and_rm_group(args, group(), GenerateState(args).sampling_params.copy())
    assert [first.reward, second.reward] == [1.0, 1.0]
    assert first.spans == [VersionSpan(3, 0, 1)]
    assert first.rollout_log_probs == [-0.5]
    [sampling] = run.generator.asked
    assert sampling is not None
    assert (sampling.max_new_tokens, sampling.stop) == (16, ("</answer>",))
    assert run.rewarder.sizes == [2]


async def test_a_worker_may_call_from_the_event_loop_of_its_own_thread() -> None:
    run = Run()
    args = run.args()
    results: list[list[Sample]] = []

    def work() -> None:
        results.append(asyncio.run(generate_and_rm_group(args, group(), GenerateState(args).sampling_params)))

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [sample.reward for sample in results[0]] == [1.0, 1.0]
    assert run.generator.loops == [asyncio.get_running_loop()]


async def test_parameters_of_a_call_override_those_of_the_run() -> None:
    run = Run()
    args = run.args()
    await generate_and_rm(args, group(1)[0], {**GenerateState(args).sampling_params, "temperature": 0.3, "min_p": 0.1})
    [sampling] = run.generator.asked
    assert sampling is not None
    assert (sampling.temperature, sampling.other["min_p"]) == (0.3, 0.1)


async def test_evaluations_do_not_use_the_requests_of_training() -> None:
    run = Run()
    args = run.args()
    await generate_and_rm_group(args, group(), GenerateState(args).sampling_params, evaluation=True)
    assert (len(run.generator.asked), len(run.evaluator.asked)) == (0, 1)


async def test_generate_leaves_the_reward_to_its_caller_and_rewards_leave_the_sample_unchanged() -> None:
    args = Run().args()
    sample = await generate(args, group(1)[0], GenerateState(args).sampling_params)
    assert await async_rm(args, sample) == 1.0
    assert await batched_async_rm(args, [sample, replace(sample, response="3")]) == [1.0, 0.0]
    assert sample.reward is None


@pytest.mark.parametrize("group_rm, scored", [(False, [1]), (True, [2])])
async def test_rewards_that_are_set_stay_unless_a_reward_needs_the_whole_group(
    group_rm: bool, scored: list[int]
) -> None:
    run = Run()
    settings = {"group_rm": True, "custom_rm_path": "mine.reward", "rm_type": None} if group_rm else {}
    args = run.args(**settings)
    samples = group()
    samples[0].status, samples[0].reward = SampleStatus.COMPLETED, 0.25
    await generate_and_rm_group(args, samples, GenerateState(args).sampling_params)
    assert run.rewarder.sizes == scored
    assert samples[0].reward == (0.0 if group_rm else 0.25)


@pytest.mark.virtual_time
@pytest.mark.parametrize("failures, first", [(2, 1.0), (3, None)])
async def test_samples_whose_reward_server_fails_are_scored_again_as_in_the_pipeline(
    failures: int, first: float | None
) -> None:
    run = Run()
    run.rewarder.failures = failures
    args = run.args()
    samples = await generate_and_rm_group(args, group(), GenerateState(args).sampling_params)
    assert [sample.reward for sample in samples] == [first, 1.0]
    assert [sample.status is SampleStatus.FAILED for sample in samples] == [first is None, False]
    assert len(run.rewarder.sizes) == 3


async def test_with_a_reward_for_groups_a_single_sample_is_not_scored() -> None:
    run = Run()
    args = run.args(group_rm=True, custom_rm_path="mine.reward", rm_type=None)
    assert (await generate_and_rm(args, group(1)[0], GenerateState(args).sampling_params)).reward is None
    assert run.rewarder.sizes == []


async def test_a_group_that_cannot_be_generated_or_scored_has_status_failed_with_the_error() -> None:
    run = Run(FakeGenerator(errors=[TrajectoryError("the prompt is too long")]))
    args = run.args()
    samples = await generate_and_rm_group(args, group(), GenerateState(args).sampling_params)
    assert {(sample.status, sample.metadata["error"]) for sample in samples} == {
        (SampleStatus.FAILED, "the prompt is too long")
    }
    run.rewarder.error = "the reward took too long"
    samples = await generate_and_rm_group(args, group(), GenerateState(args).sampling_params)
    assert {sample.metadata["error"] for sample in samples} == {"the reward took too long"}


async def test_generation_waits_while_no_engine_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.rollout.sample_service.ROUTER_LOST_PAUSE_SECONDS", 0.0)
    run = Run(FakeGenerator(errors=[RouterLostError("no engine"), RouterLostError("no engine")]))
    args = run.args()
    [sample] = await generate_and_rm_group(args, group(1), GenerateState(args).sampling_params)
    assert (sample.reward, len(run.generator.asked)) == (1.0, 3)


@pytest.mark.parametrize("partial", [True, False])
async def test_an_abort_returns_the_groups_that_were_submitted_and_did_not_finish(partial: bool) -> None:
    run = Run()
    args = run.args(partial_rollout=partial)
    state = GenerateState(args)
    state.submit_generate_tasks([group()])
    [finished] = await asyncio.gather(*state.pendings)
    assert state is GenerateState(args)
    state.reset()
    run.generator.block = asyncio.Event()
    state.submit_generate_tasks([group(), group()])
    await asyncio.sleep(0)
    unfinished = await abort(args, 7)
    assert (len(unfinished), state.remaining_batch_size, state.pendings) == (2, 2, set())
    assert finished not in unfinished
    [sample, *_] = unfinished[0]
    expected = (SampleStatus.ABORTED, 1, 7) if partial else (SampleStatus.PENDING, 0, None)
    assert (sample.status, sample.response_length, sample.metadata.get("start_rollout_id")) == expected
    [refused, *_] = await generate_and_rm_group(args, group(), state.sampling_params)
    assert refused.status is SampleStatus.ABORTED
    state.reset()
    run.generator.block = None
    [generated, *_] = await generate_and_rm_group(args, group(), state.sampling_params)
    assert generated.status is SampleStatus.COMPLETED


async def test_the_state_has_the_attributes_that_functions_of_slime_read() -> None:
    args = Run().args(rollout_num_gpus=4, rollout_num_gpus_per_engine=2, sglang_server_concurrency=8)
    state = GenerateState(args)
    assert (state.args, state.tokenizer, state.processor, state.aborted) == (args, "its tokenizer", None, False)
    assert get_rollout_num_engines(args) == 2
    assert state.semaphore._value == 16


class Prompts:
    """Groups of two samples without end, from which the generated ones are known."""

    def __init__(self) -> None:
        self.taken = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first, self.taken = self.taken, self.taken + num_samples
        return [
            [Sample(index=2 * number + i, prompt="?", metadata={"number": number}) for i in range(2)]
            for number in range(first, self.taken)
        ]


def keep_odd(args: Any, samples: list[Sample], **kwargs: Any) -> Verdict:
    return Verdict(bool(samples[0].metadata["number"] % 2), "even")


def remember_all(args: Any, all_groups: list[list[Sample]], data_source: Any) -> None:
    args.all_numbers = [group[0].metadata["number"] for group in all_groups]


async def test_a_batch_of_groups_that_the_filter_keeps_is_generated_and_the_others_are_returned() -> None:
    own = {
        "dynamic_sampling_filter_path": f"{__name__}.keep_odd",
        "rollout_all_samples_process_path": f"{__name__}.remember_all",
    }
    args, prompts = Run().args(rollout_batch_size=3, over_sampling_batch_size=4, **own), Prompts()
    output, unused = await generate_rollout_async(args, 0, prompts.get_samples)
    numbers = [group[0].metadata["number"] for group in output.samples]
    assert (len(numbers), numbers) == (3, sorted(numbers))
    assert all(number % 2 for number in numbers)
    assert {sample.reward for group in output.samples for sample in group} == {1.0}
    assert output.metrics is not None
    assert output.metrics["rollout/dynamic_filter/drop_even"] >= 2
    returned = [group[0].metadata["number"] for group in unused]
    assert set(args.all_numbers) >= set(numbers)
    dropped = [number for number in args.all_numbers if not number % 2]
    assert sorted([*numbers, *returned, *dropped]) == list(range(prompts.taken)), "each prompt is accounted for"
    assert GenerateState(args).pendings == set()


async def test_a_group_is_filtered_by_the_filter_of_its_data_set() -> None:
    class OfTwoSets(Prompts):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for sample in chain.from_iterable(groups):
                name = "code" if sample.metadata["number"] < 8 else "math"
                sample.metadata[FROM_DATASET] = {"name": name, "epochs": 0.0}
            return groups

    code = TrainDataset(prompt_data="code.jsonl", dynamic_sampling_filter_path=f"{__name__}.keep_odd")
    sets = {"code": code, "math": TrainDataset(prompt_data="math.jsonl")}
    args = Run().args(rollout_batch_size=8, over_sampling_batch_size=12, datasets=sets)
    output, _ = await generate_rollout_async(args, 0, OfTwoSets().get_samples)
    numbers = {group[0].metadata["number"] for group in output.samples}
    assert numbers == {1, 3, 5, 7, 8, 9, 10, 11}


async def test_a_plain_function_generates_a_batch_from_its_thread() -> None:
    args, prompts = Run().args(rollout_batch_size=2), Prompts()
    groups, unused = await asyncio.to_thread(generate_abortable_samples, args, 0, prompts.get_samples)
    assert ([group[0].reward for group in groups], unused) == ([1.0, 1.0], [])
    with pytest.raises(UserError, match="generate_abortable_samples cannot evaluate: call generate_rollout"):
        generate_abortable_samples(args, 0, prompts.get_samples, evaluation=True)


# --- workers in whole runs ------------------------------------------------------------------------------------------


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 4, "num_rollout": 12, "n_samples_per_prompt": 2, "max_weight_staleness": 2}
    return run_config(**{**sizes, "sglang_server_concurrency": 6, "rollout_num_gpus": 1, **settings})


class EnginesWithSampling(Engines):
    """Simulated engines that accept sampling parameters."""

    async def generate(self, group: Group, sampling: SamplingParams | None = None) -> None:
        await super().generate(group)
        for sample in group:
            sample.rollout_log_probs = [-0.5] * sample.response_length


@dataclass(kw_only=True)
class WorkerRun(World):
    """A run of a rollout function with a worker, which generates with the building blocks."""

    function: Any
    keeps_groups: bool | None = True
    """What the function declares; None without a declaration."""
    engine_kind: type[Engines] = EnginesWithSampling

    def _ports(self, clock: VirtualClock) -> Ports:
        engines: Any = self.fleet
        service = SampleService(SAMPLING, max_attempts=3)
        service.connect(generator=engines, evaluator=engines, rewarder=Judge(clock, self.reward_seconds))
        args = flat_args(self.config, sample_service=service, tokenizer=None)
        adapter = RolloutFunctionAdapter(
            self.function, args, self.config, score_tokens=_nothing_to_score, keeps_groups=self.keeps_groups
        )
        functions = RunFunctions(rollout=adapter)
        return replace(super()._ports(clock), functions=functions, keeps_groups=self.keeps_groups)

    def check(self) -> None:
        """The staleness limit holds, and no prompt is lost or trained twice."""
        ages = [age for step in self.trace.of(StepStarted) for age in step.staleness]
        assert 0 < max(ages) <= 2
        trained = Counter(chain.from_iterable(self.trainer.batches))
        assert max(trained.values()) == 1
        held = {group.feed_index for group in self.service.held.taken.copies}
        taken = {f"sample_0_{number}" for number in range(self.feed.position()["next"])}
        assert set(trained) | held | self.returned | self.dead_letters.prompts == taken
        assert self.audit.violations == []


async def _nothing_to_score(sample: Sample) -> None:
    raise AssertionError("the building blocks record log-probabilities")


class FullyAsyncRollout:
    """A worker in the form of a class, as in Miles: a task in the run's event loop, and `state` instead of `args`."""

    def __init__(self) -> None:
        self._output: asyncio.Queue[list[Sample]] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    async def __call__(
        self, args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
    ) -> list[list[Sample]]:
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(GenerateState(args), data_source))
        return [await self._output.get() for _ in range(args.rollout_batch_size)]

    async def generate_and_rm_group(self, state: GenerateState, samples: list[Sample]) -> list[Sample]:
        return await generate_and_rm_group(state.args, samples, state.sampling_params.copy())

    async def _work(self, state: GenerateState, data_source: RolloutSource) -> None:
        active: set[asyncio.Task[list[Sample]]] = set()
        while True:
            while len(active) < 6 and (groups := data_source.get_samples(1)):
                active.add(asyncio.create_task(self.generate_and_rm_group(state, groups[0])))
            if not active:
                await asyncio.sleep(0.1)
                continue
            done, active = await asyncio.wait(active, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._output.put_nowait(task.result())


@pytest.mark.parametrize(
    "keeps_groups, schedule",
    [(True, Schedule.FULLY_ASYNC), (None, Schedule.ONE_STEP_OFF)],
    ids=["declared", "undeclared"],
)
def test_a_worker_in_the_class_form_of_miles_trains_within_the_staleness_limit(
    keeps_groups: bool | None, schedule: Schedule
) -> None:
    world = WorkerRun(
        config=config(),
        schedule=schedule,
        function=FullyAsyncRollout(),
        keeps_groups=keeps_groups,
        train_seconds=2.0,
    ).run()
    assert all(event.by_worker for event in world.trace.of(GroupGenerated))
    world.check()


async def slimes_loop(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    output, unused = await generate_rollout_async(args, rollout_id, data_source.get_samples)
    data_source.add_samples(unused)
    return output


def test_the_loop_of_slime_trains_each_prompt_once() -> None:
    world = WorkerRun(
        config=config(over_sampling_batch_size=6),
        schedule=Schedule.ONE_STEP_OFF,
        function=slimes_loop,
        keeps_groups=None,
        train_seconds=2.0,
    ).run()
    assert [len(batch) for batch in world.trainer.batches] == [4] * 12
    trained = Counter(chain.from_iterable(world.trainer.batches))
    assert max(trained.values()) == 1
    assert world.audit.violations == []


@pytest.fixture
def slime_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """slime's package, from a checkout, with the imports of `--slime-imports`."""
    folder = os.environ.get("SLIME_CHECKOUT")
    if folder is None:
        pytest.skip("set SLIME_CHECKOUT to a checkout of slime")
    if not Path(folder, "slime/rollout/fully_async_rollout.py").is_file():
        pytest.skip(f"SLIME_CHECKOUT {folder} has no slime/rollout/fully_async_rollout.py")
    monkeypatch.syspath_prepend(folder)
    yield from with_slime_imports()


def with_slime_imports() -> Iterator[None]:
    install_slime_imports()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "miles")]:
        del sys.modules[name]


@pytest.mark.usefixtures("slime_checkout")
def test_the_fully_asynchronous_worker_of_slime_runs_unchanged() -> None:
    """Tried with commit 624b824a898ab0ec1fcb4d373004c7f3852bf515 of THUDM/slime (21 August 2026).

    The worker has a thread with its own event loop, so this run takes real time.
    """
    worker = importlib.import_module("slime.rollout.fully_async_rollout")
    world = WorkerRun(
        config=config(num_rollout=6),
        function=worker.generate_rollout_fully_async,
        latency=lambda group, rng: rng.uniform(0.01, 0.1),
        train_seconds=0.05,
    )
    try:
        asyncio.run(world._run())
    finally:
        worker._stop_global_worker()
    assert [len(batch) for batch in world.trainer.batches] == [4] * 6
    world.check()


@pytest.fixture
def slime_imports() -> Iterator[None]:
    yield from with_slime_imports()


@pytest.mark.usefixtures("slime_imports")
def test_names_of_slime_are_found_without_a_checkout() -> None:
    found = {
        name: importlib.import_module(f"slime.{name}")
        for name in ("rollout.sglang_rollout", "rollout.rm_hub", "rollout.data_source", "utils.types", "utils.misc")
    }
    assert found["rollout.sglang_rollout"].generate_and_rm_group is generate_and_rm_group
    assert found["rollout.rm_hub"].async_rm is async_rm
    assert found["rollout.data_source"].RolloutDataSourceWithBuffer is RolloutDataSourceWithBuffer is RolloutDataSource
    assert found["utils.types"].Sample is Sample
    assert found["utils.misc"].load_function("miles_async.types.Sample") is Sample
    asynchronous: Any = importlib.import_module("slime.utils.async_utils")
    assert asynchronous.run(asyncio.sleep(0, "done")) == "done"
    assert asynchronous.get_async_loop() is asynchronous.get_async_loop()
    assert asynchronous.AsyncLoopThread().run(asyncio.sleep(0, "in its own loop")) == "in its own loop"

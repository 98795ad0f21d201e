"""Rollout classes in Miles' form generate through the pipeline's generator and rewarder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_async.compat.miles.forms import in_slimes_form
from miles_async.modes.mode import mode_of
from miles_async.modes.shipped import Stream
from miles_async.rollout import fully_async
from miles_async.rollout.contract import call_rollout_function
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Sample, SampleStatus
from tests.sim.test_building_blocks import FakeGenerator, Prompts, Run, WorkerRun, config, group
from tests.unit.compat.slime_names import names_of_slime, of_miles


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    with names_of_slime():
        yield


class Source(Prompts):
    """Prompts without end, and the scores of an evaluation."""

    live_version = 7

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[list[Sample]] = []
        self.loops: list[asyncio.AbstractEventLoop] = []

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        self.loops.append(asyncio.get_running_loop())
        return {"held_out": {"rewards": [float(rollout_id)], "truncated": [False]}}


def rollout(function: type) -> Callable[..., Any]:
    """A class as the run calls it."""
    called = in_slimes_form(function, "rollout_function_path 'mine.Rollout'", "rollout_function_path")
    assert called is not None
    return called


class Remembers:
    """A class of a user without a base class."""

    created = 0

    def __init__(self, input: Any) -> None:
        type(self).created += 1
        self.args, self.data_source = input.args, input.data_source
        self.inputs: list[tuple[int, bool, Any]] = []

    def __call__(self, input: Any) -> Any:
        self.inputs.append((input.rollout_id, input.evaluation, input.weight_version))
        types = of_miles("base_types")
        if input.evaluation:
            return types.RolloutFnEvalOutput({"mine": {"rewards": [1.0], "truncated": [False]}})
        groups = self.data_source.get_samples(self.args.rollout_batch_size)
        return types.RolloutFnTrainOutput(groups, {"seen": list(self.inputs)})


async def test_one_object_generates_the_batches_of_a_run_and_evaluates() -> None:
    Remembers.created = 0
    source: Any = Source()
    args, metrics = Run().args(rollout_batch_size=3), dict[str, Any]()
    batches, evaluations = rollout(Remembers), rollout(Remembers)
    groups: Any = await call_rollout_function(batches, args, 4, source, evaluation=False)
    scores = await call_rollout_function(evaluations, args, 4, source, evaluation=True)
    assert (len(groups), scores) == (3, {"mine": {"rewards": [1.0], "truncated": [False]}})
    fewer = args.with_values(rollout_batch_size=1)
    groups = await call_rollout_function(batches, fewer, 4, source, evaluation=False, metrics=metrics)
    assert len(groups) == 1, "a call that replaces groups asks for fewer"
    assert metrics["seen"] == [(4, False, 7), (4, True, None), (4, False, 7)]
    assert Remembers.created == 1
    await call_rollout_function(batches, Run().args(), 0, source, evaluation=False)
    assert Remembers.created == 2, "another run has another object"


async def test_a_class_derived_from_that_of_miles_generates_a_batch_and_adds_metrics() -> None:
    class WithMetrics(of_miles("inference_rollout.inference_rollout_common").InferenceRolloutFn):  # type: ignore[misc]
        async def _call_train(self, input: Any) -> Any:
            self.thread = threading.current_thread()
            output = await super()._call_train(input)
            output.metrics = {**output.metrics, "groups": len(output.samples)}
            return output

    source: Any = Source()
    run, metrics = Run(), dict[str, Any]()
    args = run.args(rollout_batch_size=2, over_sampling_batch_size=4)
    called = rollout(WithMetrics)
    groups: Any = await call_rollout_function(called, args, 0, source, evaluation=False, metrics=metrics)
    assert [sample.reward for group in groups for sample in group] == [1.0] * 4
    assert metrics["groups"] == 2
    assert {id(loop) for loop in run.generator.loops} == {id(asyncio.get_running_loop())}
    trained = {group[0].metadata["number"] for group in groups}
    assert trained | {group[0].metadata["number"] for group in source.returned} == set(range(4))


async def test_a_class_derived_from_that_of_miles_evaluates_as_the_run_does() -> None:
    base = of_miles("inference_rollout.inference_rollout_common").InferenceRolloutFn
    source: Any = Source()
    scores = await call_rollout_function(rollout(base), Run().args(), 5, source, evaluation=True)
    assert scores == {"held_out": {"rewards": [5.0], "truncated": [False]}}
    assert source.loops == [asyncio.get_running_loop()]


def test_a_class_derived_from_the_fully_asynchronous_one_of_miles_takes_groups_of_the_run() -> None:
    class Mine(of_miles("fully_async_rollout").FullyAsyncRolloutFn):  # type: ignore[misc]
        pass

    assert isinstance(mode_of(rollout(Mine)), Stream)
    world = WorkerRun(
        config=config(num_rollout=4),
        function=rollout(Mine),
        keeps_groups=False,
        schedule=Schedule.FULLY_ASYNC,
        latency=lambda group, rng: rng.uniform(0.01, 0.05),
        train_seconds=0.05,
    )
    # The class is called in a thread, so this run takes real time.
    asyncio.run(world._run())
    assert [len(batch) for batch in world.trainer.batches] == [4] * 4
    assert world.audit.violations == []


async def test_blocks_of_miles_take_a_state_where_those_of_slime_take_args() -> None:
    blocks, trains = (
        of_miles("inference_rollout.inference_rollout_common"),
        of_miles("inference_rollout.inference_rollout_train"),
    )
    args = Run().args()
    state = blocks.GenerateState(args)
    assert (state.args, state.tokenizer, state.processor, state.aborted) == (args, "its tokenizer", None, False)
    finished: list[int] = []
    [first, second] = await blocks.generate_and_rm_group(
        state, group(), state.sampling_params, sample_done_callback=lambda: finished.append(1)
    )
    assert (first.reward, second.reward, len(finished)) == (1.0, 1.0, 2)
    assert (await blocks.generate_and_rm(state, group(1)[0], state.sampling_params)).reward == 1.0
    params = blocks.compute_sampling_params(args, temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=3)
    assert (params["temperature"], params["max_new_tokens"], params["stop"]) == (0.0, 3, ["</answer>"])
    [task] = trains.submit_generate_tasks(state, [group()])
    assert [sample.reward for sample in await task] == [1.0, 1.0]
    [unscored] = group(1)
    found = await state.generate_function(of_miles("base_types").GenerateFnInput(state, unscored, params, False))
    assert (found.samples, unscored.reward) == (unscored, None)
    await of_miles("rm_hub").batched_async_rm(args, [unscored], inplace_set_reward_field=True)
    assert unscored.reward == 1.0


async def test_an_abort_returns_the_unfinished_groups_and_leaves_evaluations_alone() -> None:
    blocks, trains = (
        of_miles("inference_rollout.inference_rollout_common"),
        of_miles("inference_rollout.inference_rollout_train"),
    )
    run = Run(FakeGenerator(block=asyncio.Event()))
    state = blocks.GenerateState(run.args())
    pending = set(trains.submit_generate_tasks(state, [group(), group()]))
    await asyncio.sleep(0)
    unfinished = await trains.abort(state, pending, 0)
    assert [[sample.status for sample in group] for group in unfinished] == [[SampleStatus.PENDING] * 2] * 2
    assert state.aborted
    [evaluated] = await blocks.generate_and_rm_group(state, group(1), state.sampling_params, evaluation=True)
    assert evaluated.reward == 1.0
    state.reset()
    assert not state.aborted


def test_the_mode_of_a_class_is_that_of_the_function() -> None:
    @fully_async(keeps_groups=True)
    class Mine(Remembers):
        pass

    assert mode_of(rollout(Mine)).keeps_groups

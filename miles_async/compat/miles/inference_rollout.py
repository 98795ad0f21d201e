"""Miles' building blocks for rollout functions: those of slime with Miles' arguments.

Miles passes a `GenerateState` where slime passes `args`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from miles_async.compat.miles.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles_async.compat.slime import sglang_rollout as of_slime
from miles_async.modes.shipped import Stream
from miles_async.rollout.contract import Arguments
from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async
from miles_async.types import Group, Sample

__all__ = [
    "FullyAsyncRolloutFn",
    "GenerateState",
    "InferenceRolloutFn",
    "abort",
    "compute_sampling_params",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout_async",
    "submit_generate_tasks",
]


class GenerateState:
    """What generation needs, and whether it was aborted. Objects of the same run share everything but `args`."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self._shared = of_slime.GenerateState(args)
        self.processor = self._shared.processor
        self.generate_fn_semaphore = self._shared.semaphore
        self.sampling_params = args.sample_service.sampling_params

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint, of the library transformers."""
        return self._shared.tokenizer

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called since `reset`. No training samples are generated meanwhile."""
        return self._shared.aborted

    @aborted.setter
    def aborted(self, aborted: bool) -> None:
        self._shared.aborted = aborted

    def reset(self) -> None:
        """Allow generation again after an abort."""
        self._shared.reset()

    async def generate_function(self, input: GenerateFnInput) -> GenerateFnOutput:
        """Generate a sample without a reward, with the generate function of the run if it has one."""
        group = Group.of([input.sample])
        await self.args.sample_service.generate(group, input.sampling_params, evaluation=input.evaluation)
        return GenerateFnOutput(group[0] if len(group) == 1 else list(group))


async def generate_and_rm(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate one sample and score it, except with `group_rm`."""
    return await of_slime.generate_and_rm(state.args, sample, sampling_params, evaluation)


async def generate_and_rm_group(
    state: GenerateState,
    group: list[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    sample_done_callback: Callable[[], None] | None = None,
) -> Any:
    """Generate the unfinished samples of a group, and score those without a reward.

    An entry of the result is a sample, or the list of the segments of a trajectory. `sample_done_callback` is called
    once per sample, when the group is finished, because the samples of a group may be one request.
    """
    try:
        finished = await of_slime.generate_and_rm_group(state.args, group, sampling_params, evaluation)
    finally:
        if sample_done_callback is not None:
            for _ in group:
                sample_done_callback()
    trajectories = Group.of(finished).trajectories
    if len(trajectories) == len(finished):
        return finished
    return [segments[0] if len(segments) == 1 else segments for segments in trajectories]


def submit_generate_tasks(
    state: GenerateState, samples: Sequence[list[Sample]], sample_done_callback: Callable[[], None] | None = None
) -> list[asyncio.Task[Any]]:
    """Start to generate and score groups in the current event loop. Returns one task for each."""
    params = state.sampling_params
    return [
        asyncio.create_task(
            generate_and_rm_group(state, group, params.copy(), sample_done_callback=sample_done_callback)
        )
        for group in samples
    ]


async def abort(state: GenerateState, pendings: set[asyncio.Task[Any]], rollout_id: int) -> list[list[Sample]]:
    """Abort all generation, wait for the tasks, and return the groups that did not finish, for `add_samples`."""
    of_slime.GenerateState(state.args).pendings |= pendings
    return await of_slime.abort(state.args, rollout_id)


async def generate_rollout_async(
    state: GenerateState, rollout_id: int, data_source: Callable[[int], Sequence[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Generate `rollout_batch_size` groups that the dynamic filter keeps, and abort the others.

    The second part of the result are the groups that did not finish or are not needed, for `data_source.add_samples`.
    """
    return await of_slime.generate_rollout_async(state.args, rollout_id, data_source)


def compute_sampling_params(
    args: Arguments, *, temperature: float, top_p: float, top_k: int, max_new_tokens: int
) -> dict[str, Any]:
    """SGLang's dictionary of the sampling parameters of the run, with these values."""
    values = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens}
    return {**args.sample_service.sampling_params, **values}


class InferenceRolloutFn:
    """Generates one batch per call, and evaluates as the run does; a base class for rollout classes of users."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args = input.args
        self.data_source = input.data_source
        self.state = GenerateState(input.args)

    async def __call__(self, input: RolloutFnInput) -> RolloutFnOutput:
        match input:
            case RolloutFnTrainInput():
                return await self._call_train(input)
            case _:
                return await self._call_eval(input)

    async def _call_train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        output, unused = await generate_rollout_async(self.state, input.rollout_id, self.data_source.get_samples)
        self.data_source.add_samples(unused)
        return output

    async def _call_eval(self, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
        evaluation = self.data_source.evaluate(input.rollout_id)
        return RolloutFnEvalOutput(await self.args.sample_service.in_pipeline(evaluation))


@Stream()
class FullyAsyncRolloutFn(InferenceRolloutFn):
    """Takes the groups that the run generates all the time."""

    async def _call_train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        groups = generate_rollout_fully_async(self.args, input.rollout_id, self.data_source)
        return RolloutFnTrainOutput(await self.args.sample_service.in_pipeline(groups))

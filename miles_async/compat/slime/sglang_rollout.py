"""slime's building blocks for users' rollout functions and workers.

They have slime's names and signatures. They generate and score through `args.sample_service`, so they may be called
from any thread and event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

from miles_async.compat.slime.async_utils import run
from miles_async.compat.slime.base_types import RolloutFnTrainOutput
from miles_async.compat.slime.rm_hub import async_rm, batched_async_rm
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from miles_async.identity import identity_set
from miles_async.rollout.batch_rollout import generate_rollout
from miles_async.rollout.contract import Arguments, failed_trajectories
from miles_async.rollout.sample_service import SampleService
from miles_async.types import Group, Sample, SampleStatus, Verdict

__all__ = [
    "GenerateState",
    "abort",
    "async_rm",
    "batched_async_rm",
    "generate",
    "generate_abortable_samples",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_rollout_num_engines",
]

NO_PROMPT_PAUSE_SECONDS = 0.5
"""Time until a data source that returned no group is asked again."""


class GenerateState:
    """The state of a run's generation: `GenerateState(args)` returns the same object wherever it is called.

    Example::

        state = GenerateState(args)
        state.submit_generate_tasks(data_source.get_samples(8))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
    """

    args: Arguments
    processor: None
    """slime's image processor; prompts with images are not supported."""
    semaphore: asyncio.Semaphore
    """For requests that a function sends to the router itself. The building blocks do not need it."""
    sampling_params: dict[str, Any]
    """SGLang's dictionary of the sampling parameters of training samples."""
    pendings: set[asyncio.Task[list[Sample]]]
    """The tasks of `submit_generate_tasks`. The caller removes those that are done."""
    remaining_batch_size: int
    """Number of groups that were submitted since `reset`. The caller subtracts those that it drops."""
    aborted: bool
    """Whether `abort` was called since `reset`. No training samples are generated meanwhile."""

    def __new__(cls, args: Arguments) -> GenerateState:
        service: SampleService = args.sample_service
        if (existing := service.states.get(cls)) is not None:
            assert isinstance(existing, GenerateState)
            return existing
        state = super().__new__(cls)
        state.args, state.processor = args, None
        state.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * get_rollout_num_engines(args))
        state.sampling_params = service.sampling_params
        state.reset()
        service.states[cls] = state
        return state

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `args`, of the library transformers: the checkpoint's, unless a function has set another."""
        match self.args.tokenizer:
            case object(transformers=tokenizer) | tokenizer:
                return tokenizer

    def reset(self) -> None:
        """Forget the submitted groups, and allow generation again after an abort."""
        self.remaining_batch_size, self.pendings, self.aborted = 0, set(), False

    def submit_generate_tasks(self, samples: Sequence[list[Sample]]) -> None:
        """Start to generate and score groups in the current event loop, one task each."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


def get_rollout_num_engines(args: Arguments) -> int:
    """Number of engines that the run was configured with (slime's `utils/http_utils.py`)."""
    return max(1, int(args.rollout_num_gpus) // int(args.rollout_num_gpus_per_engine))


async def generate(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Generate one sample without a reward, in place; `custom_generate_function_path` may return another object.

    The result is the sample, or the list of segments if the function returned several.

    `sampling_params["max_new_tokens"]` limits the whole response, including tokens that the sample already has. The
    returned sample has status FAILED if the generation failed, with the error in `metadata["error"]`.
    """
    group = Group.of([sample])
    await args.sample_service.generate(group, sampling_params)
    return _sample_or_segments(group)


async def generate_and_rm(
    args: Arguments, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate one sample and score it, except with `group_rm`. Otherwise as `generate_and_rm_group`."""
    group = Group.of([sample])
    await _generate_and_score(args, group, sampling_params, evaluation, score=not args.group_rm)
    return _sample_or_segments(group)


async def generate_and_rm_group(
    args: Arguments, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Generate the unfinished samples of a group, and score those without a reward.

    The group is one request to an engine, or one call of `custom_generate_function_path` per sample. Its samples have
    weight versions and log-probabilities afterwards. Nothing is raised if generation or reward fails: the samples then
    have status FAILED, and a rollout function returns them, so that the prompt is requeued. Samples that were aborted
    have status ABORTED; `data_source.add_samples([group])` puts their prompt first in line.
    """
    result = Group.of(group)
    await _generate_and_score(args, result, sampling_params, evaluation, score=True)
    return result


async def abort(args: Arguments, rollout_id: int) -> list[list[Sample]]:
    """Abort all generation, and wait for the tasks in `GenerateState.pendings`.

    Returns the groups that did not finish, for `data_source.add_samples`. With `partial_rollout` they keep their
    tokens, and `metadata["start_rollout_id"]` is the rollout in which they were started; without it, the tokens are
    discarded.
    """
    state = GenerateState(args)
    state.aborted = True
    await args.sample_service.abort()
    unfinished: list[list[Sample]] = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        unfinished += [group for group in (task.result() for task in done) if _has(group, SampleStatus.ABORTED)]
    for group in unfinished:
        for sample in group:
            if not args.partial_rollout:
                sample.reset()
            elif sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
    return unfinished


async def generate_rollout_async(
    args: Arguments, rollout_id: int, data_source: Callable[[int], Sequence[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Generate `rollout_batch_size` groups that the dynamic filter keeps, and abort the others.

    `data_source` returns groups, as the method `get_samples` does. The second part of the result are the groups that
    did not finish or are not needed, for `data_source.add_samples`. Groups that could not be generated are returned
    with status FAILED, so that their prompts are requeued. The run itself applies `rollout_sample_filter_path`.

    Example::

        output, unused = await generate_rollout_async(args, rollout_id, data_source.get_samples)
        data_source.add_samples(unused)
        return output
    """
    state, size = GenerateState(args), args.rollout_batch_size
    load_filter = cache(partial(load_function, setting="dynamic_sampling_filter_path"))
    kept: list[list[Sample]] = []
    unused: list[list[Sample]] = []
    finished: list[list[Sample]] = []
    dropped: Counter[str] = Counter()
    while len(kept) < size:
        while state.remaining_batch_size < size:
            if not (groups := data_source(args.over_sampling_batch_size or size)):
                break
            state.submit_generate_tasks(groups)
        if not state.pendings:
            await asyncio.sleep(NO_PROMPT_PAUSE_SECONDS)
            continue
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for group in (task.result() for task in done):
            finished.append(group)
            path, verdict = _filter_of(args, group), Verdict(True)
            if path is not None and not _has(group, SampleStatus.FAILED):
                verdict = Verdict.of(load_filter(path)(args, group))
            fallback = verdict.keep_when_insufficient and state.remaining_batch_size <= size
            if not verdict.keep and not fallback:
                dropped[f"rollout/dynamic_filter/drop_{verdict.reason}"] += 1
                state.remaining_batch_size -= 1
            else:
                (kept if len(kept) < size else unused).append(group)
    running = list(state.pendings)
    unused += await abort(args, rollout_id)
    # The abort has returned those that it left unfinished, with or without their tokens.
    finished_late = (task.result() for task in running)
    unused += [group for group in finished_late if not _has(group, SampleStatus.ABORTED, SampleStatus.PENDING)]
    state.reset()
    if (path := args.rollout_all_samples_process_path) is not None:
        load_function(path, setting="rollout_all_samples_process_path")(args, _ordered(finished), data_source)
    return RolloutFnTrainOutput(_ordered(kept), dict(dropped)), unused


def generate_abortable_samples(
    args: Arguments,
    rollout_id: int,
    data_source: Callable[[int], Sequence[list[Sample]]],
    evaluation: bool = False,
) -> tuple[Sequence[Sequence[Sample]], list[list[Sample]]]:
    """The groups of `generate_rollout_async`, for plain functions. Blocks the calling thread.

    Raises UserError for an evaluation, because `data_source` has no data sets for it.
    """
    if evaluation:
        raise UserError(
            "generate_abortable_samples cannot evaluate: call generate_rollout of "
            "miles_async.rollout.sglang_rollout with evaluation=True"
        )
    output, unused = run(generate_rollout_async(args, rollout_id, data_source))
    return output.samples, unused


def _filter_of(args: Arguments, group: list[Sample]) -> str | None:
    """The path of the dynamic filter for a group: that of its data set, or else that of the run."""
    own = args.datasets.get(group[0].dataset)
    path: str | None = None if own is None else own.dynamic_sampling_filter_path
    return args.dynamic_sampling_filter_path if path is None else path


def _ordered(groups: Sequence[list[Sample]]) -> list[list[Sample]]:
    return sorted(groups, key=lambda group: group[0].index or 0)


def _has(group: list[Sample], *statuses: SampleStatus) -> bool:
    return any(sample.status in statuses for sample in group)


async def _generate_and_score(
    args: Arguments, group: Group, sampling_params: dict[str, Any], evaluation: bool, *, score: bool
) -> None:
    service: SampleService = args.sample_service
    if GenerateState(args).aborted and not evaluation:
        for sample in group:
            if sample.status is SampleStatus.PENDING:
                sample.status = SampleStatus.ABORTED
        return
    await service.generate(group, sampling_params, evaluation=evaluation)
    if not score or _has(group, SampleStatus.ABORTED):
        return
    # A generate function may have set rewards. A reward for whole groups needs all samples that did not fail.
    group.share_rewards()
    failed = identity_set(chain.from_iterable(failed_trajectories(group)))
    unscored = Group((sample for sample in group if sample not in failed), feed_index=group.feed_index)
    if not args.group_rm:
        unscored[:] = [sample for sample in unscored if sample.reward is None]
    if any(sample.reward is None for sample in unscored):
        await service.score(unscored)


def _sample_or_segments(group: Group) -> Any:
    return group[0] if len(group) == 1 else list(group)

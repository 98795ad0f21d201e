"""The contract of rollout functions, which is the one of slime and Miles.

A rollout function is `fn(args, rollout_id, data_source, evaluation=False)`, plain or async, and returns the groups of
one batch. `RolloutFunctionAdapter` turns such a function into the pipeline's `RolloutFunction`. `Arguments` is the only
place where the configuration is flattened; all other code takes typed sections.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import Any

import structlog

from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.config.fields import SETTINGS, values_of
from miles_async.config.losses import clip_range, loss_aggregation
from miles_async.config.schema import RunConfig
from miles_async.errors import TrajectoryError, UserError
from miles_async.guests import GUESTS
from miles_async.identity import IdentityMap, identity_set
from miles_async.json_values import readable_entries, shown
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.recording_generator import RecordingGenerator
from miles_async.sample_schema import accept_values, check_columns, check_reward
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from miles_async.user_code import call_plain_or_async, is_cancellation

log = structlog.get_logger(__name__)


class Arguments:
    """All settings of a run as attributes, values that the run adds, such as the tokenizer, and flags of guests.

    Settings are read-only. Functions of users may set other attributes, which last for the run in their process.
    """

    _values: Mapping[str, Any]
    _own: dict[str, Any]

    def __init__(self, values: Mapping[str, Any], own: dict[str, Any] | None = None) -> None:
        """`own` are the attributes of users' functions."""
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_own", {} if own is None else own)

    def __getattr__(self, name: str) -> Any:
        for known in (self._own, self._values):
            if name in known:
                return known[name]
        near = get_close_matches(name, [*self._values, *self._own], n=1)
        raise AttributeError(f"args has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            raise AttributeError(f"args.{name} is read-only: set it in the configuration")
        self._own[name] = value

    def with_values(self, **runtime: Any) -> Arguments:
        """A copy with further values. What users' functions set in the copy is set here too."""
        return Arguments({**self._values, **runtime}, self._own)

    def take_values(self, other: Arguments) -> None:
        """Have the values of `other` from now on, which are those of a later call."""
        object.__setattr__(self, "_values", other._values)

    def __reduce__(self) -> tuple[type[Arguments], tuple[Mapping[str, Any], dict[str, Any]]]:
        return Arguments, (self._values, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Arguments:
        """Arguments whose attributes of users' functions change independently. What the run has set is shared."""
        return Arguments(self._values, deepcopy(self._own, memo))


def flat_args(config: RunConfig, **runtime: Any) -> Arguments:
    """All settings of `config` by name, what functions of guests expect, and the values in `runtime`.

    Settings of the objective that are unset have the values that training uses.
    """
    settings = values_of(config)
    of_guests = GUESTS.ask("provide arguments", lambda guest: dict(guest.arguments(settings)))
    low, high = clip_range(config.algorithm)
    objective = {"eps_clip": low, "eps_clip_high": high, "loss_aggregation": loss_aggregation(config.algorithm)}
    values = {**ChainMap(*of_guests.values()), **settings, **objective, **runtime}
    own = {name: value for name, value in config.rollout.custom_args.items() if name not in SETTINGS}
    return Arguments(values, own)


MAX_USELESS_CALLS = 3
"""Calls of a rollout function in a row that may return no valid group."""


class RolloutFunctionAdapter:
    """Implements `pipeline.rollout_source.RolloutFunction` with a function in slime's shape.

    The adapter checks the returned groups and adds what functions written for slime do not record: log-probabilities
    and weight versions.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Arguments,
        config: RunConfig,
        *,
        score_tokens: Callable[[Sample], Awaitable[None]],
        recording: RecordingGenerator | None = None,
        limits: SampleLimits = NO_LIMITS,
        keeps_groups: bool | None = False,
        metrics: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """`score_tokens` asks the engines for missing log-probabilities; `recording` records or replays each batch.
        `metrics` receives what the function returns as metrics, by rollout.

        With `keeps_groups`, a worker of the function may have generated a group long before the call that returns it. A
        sample that has neither weight versions nor a prompt of the data source is then invalid.
        """
        self._function = function
        self._args = args
        self._rollout = config.rollout
        self._reward_key_of = config.reward_key_of
        self._min_samples = config.rollout.smallest_group
        self._score_tokens = _zero_log_probs if config.learner.loss_type == "sft_loss" else score_tokens
        self._recording = recording
        self._limits = limits
        self._keeps_groups = keeps_groups
        self._metrics = metrics

    async def __call__(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        """Return `size` groups.

        A group whose generation failed is requeued, one with an invalid sample becomes a dead letter, and the function
        is called again for the missing groups. Raises UserError if the result is not a list of groups of the right
        sizes, or if several results in a row have no valid group.
        """
        collect = partial(self._collect, rollout_id, source, size)
        # The recording of a batch does not contain groups that replace stale ones.
        if self._recording is None or size < self._rollout.rollout_batch_size:
            return await collect()
        return await self._recording.batch(rollout_id, collect)

    async def _collect(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups: list[Group] = []
        useless_calls = 0
        while missing := size - len(groups):
            valid, error = await self._collect_part(rollout_id, source, missing)
            useless_calls = useless_calls + 1 if error and not valid else 0
            if useless_calls == MAX_USELESS_CALLS:
                raise UserError(f"{error}; {useless_calls} calls in a row returned no valid group")
            groups += valid
        return groups

    async def _collect_part(self, rollout_id: int, source: RolloutSource, size: int) -> tuple[list[Group], str]:
        """Call the function for `size` groups. Return the valid groups and the error of the last invalid group.

        Groups whose generation failed are not invalid: each has a limited number of attempts.
        """
        version = None if self._keeps_groups else source.live_version
        args = self._args.with_values(rollout_batch_size=size)
        metrics = None if self._metrics is None else self._metrics.setdefault(rollout_id, {})
        result = await call_rollout_function(
            self._function, args, rollout_id, source, evaluation=False, metrics=metrics
        )
        refused = _refused(result)
        groups = as_groups(result, self._rollout.n_samples_per_prompt, self._min_samples)
        if len(groups) != size:
            raise UserError(f"the rollout function returned {len(groups)} groups: rollout_batch_size is {size}")
        # At once, because the engines must still hold the weights that sampled the tokens.
        completed = (self._complete(group, refused, version, source) for group in groups)
        errors = await asyncio.gather(*completed)
        valid, sentence = [], ""
        for group, error in zip(groups, errors, strict=True):
            if error is None:
                valid.append(group)
            elif failed_trajectories(group):
                source.fail(group, f"the rollout function could not generate it: {error}")
            else:
                sentence = f"the rollout function returned an invalid group; {error}"
                source.refuse(group, sentence)
        return valid, sentence

    async def _complete(
        self, group: Group, refused: Mapping[Sample, TrajectoryError], version: int | None, source: RolloutSource
    ) -> TrajectoryError | None:
        """Check a group and add what is missing. Return the error if the group cannot be trained.

        `refused` has the errors of samples whose values were refused. Samples without weight versions get the
        version that was live when their prompt was taken, or else `version`.
        """
        try:
            self._leave_out_failed(group)
            group.share_rewards()
            for sample in group:
                if sample in refused:
                    return refused[sample]
                check_columns(sample, self._limits, source.trainer_version)
                if isinstance(sample.reward, dict) and sample.reward_key is None:
                    sample.reward_key = self._reward_key_of(sample.dataset)
                check_reward(sample)
            dates = [source.version_when_taken(sample) for sample in group]
            await asyncio.gather(
                *(
                    complete(sample, version if date is None else date, self._score_tokens)
                    for sample, date in zip(group, dates, strict=True)
                )
            )
            if not group.response_tokens:
                return TrajectoryError(f"sample {group[0].index}: no sample of its group has response tokens")
            # Raises TrajectoryError for a sample without a weight version.
            _ = group.oldest_version
        except TrajectoryError as error:
            return error
        return None

    def _leave_out_failed(self, group: Group) -> None:
        """Remove samples that failed. Raises TrajectoryError if too few are left."""
        failed = failed_trajectories(group)
        if failed and len(group.trajectories) - len(failed) < self._min_samples:
            raise TrajectoryError(group_error(group))
        group.leave_out([sample for segments in failed for sample in segments])


def failed_trajectories(group: Group) -> list[list[Sample]]:
    """The trajectories that failed before they got a reward."""
    return [
        segments
        for segments in group.trajectories
        if any(sample.status is SampleStatus.FAILED and sample.reward is None for sample in segments)
    ]


def group_error(group: Group) -> str:
    """The error of the first failed sample of a group."""
    errors = (str(sample.metadata.get("error", "")) for sample in group if sample.status is SampleStatus.FAILED)
    return next(filter(None, errors), f"a sample of group {group.feed_index} has status FAILED")


async def _zero_log_probs(sample: Sample) -> None:
    """Supervised losses do not use log-probabilities, and no engine may run that could compute them."""
    sample.rollout_log_probs = [0.0] * sample.response_length


async def call_rollout_function(
    function: Callable[..., Any],
    args: Arguments,
    rollout_id: int,
    data_source: RolloutSource,
    *,
    evaluation: bool,
    metrics: dict[str, Any] | None = None,
) -> Any:
    """Call a rollout or evaluation function, or an object of that form, and return its groups or scores.

    A plain function runs in a thread, because it may block. It may return an object with the attributes `samples` (or
    `data`, for an evaluation) and `metrics`; these are written to the log, and into `metrics` if they have names.
    """
    result = await _call(function, args, rollout_id, data_source, evaluation)
    # By shape, because the class may be one of another project.
    match result:
        case object(samples=content, metrics=found) | object(data=content, metrics=found):
            # As one fact, because a metric may have any name, also that of another fact.
            values = {} if found is None else found
            if metrics is not None and isinstance(values, Mapping):
                metrics.update(values)
            if facts := readable_entries(values if isinstance(values, Mapping) else {"values": values}):
                log.info("metrics of the rollout function", rollout=rollout_id, metrics=facts)
            return content
        case _:
            return result


async def _call(
    function: Callable[..., Any], args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool
) -> Any:
    try:
        return await call_plain_or_async(function, args, rollout_id, data_source, evaluation=evaluation)
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        if is_cancellation(error):
            raise
        # These would end the process, or the task of this call, without a word.
        kind = "evaluation" if evaluation else "rollout"
        sentence = f"the {kind} function raised {shown(error)}: return from it, or raise another exception"
        raise UserError(sentence) from error


def as_groups(result: Any, n_samples_per_prompt: int, min_samples: int) -> list[Group]:
    """Convert the result of a rollout function (a list of groups, of lists of samples, or of samples) to groups.

    A flat list is grouped by sample index if every sample has one, else in order. In a list for one group, a list
    within it holds the segments of one trajectory. Raises UserError that names the sample if a group has more than
    `n_samples_per_prompt` or fewer than `min_samples` trajectories, or a sample twice. The contents of the samples are
    not checked.
    """
    if not isinstance(result, Sequence):
        raise UserError(f"the rollout function returned a {type(result).__name__}: return a list of groups")
    if all(isinstance(item, Sample) for item in result):
        groups = _regroup(result, n_samples_per_prompt)
    else:
        groups = [_group(item, position) for position, item in enumerate(result)]
    for group in groups:
        if len(identity_set(group)) < len(group):
            raise UserError(
                f"the rollout function returned a sample twice in the group of sample {group[0].index} "
                f"({group.feed_index}): return a separate sample for each response"
            )
        if not min_samples <= (count := len(group.trajectories)) <= n_samples_per_prompt:
            raise UserError(
                f"the rollout function returned {count} samples in the group of sample {group[0].index} "
                f"({group.feed_index}): n_samples_per_prompt is {n_samples_per_prompt}, and min_samples_per_group is "
                f"{min_samples}"
            )
    return groups


def _refused(result: Any) -> IdentityMap[Sample, TrajectoryError]:
    """Accept the values of all samples of a result; see `RolloutFunctionAdapter._complete`."""
    if isinstance(result, Sample):
        try:
            accept_values(result)
        except TrajectoryError as error:
            return IdentityMap([(result, error)])
    errors: IdentityMap[Sample, TrajectoryError] = IdentityMap()
    for entry in result if isinstance(result, list | tuple) else ():
        errors.update(_refused(entry))
    return errors


def _regroup(samples: Sequence[Sample], size: int) -> list[Group]:
    # The data source numbers the samples of a group consecutively, so index // size identifies the prompt in any order.
    pairs = [(sample.index, sample) for sample in samples if sample.index is not None]
    if len(pairs) < len(samples):
        pairs = list(enumerate(samples))
    pairs.sort(key=lambda pair: pair[0])
    return [Group.of(sample for _, sample in part) for _, part in groupby(pairs, key=lambda pair: pair[0] // size)]


def _group(item: Any, position: int) -> Group:
    if not isinstance(item, list) or not item or not all(map(_is_trajectory, item)):
        kind = type(item).__name__
        raise UserError(
            f"the rollout function returned a {kind} at position {position}: return a list of samples per group"
        )
    return Group.of(item)


def _is_trajectory(entry: Any) -> bool:
    segments = entry if isinstance(entry, list) else [entry]
    return bool(segments) and all(isinstance(sample, Sample) for sample in segments)


async def complete(sample: Sample, version: int | None, score_tokens: Callable[[Sample], Awaitable[None]]) -> None:
    """Set missing log-probabilities with `score_tokens`, and a missing span to `version`.

    `version` is the weight version that was live when the sample's generation began, or when its prompt was taken, so
    the age is never understated. Raises TrajectoryError if it is needed and None.
    """
    if sample.response_length and not sample.spans and version is None:
        raise TrajectoryError(
            f"sample {sample.index} has no weight versions and was not taken with data_source.get_samples, so its age "
            "is unknown: set sample.spans, or return only samples that were taken"
        )
    if sample.response_length and not sample.rollout_log_probs:
        await score_tokens(sample)
    if sample.response_length and not sample.spans and version is not None:
        sample.spans = [VersionSpan(version, 0, sample.response_length)]

"""Scores the samples of a generated group with a built-in reward or the user's reward function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog

from miles_async.errors import InfrastructureError, TrajectoryError, is_infrastructure
from miles_async.identity import identity_set
from miles_async.json_values import (
    MAX_NUMBER,
    UnrepresentableError,
    finite_number,
    json_value,
    readable_entries,
    shown,
    shown_error,
)
from miles_async.rewards.answers import last_boxed
from miles_async.rewards.grader_pool import GraderError, GraderPool, UnavailableError, UnfinishedError
from miles_async.rewards.threads import Threads
from miles_async.sample_schema import accept_group, accept_values, keep_origins
from miles_async.time_limit import TimeLimit
from miles_async.types import REWARD_ERROR, Group, Sample
from miles_async.user_code import USER_CODE_ERRORS, is_async, is_cancellation

RewardFunction = Callable[..., Any]
"""`fn(args, sample)`, plain or async, as in slime; it returns a number or a dictionary.

With `group_rm` it is `fn(args, samples)` instead and returns a list with one reward per sample.
"""

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class Rewarder:
    """Implements the `Rewarder` port.

    A plain function runs in a thread, for one sample after the other, so it may block. An async function runs for all
    samples of a group concurrently.

    A plain function computes, so one that exceeds its limits has found an expensive response: the sample gets the
    reward of a wrong one. An async function waits for a server, so one that misses its deadline is infrastructure.
    """

    function: RewardFunction | GraderPool
    """The reward function, or the processes that call it."""
    args: Any
    """The flat configuration that `function` receives first."""
    name: str
    """Name of the reward in error messages."""
    timeout_seconds: float | None
    """Deadline per sample, or per group with `whole_groups`; None if `function` enforces its own."""
    reward_key: str | None = None
    """The entry that counts if the reward is a dictionary."""
    whole_groups: bool = False
    """`function` scores a group per call."""
    boxed: bool = False
    """`function` sees only the contents of the last box in the response."""
    reads_box: bool = False
    """With `boxed`, `function` sees the box, too."""
    changes_samples: bool = True
    """`function` may write into the samples that it sees, so they are checked afterwards."""
    wrong: float | Mapping[str, Any] = 0.0
    """The reward of a response whose reward exceeds its limits."""
    release: Callable[[], Awaitable[None]] | None = None
    """Releases processes and connections of `function`."""

    def __post_init__(self) -> None:
        # Another process gets copies.
        self.changes_samples = self.changes_samples and not isinstance(self.function, GraderPool)
        self._threads = Threads()
        self._is_async = self.function.is_async if isinstance(self.function, GraderPool) else is_async(self.function)
        self._scored: Sample | None = None
        """The last sample that was scored. If the function still works, it finishes for this sample."""

    async def score(self, group: Group) -> None:
        """Set `reward` and `reward_key` of every sample.

        The reward function is called once per trajectory, with the segment that ended last, and all segments get the
        result. It is not called for a trajectory with a reward, which the generate function has set: segments without
        one get the same. A function for whole groups is always called, for all trajectories.

        A trajectory whose reward exceeds its limits of time or memory gets `wrong`, and the reason in its metadata
        (`types.REWARD_ERROR`).

        The fields of samples that the function may have changed are converted to plain values. What the run itself has
        stored in the metadata stays there (`types.FROM_DATASET`).

        Raises TrajectoryError if the function raises, returns an invalid reward or sets a field to an invalid value.
        Raises InfrastructureError if infrastructure failed, if an async function missed its deadline, or if the
        function finishes for no response. The error names the samples, and all others have their reward. An error of a
        function for whole groups may name no samples.
        """
        with keep_origins(group):
            try:
                errors = await self._scored_with_errors(group)
            except TrajectoryError:
                if self.changes_samples:
                    with suppress(TrajectoryError):
                        accept_group(group)
                _convert_metadata(group)
                raise
            _convert_metadata(group)
        raise_first(errors)

    def _shown(self, sample: Sample) -> Sample:
        """What `function` sees."""
        if not self.boxed:
            return sample
        content = last_boxed(sample.response) or ""
        return replace(sample, response=f"\\boxed{{{content}}}" if self.reads_box and content else content)

    async def _scored_with_errors(self, group: Group) -> list[TrajectoryError]:
        group.share_rewards()
        trajectories = [one for one in group.trajectories if self.whole_groups or one[-1].reward is None]
        shown = [self._shown(segments[-1]) for segments in trajectories]
        results = await (self._score_together(shown, group) if self.whole_groups else self._score_each(shown))
        errors: list[TrajectoryError] = []
        for segments, result in zip(trajectories, results, strict=True):
            if isinstance(result, TrajectoryError):
                result.samples = segments
                errors.append(result)
                continue
            for segment in segments:
                segment.reward = result
        unscored = identity_set(sample for error in errors for sample in error.samples)
        for sample in group:
            if sample in unscored:
                continue
            try:
                sample.reward, sample.reward_key = self._checked(sample, sample.reward)
            except TrajectoryError as error:
                sample.reward = None
                errors.append(error)
        return errors

    async def close(self) -> None:
        """Release threads, processes and connections; the rewarder cannot score afterwards."""
        self._threads.close()
        if isinstance(self.function, GraderPool):
            await self.function.close()
        if self.release is not None:
            await self.release()

    async def _score_each(self, shown: list[Sample]) -> list[Any]:
        """Return the reward of each shown sample, or a TrajectoryError in its place."""
        if not shown:
            return []
        for sample in shown:
            sample.metadata.pop(REWARD_ERROR, None)
        results = await self._call_each(shown)
        refused = await self._accept(shown)
        scored = [
            sample for sample, result in zip(shown, results, strict=True) if not isinstance(result, BaseException)
        ]
        if scored:
            self._scored = replace(scored[-1], metadata=dict(scored[-1].metadata))
        unfinished = [result for result in results if isinstance(result, UnfinishedError)]
        broken = len(unfinished) == len(results) and not await self._works(shown[0])
        outcomes = [self._outcome(*pair, broken) for pair in zip(shown, results, strict=True)]
        return [error or outcome for error, outcome in zip(refused, outcomes, strict=True)]

    async def _accept(self, shown: list[Sample]) -> list[TrajectoryError | None]:
        """Convert the fields of samples that the function has seen. Returns the error of each sample, or None."""
        errors: list[TrajectoryError | None] = [None] * len(shown)
        for number, sample in enumerate(shown if self.changes_samples else ()):
            try:
                accept_values(sample)
            except TrajectoryError as error:
                errors[number] = error
            # A long sample takes milliseconds, and a group has many.
            await asyncio.sleep(0)
        return errors

    async def _works(self, sample: Sample) -> bool:
        """Whether the function finishes for the last sample that was scored, or for `sample` with the response `0`."""
        known = self._scored or replace(sample, response="0")
        [result] = await self._call_each([replace(known, metadata=dict(known.metadata))])
        return not isinstance(result, UnfinishedError | InfrastructureError)

    def _outcome(self, sample: Sample, result: Any, broken: bool) -> Any:
        if not isinstance(result, BaseException):
            return result
        sentence = f"sample {sample.index}: reward {self.name} {_failure(result)}"
        if isinstance(result, UnfinishedError):
            if broken:
                return InfrastructureError(f"{sentence}; it finishes for no other response either")
            log.warning(
                "a reward did not finish, and its sample counts as wrong",
                reward=self.name,
                sample=sample.index,
                cause=str(result),
            )
            sample.metadata[REWARD_ERROR] = sentence
            return self.wrong
        failure = InfrastructureError(sentence) if is_infrastructure(result) else TrajectoryError(sentence)
        failure.__cause__ = result
        return failure

    async def _call_each(self, shown: list[Sample]) -> list[Any]:
        """Return the reward of each shown sample, or the error in its place."""
        if isinstance(self.function, GraderPool):
            return await self.function.grade(shown)
        if self._is_async:
            # If this is cancelled, `gather` waits for the calls: none may write into samples that are generated again.
            return await asyncio.gather(*map(self._await, shown))
        results: list[Any] = []
        while len(results) < len(shown):
            results += await self._threads.score(self._call, shown[len(results) :], self.timeout_seconds)
            if len(results) < len(shown):
                results.append(UnfinishedError(self._too_slow()))
        return results

    async def _score_together(self, shown: list[Sample], group: Group) -> list[Any]:
        """Return the rewards of a group. Raises TrajectoryError, or InfrastructureError, which names all samples."""
        limit = TimeLimit(self.timeout_seconds)
        try:
            rewards = list(await limit.run(self._call_together(shown)))
        except USER_CODE_ERRORS as error:
            if is_cancellation(error):
                raise
            late = limit.expired() or isinstance(error, UnfinishedError)
            cause = self._too_slow() if limit.expired() else _failure(error)
            sentence = f"group {group.feed_index}: reward {self.name} {cause}"
            if self._is_async if late else is_infrastructure(error):
                raise InfrastructureError(sentence, list(group)) from error
            # Nobody knows which sample is at fault.
            raise TrajectoryError(sentence) from error
        if len(rewards) != len(shown):
            raise TrajectoryError(
                f"group {group.feed_index}: reward {self.name} returned {len(rewards)} rewards for {len(shown)} samples"
            )
        refused = await self._accept(shown)
        return [error or reward for error, reward in zip(refused, rewards, strict=True)]

    async def _call_together(self, shown: list[Sample]) -> Sequence[Any]:
        if isinstance(self.function, GraderPool):
            return await self.function.grade_group(shown)
        function: RewardFunction = self.function
        if self._is_async:
            return await function(self.args, shown)  # type: ignore[no-any-return]
        return await self._threads.run(lambda: function(self.args, shown))  # type: ignore[no-any-return]

    def _too_slow(self) -> str:
        return f"took longer than {self.timeout_seconds:g} s (reward_timeout_seconds)"

    async def _await(self, sample: Sample) -> Any:
        limit = TimeLimit(self.timeout_seconds)
        try:
            return await limit.run(self.function(self.args, sample))  # type: ignore[operator]
        except USER_CODE_ERRORS as error:
            if is_cancellation(error):
                raise
            return UnavailableError(self._too_slow()) if limit.expired() else error

    def _call(self, sample: Sample) -> Any:
        try:
            return self.function(self.args, sample)  # type: ignore[operator]
        except USER_CODE_ERRORS as error:
            return error

    def _checked(self, sample: Sample, reward: Any) -> tuple[Any, str | None]:
        """Return the validated reward, and the key of the entry that counts if the reward is a dictionary."""
        if type(reward) is float or not isinstance(reward, Mapping):
            return self._number(sample, reward), None
        try:
            reward = json_value(reward)
        except UnrepresentableError as error:
            raise TrajectoryError(f"sample {sample.index}: the reward of {self.name} {error}", [sample]) from error
        key = self.reward_key
        if key is None:
            raise TrajectoryError(
                f"sample {sample.index}: reward {self.name} returned a dictionary: set reward_key to one of "
                f"{', '.join(reward)}",
                [sample],
            )
        if key not in reward:
            raise TrajectoryError(
                f"sample {sample.index}: reward {self.name} returned no {key!r} (reward_key)", [sample]
            )
        return {**reward, key: self._number(sample, reward[key])}, key

    def _number(self, sample: Sample, reward: Any) -> float:
        number = finite_number(reward)
        if number is None:
            kind = type(reward).__name__
            raise TrajectoryError(
                f"sample {sample.index}: reward {self.name} returned {shown(reward)}, a {kind}, not a number from "
                f"{-MAX_NUMBER:g} to {MAX_NUMBER:g}",
                [sample],
            )
        return number


def _convert_metadata(group: Group) -> None:
    """Convert the metadata to plain values; the function may have been the last one to read a user's objects."""
    for sample in group:
        sample.metadata = readable_entries(sample.metadata)


def raise_first(errors: Sequence[TrajectoryError]) -> None:
    """Raise the first error, and name the samples of all errors of its kind; an InfrastructureError comes last.

    Samples that only infrastructure has failed are scored again in the next attempt.
    """
    for kind in (False, True):
        if chosen := [error for error in errors if isinstance(error, InfrastructureError) is kind]:
            chosen[0].samples = [sample for error in chosen for sample in error.samples]
            raise chosen[0]


def _failure(error: BaseException) -> str:
    return str(error) if isinstance(error, GraderError) else f"raised {shown_error(error)}"

"""Grades a generated group: whether it is complete and valid, its rewards, and whether the filter keeps it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from miles_async.columns.column import SampleLimits
from miles_async.errors import InfrastructureError, UserError
from miles_async.events import GroupGenerated
from miles_async.pipeline.lifecycle import sequence_of
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.training import mean_reward
from miles_async.ports import Rewarder
from miles_async.sample_schema import check_group
from miles_async.scheduling.admission import Candidates
from miles_async.types import DropReason, Group, Verdict, trajectories_of

REWARD_PAUSE_SECONDS = 1.0
"""Delay before samples are scored again whose reward failed; it doubles with each failure."""


async def score(
    group: Group,
    rewarder: Rewarder,
    *,
    sleep: Callable[[float], Awaitable[None]],
    max_attempts: int,
    stopping: Callable[[], bool] = lambda: False,
) -> InfrastructureError | None:
    """Score the samples up to `max_attempts` times; those that failed keep their tokens.

    Returns the error of the last attempt, which names the samples without a reward, or None if all have one. No further
    attempt begins once `stopping` returns True. Any other error of `Rewarder.score` is raised.
    """
    failures = 0
    while True:
        try:
            await rewarder.score(group)
            return None
        except InfrastructureError as error:
            failures += 1
            if failures == max_attempts or stopping():
                return error
        await sleep(REWARD_PAUSE_SECONDS * 2 ** (failures - 1))


@dataclass(eq=False, repr=False)
class Grading:
    """Decides what a generated group is worth."""

    run_state: RunState
    rewarder: Rewarder
    dynamic_filter: Callable[[Group], Verdict]
    limits: SampleLimits
    """Those of the model and the learner."""
    min_samples: int
    """A group that lost samples to infrastructure is trained if it has so many left."""
    max_attempts: int
    """How often samples are scored."""

    def __post_init__(self) -> None:
        self.candidates: Candidates | None = None
        """The groups of the batch that is being generated; None in the stream."""
        self.rejected: list[Group] | None = None
        """Receives the groups that the filter rejects; None forgets them."""

    def check(self, group: Group) -> None:
        """Raise TrajectoryError if a sample is not valid, and UserError if another adapter has sampled it."""
        check_group(group, self.limits, self.run_state.trainer_version)
        if not (adapter := self.run_state.adapter_of(group)):
            return
        if others := [version for version in group.versions if self.run_state.owner_of(version) != adapter]:
            raise UserError(
                f"group {group.feed_index} trains adapter {adapter}, but version {others[0]}, which sampled it, is not "
                "of this adapter: let the generate function sample with args.turns or args.agents, which name it"
            )

    async def score(self, group: Group, stopping: Callable[[], bool]) -> None:
        """Score the samples. No further attempt begins once `stopping` returns True.

        Raises the error if too few samples would be left without those that cannot be scored.
        """
        sleep = self.run_state.clock.sleep
        error = await score(group, self.rewarder, sleep=sleep, max_attempts=self.max_attempts, stopping=stopping)
        if error is not None:
            self.leave_out(group, error)
            for sample in error.samples:
                tokens = sample.response_length
                self.run_state.journal.report_discarded(group, sample, DropReason.FAILED, tokens, str(error))

    def leave_out(self, group: Group, error: InfrastructureError) -> None:
        """Continue without the failed samples. Raises the error if too few would be left."""
        if len(group.trajectories) - len(trajectories_of(error.samples)) < self.min_samples:
            raise error
        group.leave_out(error.samples)

    def filter(self, group: Group) -> Verdict:
        """The verdict of the dynamic filter. A batch that has too few groups keeps a group that the filter rejects."""
        verdict = self.dynamic_filter(group)
        if verdict.keep:
            return verdict
        if self.candidates is not None:
            if verdict.keep_when_insufficient and self.candidates.insufficient:
                return Verdict(True)
            self.candidates.drop()
        if self.rejected is not None:
            self.rejected.append(group)
        return verdict


def generated_event(
    group: Group, now: float, generation_seconds: float, reward_seconds: float, *, by_worker: bool = False
) -> GroupGenerated:
    """The event of a group that has its rewards. Raises TrajectoryError if the group has no versions."""
    versions = group.versions
    return GroupGenerated(
        time=now,
        sequence=sequence_of(group),
        generation_seconds=generation_seconds,
        reward_seconds=reward_seconds,
        versions=(min(versions), max(versions)),
        response_tokens=group.response_tokens,
        reward=mean_reward([group]),
        truncated=sum(group.truncated),
        missing=len(trajectories_of(group.missing)),
        unfinished_rewards=len(group.unfinished_rewards),
        by_worker=by_worker,
        reused_tokens=sum(span.reused for sample in group for span in sample.spans),
        key_age=max(span.version - span.oldest for sample in group for span in sample.spans),
        dataset=group.dataset,
        adapter=group.adapter,
        epochs=group[0].origin.get("epochs", 0.0),
    )

"""The data source that rollout functions receive, which can also collect batches through the pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from miles_async.errors import TrajectoryError, UserError
from miles_async.json_values import plain_text, shown
from miles_async.pipeline.collect import BatchCollector, Choose
from miles_async.pipeline.evaluate import Evaluator
from miles_async.pipeline.held_prompts import HeldPrompts
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource
from miles_async.sample_schema import accept_group
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, Sample


class PositionInData:
    """What slime's functions read of a data source, under the names of slime's `RolloutDataSourceWithBuffer`."""

    _data: DataSource

    @property
    def epoch_id(self) -> int:
        """Number of passes over the data that are complete."""
        return int(self._data.position()["epoch_id"])

    @property
    def sample_offset(self) -> int:
        """Number of rows of this epoch that were read."""
        return int(self._data.position()["sample_offset"])

    @property
    def sample_index(self) -> int:
        """Index of the next sample; the numbering continues across epochs."""
        return int(self._data.position()["sample_index"])

    @property
    def buffer(self) -> list[Group]:
        """A new list of the groups that were returned and wait in front of the data. `add_samples` adds groups."""
        return list(self._data.returned())

    def get_buffer_length(self) -> int:
        """Number of groups in `buffer`."""
        return len(self._data.returned())

    @property
    def metadata(self) -> dict[str, Any]:
        """Values of the rollout function, as JSON, which are stored with the position."""
        return self._data.metadata

    def get_metadata(self) -> dict[str, Any]:
        """The same as `metadata`, under slime's older name."""
        return self.metadata

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Set some of the values in `metadata`."""
        self.metadata.update(metadata)


class RolloutSource(PositionInData):
    """Takes prompts from the data, returns them, and collects batches through the pipeline.

    Rollout functions written for slime use `get_samples` and `add_samples`, and some read the position in the data.
    """

    def __init__(
        self,
        *,
        data: DataSource,
        run_state: RunState,
        held: HeldPrompts,
        collector: BatchCollector,
        evaluator: Evaluator,
        schedule: Schedule,
    ) -> None:
        self._data = data
        self._run_state = run_state
        self._held = held
        self._collector = collector
        self._evaluator = evaluator
        self._schedule = schedule

    def get_samples(self, num_samples: int) -> list[Group]:
        """Take up to `num_samples` groups from the data source. Callable from any thread.

        A worker that holds as many groups as the run allows gets fewer, perhaps none. It tries again later, after the
        rollout function has returned groups.
        """
        return self._held.take(num_samples)

    def add_samples(self, samples: Sequence[Iterable[Sample]]) -> None:
        """Give groups back to the front of the feed, with the tokens that they have. Callable from any thread.

        A group may be new, taken with `get_samples`, or collected with `drain_stream` or `collect_batch`; new lists and
        copies of its samples stand for it. A group that the function no longer holds, because it returned the group or
        gave it back before, is not added a second time. A taken or collected group gets the samples back that it lacks.
        Raises UserError if any other group is incomplete.
        """
        self._held.give_back([_accepted(group) for group in samples])

    def discard(self, group: Iterable[Sample], reason: str) -> None:
        """Drop a finished group that was generated outside the pipeline. Call it in the rollout function's own call."""
        text = plain_text(reason) if type(reason) is str else shown(reason)
        self._held.drop(_accepted(group), text)

    def refuse(self, group: Group, error: str) -> None:
        """Dead-letter a group of a rollout function that cannot be trained."""
        self._held.refuse(group, error)

    def fail(self, group: Group, error: str) -> None:
        """Requeue the prompt of a group whose generation failed, or dead-letter it after its last attempt."""
        self._held.fail(group, error)

    def version_when_taken(self, sample: Sample) -> int | None:
        """The live weight version when the sample's prompt was taken with `get_samples`; None if it was not taken."""
        return self._held.version_when_taken(sample)

    @property
    def live_version(self) -> int:
        """Newest weight version on every routed engine."""
        return self._run_state.live_version

    def age_of(self, group: Group) -> int:
        """Age of the group's oldest token in weight updates, relative to `live_version`."""
        lineage = self._run_state.lineages[self._run_state.adapter_of(group)]
        return lineage.oldest_age(group.versions, self._run_state.live_version)

    @property
    def trainer_version(self) -> int:
        """Newest weight version that the learner staged."""
        return self._run_state.trainer_version

    @property
    def has_stream(self) -> bool:
        """Whether a persistent producer fills the queue, so that `drain_stream` can be called."""
        return self._schedule is Schedule.FULLY_ASYNC

    async def drain_stream(self, rollout_id: int, size: int) -> list[Group]:
        """Take `size` groups from the queue of the persistent producer. Raises UserError unless fully asynchronous."""
        if not self.has_stream:
            raise UserError(
                f"the rollout function calls drain_stream, but the schedule is {self._schedule}: "
                "set --schedule fully_async, or declare the function with @fully_async of miles_async.rollout"
            )
        groups = await self._collector.drain_stream(rollout_id, size)
        self._held.collect(groups)
        return groups

    async def collect_batch(
        self,
        rollout_id: int,
        size: int,
        over_sampling: int,
        choose: Choose | None = None,
        rejected: list[Group] | None = None,
    ) -> list[Group]:
        """Generate a batch of `size` groups out of `over_sampling`; the rest is aborted and requeued.

        With `choose`, all of them are finished, and the first `size` groups that it returns form the batch. `rejected`
        receives the finished groups that the dynamic filter or `choose` rejects. Raises UserError under the fully
        asynchronous schedule, whose persistent producer generates already.
        """
        if self.has_stream:
            raise UserError(
                "the rollout function calls collect_batch, but the schedule is fully_async: "
                "call drain_stream instead, or set --schedule one_step_off"
            )
        offered: list[Group] = []

        def chosen(groups: list[Group]) -> Iterable[Group]:
            offered.extend(groups)
            return groups if choose is None else choose(groups)

        groups = await self._collector.generate(rollout_id, size, over_sampling, choose and chosen, rejected)
        self._held.collect(groups, offered)
        return groups

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Rewards and truncation flags on the held-out problems, by data set."""
        return await self._evaluator.evaluate(rollout_id)


def _accepted(samples: Iterable[Sample | list[Sample]]) -> Group:
    """The samples as a group whose values are plain. A field that was refused is empty."""
    members = list(samples)
    for entry in members:
        with suppress(TrajectoryError):
            accept_group([entry] if isinstance(entry, Sample) else entry)
    return samples if isinstance(samples, Group) else Group.of(members)


RolloutFunction = Callable[[int, RolloutSource, int], Awaitable[list[Group]]]
"""`(rollout_id, source, size) -> groups`: returns the `size` groups to train next, or to train in place of others."""

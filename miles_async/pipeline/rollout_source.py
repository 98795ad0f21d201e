"""The data source that rollout functions receive, which can also collect batches through the pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_async.errors import UserError
from miles_async.pipeline.collect import BatchCollector, Choose
from miles_async.pipeline.evaluate import Evaluator
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group


class RolloutSource:
    """Implements `ports.DataSource` and adds the pipeline's methods to collect a batch.

    Rollout functions written for slime use `get_samples` and `add_samples` only.
    """

    def __init__(
        self,
        *,
        data: DataSource,
        run_state: RunState,
        collector: BatchCollector,
        evaluator: Evaluator,
        schedule: Schedule,
    ) -> None:
        self._data = data
        self._run_state = run_state
        self._collector = collector
        self._evaluator = evaluator
        self._schedule = schedule

    def get_samples(self, num_samples: int) -> list[Group]:
        """Take up to `num_samples` groups from the data source. Callable from any thread."""
        with self._run_state.journal.data_lock:
            groups = self._data.get_samples(num_samples)
            self._run_state.record_taken(groups)
        return groups

    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups to the front of the feed. Callable from any thread."""
        with self._run_state.journal.data_lock:
            self._data.add_samples(samples)
            self._run_state.record_returned(samples)
            for group in samples:
                self._run_state.owe(Group.of(group))

    def discard(self, group: Group, reason: str) -> None:
        """Count a finished group that was generated outside the pipeline and will not be trained."""
        self._collector.adopt(group)
        self._run_state.drop_filtered(group, reason)

    def refuse(self, group: Group, error: str) -> None:
        """Dead-letter a group of a rollout function that cannot be trained."""
        self._collector.refuse(group, error)

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state)

    @property
    def live_version(self) -> int:
        """Newest weight version on every routed engine."""
        return self._run_state.live_version

    @property
    def trainer_version(self) -> int:
        """Newest weight version that the learner staged."""
        return self._run_state.trainer_version

    async def drain_stream(self, rollout_id: int, size: int) -> list[Group]:
        """Take `size` groups from the queue of the persistent producer. Raises UserError unless fully asynchronous."""
        if self._schedule is not Schedule.FULLY_ASYNC:
            raise UserError(
                f"the rollout function calls drain_stream, but the schedule is {self._schedule}: "
                "set --schedule fully_async"
            )
        return await self._collector.collect(rollout_id, size)

    async def collect_batch(
        self, rollout_id: int, size: int, over_sampling: int, choose: Choose | None = None
    ) -> list[Group]:
        """Generate a batch of `size` groups out of `over_sampling`; the rest is aborted and fed again.

        With `choose`, all of them are finished, and the first `size` groups that it returns form the batch. Raises
        UserError under the fully asynchronous schedule, whose persistent producer generates already.
        """
        if self._schedule is Schedule.FULLY_ASYNC:
            raise UserError(
                "the rollout function calls collect_batch, but the schedule is fully_async: "
                "call drain_stream instead, or set --schedule one_step_off"
            )
        return await self._collector.generate(rollout_id, size, over_sampling, choose)

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, list[float]]]:
        """Rewards and truncation flags on the held-out problems, by data set."""
        return await self._evaluator.evaluate(rollout_id)


RolloutFunction = Callable[[int, RolloutSource], Awaitable[list[Group]]]
"""`(rollout_id, source) -> groups`: returns the `rollout_batch_size` groups to train next."""

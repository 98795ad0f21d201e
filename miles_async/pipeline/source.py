"""What a rollout function is handed: the data source, plus the pipeline's own ways to collect a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_async.pipeline.collect import BatchCollector, Choose
from miles_async.pipeline.evaluate import Evaluator
from miles_async.ports import DataSource
from miles_async.types import Group


class RolloutSource:
    """A `DataSource` that can also collect. Users' functions that only know slime's two methods need nothing more."""

    def __init__(self, data: DataSource, drain: BatchCollector, evaluator: Evaluator) -> None:
        self._data = data
        self._collector = drain
        self._evaluator = evaluator

    def get_samples(self, num_samples: int) -> list[Group]:
        run_state = self._evaluator.run_state
        with run_state.lending:
            groups = self._data.get_samples(num_samples)
            run_state.lend(groups)
        return groups

    def add_samples(self, samples: Sequence[Group]) -> None:
        run_state = self._evaluator.run_state
        with run_state.lending:
            self._data.add_samples(samples)
            run_state.took_back(samples)

    def discard(self, group: Group, reason: str) -> None:
        """Account for a finished group that somebody else generated and that is not to be trained."""
        run_state = self._evaluator.run_state
        run_state.adopt(group)
        run_state.filtered(group, reason)

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state)

    @property
    def live_version(self) -> int:
        """Newest weight version on every routed engine."""
        return self._evaluator.run_state.live_version

    async def drain_stream(self, rollout_id: int, size: int) -> list[Group]:
        """A batch of `size` groups from the persistent producer, which the first call starts."""
        return await self._collector.stream(rollout_id, size)

    async def collect_batch(
        self, rollout_id: int, size: int, over_sampling: int, choose: Choose | None = None
    ) -> list[Group]:
        """A batch of `size` groups out of `over_sampling` generated for it; the rest is aborted and goes back.

        With `choose` all of them are finished, and the first `size` of the order it gives them are the batch.
        """
        return await self._collector.batch(rollout_id, size, over_sampling, choose)

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, list[float]]]:
        """Rewards and truncation flags on the held-out problems, by data set."""
        return await self._evaluator.evaluate(rollout_id)

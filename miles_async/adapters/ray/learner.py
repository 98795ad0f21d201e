"""The learner as the pipeline sees it, over the Ray actors of all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from miles_async.adapters.checkpoints import CheckpointFolder
from miles_async.adapters.megatron.batch import rank_shares
from miles_async.config.derived import data_parallel_rank
from miles_async.config.schema import RunConfig
from miles_async.errors import Fatal
from miles_async.types import Group, StepReport

Rank = Any
"""Handle of a `workers.learner.LearnerRank` actor."""


class RayLearner:
    """`ports.Learner`: cuts a batch up for the ranks and merges what they report."""

    def __init__(self, config: RunConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._ranks = ranks
        save = config.learner.save
        self._checkpoints = None if save is None else CheckpointFolder(Path(save).expanduser().absolute())

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        # Packing a large batch takes long enough to be felt by a loop that also keeps requests in flight.
        shares = await asyncio.to_thread(rank_shares, groups, self._config, len(self._ranks))
        reports = await _of_all(
            rank.train.remote(rollout_id, share) for rank, share in zip(self._ranks, shares, strict=True)
        )
        learner, ranks = self._config.learner, len(reports)
        # Ranks of one share count the same tokens.
        per_share = {data_parallel_rank(learner, rank, ranks): report.tokens for rank, report in enumerate(reports)}
        return StepReport(
            started=min(report.started for report in reports),
            ended=max(report.ended for report in reports),
            tokens=sum(per_share.values()),
            finite=all(report.finite for report in reports),
            metrics=reports[0].metrics,
        )

    async def offload(self) -> None:
        await _of_all(rank.offload.remote() for rank in self._ranks)

    async def onload(self) -> None:
        await _of_all(rank.onload.remote() for rank in self._ranks)

    async def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        """See `MegatronLearner.logprobs`."""
        results = await _of_all(rank.logprobs.remote(token_lists) for rank in self._ranks)
        return results[0]  # type: ignore[no-any-return]

    async def save(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        """All ranks write their part into one folder, which they must share; generation goes on."""
        settings = self._config.learner
        assert self._checkpoints is not None, "the pipeline saves only where it was told to"
        folder = self._checkpoints
        try:
            draft = await asyncio.to_thread(folder.begin, rollout_id)
            try:
                await _of_all(rank.save_state.remote(str(draft)) for rank in self._ranks)
                await asyncio.to_thread(folder.commit, draft, rollout_id, progress, settings.save_keep)
            finally:
                await asyncio.to_thread(folder.discard, draft)
        except OSError as error:
            raise Fatal(
                f"the checkpoint of rollout {rollout_id} could not be written to {settings.save}: {error}; "
                "the one before it is whole"
            ) from error

    async def save_hf(self, path: str) -> None:
        await _of_all(rank.save_hf.remote(path) for rank in self._ranks)


async def _of_all(calls: Any) -> list[Any]:
    """The answers of all ranks. Raises Fatal at the first that is lost or fails: the others would wait for it."""
    pending: list[Awaitable[Any]] = list(calls)
    try:
        return list(await asyncio.gather(*pending))
    except RayError as error:
        raise Fatal(f"a learner rank failed: {_cause(error)}") from error


def _cause(error: RayError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__

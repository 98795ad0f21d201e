"""The learner as the pipeline sees it, over the Ray actors of all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from miles_async.adapters.ray.ranks import Rank, of_all
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.batching.batch import rank_batches
from miles_async.config.derived import data_parallel_rank, hf_export
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.types import Group, StepReport

T = TypeVar("T")


class RayLearner:
    """`ports.Learner`: cuts a batch up for the ranks and merges what they report."""

    def __init__(self, config: RunConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._ranks = ranks
        save = config.learner.save
        self._checkpoints = None if save is None else CheckpointFolder(Path(save).expanduser().absolute())
        self._draft: Path | None = None
        """Where the checkpoint that was copied last is written."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        # Packing a large batch takes long enough to be felt by a loop that also keeps requests in flight.
        shares = await asyncio.to_thread(rank_batches, groups, self._config, len(self._ranks))
        reports = await of_all(
            rank.train.remote(rollout_id, share) for rank, share in zip(self._ranks, shares, strict=True)
        )
        learner, ranks = self._config.learner, len(reports)
        # Ranks of one share count the same tokens.
        per_share = {data_parallel_rank(learner, rank, ranks): report.tokens for rank, report in enumerate(reports)}
        started, ended = min(report.started for report in reports), max(report.ended for report in reports)
        tokens = sum(per_share.values())
        return StepReport(
            started=started,
            ended=ended,
            tokens=tokens,
            finite=all(report.finite for report in reports),
            metrics={
                **reports[0].metrics,
                **_of_machine(reports),
                "tokens_per_second": tokens / max(ended - started, 1e-9),
            },
        )

    async def offload(self) -> None:
        await of_all(rank.offload.remote() for rank in self._ranks)

    async def onload(self) -> None:
        await of_all(rank.onload.remote() for rank in self._ranks)

    async def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        """See `MegatronLearner.logprobs`."""
        results = await of_all(rank.logprobs.remote(token_lists) for rank in self._ranks)
        return results[0]  # type: ignore[no-any-return]

    async def copy_state(self, rollout_id: int) -> None:
        settings = self._config.learner
        if self._checkpoints is not None:
            self._draft = await self._on_disk(rollout_id, asyncio.to_thread(self._checkpoints.begin, rollout_id))
        folder = None if self._draft is None else str(self._draft)
        export = None if settings.save_hf is None else str(hf_export(settings.save_hf, rollout_id))
        await of_all(rank.copy_state.remote(folder, export) for rank in self._ranks)

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        try:
            await self._on_disk(rollout_id, self._write(rollout_id, progress))
        finally:
            if self._checkpoints is not None and self._draft is not None:
                await asyncio.to_thread(self._checkpoints.discard, self._draft)

    async def _write(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        """All ranks write their part into one folder, which they must share."""
        written = await of_all(rank.write_state.remote() for rank in self._ranks)
        await of_all([self._ranks[0].finish_state.remote(written)])
        if self._checkpoints is not None and self._draft is not None:
            keep = self._config.learner.save_keep
            await asyncio.to_thread(self._checkpoints.commit, self._draft, rollout_id, progress, keep)

    async def _on_disk(self, rollout_id: int, work: Awaitable[T]) -> T:
        try:
            return await work
        except (FatalError, OSError) as error:
            raise FatalError(
                f"the checkpoint of rollout {rollout_id} could not be written to "
                f"{self._config.learner.save or self._config.learner.save_hf}: {error}; the one before it is whole"
            ) from error


def _of_machine(reports: Sequence[StepReport]) -> dict[str, float]:
    """The fullest rank's memory, and what the ranks reach of their devices' speed on average."""
    found = {"memory_gib": max(report.metrics["memory_gib"] for report in reports)}
    if "mfu" in reports[0].metrics:
        found["mfu"] = fmean(report.metrics["mfu"] for report in reports)
    return found

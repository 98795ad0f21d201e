"""The learner as the pipeline sees it, over the Ray actors of all learner ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import ray

from miles_async.adapters.ray.actor_errors import actor_result
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.adapters.system.work_time import WorkTime
from miles_async.batching.advantages import PostProcess
from miles_async.batching.batch import rank_batches
from miles_async.config.model_shape import dimensions
from miles_async.config.schema import RunConfig
from miles_async.config.table import parallel_layout
from miles_async.errors import FatalError
from miles_async.types import Group, LearnerProgress, StepReport

T = TypeVar("T")
Rank = Any
"""Handle of a `workers.learner.LearnerRank` actor."""
Part = Any
"""Reference to a list of `TrainStep` in Ray's object store."""


class RayRanks:
    """Calls the ranks of the learner, so that a call begins on all ranks or on none.

    The ranks wait for each other in collective operations. If this process died while it called one rank after the
    other, some ranks would wait forever. So it calls the first rank, which calls the others. The parts of a batch are
    too large for this: each rank receives its part before, and the training of the batch begins on all ranks.

    Every call raises FatalError if a rank is lost.
    """

    def __init__(self, actors: Sequence[Rank]) -> None:
        """`actors` are the actors of all ranks, in order."""
        self.actors = actors

    async def give_batch(self, rank: int, rollout_id: int, groups: Sequence[int], part: Part) -> None:
        """Give a rank its part of a batch; see `LearnerRank.receive_batch`."""
        await actor_result(self.actors[rank].receive_batch.remote(rollout_id, groups, part))

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `LearnerRank` on all ranks; return the results in order of the ranks."""
        results: list[Any] = await actor_result(self.actors[0].on_all.remote(method, *arguments))
        return results

    async def on_first(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LearnerRank` that is for the first rank only."""
        return await actor_result(getattr(self.actors[0], method).remote(*arguments))


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch that is packed, or being packed."""

    sequences: list[int]
    """The sequence numbers of its groups. A group that is generated again has another number."""
    parts: asyncio.Future[list[Part]]
    """One per rank."""


class RayLearner:
    """Implements `ports.Learner`: splits a batch among the ranks and merges their reports.

    Every call raises FatalError if a rank is lost.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: RayRanks,
        run: str,
        resumed_from: Path | None = None,
        post_process: PostProcess | None = None,
    ) -> None:
        """`run` is the name of the run; `resumed_from` is the checkpoint that the next one follows.

        `post_process` is the user's function for the rewards of a batch.
        """
        self._config = config
        self._post_process = post_process
        self._run = run
        self._ranks = ranks
        save = config.learner.save_folder
        checksums = config.learner.checkpoint_checksums
        self._checkpoints = None if save is None else CheckpointFolder(save, resumed_from, checksums=checksums)
        self._draft: Path | None = None
        """Folder of the checkpoint that was copied last, until it is committed."""
        self._share_prefixes: bool | None = None
        """Whether the ranks compute a common prefix of samples once; None before the first batch."""
        self._ahead: _Packed | None = None
        """The batch that was packed last and is not trained yet."""
        self._work_time = WorkTime()
        """The time in which this process writes checkpoints."""

    def pack(self, groups: Sequence[Group]) -> None:
        # Before the first batch it is not known how batches are packed.
        if self._share_prefixes is not None:
            self._ahead = self._begin_packing(groups, share_prefixes=self._share_prefixes)
            # `train` may get another batch; then nobody asks why packing this one failed.
            self._ahead.parts.add_done_callback(lambda parts: parts.cancelled() or parts.exception())

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        if self._share_prefixes is None:
            self._share_prefixes = await self._ranks.on_first("shares_prefixes")
        sequences, packed = _sequences(groups), self._ahead
        if packed is not None and packed.sequences == sequences:
            self._ahead = None
        else:
            packed = self._begin_packing(groups, share_prefixes=self._share_prefixes)
        parts = await packed.parts
        await asyncio.gather(
            *(self._ranks.give_batch(rank, rollout_id, sequences, part) for rank, part in enumerate(parts))
        )
        adapter = groups[0].adapter if self._config.data.adapters else ""
        reports = await self._ranks.on_all("train", rollout_id, adapter)
        return _merged(reports, sum(len(sample.tokens) for group in groups for sample in group))

    def _begin_packing(self, groups: Sequence[Group], *, share_prefixes: bool) -> _Packed:
        # In a thread: packing a large batch would block the event loop, which also keeps requests in flight.
        packing = asyncio.to_thread(self._pack, groups, share_prefixes=share_prefixes)
        return _Packed(_sequences(groups), asyncio.ensure_future(packing))

    def _pack(self, groups: Sequence[Group], *, share_prefixes: bool) -> list[Part]:
        """Pack the batch; returns a reference to the part of each rank.

        The ranks of a model replica have the same part. It is put into Ray's object store once, from which the ranks of
        a node read it without a copy.
        """
        ranks = len(self._ranks.actors)
        batches = rank_batches(
            groups, self._config, ranks, share_prefixes=share_prefixes, post_process=self._post_process
        )
        replicas = [self._config.learner.data_parallel_rank(rank, ranks) for rank in range(ranks)]
        stored = {replica: ray.put(batches[replicas.index(replica)]) for replica in sorted(set(replicas))}
        return [stored[replica] for replica in replicas]

    async def progress(self) -> LearnerProgress:
        ranks: list[LearnerProgress] = await self._ranks.on_all("progress")
        first = ranks[0]
        if len({(rank.rollout, rank.version, rank.changed) for rank in ranks}) > 1:
            done = "; ".join(f"rollout {rank.rollout}, version {rank.version}" for rank in ranks)
            # No rank can undo its step, so all of them are replaced by ranks that load the last checkpoint.
            for actor in self._ranks.actors:
                ray.kill(actor)
            raise FatalError(f"a call to the learner failed on some of its ranks, and the ranks differ now: {done}")
        reports = [rank.report for rank in ranks if rank.report is not None]
        report = _merged(reports, sum(report.tokens for report in reports)) if reports else None
        return replace(first, report=report)

    async def offload(self) -> None:
        await self._ranks.on_all("offload")

    async def onload(self) -> None:
        await self._ranks.on_all("onload")

    async def work_seconds(self) -> float:
        seconds: list[float] = await self._ranks.on_all("work_seconds")
        return sum(seconds) + self._work_time.seconds

    async def copy_state(self, rollout_id: int) -> None:
        if self._checkpoints is not None:
            self._draft = await self._writing(rollout_id, asyncio.to_thread(self._checkpoints.begin, rollout_id))
        folder = None if self._draft is None else str(self._draft)
        export = self._config.learner.export_folder(rollout_id)
        await self._ranks.on_all("copy_state", folder, None if export is None else str(export))

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        try:
            await self._writing(rollout_id, self._write(rollout_id, progress))
        except FatalError:
            # Only after a failure: if this call is cancelled, a thread may still be committing the draft.
            if self._checkpoints is not None and self._draft is not None:
                await asyncio.to_thread(self._checkpoints.discard, self._draft)
            raise

    async def _write(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        """Let all ranks write their parts into one folder on a shared file system, then commit the folder."""
        if self._checkpoints is not None and self._draft is not None:
            model, layout = dimensions(self._config), parallel_layout(self._config.learner)
            facts = {"run": self._run, "model": model, "layout": layout}
            await asyncio.to_thread(self._checkpoints.write_progress, self._draft, {**facts, **progress})
        await self._ranks.on_first("finish_state", await self._ranks.on_all("write_state"))
        if self._checkpoints is not None and self._draft is not None:
            keep = self._config.learner.save_keep
            # The commit reads all files for their checksums.
            with self._work_time.writing():
                await asyncio.to_thread(self._checkpoints.commit, self._draft, rollout_id, keep)

    async def _writing(self, rollout_id: int, work: Awaitable[T]) -> T:
        """Await a step of writing a checkpoint; name the checkpoint and its folder if the step fails."""
        try:
            return await work
        except (FatalError, OSError, TypeError, ValueError) as error:
            folder = self._config.learner.save or self._config.learner.save_hf
            raise FatalError(
                f"the checkpoint of rollout {rollout_id} could not be written to {folder}: {error}; "
                "the previous checkpoint is intact"
            ) from error


def _sequences(groups: Sequence[Group]) -> list[int]:
    return [group.sequence or 0 for group in groups]


def _merged(reports: Sequence[StepReport], tokens: int) -> StepReport:
    """Merge the reports of all ranks on a batch of `tokens` tokens.

    - `tokens_per_second`: Prompt and response tokens of the batch per second of its steps. Worry if it falls while
      responses are as long as before: another process uses the machine, or a rank is slow.
    """
    seconds = max(report.seconds for report in reports)
    return StepReport(
        seconds=seconds,
        tokens=tokens,
        finite=all(report.finite for report in reports),
        metrics={
            **reports[0].metrics,
            **_device_metrics(reports),
            "tokens_per_second": tokens / max(seconds, 1e-9),
        },
    )


def _device_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the memory of the fullest rank, and the mean of the ranks' model FLOPs utilisation."""
    metrics = {"memory_gib": max(report.metrics["memory_gib"] for report in reports)}
    if "mfu" in reports[0].metrics:
        metrics["mfu"] = fmean(report.metrics["mfu"] for report in reports)
    return metrics

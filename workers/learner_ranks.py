"""The learner of a run, and the learner that takes its place when a rank is lost.

Ranks train together, so the loss of one ends all of them. The next learner continues with the weights of the newest
checkpoint of this run, or with those that the run began with (`miles_async/pipeline/restore.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from miles_async.adapters.ray.actor_errors import describe_death
from miles_async.adapters.ray.learner import RayRanks
from miles_async.adapters.storage.checkpoints import CheckpointFolder, LoadedCheckpoint
from miles_async.config.schema import RunConfig
from miles_async.pipeline.monitor import MIN_WORK_SECONDS, WORK_POLL_SECONDS

ANSWER_SECONDS = 5.0
"""A rank that is alive answers within this time, unless it is stopped."""

log = structlog.get_logger(__name__)


class LearnerRanks:
    """Starts the actors of all ranks, and starts them again from a checkpoint."""

    def __init__(self, config: RunConfig, run: str, create: Callable[[int, str], ActorHandle[Any]], host: str) -> None:
        """`create` starts the actor of a rank under a name. `host` is the address of the node of the first rank."""
        self._config = config
        self._run = run
        self._create = create
        self._host = host
        self._starts = 0
        self._loaded: LoadedCheckpoint | None = None
        self._read_bytes = 0
        """Bytes that were read to check checkpoints. Several threads add to it, so that only its changes count."""
        self.actors: Sequence[ActorHandle[Any]] = ()

    def create(self, ranks: int | None = None) -> None:
        """Create the actors of all ranks, or of the first `ranks`."""
        self._starts += 1
        suffix = "" if self._starts == 1 else f"-{self._starts}"
        count = self._config.learner.ranks if ranks is None else ranks
        self.actors = [self._create(rank, f"learner-{rank}{suffix}") for rank in range(count)]

    def import_libraries(self) -> None:
        """Begin to import what all ranks need, which takes seconds and no memory of a device."""
        for actor in self.actors:
            actor.import_libraries.remote()

    async def start(self, model: str, checkpoint: LoadedCheckpoint | None) -> None:
        """Load the model folder `model` on all ranks, then a checkpoint."""
        ranks = RayRanks(self.actors)
        # torch.distributed connects all ranks through a port on the node of the first rank.
        port: int = await ranks.on_first("claim_port", self._host)
        await ranks.on_first("lead", self.actors[1:])
        await ranks.on_all("start", model, self._host, port)
        if checkpoint is not None:
            folder = str(checkpoint.folder)
            await ranks.on_all("load_state", folder)
            log.info("learner resumes", checkpoint=folder)
        self._loaded = checkpoint

    async def begin(self) -> None:
        """Begin to count batches and versions from what was loaded. Call it after the transports were measured."""
        loaded = self._loaded
        # Each adapter has its first version before the first batch.
        first = len(self._config.data.adapter_weights) - 1
        counts = (-1, first, None) if loaded is None else (loaded.rollout, max(first, loaded.version), loaded.changed)
        await RayRanks(self.actors).on_all("begin", *counts)

    async def offload(self) -> None:
        """Move all ranks off devices that engines use, too."""
        await RayRanks(self.actors).on_all("offload")

    async def onload(self) -> None:
        """Move all ranks onto the devices again."""
        await RayRanks(self.actors).on_all("onload")

    async def replace(
        self, model: str, began_with: LoadedCheckpoint | None, idle_limit: float
    ) -> LoadedCheckpoint | None:
        """End the ranks that still live, and start others from the newest checkpoint of this run.

        Before the first one, they start from `began_with`, the checkpoint that the run began with. Returns the
        checkpoint. Raises TimeoutError if neither the check of the checkpoint's files nor a rank has advanced for
        `idle_limit` seconds. A large checkpoint may take longer.
        """
        for actor in self.actors:
            ray.kill(actor)
        self.create()
        replacing = asyncio.ensure_future(self._start_from_newest(model, began_with))
        try:
            read, worked, advanced_at = self._read_bytes, dict[int, float](), time.monotonic()
            while not (await asyncio.wait([replacing], timeout=WORK_POLL_SECONDS))[0]:
                before, worked = worked, worked | await self._work_seconds()
                works = any(seconds - before.get(rank, 0.0) > MIN_WORK_SECONDS for rank, seconds in worked.items())
                if works or self._read_bytes != read:
                    read, advanced_at = self._read_bytes, time.monotonic()
                if time.monotonic() - advanced_at >= idle_limit:
                    raise TimeoutError
            return replacing.result()
        finally:
            replacing.cancel()

    async def _start_from_newest(self, model: str, began_with: LoadedCheckpoint | None) -> LoadedCheckpoint | None:
        checkpoint = await asyncio.to_thread(self._newest_checkpoint) or began_with
        for damage in checkpoint.damage if checkpoint is not None else ():
            log.warning(f"{damage}; the learner continues from an older checkpoint")
        await self.start(model, checkpoint)
        await self.begin()
        return checkpoint

    async def death(self) -> str | None:
        """Describe the death of a rank in one sentence; None if all ranks are alive."""
        calls = await self._ended_calls(lambda rank: rank.heartbeat.remote())
        errors = (call.exception() for call in calls.values())
        return next((describe_death(error) for error in errors if isinstance(error, RayActorError)), None)

    async def _work_seconds(self) -> dict[int, float]:
        """Return the seconds of work of the ranks that answer, by rank."""
        calls = await self._ended_calls(lambda rank: rank.work_seconds.remote())
        return {rank: call.result() for rank, call in calls.items() if call.exception() is None}

    async def _ended_calls(self, call: Callable[[ActorHandle[Any]], Any]) -> dict[int, asyncio.Future[Any]]:
        """Call a method of all ranks; return the calls that have ended in time, by rank, and forget the others."""
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(call(actor)) for actor in self.actors]
        ended, late = await asyncio.wait(calls, timeout=ANSWER_SECONDS) if calls else (set(), set())
        for unanswered in late:
            unanswered.cancel()
        return {rank: answer for rank, answer in enumerate(calls) if answer in ended}

    def _count_read(self, size: int) -> None:
        self._read_bytes += size

    def _newest_checkpoint(self) -> LoadedCheckpoint | None:
        folder = self._config.learner.save_folder
        checksums = self._config.learner.checkpoint_checksums
        if folder is None:
            return None
        return CheckpointFolder(folder, checksums=checksums).newest_of(self._run, self._count_read)

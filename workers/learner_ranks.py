"""The learner of a run, and the learner that takes its place when a rank is lost.

Ranks train together, so the loss of one ends all of them. The next learner continues with the weights of the newest
checkpoint of this run, or with those that the run began with (`miles_async/pipeline/restore.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from miles_async.adapters.ray.actor_errors import actor_result, describe_death
from miles_async.adapters.storage.checkpoints import CheckpointFolder, LoadedCheckpoint
from miles_async.config.derived import learner_ranks, save_folder
from miles_async.config.schema import RunConfig

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
        self.actors: Sequence[ActorHandle[Any]] = ()

    def create(self, ranks: int | None = None) -> None:
        """Create the actors of all ranks, or of the first `ranks`."""
        self._starts += 1
        suffix = "" if self._starts == 1 else f"-{self._starts}"
        count = learner_ranks(self._config) if ranks is None else ranks
        self.actors = [self._create(rank, f"learner-{rank}{suffix}") for rank in range(count)]

    async def start(self, model: str, checkpoint: LoadedCheckpoint | None) -> None:
        """Load the model folder `model` on all ranks, then a checkpoint."""
        # torch.distributed connects all ranks through a port on the node of the first rank.
        port: int = await actor_result(self.actors[0].claim_port.remote(self._host))
        await actor_result(self.actors[0].lead.remote(self.actors[1:]))
        await self._on_all(lambda rank: rank.start.remote(model, self._host, port))
        if checkpoint is not None:
            folder = str(checkpoint.folder)
            await self._on_all(lambda rank: rank.load_state.remote(folder))
            log.info("learner resumes", checkpoint=folder)
        self._loaded = checkpoint

    async def begin(self) -> None:
        """Begin to count batches and versions from what was loaded. Call it after the transports were measured."""
        loaded = self._loaded
        counts = (-1, 0, False) if loaded is None else (loaded.rollout, loaded.version, loaded.changed)
        await self._on_all(lambda rank: rank.begin.remote(*counts))

    async def replace(self, model: str, began_with: LoadedCheckpoint | None) -> LoadedCheckpoint | None:
        """End the ranks that still live, and start others from the newest checkpoint of this run.

        Before the first one, they start from `began_with`, the checkpoint that the run began with. Returns the
        checkpoint.
        """
        for actor in self.actors:
            ray.kill(actor)
        self.create()
        checkpoint = await asyncio.to_thread(self._newest_checkpoint) or began_with
        for damage in checkpoint.damage if checkpoint is not None else ():
            log.warning(f"{damage}; the learner continues from an older checkpoint")
        await self.start(model, checkpoint)
        await self.begin()
        return checkpoint

    async def death(self) -> str | None:
        """Describe the death of a rank in one sentence; None if all ranks are alive."""
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(actor.heartbeat.remote()) for actor in self.actors]
        if not calls:
            return None
        await asyncio.wait(calls, timeout=ANSWER_SECONDS)
        errors = [call.exception() for call in calls if call.done()]
        return next((describe_death(error) for error in errors if isinstance(error, RayActorError)), None)

    def _newest_checkpoint(self) -> LoadedCheckpoint | None:
        folder = save_folder(self._config)
        checksums = self._config.learner.checkpoint_checksums
        return None if folder is None else CheckpointFolder(folder, checksums=checksums).newest_of(self._run)

    async def _on_all(self, call: Callable[[ActorHandle[Any]], Any]) -> list[Any]:
        """Call a method on all ranks. Raises as `actor_result`, as soon as one call fails."""
        calls = [asyncio.ensure_future(actor_result(call(actor))) for actor in self.actors]
        try:
            return await asyncio.gather(*calls)
        finally:
            for running in calls:
                running.cancel()

"""Checkpoints of a run: the learner's state, the position in the data, and the prompts that are not trained yet.

These are the prompts that were fed before the checkpoint was written. A resumed run generates them again, so no prompt
is lost and none is trained twice. Weight versions restart at 0, because a resumed run starts new
engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.errors import UserError
from miles_async.events import CheckpointWritten
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import DataSource, Learner
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group

Snapshot = Callable[[], tuple[dict[str, Any], Sequence[Group]]]
"""Returns the position in the data, and the groups before it that wait or that a rollout function has taken."""


@dataclass(kw_only=True, eq=False, repr=False)
class Checkpointer:
    """Writes checkpoints, one at a time: copied between two steps, written while training continues."""

    run_state: RunState
    lifecycle: GroupLifecycle
    snapshot: Snapshot
    learner: Learner
    tasks: TaskSupervisor
    asynchronous: bool
    """`--async-save`; without it, `write` returns when the checkpoint is on disk."""

    def __post_init__(self) -> None:
        self.newest: asyncio.Task[None] | None = None
        """The task that writes, or wrote, the newest checkpoint; None before the first."""
        self.last_rollout: int | None = None
        """The rollout of the newest checkpoint of this run, complete or not; None before the first."""
        self.last_saved: int | None = None
        """The rollout of the newest complete checkpoint of this run; None before the first."""

    async def write(self, rollout_id: int) -> None:
        """Copy the state after `rollout_id` and start writing it; waits for the previous checkpoint first."""
        if self.newest is not None:
            await self.newest
        # The progress is captured before the first await of the copy, at the same point between two steps.
        progress = progress_of(rollout_id, self.run_state, self.lifecycle, self.snapshot)
        await self.learner.copy_state(rollout_id)
        self.last_rollout = rollout_id
        self.newest = self.tasks.spawn(f"checkpoint-{rollout_id}", self._write(rollout_id, progress))
        if not self.asynchronous:
            await self.newest
        self.run_state.mark_progress()

    async def _write(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        # The store must know every batch that a checkpoint contains.
        await self.run_state.journal.flush()
        await self.learner.write_state(rollout_id, progress)
        self.last_saved = rollout_id
        self.run_state.journal.save(rollout_id)
        self.run_state.journal.emit(CheckpointWritten(time=self.run_state.clock.time(), rollout=rollout_id))


def progress_of(rollout_id: int, run_state: RunState, lifecycle: GroupLifecycle, snapshot: Snapshot) -> dict[str, Any]:
    """The progress after `rollout_id`, which can be serialised as JSON.

    This runs on the event loop, so it leaves generated tokens out and does not encode anything.
    """
    position, taken = snapshot()
    untrained = [group for group in lifecycle.live_groups if lifecycle.state_of(group) is not GroupState.TRAINED]
    return {
        "rollout": rollout_id,
        "version": run_state.trainer_version,
        "changed": run_state.changed_adapter,
        "data": position,
        "owed": [group.tracked or group.prompt_dict() for group in (*taken, *untrained, *lifecycle.quarantine.waiting)],
    }


def resume(progress: Mapping[str, Any], data: DataSource, journal: Journal) -> None:
    """Restore the position in the data, and put the prompts that were not trained first in line.

    The store of this run is new, so all prompts that wait are recorded in the journal. Raises UserError if the progress
    is incomplete, or if it belongs to other data.
    """
    try:
        data.seek(progress["data"])
        data.add_samples([Group.from_prompt_dict(values) for values in progress["owed"]])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the progress of the checkpoint is not valid ({type(error).__name__}: {error}): load another checkpoint"
        ) from error
    for group in data.returned():
        journal.track_prompt(group)

"""What happens when the head of the window keeps everybody waiting.

A window bounds how far the others may get ahead of its head, so one stuck rollout stalls the trainer (torchtitan
#4826: rollouts of 50 minutes). A deadline ends that. `recycle` sends the prompt back for a fresh attempt; `salvage`
sends it back with the tokens it has, to be continued (one without any is recycled); `wait` is the plain window.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HeadAction(StrEnum):
    WAIT = "wait"
    RECYCLE = "recycle"
    SALVAGE = "salvage"


@dataclass(frozen=True, slots=True)
class HeadPolicy:
    """`deadline_seconds` count from when a group becomes the head, not from its admission: only then others wait."""

    deadline_seconds: float | None
    action: HeadAction

    @property
    def active(self) -> bool:
        return self.deadline_seconds is not None and self.action is not HeadAction.WAIT

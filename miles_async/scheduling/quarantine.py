"""Finds the prompts that crash engines, without charging the prompts that were generated next to them.

A crash ends every request of an engine and does not tell which request caused it. Engines also die for other reasons,
so the first loss of a prompt has no consequence. From the second loss on, the prompt is a suspect: it waits here, not
in the data source, until it is tried. One suspect is tried at a time, so that two prompts that both crash engines are
told apart:

    losses    the next attempt
    0, 1      with the other groups
    2         a trial next to groups that are not suspects
    3 to 5    a trial alone: no other request is at the engines
    6         none: three losses alone prove that the prompt crashes engines

An attempt that ends without the loss of its engine clears a suspect; an abort only interrupts the trial. A prompt that
crashes engines therefore costs six of them, however many prompts are generated next to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from miles_async.types import Group

SUSPECT_LOSSES = 2
ALONE_LOSSES = 3
CULPRIT_LOSSES = 6


class Quarantine:
    """Counts engine losses by prompt, holds the suspects, and releases one at a time for its trial."""

    def __init__(self) -> None:
        self._losses: Counter[str] = Counter()
        """Engines lost since the last cleared attempt, by feed index."""
        self._waiting: deque[Group] = deque()
        """Suspects that wait for their trial; those that are tried alone come first."""
        self._on_trial: str | None = None
        """Feed index of the suspect that is being generated."""

    @property
    def waiting(self) -> Sequence[Group]:
        """Suspects that wait for their trial."""
        return tuple(self._waiting)

    @property
    def wants_engines_alone(self) -> bool:
        """Whether the current trial, or else the next one, must be the only request at the engines."""
        if self._on_trial is not None:
            return self._losses[self._on_trial] >= ALONE_LOSSES
        return bool(self._waiting) and self._losses[self._waiting[0].feed_index] >= ALONE_LOSSES

    @property
    def has_engines_alone(self) -> bool:
        """Whether a trial runs that must be the only request at the engines."""
        return self._on_trial is not None and self.wants_engines_alone

    def suspects(self, group: Group) -> bool:
        """Return whether the next attempt of the group is a trial."""
        return self._losses[group.feed_index] >= SUSPECT_LOSSES

    def hold(self, group: Group) -> None:
        """Let a suspect wait for its trial."""
        if self._losses[group.feed_index] >= ALONE_LOSSES:
            self._waiting.appendleft(group)
        else:
            self._waiting.append(group)

    @property
    def due(self) -> Group | None:
        """The suspect that is tried next; None if no suspect waits or a trial runs."""
        return self._waiting[0] if self._waiting and self._on_trial is None else None

    def release(self) -> Group | None:
        """Return the suspect whose trial begins now; None if none is due."""
        if self.due is None:
            return None
        group = self._waiting.popleft()
        self._on_trial = group.feed_index
        return group

    def end_trial(self, group: Group) -> None:
        """Record that the group's attempt has ended; does nothing if the attempt was not a trial."""
        if self._on_trial == group.feed_index:
            self._on_trial = None

    def count_loss(self, group: Group) -> int:
        """Count a lost engine. Returns the number of engines that the prompt lost since it was last cleared."""
        self._losses[group.feed_index] += 1
        return self._losses[group.feed_index]

    def clear(self, group: Group) -> None:
        """Record that an attempt ended without the loss of its engine."""
        self._losses.pop(group.feed_index, None)

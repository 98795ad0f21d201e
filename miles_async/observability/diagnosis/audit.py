"""An independent check of a run's events: no group is lost, trained twice, too stale or collected out of order.

The audit shares no code with the scheduler that it checks. It derives states, versions, bypasses and slots from the
events alone. Memory grows with the number of live groups, plus one entry per trained prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from miles_async.events import (
    Event,
    EventsMissing,
    GroupGenerated,
    GroupMoved,
    GroupReplayed,
    PublishEnded,
    RunStarted,
    StepStarted,
)

_LIFECYCLE = ("fed", "in_flight", "finished", "queued", "leased", "trained", "published")
_NEXT = dict(pairwise(_LIFECYCLE))
_RETRIED = frozenset(
    {"stale", "failed", "engine_lost", "router_lost", "worker_lost", "head_deadline", "aborted", "partial"}
)
"""Drop reasons after which the prompt must get another attempt or become a dead letter."""


@dataclass(slots=True)
class _Life:
    feed_index: str
    attempt: int
    state: str
    admitted_at: int
    """The live version at admission. If the group continues an earlier attempt, the version at that admission."""
    oldest: int | None = None
    """The oldest version of its tokens."""
    trained_as: int | None = None
    """The version that its training step produces."""
    replayed: bool = False
    """Whether its tokens come from a recording, in which case they may be older than its admission."""
    bypassed: int = 0
    """Number of younger groups that were collected before it."""


class Audit:
    """Pass every event to `observe` in order. An event log with deleted parts is checked up to the first of them.

    `violations` are sentences. `owed` holds the prompts that were dropped and have not been admitted again yet.
    """

    def __init__(self, staleness_limit: int | None, *, windowed: bool = True) -> None:
        """`staleness_limit` is in versions; None disables the check. `windowed` enables the check of bypasses."""
        self._limit = staleness_limit
        self._windowed = windowed
        self._window: int | None = None
        self._slots: int | None = None
        self._live: dict[int, _Life] = {}
        self._waiting: dict[int, _Life] = {}
        """The live groups that are not collected yet, oldest first."""
        self._interrupted: dict[str, tuple[int, int]] = {}
        """Attempt and `admitted_at` of dropped groups that may keep their tokens, by prompt."""
        self._trained: set[str] = set()
        self._live_version = -1
        self._next_sequence = 0
        self._complete = True
        """Whether no events are missing so far."""
        self.violations: list[str] = []
        self.owed: set[str] = set()
        self.trained = 0
        self.recycled = 0
        self.greatest_age = 0
        self.greatest_bypass = 0

    def observe(self, event: Event) -> None:
        if not self._complete:
            return
        match event:
            case RunStarted():
                self._window, self._slots = event.window, event.slots
            case GroupMoved():
                self._moved(event)
            case GroupReplayed():
                self._live[event.sequence].replayed = True
            case GroupGenerated():
                self._group_generated(event)
            case StepStarted():
                self._step_started(event)
            case PublishEnded() if event.live:
                self._live_version = event.version
            case EventsMissing():
                self._violated("parts of the event log were deleted; later events cannot be checked")
                self._complete = False
            case _:
                pass

    def _moved(self, event: GroupMoved) -> None:
        sequence = event.sequence
        if event.before is None:
            self._admitted(event)
        elif (life := self._live.get(sequence)) is None or life.state != event.before:
            self._violated(f"group {sequence} left state {event.before} without being in it")
            return
        elif event.after == "dropped":
            self._dropped(event, life)
        elif (event.before, event.after) == ("leased", "queued"):
            # A batch that was not trained returns to the queue when its rollout worker is lost.
            life.state = event.after
        elif _NEXT.get(event.before) != event.after:
            self._violated(f"group {sequence} went from {event.before} to {event.after}")
        else:
            life.state = event.after
            if event.after == "queued":
                self._collected(sequence)
            elif event.after == "trained":
                self._entered_weights(life)
            elif event.after == "published":
                self._published(sequence, life)
        self._check_counts(event)

    def _admitted(self, event: GroupMoved) -> None:
        if event.sequence != self._next_sequence:
            self._violated(f"sequence number {event.sequence} came instead of {self._next_sequence}")
        self._next_sequence = event.sequence + 1
        attempt, admitted_at = self._interrupted.pop(event.feed_index, (-1, 0))
        if attempt != event.attempt:
            # A new attempt starts without tokens. An attempt with the same number continues the tokens it has.
            admitted_at = self._live_version
        life = _Life(event.feed_index, event.attempt, "fed", admitted_at)
        self._live[event.sequence] = self._waiting[event.sequence] = life
        self.owed.discard(event.feed_index)
        if self._slots is not None and len(self._live) > self._slots:
            self._violated(f"group {event.sequence} was admitted as live group {len(self._live)} of {self._slots}")

    def _dropped(self, event: GroupMoved, life: _Life) -> None:
        del self._live[event.sequence]
        self._waiting.pop(event.sequence, None)
        if life.state == "trained":
            self._violated(f"group {event.sequence} was dropped after it was trained")
        self.recycled += event.reason == "stale"
        if event.reason in _RETRIED:
            self.owed.add(event.feed_index)
        if event.reason in ("head_deadline", "partial"):
            self._interrupted[event.feed_index] = life.attempt, life.admitted_at

    def _collected(self, sequence: int) -> None:
        del self._waiting[sequence]
        # A group that a user's function generated does not go through the window.
        generated_outside = self._live[sequence].oldest is None
        if generated_outside or not self._windowed or self._window is None:
            return
        for older, life in self._waiting.items():
            if older > sequence:
                break
            life.bypassed += 1
            self.greatest_bypass = max(self.greatest_bypass, life.bypassed)
            if life.bypassed > self._window - 1:
                self._violated(f"group {older} was bypassed {life.bypassed} times with a window of {self._window}")

    def _entered_weights(self, life: _Life) -> None:
        self.trained += 1
        if life.feed_index in self._trained:
            self._violated(f"prompt {life.feed_index} was trained twice")
        self._trained.add(life.feed_index)

    def _published(self, sequence: int, life: _Life) -> None:
        del self._live[sequence]
        if life.trained_as is None or life.trained_as > self._live_version:
            self._violated(f"the slot of group {sequence} was freed before version {life.trained_as} was live")

    def _group_generated(self, event: GroupGenerated) -> None:
        life = self._live[event.sequence]
        life.oldest = event.versions[0]
        if life.oldest < life.admitted_at and not life.replayed:
            self._violated(
                f"group {event.sequence} has tokens of version {life.oldest}, but was admitted at {life.admitted_at}"
            )

    def _step_started(self, event: StepStarted) -> None:
        for sequence, claimed in zip(event.groups, event.staleness, strict=True):
            life = self._live[sequence]
            life.trained_as = event.version + 1
            if life.oldest is None:
                continue
            age = event.version - life.oldest
            self.greatest_age = max(self.greatest_age, age)
            if age != claimed:
                self._violated(f"group {sequence} entered its step {age} versions old, but the event reports {claimed}")
            if self._limit is not None and age > self._limit:
                self._violated(f"group {sequence} entered its step {age} versions old, over the limit {self._limit}")

    def _check_counts(self, event: GroupMoved) -> None:
        if sum(event.counts.values()) != len(self._live):
            self._violated(f"the ledger counts {event.counts}, but {len(self._live)} groups are live")

    def _violated(self, sentence: str) -> None:
        self.violations.append(sentence)

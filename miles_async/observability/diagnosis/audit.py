"""An independent check of a run's event trace: no group lost, none trained twice, none too old, none out of order.

It shares no code with the scheduler it judges: states, versions, bypasses and slots are worked out again from the
events alone. Memory grows with what is live, plus one entry per prompt that was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from miles_async.events import (
    Event,
    GroupGenerated,
    GroupMoved,
    GroupReplayed,
    PublishEnded,
    RunStarted,
    StepStarted,
)

_WAY = ("fed", "in_flight", "finished", "queued", "leased", "trained", "published")
_NEXT = dict(pairwise(_WAY))
_RETURNS = frozenset({"stale", "failed", "engine_lost", "head_deadline", "aborted", "partial"})
"""Reasons after which the prompt is owed another attempt, or a grave."""


@dataclass(slots=True)
class _Life:
    feed_index: str
    attempt: int
    state: str
    born: int
    """The live version at admission; of a salvaged group, at its first one."""
    oldest: int | None = None
    trained_as: int | None = None
    """The version its batch goes into."""
    replayed: bool = False
    """Its tokens were recorded, and are as old as they were then."""
    bypassed: int = 0
    """Younger groups collected before it."""


class Audit:
    """Give it every event in order; `violations` are sentences, `owed` the prompts whose next attempt is still due."""

    def __init__(self, staleness_limit: int | None, *, windowed: bool = True) -> None:
        self._limit = staleness_limit
        self._windowed = windowed
        self._window: int | None = None
        self._slots: int | None = None
        self._live: dict[int, _Life] = {}
        self._waiting: dict[int, _Life] = {}
        """Those of them that are not collected yet, oldest first."""
        self._interrupted: dict[str, tuple[int, int]] = {}
        """Attempt and `born` of groups sent back that may keep their tokens, by prompt."""
        self._trained: set[str] = set()
        self._live_version = -1
        self._next_sequence = 0
        self.violations: list[str] = []
        self.owed: set[str] = set()
        self.trained = 0
        self.recycled = 0
        self.greatest_age = 0
        self.greatest_bypass = 0

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._window, self._slots = event.window, event.slots
            case GroupMoved():
                self._moved(event)
            case GroupReplayed():
                self._live[event.sequence].replayed = True
            case GroupGenerated():
                self._generated(event)
            case StepStarted():
                self._stepped(event)
            case PublishEnded() if event.live:
                self._live_version = event.version
            case _:
                pass

    def _moved(self, event: GroupMoved) -> None:
        sequence = event.sequence
        if event.before is None:
            self._born(event)
        elif (life := self._live.get(sequence)) is None or life.state != event.before:
            self._violated(f"group {sequence} left {event.before}, where it was not")
            return
        elif event.after == "dropped":
            self._dropped(event, life)
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

    def _born(self, event: GroupMoved) -> None:
        if event.sequence != self._next_sequence:
            self._violated(f"sequence number {event.sequence} came where {self._next_sequence} was due")
        self._next_sequence = event.sequence + 1
        attempt, born = self._interrupted.pop(event.feed_index, (-1, 0))
        if attempt != event.attempt:
            born = self._live_version  # a fresh attempt; one of the same number continues the tokens it has
        life = _Life(event.feed_index, event.attempt, "fed", born)
        self._live[event.sequence] = self._waiting[event.sequence] = life
        self.owed.discard(event.feed_index)
        if self._slots is not None and len(self._live) > self._slots:
            self._violated(f"group {event.sequence} was admitted as number {len(self._live)} of {self._slots} slots")

    def _dropped(self, event: GroupMoved, life: _Life) -> None:
        del self._live[event.sequence]
        self._waiting.pop(event.sequence, None)
        if life.state == "trained":
            self._violated(f"group {event.sequence} was dropped after it was trained")
        self.recycled += event.reason == "stale"
        if event.reason in _RETURNS:
            self.owed.add(event.feed_index)
        if event.reason in ("head_deadline", "partial"):
            self._interrupted[event.feed_index] = life.attempt, life.born

    def _collected(self, sequence: int) -> None:
        del self._waiting[sequence]
        if not self._windowed or self._window is None:
            return
        for older, life in self._waiting.items():
            if older > sequence:
                break
            life.bypassed += 1
            self.greatest_bypass = max(self.greatest_bypass, life.bypassed)
            if life.bypassed > self._window - 1:
                self._violated(f"group {older} was passed {life.bypassed} times, window {self._window}")

    def _entered_weights(self, life: _Life) -> None:
        self.trained += 1
        if life.feed_index in self._trained:
            self._violated(f"prompt {life.feed_index} was trained twice")
        self._trained.add(life.feed_index)

    def _published(self, sequence: int, life: _Life) -> None:
        del self._live[sequence]
        if life.trained_as is None or life.trained_as > self._live_version:
            self._violated(f"the slot of group {sequence} was freed before version {life.trained_as} was live")

    def _generated(self, event: GroupGenerated) -> None:
        life = self._live[event.sequence]
        life.oldest = event.versions[0]
        if life.oldest < life.born and not life.replayed:
            self._violated(f"group {event.sequence} holds tokens of {life.oldest}, older than {life.born} at admission")

    def _stepped(self, event: StepStarted) -> None:
        for sequence, claimed in zip(event.groups, event.staleness, strict=True):
            life = self._live[sequence]
            life.trained_as = event.version + 1
            if life.oldest is None:
                continue
            age = event.version - life.oldest
            self.greatest_age = max(self.greatest_age, age)
            if age != claimed:
                self._violated(f"group {sequence} entered its step {age} versions old, not {claimed}")
            if self._limit is not None and age > self._limit:
                self._violated(f"group {sequence} entered its step {age} versions old, over the limit {self._limit}")

    def _check_counts(self, event: GroupMoved) -> None:
        if sum(event.counts.values()) != len(self._live):
            self._violated(f"the ledger counts {event.counts}, the trace leaves {len(self._live)} groups live")

    def _violated(self, sentence: str) -> None:
        self.violations.append(sentence)

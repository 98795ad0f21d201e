"""An independent check of a run's events: no group is lost, trained twice, too stale or collected out of order.

The audit shares no code with the scheduler that it checks. It derives states, versions, bypasses and slots from the
events alone. Memory grows with the number of live groups, plus one entry per trained prompt.

If a run trains several adapters, each of them has its own versions, slots and window. The audit then counts the
versions of each adapter from 0, in the order in which the events name them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from miles_async import events

_LIFECYCLE = ("fed", "in_flight", "finished", "queued", "leased", "trained", "published")
_NEXT = dict(pairwise(_LIFECYCLE))
_RETRIED = frozenset(
    {
        "stale",
        "failed",
        "engine_lost",
        "router_lost",
        "worker_lost",
        "rolled_back",
        "head_deadline",
        "aborted",
        "partial",
        "given_back",
    }
)
"""Drop reasons after which the prompt must get another attempt or become a dead letter."""


@dataclass(slots=True)
class _Life:
    feed_index: str
    attempt: int
    adapter: str
    state: str
    admitted_at: int
    """The live version at admission. If the group continues an earlier attempt, the version at that admission. -1 if a
    rollout function generated its first tokens."""
    versions: tuple[int, int] | None = None
    """The oldest and the newest version of its tokens."""
    trained_as: int | None = None
    """The version that its training step produces."""
    rollout: int | None = None
    """The rollout of its training step."""
    replayed: bool = False
    """Whether its tokens come from a recording, in which case they may be older than its admission."""
    bypassed: int = 0
    """Number of younger groups that were collected before it."""


@dataclass(slots=True)
class _Line:
    """Consecutive versions that the current weights descend from."""

    first: int
    last: int | None
    """None for the versions that are being made now."""
    updates: int
    """Weight updates from the start of the run to the first version."""


class Audit:
    """Pass every event to `observe` in order. An event log with deleted parts is checked up to the first of them.

    `violations` are sentences. `owed` holds the prompts that were dropped, or whose training was undone, and that have
    neither been admitted nor returned to the queue again.
    """

    def __init__(self, staleness_limit: int | None, *, windowed: bool = True, trains_off_lineage: bool = False) -> None:
        """`staleness_limit` is in versions; None disables the check. `windowed` enables the check of bypasses.

        `trains_off_lineage` allows tokens of versions that were rolled back (`--off-lineage train`).
        """
        self._limit = staleness_limit
        self._windowed = windowed
        self._trains_off_lineage = trains_off_lineage
        self._versions: dict[str, list[int]] = {}
        """The numbers of the versions of each adapter."""
        self._lines: dict[str, list[_Line]] = {"": [_Line(0, None, 0)]}
        """By adapter."""
        self._key_age = 0
        """Versions by which keys may be older than the weights; negative without a limit."""
        self._window: int | None = None
        self._slots: int | None = None
        self._live: dict[int, _Life] = {}
        self._held = Counter[str]()
        """Number of live groups of each adapter."""
        self._live_prompts: set[str] = set()
        self._waiting: dict[int, _Life] = {}
        """The live groups that are not collected yet, oldest first."""
        self._interrupted: dict[str, int] = {}
        """`admitted_at` of dropped groups whose next attempt has tokens from the beginning, by prompt."""
        self._trained: set[str] = set()
        """Prompts that the current weights were trained on."""
        self._published_lives: dict[int, _Life] = {}
        """Published groups, by sequence number: a learner that is restored from a checkpoint undoes their training."""
        self._live_versions: dict[str, int] = {}
        """By adapter."""
        self._next_sequence = 0
        self._complete = True
        """Whether no events are missing so far."""
        self.violations: list[str] = []
        self.owed: set[str] = set()
        self.trained = 0
        self.recycled = 0
        self.greatest_age = 0
        self.greatest_bypass = 0

    def observe(self, event: events.Event) -> None:
        if not self._complete:
            return
        match event:
            case events.RunStarted():
                self._window, self._slots, self._key_age = event.window, event.slots, event.max_kv_staleness
            case events.GroupMoved():
                self._moved(event)
            case events.GroupReplayed():
                if life := self._live_group(event.sequence, "was replayed"):
                    life.replayed = True
            case events.GroupGenerated():
                self._group_generated(event)
            case events.StepStarted():
                self._step_started(event)
            case events.PublishStarted():
                self._register(event.adapter, event.version)
            case events.PublishEnded() if event.live:
                self._live_versions[event.adapter] = self._count_of(event.adapter, event.version)
            case events.LearnerRestored():
                self._learner_restored(event)
            case events.EventsMissing():
                self._violated("parts of the event log were deleted; later events cannot be checked")
                self._complete = False

    def _register(self, adapter: str, version: int) -> None:
        """Learn that a version belongs to an adapter."""
        if not adapter:
            return
        own = self._versions.setdefault(adapter, [])
        self._lines.setdefault(adapter, [_Line(0, None, 0)])
        if version not in own:
            own.append(version)
            own.sort()

    def _count_of(self, adapter: str, version: int) -> int:
        """The number of a version among those of its adapter."""
        return bisect_right(self._versions.get(adapter, []), version) - 1 if adapter else version

    def _moved(self, event: events.GroupMoved) -> None:
        sequence = event.sequence
        if event.before is None:
            self._admitted(event)
        elif (event.before, event.after) in (("trained", "queued"), ("published", "queued")):
            self._training_undone(event)
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

    def _admitted(self, event: events.GroupMoved) -> None:
        if event.sequence != self._next_sequence:
            self._violated(f"sequence number {event.sequence} came instead of {self._next_sequence}")
        self._next_sequence = event.sequence + 1
        # An attempt may begin with tokens of the one before, or with those that a rollout function gave back.
        known_since = -1 if event.kept_tokens else self._live_versions.get(event.adapter, -1)
        admitted_at = self._interrupted.pop(event.feed_index, known_since)
        if event.feed_index and event.feed_index in self._live_prompts:
            self._violated(f"prompt {event.feed_index} was admitted again while an attempt at it holds a slot")
        self._live_prompts.add(event.feed_index)
        life = _Life(event.feed_index, event.attempt, event.adapter, "fed", admitted_at)
        self._live[event.sequence] = self._waiting[event.sequence] = life
        self._held[event.adapter] += 1
        self.owed.discard(event.feed_index)
        if self._slots is not None and self._held[event.adapter] > self._slots:
            held = self._held[event.adapter]
            self._violated(f"group {event.sequence} was admitted as live group {held} of {self._slots}")

    def _dropped(self, event: events.GroupMoved, life: _Life) -> None:
        del self._live[event.sequence]
        self._held[life.adapter] -= 1
        self._live_prompts.discard(event.feed_index)
        self._waiting.pop(event.sequence, None)
        if life.state == "trained":
            self._violated(f"group {event.sequence} was dropped after it was trained")
        self.recycled += event.reason == "stale"
        if event.reason in _RETRIED:
            self.owed.add(event.feed_index)
        if event.kept_tokens:
            self._interrupted[event.feed_index] = life.admitted_at

    def _collected(self, sequence: int) -> None:
        own = self._waiting.pop(sequence)
        # A group that a user's function generated does not go through the window.
        generated_outside = self._live[sequence].versions is None
        if generated_outside or not self._windowed or self._window is None:
            return
        for older, life in self._waiting.items():
            if older > sequence:
                break
            if life.adapter != own.adapter:
                continue
            life.bypassed += 1
            self.greatest_bypass = max(self.greatest_bypass, life.bypassed)
            if life.bypassed > self._window - 1:
                self._violated(f"group {older} was bypassed {life.bypassed} times with a window of {self._window}")

    def _training_undone(self, event: events.GroupMoved) -> None:
        life = self._live.get(event.sequence) or self._published_lives.pop(event.sequence, None)
        if life is None or life.state != event.before or (life.feed_index and life.feed_index in self._trained):
            self._violated(f"group {event.sequence} returned to the queue, but its training was not undone")
            return
        life.state = "queued"
        self._held[life.adapter] += event.sequence not in self._live
        self._live[event.sequence] = life
        self._live_prompts.add(life.feed_index)
        self.owed.discard(event.feed_index)

    def _entered_weights(self, life: _Life) -> None:
        self.trained += 1
        if life.feed_index and life.feed_index in self._trained:
            self._violated(f"prompt {life.feed_index} was trained twice")
        self._trained.add(life.feed_index)

    def _published(self, sequence: int, life: _Life) -> None:
        self._published_lives[sequence] = self._live.pop(sequence)
        self._held[life.adapter] -= 1
        self._live_prompts.discard(life.feed_index)
        life.state = "published"
        if life.trained_as is None or life.trained_as > self._live_versions.get(life.adapter, -1):
            self._violated(f"the slot of group {sequence} was freed before version {life.trained_as} was live")

    def _group_generated(self, event: events.GroupGenerated) -> None:
        life = self._live_group(event.sequence, "was generated")
        if life is None:
            return
        for version in event.versions:
            if life.adapter and version not in self._versions.get(life.adapter, ()):
                self._violated(f"group {event.sequence} has tokens of version {version} of another adapter")
        first, last = event.versions
        oldest, _ = life.versions = self._count_of(life.adapter, first), self._count_of(life.adapter, last)
        # The worker of a rollout function generates a group before the group is admitted.
        before_attempt = self._key_age >= 0 and oldest < life.admitted_at - self._key_age
        if before_attempt and not life.replayed and not event.by_worker:
            self._violated(
                f"group {event.sequence} has tokens of version {oldest}, but was admitted at {life.admitted_at}"
            )

    def _step_started(self, event: events.StepStarted) -> None:
        self._register(event.adapter, event.version)
        current = self._count_of(event.adapter, event.version)
        for sequence, claimed in zip(event.groups, event.staleness, strict=True):
            life = self._live_group(sequence, "entered a step")
            if life is None:
                continue
            if life.adapter != event.adapter:
                self._violated(f"group {sequence} of adapter {life.adapter} entered a step of adapter {event.adapter}")
            life.trained_as, life.rollout = current + 1, event.rollout
            if life.versions is None:
                continue
            ages = [self._age(event.adapter, version, current) for version in life.versions]
            if None in ages and not self._trains_off_lineage:
                self._violated(f"group {sequence} entered its step with tokens of versions that were rolled back")
            # A version that was rolled back counts all versions since. So a version between the oldest and the newest
            # one, which no event names, may be the one with the highest age.
            oldest, newest = life.versions
            possible = {self._counted_age(event.adapter, one, current) for one in range(oldest, newest + 1)}
            age = max(self._counted_age(event.adapter, version, current) for version in life.versions)
            if claimed not in possible or claimed < age:
                self._violated(f"group {sequence} entered its step {age} versions old, but the event reports {claimed}")
            age = max(age, claimed)
            self.greatest_age = max(self.greatest_age, age)
            if self._limit is not None and age > self._limit:
                self._violated(f"group {sequence} entered its step {age} versions old, over the limit {self._limit}")

    def _learner_restored(self, event: events.LearnerRestored) -> None:
        """Begin another line of versions, and undo the training of rollouts that the checkpoint does not have."""
        # The learner may have been lost before the publish of the version that its checkpoint holds.
        for version in (event.kept_version, event.version):
            self._register(event.adapter, version)
        kept = self._count_of(event.adapter, event.kept_version)
        lines = self._lines[event.adapter] = [line for line in self._lines[event.adapter] if line.first <= kept]
        lines[-1].last = kept
        updates = lines[-1].updates + kept - lines[-1].first + event.updates
        lines.append(_Line(self._count_of(event.adapter, event.version), None, updates))
        for life in (*self._live.values(), *self._published_lives.values()):
            is_undone = life.rollout is not None and life.rollout > event.rollout and life.adapter == event.adapter
            if is_undone and life.state in ("trained", "published"):
                self._trained.discard(life.feed_index)
                self.trained -= 1
                self.owed.add(life.feed_index)

    def _age(self, adapter: str, version: int, current: int) -> int | None:
        """Weight updates from a version of an adapter to another; None if the weights do not descend from `version`."""
        updates = [
            line.updates + at - line.first
            for at in (version, current)
            for line in self._lines[adapter]
            if line.first <= at and (line.last is None or at <= line.last)
        ]
        return updates[1] - updates[0] if len(updates) == 2 else None

    def _counted_age(self, adapter: str, version: int, current: int) -> int:
        """The age of a version for the staleness limit: a version that was rolled back counts all versions since."""
        age = self._age(adapter, version, current)
        return current - version if age is None else age

    def _live_group(self, sequence: int, what: str) -> _Life | None:
        life = self._live.get(sequence)
        if life is None:
            self._violated(f"group {sequence} {what} without being live")
        return life

    def _check_counts(self, event: events.GroupMoved) -> None:
        if sum(event.counts.values()) != len(self._live):
            self._violated(f"the ledger counts {event.counts}, but {len(self._live)} groups are live")

    def _violated(self, sentence: str) -> None:
        self.violations.append(sentence)

"""The training steps of a run, and how the learner spends its time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from miles_async.events import LearnerRestored, StepEnded, StepStarted

HORIZON_SECONDS = 10.0
"""The recent time covers the last 10 seconds, or the last three batches if these take longer."""
MAX_HORIZON_SECONDS = 600.0
REMEMBERED_STEPS = 4096
"""Number of recent steps that can still be undone."""
REWARD_BATCHES = 10
FEWEST_BATCHES, RECENT_BATCHES = 3, 16
CLOCK_STEP_SECONDS = 60.0
"""Two times further apart than this lie before and after a step of the wall clock: a run reports twice a second."""


class Step(NamedTuple):
    """A training step that ended."""

    rollout: int
    finite: bool
    seconds: float
    tokens: int
    """Prompt and response tokens."""
    ages: tuple[tuple[int, int], ...]
    """The staleness of the trained groups, in versions, and the number of groups with it."""
    reward: float


@dataclass(slots=True)
class Work:
    """The sum of several training steps. The groups and tokens of a batch that was not finite do not count."""

    batches: int = 0
    groups: int = 0
    tokens: int = 0
    """Prompt and response tokens."""
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.batches += 1
        self.seconds += step.seconds
        if step.finite:
            self.groups += sum(count for _, count in step.ages)
            self.tokens += step.tokens


class Steps:
    """The training steps of a run: all of them, and those that were undone.

    A step is undone if the learner was restored from an earlier checkpoint, or if its rollout is trained again.
    """

    def __init__(self) -> None:
        self.first_rollout: int | None = None
        self.last: StepEnded | None = None
        self.trained, self.undone = Work(), Work()
        """All steps that ended, and those of them whose training was lost."""
        self.unfinished_seconds = 0.0
        """Seconds of steps that did not end, because the learner or the rollout worker was lost."""
        self._busy = 0.0
        """Seconds of all steps, as far as a rollout worker served the run in them."""
        self._interrupted: tuple[int, float] | None = None
        """Rollout and seconds of the step during which the rollout worker was lost. The learner may end it."""
        self._newest = -1
        """The newest batch that the current weights were trained on."""
        self._kept: deque[Step] = deque(maxlen=REMEMBERED_STEPS)
        self._first_rewards: dict[int, float] = {}
        """The rewards of the first `REWARD_BATCHES` batches, by rollout."""
        self.running_since: float | None = None
        """When the step that runs now began."""
        self._rollout = -1
        """The rollout of the step that began last."""
        self.saved: int | None = None
        """The rollout of the newest checkpoint; None if no checkpoint was written or restored."""

    def start(self, event: StepStarted) -> list[Step]:
        """Return the steps that are undone, because their rollouts are trained again."""
        self.running_since, self._interrupted = event.time, None
        self._rollout = event.rollout
        return self._undo(event.rollout - 1)

    def end(self, event: StepEnded, ages: Iterable[int]) -> Step:
        """Count a step. `ages` is the staleness of its groups."""
        if self.first_rollout is None:
            self.first_rollout = event.rollout
        counted = tuple(Counter(ages).items())
        step = Step(event.rollout, event.finite, event.seconds, event.tokens, counted, event.reward)
        if self._interrupted is not None and self._interrupted[0] == event.rollout:
            self.unfinished_seconds -= self._interrupted[1]
        else:
            self._busy += event.seconds
        self.last, self._newest, self.running_since, self._interrupted = event, event.rollout, None, None
        self.trained.add(step)
        self._kept.append(step)
        if event.rollout - self.first_rollout < REWARD_BATCHES:
            self._first_rewards[event.rollout] = event.reward
        return step

    def interrupt(self, time: float) -> None:
        """The rollout worker was lost at `time`, and so is the step that runs now, unless its end is reported later."""
        if self.running_since is not None:
            seconds = max(0.0, time - self.running_since)
            self._busy += seconds
            self.unfinished_seconds += seconds
            self.running_since, self._interrupted = None, (self._rollout, seconds)

    def restore(self, event: LearnerRestored) -> list[Step]:
        """Return the steps that are undone."""
        self.saved = event.rollout
        if self.first_rollout is not None:
            self._newest = event.rollout
        return self._undo(event.rollout)

    def _undo(self, last: int) -> list[Step]:
        """Undo the steps of the rollouts after `last`, and return them."""
        undone = []
        while self._kept and self._kept[-1].rollout > last:
            undone.append(self._kept.pop())
            self.undone.add(undone[-1])
            self._first_rewards.pop(undone[-1].rollout, None)
        return undone

    @property
    def batches(self) -> int:
        """Batches that the current weights were trained on in this run, without those that were undone."""
        return self._newest - self.first_rollout + 1 if self.first_rollout is not None else 0

    @property
    def next_rollout(self) -> int:
        """The rollout that follows the newest one that the current weights were trained on."""
        return self._newest + 1

    @property
    def unsaved_batches(self) -> int:
        """The last of the `batches`, which no checkpoint has."""
        return self.batches if self.saved is None else min(self.batches, max(0, self._newest - self.saved))

    @property
    def kept(self) -> Work:
        """All steps without those that were undone."""
        return Work(
            self.trained.batches - self.undone.batches,
            self.trained.groups - self.undone.groups,
            self.trained.tokens - self.undone.tokens,
            self.trained.seconds - self.undone.seconds,
        )

    @property
    def lost_seconds(self) -> float:
        """Seconds of steps whose training was lost: those that were undone, and those that did not end."""
        return self.undone.seconds + self.unfinished_seconds

    def rewards(self) -> tuple[float, float, int] | None:
        """Return the mean reward of the first and of the last batches, and of how many; None without a batch.

        A quarter of the batches is averaged at either end, but at most `REWARD_BATCHES`, and at least one.
        """
        count = min(REWARD_BATCHES, max(1, len(self._kept) // 4))
        first = [self._first_rewards[rollout] for rollout in sorted(self._first_rewards)][:count]
        last = [step.reward for step in islice(reversed(self._kept), count)]
        return (fmean(first), fmean(last), count) if first and last else None

    def busy_seconds(self, now: float) -> float:
        """Return the seconds of all steps up to `now`, also of those that were lost, without interruptions."""
        return self._busy + (max(0.0, now - self.running_since) if self.running_since is not None else 0.0)


@dataclass(slots=True)
class RecentTime:
    """The learner's time within a sliding horizon, by label."""

    _slices: deque[tuple[float, float, str, bool]] = field(default_factory=deque)
    """End, seconds, label and whether admission was held back, oldest first."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _held_back: float = 0.0

    def add(self, now: float, seconds: float, label: str, held_back: bool, horizon: float) -> None:
        # The sums are updated as slices enter and leave, so that reading them does not walk the whole horizon.
        self._slices.append((now, seconds, label, held_back))
        self._seconds[label] = self._seconds.get(label, 0.0) + seconds
        self._held_back += seconds * held_back
        while self._slices[0][0] < now - horizon:
            _, expired, expired_label, was_held_back = self._slices.popleft()
            self._seconds[expired_label] -= expired
            self._held_back -= expired * was_held_back

    @property
    def fractions(self) -> dict[str, float]:
        """Fractions of the time by label; they add up to 1. Empty before any time has passed."""
        total = sum(self._seconds.values())
        return {label: seconds / total for label, seconds in self._seconds.items()} if total > 0 else {}

    @property
    def held_back(self) -> float:
        """Fraction of the time in which admission waited for the learner."""
        total = sum(self._seconds.values())
        return self._held_back / total if total > 0 else 0.0


class LearnerTime:
    """What the learner does, and its time by what it did or what it waited for, since it requested its first batch.

    The labels of the time are `step`, `save`, `evaluate`, and the things that the learner may wait for
    (`diagnosis/verdict.py`).
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        """What the learner does (`TrainerPhaseChanged.to`); None before it begins and after the run ends."""
        self.seconds: dict[str, float] = {}
        """The whole time by label."""
        self.recent = RecentTime()
        self.accounted_until = 0.0
        """The newest time that the rollout worker has reported."""
        self._at_steps: deque[dict[str, float]] = deque(maxlen=RECENT_BATCHES + 1)
        """The seconds by label at the end of each of the last steps, oldest first."""
        self._step_ended: float | None = None
        self._horizon = HORIZON_SECONDS

    def end_step(self, time: float) -> None:
        """Adapt the horizon: one that is shorter than a few batches would make the shares alternate in each batch."""
        if self._step_ended is not None:
            self._horizon = min(max(HORIZON_SECONDS, 3 * (time - self._step_ended)), MAX_HORIZON_SECONDS)
        self._step_ended = time
        self._at_steps.append(dict(self.seconds))

    @property
    def per_batch(self) -> dict[str, float]:
        """The seconds per batch by label, over the last batches; empty before there are `FEWEST_BATCHES`."""
        if len(self._at_steps) <= FEWEST_BATCHES:
            return {}
        before, after = self._at_steps[0], self._at_steps[-1]
        batches = len(self._at_steps) - 1
        return {label: (seconds - before.get(label, 0.0)) / batches for label, seconds in after.items()}

    def unaccounted(self, now: float) -> float:
        """Return the seconds since the last call, which are to be passed to `add`. 0 if there are none.

        Events of several processes arrive slightly out of order, so the time of an event may be accounted already.
        After a step of the wall clock, or if the machine was suspended, the recent time has another time base.
        """
        seconds = now - self.accounted_until
        if abs(seconds) > CLOCK_STEP_SECONDS and self.accounted_until:
            self.recent, self._step_ended, self.accounted_until = RecentTime(), None, now
            return 0.0
        self.accounted_until = max(now, self.accounted_until)
        return max(0.0, seconds) if self.phase is not None else 0.0

    @property
    def recently(self) -> float:
        """When the recent time began."""
        return self.accounted_until - self._horizon

    def interrupt(self) -> None:
        """The rollout worker was lost: what the learner does is unknown until another one reports it."""
        self.phase, self.recent, self._step_ended = None, RecentTime(), None
        self._at_steps.clear()

    def add(self, now: float, seconds: float, label: str, *, held_back: bool) -> None:
        """Account seconds that ended at `now`. `held_back` says whether admission waited for the learner."""
        self.recent.add(now, seconds, label, held_back, self._horizon)
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds

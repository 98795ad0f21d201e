"""The training steps of a run, and how the learner spends its time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from miles_async.events import LearnerRestored, StepEnded, StepStarted

HORIZON_SECONDS = 10.0
"""The recent time covers the last 10 seconds, or the last three batches if these take longer."""
MAX_HORIZON_SECONDS = 600.0
FEWEST_BATCHES, RECENT_BATCHES = 3, 16
CLOCK_STEP_SECONDS = 60.0
"""Two times further apart than this lie before and after a step of the wall clock: a run reports twice a second."""


class Steps:
    """The training steps of a run, and the time without one."""

    def __init__(self) -> None:
        self.first: StepEnded | None = None
        self.last: StepEnded | None = None
        self.seconds = 0.0
        self.tokens = 0
        self._newest = -1
        """The newest batch that the current weights were trained on."""
        self._idle = 0.0
        """Seconds without a step up to the last step."""
        self._idle_since: float | None = None
        """When the current time without a step began; None during a step and before the run."""

    def start_run(self, time: float) -> None:
        self._idle_since = time

    def start(self, event: StepStarted) -> None:
        self._idle, self._idle_since = self.idle_seconds(event.time), None

    def end(self, event: StepEnded) -> None:
        self.first, self.last = self.first or event, event
        self._newest = event.rollout
        self.seconds += event.seconds
        self.tokens += event.tokens
        self._idle_since = event.time

    def restore(self, event: LearnerRestored) -> None:
        if self.first is not None:
            self._newest = event.rollout

    @property
    def batches(self) -> int:
        """Batches that the current weights were trained on in this run, without those that a lost learner undid."""
        return self._newest - self.first.rollout + 1 if self.first is not None else 0

    @property
    def span(self) -> float:
        """Seconds from the start of the first step to the end of the last one."""
        return self.last.time - self.first.started if self.first is not None and self.last is not None else 0.0

    def idle_seconds(self, now: float) -> float:
        """Return the seconds without an optimizer step since the run began."""
        return self._idle + (max(0.0, now - self._idle_since) if self._idle_since is not None else 0.0)


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
        self._accounted_until = 0.0
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
        seconds = now - self._accounted_until
        if abs(seconds) > CLOCK_STEP_SECONDS and self._accounted_until:
            self.recent, self._step_ended, self._accounted_until = RecentTime(), None, now
            return 0.0
        self._accounted_until = max(now, self._accounted_until)
        return max(0.0, seconds) if self.phase is not None else 0.0

    def add(self, now: float, seconds: float, label: str, *, held_back: bool) -> None:
        """Account seconds that ended at `now`. `held_back` says whether admission waited for the learner."""
        self.recent.add(now, seconds, label, held_back, self._horizon)
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds

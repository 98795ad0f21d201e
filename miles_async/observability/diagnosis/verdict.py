"""Finds the bottleneck of a run continuously from its events, and names the setting to change.

The verdict follows from how the learner spends its time, because a run is as fast as its learner is busy:

- If the learner waits, the longest kind of waiting is the verdict.
- If the learner seldom waits, the run is `trainer-bound` if admission is held back for it, and `balanced` otherwise.
- In a synchronous run (`train.py`), generation and training alternate, and the longer of the two is the verdict.

A process that does not answer determines the verdict at once, because fractions of past time say nothing about a run
that hangs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from miles_async.events import (
    Event,
    GroupMoved,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    VerdictChanged,
)
from miles_async.observability.diagnosis.waste import CAUSES, WastedTokens


class Bottleneck(StrEnum):
    """The part of the pipeline that limits the speed of a run."""

    ROLLOUT = "rollout-bound"
    TRAINER = "trainer-bound"
    PUBLISH = "publish-bound"
    WINDOW = "window-bound"
    FILTER = "filter-bound"
    REWARD = "reward-bound"
    WASTE = "waste-bound"
    BALANCED = "balanced"


KNOBS = {
    Bottleneck.ROLLOUT: "add rollout capacity (--rollout-num-gpus, --sglang-server-concurrency, "
    "--over-sampling-batch-size) or make samples cheaper to generate (--rollout-max-response-len)",
    Bottleneck.TRAINER: "give the learner more ranks (--actor-num-gpus-per-node) or fuller micro-batches "
    "(--max-tokens-per-gpu), or use fewer engines",
    Bottleneck.PUBLISH: "publish less often (--update-weights-interval) or faster (--weight-transfer p2p)",
    Bottleneck.WINDOW: "widen the window (--windowed-fifo-ratio), or recycle a slow head (--head-deadline-seconds with "
    "--head-deadline-action recycle)",
    Bottleneck.FILTER: "generate more groups at once (--over-sampling-batch-size), or choose prompts or a "
    "--dynamic-sampling-filter-path that drops fewer groups",
    Bottleneck.REWARD: "make the reward function faster (--rm-type, --custom-rm-path), or lower "
    "--reward-timeout-seconds",
    Bottleneck.WASTE: "waste fewer tokens; the setting depends on the main reason (see the wasted tokens)",
    Bottleneck.BALANCED: "no setting needs to change",
}
"""What to change, by verdict."""

WAITS = {
    "rollout": Bottleneck.ROLLOUT,
    "window": Bottleneck.WINDOW,
    "filter": Bottleneck.FILTER,
    "reward": Bottleneck.REWARD,
    "waste": Bottleneck.WASTE,
    "publish": Bottleneck.PUBLISH,
}
"""The verdict for each thing the learner may wait for."""
REASONS = {
    Bottleneck.ROLLOUT: "the learner waited {fraction:.0%} of the time for groups that were still being generated",
    Bottleneck.TRAINER: "the learner trained {fraction:.0%} of the time, and generation waited for it",
    Bottleneck.PUBLISH: "the learner waited {fraction:.0%} of the time for weights to be published",
    Bottleneck.WINDOW: "the learner waited {fraction:.0%} of the time for groups that the window held back",
    Bottleneck.FILTER: "the learner waited {fraction:.0%} of the time while filters dropped most groups",
    Bottleneck.REWARD: "the learner waited {fraction:.0%} of the time for rewards",
    Bottleneck.WASTE: "the learner waited {fraction:.0%} of the time for groups, and {wasted:.0%} of the generated "
    "tokens were wasted, most of them because {cause}",
    Bottleneck.BALANCED: "the learner trained {fraction:.0%} of the time, and generation kept up",
}

NEGLIGIBLE = 0.15
"""Fraction of the time below which waiting is ignored."""
HORIZON_SECONDS = 10.0
"""The verdict covers the last 10 seconds, or the last three batches if these take longer."""
MAX_HORIZON_SECONDS = 600.0
SILENT_SECONDS = 5.0
"""A process that has not answered for this long determines the verdict."""
SETTLE_SECONDS = 2.0
"""A new verdict is announced after it has held for this long."""
CLOCK_STEP_SECONDS = 60.0
"""Two times further apart than this lie before and after a step of the wall clock: a run reports twice a second."""
MOSTLY_FILTERED = 0.5
"""Fraction of recent groups dropped by filters above which waiting for groups counts as waiting for the filter."""
NOTABLE_WASTE = 0.2
"""Fraction of the generated tokens that are wasted above which waiting for groups counts as a consequence of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its reason."""

    verdict: Bottleneck
    why: str
    """One sentence."""
    shares: dict[str, float]
    """Fractions of the learner's time within the horizon, by `step`, `save`, `evaluate` and the keys of WAITS."""
    silent: str | None = None
    """The process that does not answer, if that is the reason for the verdict."""
    wasted_for: str | None = None
    """The reason for most of the wasted tokens, if that is the reason for the verdict."""

    @property
    def knob(self) -> str:
        """Which setting to change."""
        return KNOBS[self.verdict] if self.wasted_for is None else CAUSES[self.wasted_for].knob


@dataclass(slots=True)
class _RecentTime:
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


class Verdicts:
    """Keeps the current verdict and how long each verdict held.

    Pass every event to `observe` and the time to `tick`, about four times a second. `take_change` returns each new
    verdict once.
    """

    def __init__(self) -> None:
        self._synchronous = False
        self._phase: str | None = None
        """What the learner does (`TrainerPhaseChanged.to`); None before it begins and after the run ends."""
        self._publishing = False
        self._pulse: Pulse | None = None
        self._finished_groups = 0
        """Groups that are finished but not collected yet."""
        self._filtered: deque[bool] = deque(maxlen=64)
        """For each of the last generated groups, whether a filter dropped it."""
        self.waste = WastedTokens()
        self._silent: dict[str, float] = {}
        """Processes that do not answer, and for how many seconds."""
        self._accounted_until = 0.0
        self._step_ended: float | None = None
        self._horizon = HORIZON_SECONDS
        self._recent = _RecentTime()
        self._announced: tuple[Bottleneck, str | None] | None = None
        self._changed_at: float | None = None
        """Since when the verdict has differed from the announced one."""
        self.seconds: dict[Bottleneck, float] = {}
        """Seconds for which each verdict has held since the first batch was requested."""
        self.trainer_seconds: dict[str, float] = {}
        """The learner's time since the first batch was requested, by the labels of `Finding.shares`."""

    def observe(self, event: Event) -> None:
        self.waste.observe(event)
        match event:
            case GroupMoved():
                self._finished_groups = event.counts.get("finished", 0)
                if event.after == "finished" or event.reason == "filtered":
                    self._filtered.append(event.reason == "filtered")
            case RunStarted():
                self._synchronous = event.entry == "train.py"
            case TrainerPhaseChanged():
                self._enter_phase(event.time, event.to)
            case StepStarted():
                self._enter_phase(event.time, "step")
            case StepEnded():
                if self._step_ended is not None:
                    batch_seconds = event.time - self._step_ended
                    # A horizon shorter than a few batches would make the verdict alternate within each batch.
                    self._horizon = min(max(HORIZON_SECONDS, 3 * batch_seconds), MAX_HORIZON_SECONDS)
                self._step_ended = event.time
            case PublishStarted() | PublishEnded():
                self._account(event.time)
                self._publishing = isinstance(event, PublishStarted)
            case Pulse():
                self._account(event.time)
                self._pulse = event
            case ProcessSilent():
                self._process_silent(event)
            case RunEnded():
                self._account(event.time)
                self._phase = None
            case _:
                pass

    def tick(self, now: float) -> None:
        self._account(now)

    @property
    def finding(self) -> Finding:
        """The current verdict."""
        fractions = self._recent.fractions
        if self._silent:
            process, seconds = max(self._silent.items(), key=lambda item: item[1])
            kind = Bottleneck.TRAINER if process.startswith("learner") else Bottleneck.ROLLOUT
            return Finding(kind, f"{process} has not answered for {seconds:.0f}s", fractions, process)
        kind, fraction = self._judge(fractions)
        reason = self.waste.main_reason if kind is Bottleneck.WASTE else None
        cause = CAUSES[reason].what if reason is not None else ""
        why = REASONS[kind].format(fraction=fraction, wasted=self.waste.avoidable, cause=cause)
        return Finding(kind, why, fractions, wasted_for=reason)

    def take_change(self, now: float) -> VerdictChanged | None:
        """Return a new verdict as an event once it has held for SETTLE_SECONDS, and None at any other time."""
        finding = self.finding
        if self._phase is None or (finding.verdict, finding.silent) == self._announced:
            self._changed_at = None
            return None
        self._changed_at = self._changed_at or now
        if now - self._changed_at < SETTLE_SECONDS and not self._silent:
            return None
        self._announced, self._changed_at = (finding.verdict, finding.silent), None
        return VerdictChanged(
            time=now, verdict=finding.verdict, why=finding.why, knob=finding.knob, shares=finding.shares
        )

    @property
    def overall(self) -> Bottleneck | None:
        """The verdict that held longest; None before the first batch is requested."""
        return max(self.seconds, key=lambda kind: self.seconds[kind], default=None)

    def _judge(self, fractions: dict[str, float]) -> tuple[Bottleneck, float]:
        """Return the verdict and the fraction of the learner's time that justifies it."""
        step = fractions.get("step", 0.0)
        waited = {kind: fractions.get(label, 0.0) for label, kind in WAITS.items()}
        longest = max(waited, key=lambda kind: waited[kind])
        if self._synchronous:
            return (longest, waited[longest]) if waited[longest] > step else (Bottleneck.TRAINER, step)
        if sum(waited.values()) > NEGLIGIBLE:
            return longest, waited[longest]
        return Bottleneck.TRAINER if self._recent.held_back > NEGLIGIBLE else Bottleneck.BALANCED, step

    def _enter_phase(self, now: float, phase: str) -> None:
        self._account(now)
        self._phase = phase

    def _account(self, now: float) -> None:
        """Assign the time since the previous call to what the learner did in it."""
        seconds = now - self._accounted_until
        if abs(seconds) > CLOCK_STEP_SECONDS and self._accounted_until:
            # The wall clock was set, or the machine was suspended. The recent time has another time base now.
            self._recent, self._step_ended, self._changed_at = _RecentTime(), None, None
            self._accounted_until = now
            return
        if seconds <= 0:
            # Events of several processes arrive slightly out of order. This time is already assigned.
            return
        self._accounted_until = now
        if self._phase is None:
            return
        label = self._label(self._phase)
        self._recent.add(now, seconds, label, self._held_back(), self._horizon)
        self.trainer_seconds[label] = self.trainer_seconds.get(label, 0.0) + seconds
        kind = self.finding.verdict
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def _label(self, phase: str) -> str:
        """Return the phase or, if the learner waits for a batch, what the batch waits for."""
        pulse = self._pulse
        if phase != "batch" or pulse is None:
            return "rollout" if phase == "batch" else phase
        if self._publishing:
            return "publish"
        missing = pulse.wanted - pulse.collected
        # The window is the cause only if the groups it holds back would complete the batch, or if they occupy slots
        # that new groups would need.
        if self._finished_groups and (self._finished_groups >= missing or pulse.waits_for == "slots"):
            return "window"
        if pulse.rewarding > pulse.generating:
            return "reward"
        if sum(self._filtered) > MOSTLY_FILTERED * len(self._filtered):
            return "filter"
        return "waste" if self.waste.avoidable > NOTABLE_WASTE else "rollout"

    def _held_back(self) -> bool:
        """Return whether admission waits for the learner to take groups."""
        return self._pulse is not None and self._pulse.waits_for in ("slots", "queue")

    def _process_silent(self, event: ProcessSilent) -> None:
        self._account(event.time)
        if event.seconds >= SILENT_SECONDS:
            self._silent[event.process] = event.seconds
        elif event.seconds == 0:
            self._silent.pop(event.process, None)

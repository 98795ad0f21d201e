"""What holds a run back, worked out continuously from its events, and the knob to turn (seed `fully-async`).

The trainer is the one finite clock, so its time is what counts: what it did, or why it had to wait. A run whose trainer
seldom waits is `trainer-bound` where generation is held back for it, and `balanced` otherwise. Where the trainer waits,
the longest waiting names the verdict. In `train.py` the two take turns, and the longer turn names it.

A process that does not answer is the verdict at once: shares of the past say nothing about a run that hangs.
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


class Bottleneck(StrEnum):
    ROLLOUT = "rollout-bound"
    TRAINER = "trainer-bound"
    PUBLISH = "publish-bound"
    WINDOW = "window-bound"
    FILTER = "filter-bound"
    REWARD = "reward-bound"
    BALANCED = "balanced"


KNOBS = {
    Bottleneck.ROLLOUT: "scale rollout capacity (--rollout-num-gpus, --sglang-server-concurrency, "
    "--over-sampling-batch-size) or lower per-sample generation cost (--rollout-max-response-len)",
    Bottleneck.TRAINER: "give the learner more ranks (--actor-num-gpus-per-node) or fuller micro-batches "
    "(--max-tokens-per-gpu); engines could be fewer",
    Bottleneck.PUBLISH: "publish less often (--update-weights-interval) or faster (--weight-transfer p2p)",
    Bottleneck.WINDOW: "widen the window (--windowed-fifo-ratio), or end a stuck head (--head-deadline-seconds with "
    "--head-deadline-action recycle)",
    Bottleneck.FILTER: "generate more groups at once (--over-sampling-batch-size), or choose prompts or a "
    "--dynamic-sampling-filter-path that keeps more of them",
    Bottleneck.REWARD: "make the reward faster (--rm-type, --custom-rm-path), or lower --reward-timeout-seconds",
    Bottleneck.BALANCED: "nothing to turn",
}

WAITING = {
    "rollout": Bottleneck.ROLLOUT,
    "window": Bottleneck.WINDOW,
    "filter": Bottleneck.FILTER,
    "reward": Bottleneck.REWARD,
    "publish": Bottleneck.PUBLISH,
}
"""What the trainer may wait for. Its other shares are `step`, `save` and `evaluate`."""
REASONS = {
    Bottleneck.ROLLOUT: "the trainer waited {share:.0%} of the time for groups that were still being generated",
    Bottleneck.TRAINER: "the trainer stepped {share:.0%} of the time, and generation waited for it",
    Bottleneck.PUBLISH: "the trainer waited {share:.0%} of the time for weights to be published",
    Bottleneck.WINDOW: "the trainer waited {share:.0%} of the time for groups that the window held back",
    Bottleneck.FILTER: "the trainer waited {share:.0%} of the time while filters dropped most groups",
    Bottleneck.REWARD: "the trainer waited {share:.0%} of the time for rewards",
    Bottleneck.BALANCED: "the trainer stepped {share:.0%} of the time, and generation kept up",
}

NEGLIGIBLE = 0.15
"""A share of the time that is not worth a verdict."""
HORIZON_SECONDS = 10.0
"""The verdict speaks of this much of the past, or of three batches where they take longer."""
HORIZON_AT_MOST = 600.0
SILENT_SECONDS = 5.0
"""A process that leaves a question unanswered for so long hangs."""
SETTLE_SECONDS = 2.0
"""Another verdict is announced after it has held for so long."""
FILTERED_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Bottleneck
    why: str
    shares: dict[str, float]
    """Of the trainer's time within the horizon: `step`, `save`, `evaluate` and the keys of WAITING."""
    silent: str | None = None
    """The process that does not answer, where that is the reason."""

    @property
    def knob(self) -> str:
        return KNOBS[self.verdict]


@dataclass(slots=True)
class _Shares:
    """Seconds by label over a sliding stretch of time."""

    _slices: deque[tuple[float, float, str, bool]] = field(default_factory=deque)
    _seconds: dict[str, float] = field(default_factory=dict)
    _held: float = 0.0

    def add(self, now: float, seconds: float, label: str, held: bool, horizon: float) -> None:
        self._slices.append((now, seconds, label, held))
        self._seconds[label] = self._seconds.get(label, 0.0) + seconds
        self._held += seconds * held
        while self._slices[0][0] < now - horizon:
            _, gone, name, was_held = self._slices.popleft()
            self._seconds[name] -= gone
            self._held -= gone * was_held

    @property
    def by_label(self) -> dict[str, float]:
        total = sum(self._seconds.values())
        return {label: seconds / total for label, seconds in self._seconds.items()} if total > 0 else {}

    @property
    def held(self) -> float:
        """Share in which admission waited for the trainer."""
        total = sum(self._seconds.values())
        return self._held / total if total > 0 else 0.0


class Verdicts:
    """Give it every event, and the time about four times a second; `announced` returns each new verdict once."""

    def __init__(self) -> None:
        self._in_turns = False
        self._doing: str | None = None
        """What the trainer does; None before it begins and after it ends."""
        self._publishing = False
        self._pulse: Pulse | None = None
        self._waiting_window = 0
        """Groups finished and not collected."""
        self._ended: deque[bool] = deque(maxlen=64)
        """Of the last groups that were generated: whether a filter dropped each."""
        self._silent: dict[str, float] = {}
        self._settled_at = 0.0
        self._step_ended: float | None = None
        self._horizon = HORIZON_SECONDS
        self._recent = _Shares()
        self._announced: tuple[Bottleneck, str | None] | None = None
        self._other_since: float | None = None
        self.seconds: dict[Bottleneck, float] = {}
        """How long each verdict held since the first batch was asked for."""
        self.trainer_seconds: dict[str, float] = {}
        """The trainer's time since then, by the labels of `Finding.shares`."""

    def observe(self, event: Event) -> None:
        match event:
            case GroupMoved():
                self._waiting_window = event.counts.get("finished", 0)
                if event.after == "finished" or event.reason == "filtered":
                    self._ended.append(event.reason == "filtered")
            case RunStarted():
                self._in_turns = event.entry == "train.py"
            case TrainerPhaseChanged():
                self._turned(event.time, event.to)
            case StepStarted():
                self._turned(event.time, "step")
            case StepEnded():
                if self._step_ended is not None:
                    batch_seconds = event.time - self._step_ended
                    self._horizon = min(max(HORIZON_SECONDS, 3 * batch_seconds), HORIZON_AT_MOST)
                self._step_ended = event.time
            case PublishStarted() | PublishEnded():
                self._settle(event.time)
                self._publishing = isinstance(event, PublishStarted)
            case Pulse():
                self._settle(event.time)
                self._pulse = event
            case ProcessSilent():
                self._heard(event)
            case RunEnded():
                self._settle(event.time)
                self._doing = None
            case _:
                pass

    def tick(self, now: float) -> None:
        self._settle(now)

    @property
    def finding(self) -> Finding:
        """The verdict now."""
        shares = self._recent.by_label
        if self._silent:
            process, since = min(self._silent.items(), key=lambda item: item[1])
            kind = Bottleneck.TRAINER if process.startswith("learner") else Bottleneck.ROLLOUT
            return Finding(kind, f"{process} has not answered for {self._settled_at - since:.0f}s", shares, process)
        kind, share = self._judged(shares)
        return Finding(kind, REASONS[kind].format(share=share), shares)

    def take_change(self, now: float) -> VerdictChanged | None:
        """The verdict as an event, where it is a new one that has held for a while."""
        finding = self.finding
        if self._doing is None or (finding.verdict, finding.silent) == self._announced:
            self._other_since = None
            return None
        self._other_since = self._other_since or now
        if now - self._other_since < SETTLE_SECONDS and not self._silent:
            return None
        self._announced, self._other_since = (finding.verdict, finding.silent), None
        return VerdictChanged(
            time=now, verdict=finding.verdict, why=finding.why, knob=finding.knob, shares=finding.shares
        )

    @property
    def overall(self) -> Bottleneck | None:
        """The verdict that held longest; None before the first batch was asked for."""
        return max(self.seconds, key=lambda kind: self.seconds[kind], default=None)

    def _judged(self, shares: dict[str, float]) -> tuple[Bottleneck, float]:
        step = shares.get("step", 0.0)
        waited = {kind: shares.get(label, 0.0) for label, kind in WAITING.items()}
        longest = max(waited, key=lambda kind: waited[kind])
        if self._in_turns:
            return (longest, waited[longest]) if waited[longest] > step else (Bottleneck.TRAINER, step)
        if sum(waited.values()) > NEGLIGIBLE:
            return longest, waited[longest]
        return Bottleneck.TRAINER if self._recent.held > NEGLIGIBLE else Bottleneck.BALANCED, step

    def _turned(self, now: float, to: str) -> None:
        self._settle(now)
        self._doing = to

    def _settle(self, now: float) -> None:
        """Book the time since the last call. Events of several processes arrive a little out of order."""
        seconds = now - self._settled_at
        if seconds <= 0:
            return
        self._settled_at = now
        if self._doing is None:
            return
        label = self._label(self._doing)
        self._recent.add(now, seconds, label, self._held_back(), self._horizon)
        self.trainer_seconds[label] = self.trainer_seconds.get(label, 0.0) + seconds
        kind = self.finding.verdict
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def _label(self, doing: str) -> str:
        """What the trainer does or, where it waits for a batch, why."""
        pulse = self._pulse
        if doing != "batch" or pulse is None:
            return "rollout" if doing == "batch" else doing
        if self._publishing:
            return "publish"
        missing = pulse.wanted - pulse.collected
        if self._waiting_window and (self._waiting_window >= missing or pulse.waits_for == "slots"):
            return "window"
        if pulse.rewarding > pulse.generating:
            return "reward"
        if sum(self._ended) > FILTERED_MOST * len(self._ended):
            return "filter"
        return "rollout"

    def _held_back(self) -> bool:
        return self._pulse is not None and self._pulse.waits_for in ("slots", "queue")

    def _heard(self, event: ProcessSilent) -> None:
        self._settle(event.time)
        if event.seconds >= SILENT_SECONDS:
            self._silent.setdefault(event.process, event.time - event.seconds)
        elif event.seconds == 0:
            self._silent.pop(event.process, None)

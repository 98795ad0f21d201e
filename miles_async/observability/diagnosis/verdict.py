"""The verdict on what limits the speed of a run, with the setting to change.

The verdict follows from how the learner spends its time, because a run is as fast as its learner is busy:

- If the learner waits, the longest kind of waiting is the verdict.
- If the learner seldom waits, the run is `trainer-bound` if admission is held back for it, and `balanced` otherwise.
- In a synchronous run (`train.py`), generation and training alternate, and the longer of the two is the verdict.

A process that does not answer determines the verdict at once, because fractions of past time say nothing about a run
that hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from miles_async.events import Pulse, VerdictChanged
from miles_async.observability.state.learner import CLOCK_STEP_SECONDS, LearnerTime
from miles_async.observability.state.tokens import CAUSES, Recent, Tokens


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
    Bottleneck.WASTE: "the learner waited {fraction:.0%} of the time for groups, and {wasted:.0%} of the recent "
    "response tokens were wasted, most of them because {cause}",
    Bottleneck.BALANCED: "the learner trained {fraction:.0%} of the time, and generation kept up",
}

NEGLIGIBLE = 0.15
"""Fraction of the time below which waiting is ignored."""
SILENT_SECONDS = 5.0
"""A process that has not answered for this long determines the verdict."""
SETTLE_SECONDS = 2.0
"""A new verdict is announced after it has held for this long."""
MOSTLY_FILTERED = 0.5
"""Fraction of recent groups dropped by filters above which waiting for groups counts as waiting for the filter."""
NOTABLE_WASTE = 0.2
"""Fraction of the recently generated tokens that are wasted above which waiting for groups is a consequence of it."""


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


def find(learner: LearnerTime, tokens: Tokens, silent: Mapping[str, float], *, synchronous: bool) -> Finding:
    """Return the verdict on a run.

    `silent` has the processes that do not answer, and for how many seconds. In a `synchronous` run, generation and
    training alternate.
    """
    fractions = learner.recent.fractions
    process = max(silent, key=lambda name: silent[name], default=None)
    if process is not None and silent[process] >= SILENT_SECONDS:
        kind = Bottleneck.TRAINER if process.startswith("learner") else Bottleneck.ROLLOUT
        return Finding(kind, f"{process} has not answered for {silent[process]:.0f}s", fractions, process)
    kind, fraction = _judge(fractions, learner.recent.held_back, synchronous)
    wasted = tokens.recent(learner.recently) if kind is Bottleneck.WASTE else Recent(0.0, None)
    reason = wasted.main_reason
    cause = CAUSES[reason].what if reason is not None else ""
    why = REASONS[kind].format(fraction=fraction, wasted=wasted.share, cause=cause)
    return Finding(kind, why, fractions, wasted_for=reason)


def _judge(fractions: dict[str, float], held_back: float, synchronous: bool) -> tuple[Bottleneck, float]:
    """Return the verdict and the fraction of the learner's time that justifies it."""
    step = fractions.get("step", 0.0)
    waited = {kind: fractions.get(label, 0.0) for label, kind in WAITS.items()}
    longest = max(waited, key=lambda kind: waited[kind])
    if synchronous:
        return (longest, waited[longest]) if waited[longest] > step else (Bottleneck.TRAINER, step)
    if sum(waited.values()) > NEGLIGIBLE:
        return longest, waited[longest]
    return Bottleneck.TRAINER if held_back > NEGLIGIBLE else Bottleneck.BALANCED, step


def what_a_batch_waits_for(
    pulse: Pulse | None, *, publishing: bool, finished: int, filtered: float, wasted: float
) -> str:
    """Return the key of WAITS for a learner that waits for a batch.

    `finished` is the number of groups that are finished but not collected, `filtered` the fraction of the last groups
    that filters dropped, and `wasted` the fraction of the recent tokens whose waste could be avoided.
    """
    if pulse is None:
        return "rollout"
    if publishing:
        return "publish"
    missing = pulse.wanted - pulse.collected
    # The window is the cause only if the groups it holds back would complete the batch, or if they occupy slots that
    # new groups would need.
    if finished and (finished >= missing or pulse.waits_for == "slots"):
        return "window"
    if pulse.rewarding > pulse.generating:
        return "reward"
    if filtered > MOSTLY_FILTERED:
        return "filter"
    return "waste" if wasted > NOTABLE_WASTE else "rollout"


class Announcements:
    """Turns the current verdict into an event whenever another one has lasted."""

    def __init__(self) -> None:
        self._announced: tuple[Bottleneck, str | None] | None = None
        self._changed_at: float | None = None
        """Since when the verdict has differed from the announced one."""

    def take_change(self, finding: Finding, now: float) -> VerdictChanged | None:
        """Return a new verdict as an event once it has held for SETTLE_SECONDS, and None at any other time."""
        verdict = finding.verdict, finding.silent
        if verdict == self._announced:
            self._changed_at = None
            return None
        if self._changed_at is None or abs(now - self._changed_at) > CLOCK_STEP_SECONDS:
            self._changed_at = now
        if now - self._changed_at < SETTLE_SECONDS and finding.silent is None:
            return None
        self._announced, self._changed_at = verdict, None
        return VerdictChanged(
            time=now, verdict=finding.verdict, why=finding.why, knob=finding.knob, shares=finding.shares
        )

"""The verdict on what limits the speed of a run, with the setting to change and what the change would bring.

The verdict follows from how the learner spends its time, because a run is as fast as its learner is busy:

- If the learner waits, saves or evaluates, what takes longest is the verdict.
- If the learner seldom waits, the run is `trainer-bound` if admission is held back for it, and `balanced` otherwise.
- In a synchronous run (`train.py`), generation and training alternate, and the longer of the two is the verdict.

A process that does not answer determines the verdict at once, because fractions of past time say nothing about a run
that hangs.

A model of the run (`throughput.py`) estimates what each change would bring, and the best change comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from miles_async.events import EngineBusy, Pulse, VerdictChanged
from miles_async.observability.diagnosis.throughput import Model, groups_per_second
from miles_async.observability.state.groups import Seconds
from miles_async.observability.state.learner import CLOCK_STEP_SECONDS, LearnerTime
from miles_async.observability.state.tokens import CAUSES, Recent, Tokens
from miles_async.scheduling.admission import Blocked
from miles_async.scheduling.ledger import GroupState


class Bottleneck(StrEnum):
    """The part of the pipeline that limits the speed of a run."""

    ROLLOUT = "rollout-bound"
    TOOLS = "tool-bound"
    IN_FLIGHT = "concurrency-bound"
    STALENESS = "staleness-bound"
    TRAINER = "trainer-bound"
    PUBLISH = "publish-bound"
    WINDOW = "window-bound"
    FILTER = "filter-bound"
    REWARD = "reward-bound"
    SAVE = "save-bound"
    EVALUATE = "evaluation-bound"
    MACHINE = "machine-bound"
    WASTE = "waste-bound"
    BALANCED = "balanced"


KNOBS = {
    Bottleneck.ROLLOUT: "add rollout capacity (--rollout-num-gpus, --sglang-server-concurrency) or make samples "
    "cheaper to generate (--rollout-max-response-len)",
    Bottleneck.TOOLS: "make tools and environments faster, or generate more groups at once "
    "(--over-sampling-batch-size) while they work",
    Bottleneck.IN_FLIGHT: "generate more groups at once (--over-sampling-batch-size)",
    Bottleneck.STALENESS: "let more groups start before new weights are live (train_async.py, --max-weight-staleness)",
    Bottleneck.TRAINER: "give the learner more ranks (--actor-num-gpus-per-node) or fuller micro-batches "
    "(--max-tokens-per-gpu), or use fewer engines",
    Bottleneck.PUBLISH: "publish less often (--update-weights-interval) or faster (--weight-transfer p2p)",
    Bottleneck.WINDOW: "widen the window (--windowed-fifo-ratio), or recycle a slow head (--head-deadline-seconds with "
    "--head-deadline-action recycle)",
    Bottleneck.FILTER: "generate more groups at once (--over-sampling-batch-size), or choose prompts or a "
    "--dynamic-sampling-filter-path that drops fewer groups",
    Bottleneck.REWARD: "make the reward function faster (--rm-type, --custom-rm-path), or lower "
    "--reward-timeout-seconds",
    Bottleneck.SAVE: "save checkpoints less often (--save-interval)",
    Bottleneck.EVALUATE: "evaluate less often (--eval-interval) or on fewer problems (--eval-size)",
    Bottleneck.MACHINE: "use a machine with more processors: the processes of the run share those of this machine, so "
    "that more of one kind would slow the others",
    Bottleneck.WASTE: "waste fewer tokens; the setting depends on the main reason (see the wasted tokens)",
    Bottleneck.BALANCED: "no setting needs to change",
}
"""What to change, by verdict."""

WAITS = {
    "rollout": Bottleneck.ROLLOUT,
    "tools": Bottleneck.TOOLS,
    "in_flight": Bottleneck.IN_FLIGHT,
    "staleness": Bottleneck.STALENESS,
    "window": Bottleneck.WINDOW,
    "filter": Bottleneck.FILTER,
    "reward": Bottleneck.REWARD,
    "waste": Bottleneck.WASTE,
    "publish": Bottleneck.PUBLISH,
    "save": Bottleneck.SAVE,
    "evaluate": Bottleneck.EVALUATE,
}
"""The verdict for each thing that the learner does or waits for instead of training."""
REASONS = {
    Bottleneck.ROLLOUT: "the learner waited {share} for groups that were still being generated",
    Bottleneck.TOOLS: "the learner waited {share} for groups that mostly waited for tools, not for the engines",
    Bottleneck.IN_FLIGHT: "the learner waited {share} for groups, while the engines had room for more",
    Bottleneck.STALENESS: "the learner waited {share} for groups, while no more of them could start before new weights "
    "are live",
    Bottleneck.TRAINER: "generation waited for the learner {held_back:.0%} of the time",
    Bottleneck.PUBLISH: "the learner waited {share} for weights to be published",
    Bottleneck.WINDOW: "the learner waited {share} for groups that the window held back",
    Bottleneck.FILTER: "the learner waited {share} for groups, while filters dropped most of them",
    Bottleneck.REWARD: "the learner waited {share} for rewards",
    Bottleneck.SAVE: "the learner waited {share} for checkpoints to be saved",
    Bottleneck.EVALUATE: "the learner waited {share} for evaluations",
    Bottleneck.MACHINE: "{processors:.0%} of the processors' time is used",
    Bottleneck.WASTE: "the learner waited {share} for groups, and {wasted:.0%} of the recent response tokens were "
    "wasted, most of them because {cause}",
    Bottleneck.BALANCED: "the learner waited {waited:.0%} of the time, and generation kept up",
}

FULL = 0.9
"""Fraction of the processors' time above which the processes of a run slow each other."""
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
NOTABLE_GAIN = 1.05
"""A change that would bring less than 5 % is not printed."""


class Change(NamedTuple):
    """A change of a run whose effect can be estimated."""

    what: str
    """What is assumed, in words."""
    apply: Callable[[Model], Model]


def _widest_window(model: Model) -> Model:
    if model.slots is None:
        return replace(model, window=model.in_flight)
    # A wider window leaves fewer slots, because the staleness limit holds. Those of the groups in flight must remain.
    wider = max(0, min(model.slots - model.in_flight, model.in_flight - model.window))
    return replace(model, window=model.window + wider, slots=model.slots - wider)


def _higher_limit(model: Model) -> Model:
    if model.slots is None:
        return model
    # As in `Bounds.derive`: slots for two batches beside the groups in flight, and then a wider window.
    if model.window >= model.in_flight and model.slots >= model.in_flight + 2 * model.batch:
        return replace(model, window=model.window + model.batch)
    return replace(model, slots=model.slots + model.batch)


def _twice_as_fast(model: Model) -> Model:
    return replace(model, groups=[Seconds(each.generation / 2, each.reward) for each in model.groups])


_MORE_GROUPS = Change("twice as many groups at once", lambda model: replace(model, in_flight=2 * model.in_flight))
CHANGES = {
    Bottleneck.ROLLOUT: Change("twice the rollout capacity", _twice_as_fast),
    Bottleneck.TOOLS: Change("tools twice as fast", _twice_as_fast),
    Bottleneck.MACHINE: Change(
        "twice as many processors", lambda model: replace(_twice_as_fast(model), step=model.step / 2)
    ),
    Bottleneck.IN_FLIGHT: _MORE_GROUPS,
    Bottleneck.STALENESS: Change("a staleness limit that is higher by 1", _higher_limit),
    Bottleneck.TRAINER: Change("a learner twice as fast", lambda model: replace(model, step=model.step / 2)),
    Bottleneck.PUBLISH: Change(
        "publishes twice as fast", lambda model: replace(model, stage=model.stage / 2, write=model.write / 2)
    ),
    Bottleneck.WINDOW: Change("the widest window", _widest_window),
    Bottleneck.FILTER: _MORE_GROUPS,
    Bottleneck.REWARD: Change(
        "a reward function twice as fast",
        lambda model: replace(model, groups=[Seconds(each.generation, each.reward / 2) for each in model.groups]),
    ),
    Bottleneck.SAVE: Change("half as many checkpoints", lambda model: replace(model, save=model.save / 2)),
    Bottleneck.EVALUATE: Change("half as many evaluations", lambda model: replace(model, evaluate=model.evaluate / 2)),
}
"""What is assumed in an estimate, by verdict."""
SETTINGS = (
    Bottleneck.IN_FLIGHT,
    Bottleneck.STALENESS,
    Bottleneck.WINDOW,
    Bottleneck.SAVE,
    Bottleneck.EVALUATE,
)
"""The changes that need neither another machine nor other code."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its reason."""

    verdict: Bottleneck
    why: str
    """One sentence."""
    shares: dict[str, float]
    """Fractions of the learner's time within the horizon, by `step` and the keys of WAITS."""
    silent: str | None = None
    """The process that does not answer, if that is the reason for the verdict."""
    wasted_for: str | None = None
    """The reason for most of the wasted tokens, if that is the reason for the verdict."""

    @property
    def knob(self) -> str:
        """Which setting to change."""
        return KNOBS[self.verdict] if self.wasted_for is None else CAUSES[self.wasted_for].knob


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the change for a verdict would bring."""

    verdict: Bottleneck
    groups_per_second: float
    now: float
    """Groups per second without the change."""

    def __str__(self) -> str:
        what = CHANGES[self.verdict].what
        return f"about {self.groups_per_second:.3g} groups/s instead of {self.now:.3g} with {what}"


def estimates(model: Model, verdicts: Iterable[Bottleneck]) -> list[Estimate]:
    """Return what the changes for some verdicts would bring, best first, without those that would bring almost nothing.

    The model is scaled to the rate at which the run trained its last batches.
    """
    modelled = groups_per_second(model)
    learner = model.batch / model.batch_seconds if model.batch_seconds > 0 else 0.0
    if not modelled or not learner:
        return []
    found = [
        Estimate(verdict, learner * groups_per_second(CHANGES[verdict].apply(model)) / modelled, learner)
        for verdict in verdicts
    ]
    notable = [each for each in found if each.groups_per_second > NOTABLE_GAIN * each.now]
    return sorted(notable, key=lambda each: -each.groups_per_second)


class Advice(NamedTuple):
    """A setting to change."""

    knob: str
    estimate: Estimate | None
    """What the change would bring; None if that cannot be estimated."""

    def __str__(self) -> str:
        return self.knob if self.estimate is None else f"{self.knob}: {self.estimate}"


def advice(verdict: Bottleneck, knob: str, model: Model | None) -> list[Advice]:
    """Return what to change, best first. `knob` is what to change for the verdict.

    A setting that would bring more than the change for the verdict is named, too.
    """
    if model is None or verdict not in CHANGES:
        return [Advice(knob, None)]
    known = estimates(model, dict.fromkeys((verdict, *SETTINGS)))
    mine = next((each for each in known if each.verdict is verdict), None)
    better = [Advice(KNOBS[each.verdict], each) for each in known[:1] if each.verdict is not verdict]
    if mine is None:
        return [*better, Advice(knob, None)]
    if better and known[0].groups_per_second < NOTABLE_GAIN * mine.groups_per_second:
        better = []
    return [*better, Advice(knob, mine)]


def find(
    learner: LearnerTime, tokens: Tokens, silent: Mapping[str, float], *, synchronous: bool, processors: float
) -> Finding:
    """Return the verdict on a run.

    `silent` has the processes that do not answer, and for how many seconds. In a `synchronous` run, generation and
    training alternate. `processors` is the fraction of the processors' time that the last pulses report.
    """
    fractions = learner.recent.fractions
    process = max(silent, key=lambda name: silent[name], default=None)
    if process is not None and silent[process] >= SILENT_SECONDS:
        kind = Bottleneck.TRAINER if process.startswith("learner") else Bottleneck.ROLLOUT
        return Finding(kind, f"{process} has not answered for {silent[process]:.0f}s", fractions, process)
    waits = {kind: fractions.get(label, 0.0) for label, kind in WAITS.items()}
    waited, held_back = sum(waits.values()), learner.recent.held_back
    kind = _judge(waits, waited, held_back, fractions.get("step", 0.0), synchronous=synchronous)
    if processors > FULL and kind in (Bottleneck.ROLLOUT, Bottleneck.IN_FLIGHT, Bottleneck.TRAINER):
        kind = Bottleneck.MACHINE
    wasted = tokens.recent(learner.recently) if kind is Bottleneck.WASTE else Recent(0.0, None)
    reason = wasted.main_reason
    cause = CAUSES[reason].what if reason is not None else ""
    share = f"{waits.get(kind, waited):.0%} of the time"
    if waits.get(kind, waited) < 0.995 * waited:
        share += f" ({waited:.0%} in all)"
    why = REASONS[kind].format(
        share=share,
        waited=waited,
        held_back=held_back,
        wasted=wasted.share,
        cause=cause,
        processors=processors,
    )
    return Finding(kind, why, fractions, wasted_for=reason)


def _judge(
    waits: Mapping[Bottleneck, float], waited: float, held_back: float, step: float, *, synchronous: bool
) -> Bottleneck:
    longest = max(waits, key=lambda kind: waits[kind])
    if synchronous:
        return longest if waits[longest] > step else Bottleneck.TRAINER
    if waited > NEGLIGIBLE:
        return longest
    return Bottleneck.TRAINER if held_back > NEGLIGIBLE else Bottleneck.BALANCED


def what_a_batch_waits_for(
    pulse: Pulse | None,
    engines: EngineBusy | None,
    *,
    publishing: bool,
    finished: int,
    filtered: float,
    wasted: float,
    synchronous: bool,
) -> str:
    """Return the key of WAITS for a learner that waits for a batch.

    `finished` is the number of groups that are finished but not collected, `filtered` the fraction of the last groups
    that filters dropped, and `wasted` the fraction of the recent tokens whose waste could be avoided. A `synchronous`
    run needs no more groups at once than a batch has.
    """
    if pulse is None or engines is None:
        return "rollout"
    if publishing:
        return "publish"
    missing = pulse.wanted - pulse.collected
    # The window is the cause only if the groups it holds back would complete the batch, or if they occupy slots that
    # new groups would need.
    if finished and (finished >= missing or pulse.waits_for == Blocked.SLOTS):
        return "reward" if _head_waits_for_reward(pulse) else "window"
    if pulse.rewarding > pulse.generating:
        return "reward"
    if filtered > MOSTLY_FILTERED:
        return "filter"
    if wasted > NOTABLE_WASTE:
        return "waste"
    if pulse.waits_for == Blocked.SLOTS:
        return "staleness"
    if engines.in_flight < pulse.generating / 2:
        return "tools"
    has_room = pulse.waits_for == Blocked.IN_FLIGHT and not engines.in_line
    return "in_flight" if has_room and not synchronous else "rollout"


def _head_waits_for_reward(pulse: Pulse) -> bool:
    """Whether the oldest group of the window is generated: otherwise it would be the oldest one at the engines, too."""
    in_flight = pulse.head_state == GroupState.IN_FLIGHT
    return in_flight and bool(pulse.rewarding) and (pulse.oldest is None or pulse.oldest > pulse.head)


class Announcements:
    """Turns the current verdict into an event whenever another one has lasted."""

    def __init__(self) -> None:
        self._announced: tuple[Bottleneck, str | None] | None = None
        self._changed_at: float | None = None
        """Since when the verdict has differed from the announced one."""

    def take_change(self, finding: Finding, now: float, advise: Callable[[Finding], str]) -> VerdictChanged | None:
        """Return a new verdict as an event once it has held for SETTLE_SECONDS, and None at any other time.

        `advise` returns what to change.
        """
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
            time=now, verdict=finding.verdict, why=finding.why, knob=advise(finding), shares=finding.shares
        )

"""The generated response tokens, and the wasted ones by reason, with the setting to change.

The reason is the `DropReason` of a dropped group or of a discarded sample, `publish` for requests that a publish
aborted, `removed` for samples that a sample filter excluded from the loss, or `leftover` for what the run did not use
when it ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from miles_async.events import GroupGenerated, GroupMoved, RunStarted, SampleDiscarded, SamplesRemoved
from miles_async.observability.state.groups import Group
from miles_async.observability.state.learner import CLOCK_STEP_SECONDS, REMEMBERED_STEPS
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason


class Cause(NamedTuple):
    """What a user reads about a reason."""

    what: str
    knob: str


REMOVED = "removed"
LEFTOVER = "leftover"
_LOST = "see the log for why processes were lost; lower the memory or the load of their machines"
CAUSES: dict[str, Cause] = {
    DropReason.STALE: Cause(
        "groups were too old",
        "raise --max-weight-staleness, or generate fewer groups ahead (--over-sampling-batch-size)",
    ),
    DropReason.FAILED: Cause(
        "samples failed",
        "make tools and reward servers answer (events.jsonl and dead_letters.jsonl have the errors), or train groups "
        "without the samples that fail (--min-samples-per-group)",
    ),
    DropReason.FILTERED: Cause(
        "a filter rejected groups", "choose prompts or a --dynamic-sampling-filter-path that drops fewer groups"
    ),
    DropReason.HEAD_DEADLINE: Cause(
        "slow groups were started again",
        "continue them (--head-deadline-action salvage), or raise --head-deadline-seconds",
    ),
    DropReason.ABORTED: Cause("generation was aborted", "continue aborted groups (--partial-rollout)"),
    DropReason.NONFINITE: Cause("a loss was not finite", "look at the rewards, or lower --lr"),
    DropReason.ENGINE_LOST: Cause("engines were lost", _LOST),
    DropReason.ROUTER_LOST: Cause("the router was lost", _LOST),
    DropReason.WORKER_LOST: Cause("a rollout worker was lost", _LOST),
    DropReason.ROLLED_BACK: Cause("the learner was lost", "save checkpoints more often (--save-interval)"),
    "publish": Cause("publishes aborted requests", "set --pause-generation-mode retract"),
    REMOVED: Cause("a sample filter removed samples", "change --rollout-sample-filter-path"),
    LEFTOVER: Cause("the run ended before they were trained", "no setting needs to change"),
}
DELIBERATE = (DropReason.FILTERED, REMOVED, LEFTOVER)
"""Reasons that no setting should change: what filters reject, as their user wants it, and what is left at the end."""
MAX_RECENT_SECONDS = 600


class Recent(NamedTuple):
    """The avoidable waste of the last time."""

    share: float
    """Fraction of the generated tokens."""
    main_reason: str | None
    """The reason for most of it; None if no tokens were wasted."""


class Tokens:
    """Counts generated and wasted tokens.

    A request that is not answered returns no tokens. The tokens of requests that were lost with a rollout worker, an
    engine or the router, and that are generated twice, are therefore estimated: from the time that their group had been
    generated for, and the tokens per second of other groups.
    """

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        """Wasted tokens by reason."""
        self.lost_at_most = 0
        """Upper bound of the tokens that are estimated."""
        self._generated = 0
        self._longest_group = 0
        self._generating = 0.0
        """When groups were at the engines last."""
        self._finished_tokens = 0
        self._finished_seconds = 0.0
        self._aborted = 0
        """Tokens that were aborted since the last step: waste if another step follows, else left over."""
        self._unused = 0
        """Tokens of groups that were not trained when the run ended. A run that is resumed may still train them."""
        self._removed: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_STEPS)
        """Rollout and removed tokens of the last batches."""
        self._recent: deque[tuple[int, int, Counter[str]]] = deque(maxlen=MAX_RECENT_SECONDS)
        """Second, generated tokens and avoidable waste of the last time, oldest first."""

    def start_run(self, event: RunStarted) -> None:
        self._longest_group = event.longest_group
        self.by_reason.subtract({LEFTOVER: self._unused} if self._unused else {})
        self._unused = 0

    def start_step(self, time: float) -> None:
        self._waste(time, DropReason.ABORTED, self._aborted)
        self._aborted = 0

    def end_run(self, time: float, groups: Iterable[Group]) -> None:
        """Count what is left over, when the run ends with these live groups."""
        self._unused = sum(
            group.generated.response_tokens
            for group in groups
            if group.generated is not None and group.state != GroupState.TRAINED
        )
        self._waste(time, LEFTOVER, self._aborted + self._unused)
        self._aborted = 0

    def generating_at(self, time: float) -> None:
        """Remember that groups were at the engines at this time."""
        self._generating = time

    def generate(self, event: GroupGenerated) -> None:
        self._generate(event.time, event.response_tokens)
        self._finished_tokens += event.response_tokens
        self._finished_seconds += event.generation_seconds

    def discard(self, event: SampleDiscarded) -> None:
        self._generate(event.time, event.tokens)
        self._waste(event.time, event.reason, event.tokens)

    def remove(self, event: SamplesRemoved) -> None:
        """Count the removed samples of a batch. Those of a batch that is trained again count once."""
        while self._removed and self._removed[-1][0] >= event.rollout:
            self.by_reason[REMOVED] -= self._removed.pop()[1]
        self._removed.append((event.rollout, event.tokens))
        self._waste(event.time, REMOVED, event.tokens)

    def drop(self, event: GroupMoved, group: Group | None) -> None:
        """Count the tokens of a dropped group. `group` is what was known of it before it was dropped, if anything."""
        if event.reason is None:
            return
        tokens = event.discarded_tokens
        if event.was_lost_in_flight:
            self.lost_at_most += max(0, self._longest_group - event.kept_tokens)
            tokens = max(tokens, self._lost_tokens(group, event))
        # A group is counted as generated before it is filtered and before it leaves `in_flight`.
        if event.before in (GroupState.FED, GroupState.IN_FLIGHT) and event.reason != DropReason.FILTERED:
            self._generate(event.time, tokens)
        if event.reason == DropReason.ABORTED:
            self._aborted += tokens
        else:
            self._waste(event.time, event.reason, tokens)

    @property
    def generated(self) -> int:
        """Tokens of all responses, trained or not, as far as they are known: a user's rollout function does not report
        its groups."""
        return max(self._generated, self.by_reason.total())

    @property
    def share(self) -> float:
        """Fraction of the generated tokens that were wasted."""
        return self.by_reason.total() / max(self.generated, 1)

    @property
    def main_reason(self) -> str | None:
        """The reason for most of the wasted tokens, apart from deliberate ones; None if no tokens were wasted."""
        return _main_reason(self.by_reason)

    def recent(self, since: float) -> Recent:
        """Return the avoidable waste since a time, which is at most `MAX_RECENT_SECONDS` ago."""
        generated, wasted = 0, Counter[str]()
        for second, tokens, reasons in self._recent:
            if second >= int(since):
                generated += tokens
                wasted += reasons
        return Recent(wasted.total() / max(generated, wasted.total(), 1), _main_reason(wasted))

    def _generate(self, time: float, tokens: int) -> None:
        self._generated += tokens
        if tokens:
            self._in_second(time, tokens)

    def _waste(self, time: float, reason: str, tokens: int) -> None:
        if not tokens:
            return
        self.by_reason[reason] += tokens
        if reason not in DELIBERATE:
            self._in_second(time, 0)[reason] += tokens

    def _in_second(self, time: float, tokens: int) -> Counter[str]:
        """Count generated tokens, and return the waste of the same second."""
        second = int(time)
        while self._recent and self._recent[-1][0] > second + CLOCK_STEP_SECONDS:
            self._recent.pop()  # the clock was set back
        before = self._recent.pop() if self._recent and self._recent[-1][0] == second else (second, 0, Counter[str]())
        self._recent.append((second, before[1] + tokens, before[2]))
        return before[2]

    def _lost_tokens(self, group: Group | None, event: GroupMoved) -> int:
        if group is None or group.state != GroupState.IN_FLIGHT or not self._finished_seconds:
            return 0
        seconds = max(0.0, min(self._generating, event.time) - group.since)
        estimate = round(seconds * self._finished_tokens / self._finished_seconds)
        return max(0, min(self._longest_group, estimate) - event.kept_tokens)


def _main_reason(wasted: Counter[str]) -> str | None:
    reasons = {reason: tokens for reason, tokens in wasted.items() if tokens and reason in CAUSES}
    return max(reasons.keys() - set(DELIBERATE), key=lambda reason: reasons[reason], default=None)

"""The generated response tokens, and the wasted ones by reason, with the setting to change.

The reason is the `DropReason` of a dropped group or of a discarded sample, or `publish` for requests that a publish
aborted.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from miles_async.events import GroupGenerated, GroupMoved, RunStarted, SampleDiscarded
from miles_async.observability.state.groups import Group
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason


class Cause(NamedTuple):
    """What a user reads about a reason."""

    what: str
    knob: str


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
}


class Tokens:
    """Counts generated and wasted tokens.

    A request that is not answered returns no tokens. The tokens that a rollout worker was waiting for when it was lost,
    and that are generated twice, are therefore estimated: from the time that the group had been generated for, and the
    tokens per second of other groups.
    """

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        """Wasted tokens by reason."""
        self._generated = 0
        self._longest_group = 0
        self._generating = 0.0
        """When groups were at the engines last."""
        self._finished_tokens = 0
        self._finished_seconds = 0.0
        self._lost_groups = 0
        """Groups that were being generated when a rollout worker was lost."""

    def start_run(self, event: RunStarted) -> None:
        self._longest_group = event.longest_group

    def generating_at(self, time: float) -> None:
        """Remember that groups were at the engines at this time."""
        self._generating = time

    def generate(self, event: GroupGenerated) -> None:
        self._generated += event.response_tokens
        self._finished_tokens += event.response_tokens
        self._finished_seconds += event.generation_seconds

    def discard(self, event: SampleDiscarded) -> None:
        self._waste(event.reason, event.tokens, counted=False)

    def drop(self, event: GroupMoved, group: Group | None) -> None:
        """Count the tokens of a dropped group. `group` is what was known of it before it was dropped, if anything."""
        if event.reason is None:
            return
        tokens = event.discarded_tokens
        if event.was_lost_in_flight:
            self._lost_groups += 1
            tokens = self._lost_tokens(group)
        # A group is counted as generated before it is filtered and before it leaves `in_flight`.
        ungenerated = event.before in (GroupState.FED, GroupState.IN_FLIGHT) and event.reason != DropReason.FILTERED
        self._waste(event.reason, tokens, counted=not ungenerated)

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
    def avoidable(self) -> float:
        """The same without the groups that a filter rejected, as its user wants it."""
        return self.share - self.by_reason[DropReason.FILTERED] / max(self.generated, 1)

    @property
    def main_reason(self) -> str | None:
        """The reason for most of the wasted tokens, apart from filters; None if no tokens were wasted."""
        reasons = {reason: tokens for reason, tokens in self.by_reason.items() if tokens and reason in CAUSES}
        reasons.pop(DropReason.FILTERED, None)
        return max(reasons, key=lambda reason: reasons[reason], default=None)

    @property
    def lost_at_most(self) -> int:
        """Upper bound of the tokens that were lost with rollout workers, which are estimated."""
        return self._lost_groups * self._longest_group

    def _waste(self, reason: str, tokens: int, *, counted: bool) -> None:
        self.by_reason[reason] += tokens
        self._generated += 0 if counted else tokens

    def _lost_tokens(self, group: Group | None) -> int:
        if group is None or group.state != GroupState.IN_FLIGHT or not self._finished_seconds:
            return 0
        seconds = max(0.0, self._generating - group.since)
        return min(self._longest_group, round(seconds * self._finished_tokens / self._finished_seconds))

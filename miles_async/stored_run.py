"""What a run stores outside its processes, so that another rollout worker can continue it.

The pipeline collects changes and hands them over in batches (`pipeline/journal.py`). Each batch is one transaction, and
events leave the rollout worker only after the transaction that contains them. The stored state therefore never lags
behind anything that another process knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_async.events import Event
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group


@dataclass(slots=True, kw_only=True)
class GroupChange:
    """The newest state of one attempt at a group."""

    feed_index: str
    attempt: int
    state: GroupState
    order: int
    """Number of the transition, counted over all groups: groups of one state are restored in this order."""
    adopted: bool = False
    """Whether a rollout function generated the group outside the pipeline."""
    rollout: int | None = None
    """The rollout in which the group was trained; None before that."""
    content: Group | None = None
    """The finished group, if it has just finished; None leaves the stored content unchanged."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """Everything that changed since the previous batch.

    None removes the entry of its key from the store, if there is one.
    """

    number: int = 0
    """Counts the batches of a run, from 1."""
    groups: dict[int, GroupChange | None] = field(default_factory=dict)
    """Groups that are live, or trained since the newest checkpoint, by sequence number."""
    prompts: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """`Group.prompt_dict` of prompts that were taken from the data, by feed index. None also removes the posted group
    of this feed index."""
    posted: dict[str, Group] = field(default_factory=dict)
    """Groups that external generators have posted, by feed index."""
    keys: dict[str, str | None] = field(default_factory=dict)
    """Feed indexes of posted groups by idempotency key."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Named values that replace the stored values of the same names. JSON can express them, and they do not change."""
    events: list[Event] = field(default_factory=list)
    delivered: int = 0
    """Events of the batches up to this number have reached the driver and are no longer needed."""

    def merge_older(self, older: Changes) -> None:
        """Add the changes of an earlier batch that was not stored, except its events."""
        for sequence, change in self.groups.items():
            before = older.groups.get(sequence)
            if change is not None and before is not None and change.content is None:
                change.content = before.content
        self.groups = older.groups | self.groups
        self.posted = {name: older.posted[name] for name in older.posted if not self.removes(name)} | self.posted
        self.prompts = older.prompts | self.prompts
        self.keys = older.keys | self.keys

    def removes(self, feed_index: str) -> bool:
        """Whether the prompt and the posted group of this feed index are removed."""
        return self.prompts.get(feed_index, {}) is None


@dataclass(frozen=True, slots=True)
class StoredContent:
    """What is known of a finished group before its samples are loaded (`RunStore.load`)."""

    versions: Sequence[int]
    """The weight versions that sampled its tokens; empty if a sample has no version."""
    response_tokens: int
    """Response tokens of all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A live group, or one that was trained since the newest checkpoint, as it was stored."""

    sequence: int
    feed_index: str
    attempt: int
    state: GroupState
    adopted: bool
    rollout: int | None
    """The rollout in which the group was trained; None before that."""
    content: StoredContent | None
    """None if the store does not have the samples of the group, for example because it has not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The stored state of a run."""

    number: int
    """Number of the last batch."""
    groups: Sequence[StoredGroup]
    """Groups that are live or were trained since the newest checkpoint, in the order of their last transitions."""
    prompts: Sequence[Group]
    """Prompts that were taken from the data and are neither trained for good nor given up, in the order in which they
    were stored. Prompts of `groups` are among them."""
    posted: Sequence[str]
    """Feed indexes of posted groups that are neither trained nor given up, in the order in which they were posted.
    `RunStore.load_posted` returns their samples."""
    keys: Mapping[str, str]
    """Feed indexes of posted groups by idempotency key, in the order in which they were posted."""
    progress: Mapping[str, Any]
    events: Sequence[tuple[int, Sequence[Event]]]
    """Events that may not have reached the driver, with the number of their batch, in order."""

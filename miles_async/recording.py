"""Skipping generation: which steps are eligible, which recording answers one, and what a replay gives back.

Seed `skip-manager`. Pure: the store is `adapters/recordings`, the decorator flow `miles_async/skip`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from miles_async.types import Group, Sample, SampleStatus, VersionSpan

_RANGE = re.compile(r"(\d+)(?:-(\d*))?")
_FEED_INDEX = re.compile(r"sample_\d+_(\d+)")


class SkipAction(StrEnum):
    CACHE = "cache"
    """Replay the recording of this very step; without one, generate and record."""
    REPEAT = "repeat"
    """Replay the nearest recording there is; without any, generate and record."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The eligible steps, as closed ranges; an end of None is open."""

    ranges: tuple[tuple[int, int | None], ...]

    @staticmethod
    def parse(entries: Iterable[int | str]) -> Steps:
        """From `3`, `"1-128"` (both ends included) and `"5-"` (5 and all after it). Raises ValueError for others."""
        ranges: list[tuple[int, int | None]] = []
        for entry in entries:
            match = None if isinstance(entry, bool) else _RANGE.fullmatch(str(entry).strip())
            if match is None:
                raise ValueError(f"steps are integers from 0 or ranges such as 1-128, not {entry!r}")
            first = int(match[1])
            last = first if match[2] is None else int(match[2]) if match[2] else None
            if last is not None and last < first:
                raise ValueError(f"the range {entry} ends before it begins")
            ranges.append((first, last))
        return Steps(tuple(ranges))

    def __contains__(self, step: int) -> bool:
        return any(first <= step and (last is None or step <= last) for first, last in self.ranges)


def choose_step(action: SkipAction, current: int, available: Collection[int]) -> int | None:
    """The recorded step that answers `current`; None: generate.

    `repeat` takes the current step, else the largest below it, else the smallest above it (seed `skip-manager`).
    """
    if current in available:
        return current
    if action is SkipAction.CACHE:
        return None
    below = max((step for step in available if step < current), default=None)
    return below if below is not None else min(available, default=None)


def feed_step(feed_index: str) -> int | None:
    """The feed order in `sample_{epoch}_{index}`; None where a group has no place in the feed."""
    match = _FEED_INDEX.fullmatch(feed_index)
    return int(match[1]) if match else None


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """What was recorded under other conditions: a phrase for each field that differs."""
    names = [*recorded, *(name for name in current if name not in recorded)]
    return {
        name: f"{name} was {recorded.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if recorded.get(name) != current.get(name)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One generated group, before its reward."""

    feed_index: str
    prompt: str
    """Hash of the prompt as it came from the data: a generate function may change it."""
    version: int
    """The live weight version when its generation ended; its spans are of this one or older."""
    seconds: float
    """How long its generation took."""
    samples: Sequence[Sample]

    @staticmethod
    def of(group: Group, *, prompt: str, live_version: int, seconds: float) -> GroupRecord:
        """A copy that later stages do not change."""
        newest = max((span.version for sample in group for span in sample.spans), default=live_version)
        samples = [replace(sample, metadata=dict(sample.metadata), reward=None) for sample in group]
        version = max(live_version, newest)
        return GroupRecord(
            feed_index=group.feed_index, prompt=prompt, version=version, seconds=seconds, samples=samples
        )

    def replay_into(self, group: Group, live_version: int) -> None:
        """Make `group` what was recorded, as old relative to `live_version` as it was when it was recorded.

        What generation noted in the metadata comes back; what the data says now, of label or metadata, holds. Where
        another prompt was recorded (action `repeat`), all of it comes with the tokens; index and place in the feed
        stay.
        """
        for sample, recorded in zip(group, self.samples, strict=True):
            own = sample.metadata
            if group.feed_index != self.feed_index:
                own = {key: value for key, value in own.items() if key == "feed_index"}
                sample.label = recorded.label
            sample.prompt, sample.metadata = recorded.prompt, {**recorded.metadata, **own}
            sample.tokens, sample.rollout_log_probs = list(recorded.tokens), list(recorded.rollout_log_probs)
            sample.response, sample.response_length = recorded.response, recorded.response_length
            sample.loss_mask = None if recorded.loss_mask is None else list(recorded.loss_mask)
            sample.spans = shifted(recorded.spans, live_version - self.version)
            sample.status = recorded.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one step generated: one group in the stream, all groups of a batch otherwise."""

    groups: list[GroupRecord] = field(default_factory=list)
    seconds: float = 0.0
    replayed_from: int | None = None
    """The step it was loaded from; None when it was generated now."""


def shifted(spans: Iterable[VersionSpan], by: int) -> list[VersionSpan]:
    """The spans `by` versions later, none before version 0, neighbours of one version joined."""
    result: list[VersionSpan] = []
    for span in spans:
        version, start = max(0, span.version + by), span.start
        if result and result[-1].version == version and result[-1].end == start:
            start = result.pop().start
        result.append(VersionSpan(version, start, span.end))
    return result


def is_first_attempt(group: Group) -> bool:
    """Whether nothing of the group was generated yet: later attempts and continued ones always go live."""
    return group.attempt == 0 and all(
        sample.status is SampleStatus.PENDING and not sample.response_length for sample in group
    )

"""Rules for replaying generation: which steps are eligible, which recording is replayed, and what a replay restores.

These rules do no I/O: `adapters/storage` stores recordings, and `rollout/recording_generator.py` replays them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from miles_async.json_values import json_value
from miles_async.types import Group, Sample, SampleStatus, VersionSpan, trajectories_of

_RANGE = re.compile(r"(\d+)(?:-(\d*))?")
_FEED_INDEX = re.compile(r"sample_\d+_(\d+)")
_GENERATED = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})


def is_generated(samples: Iterable[Sample]) -> bool:
    """Whether all samples were generated completely; only such groups are recorded."""
    return all(sample.status in _GENERATED for sample in samples)


class SkipAction(StrEnum):
    """What takes the place of an eligible step. Recorded generation has `cache` and `repeat`; the others are those of
    verl for roles of users."""

    CACHE = "cache"
    """The recording of the same step. Without one, the step is generated and recorded."""
    REPEAT = "repeat"
    """The nearest recording. Without any, the step is generated and recorded."""
    RANDOM = "random"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Steps:
    """The eligible steps as closed ranges; a range with the end None is open."""

    ranges: tuple[tuple[int, int | None], ...]

    @staticmethod
    def parse(entries: Iterable[int | str]) -> Steps:
        """Parse `3`, `"1-128"` (both ends included) and `"5-"` (5 and later). Raises ValueError for anything else."""
        ranges: list[tuple[int, int | None]] = []
        for entry in entries:
            match = None if isinstance(entry, bool) else _RANGE.fullmatch(str(entry).strip())
            if match is None:
                raise ValueError(f"steps are integers from 0 or ranges such as 1-128, not {entry!r}")
            first = int(match[1])
            last = first if match[2] is None else int(match[2]) if match[2] else None
            if last is not None and last < first:
                raise ValueError(f"the range {entry} ends before it begins: write the first step first")
            ranges.append((first, last))
        return Steps(tuple(ranges))

    def __contains__(self, step: int | None) -> bool:
        return step is not None and any(first <= step and (last is None or step <= last) for first, last in self.ranges)


def choose_step(action: SkipAction, current: int, available: Collection[int]) -> int | None:
    """The recorded step to replay as step `current`; None if the step is to be generated.

    `repeat` takes the current step, else the largest step below it, else the smallest above it.
    """
    if current in available:
        return current
    if action is SkipAction.CACHE:
        return None
    # Another thread may add steps meanwhile.
    steps = list(available)
    below = max((step for step in steps if step < current), default=None)
    return below if below is not None else min(steps, default=None)


def feed_step(feed_index: str) -> int | None:
    """The index in `sample_{epoch}_{index}`; None for a group that did not come from the feed."""
    match = _FEED_INDEX.fullmatch(feed_index)
    return int(match[1]) if match else None


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """The conditions under which a recording differs from the current run: a phrase for each differing field."""
    names = [*recorded, *(name for name in current if name not in recorded)]
    return {
        name: f"{name} was {recorded.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if recorded.get(name) != current.get(name)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One generated group. It has rewards only if the generate function set them."""

    feed_index: str
    prompt: str
    """Hash of the prompt as it came from the data, because a generate function may change the prompt."""
    version: int
    """The live weight version when generation ended. Spans are of this version or older."""
    seconds: float
    """Duration of the generation."""
    samples: Sequence[Sample]

    @staticmethod
    def of(group: Group, *, prompt: str, live_version: int, seconds: float) -> GroupRecord:
        """Record a copy of `group`, so that later stages do not change the record."""
        newest = max((span.version for sample in group for span in sample.spans), default=live_version)
        samples = [replace(sample, metadata=json_value(sample.metadata)) for sample in group]
        for sample, copied in zip(group, samples, strict=True):
            copied.copy_columns(sample)
        version = max(live_version, newest)
        return GroupRecord(
            feed_index=group.feed_index, prompt=prompt, version=version, seconds=seconds, samples=samples
        )

    def replay_into(self, group: Group, live_version: int, *, same_prompt: bool = True) -> None:
        """Fill `group` with the recorded responses, in place.

        The spans are shifted so that the group is as old relative to `live_version` as it was when it was recorded.
        Metadata that generation added is restored, but label and metadata from the current data take precedence. If
        another prompt was recorded (action `repeat`), its prompt, label and metadata come with its tokens, and only
        the sample's index and feed index stay. `same_prompt` says whether the group has the prompt whose hash is
        `prompt`. A group with another feed index counts as another prompt.
        """
        same_prompt = same_prompt and group.feed_index == self.feed_index
        members: list[Sample] = []
        for sample, segments in zip(group, trajectories_of(self.samples), strict=True):
            replayed = [sample, *(replace(sample) for _ in segments[1:])]
            for segment, recorded in zip(replayed, segments, strict=True):
                self._fill(segment, recorded, live_version, same_prompt=same_prompt)
            members += replayed
        group[:] = members

    def _fill(self, sample: Sample, recorded: Sample, live_version: int, *, same_prompt: bool) -> None:
        current = sample.metadata
        if not same_prompt:
            # The reward function must see the label of the prompt that the recorded tokens answer.
            current = {key: value for key, value in current.items() if key == "feed_index"}
            sample.label = recorded.label
        sample.prompt, sample.metadata = recorded.prompt, {**recorded.metadata, **current}
        sample.trajectory = recorded.trajectory
        sample.copy_columns(recorded)
        sample.response, sample.response_length = recorded.response, recorded.response_length
        sample.spans = shift_versions(recorded.spans, live_version - self.version)
        sample.status, sample.reward = recorded.status, recorded.reward
        sample.remove_sample = recorded.remove_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The groups that one step generated: one group in a stream, all groups of a batch otherwise."""

    groups: list[GroupRecord] = field(default_factory=list)
    seconds: float = 0.0
    replayed_from: int | None = None
    """The step that the recording was loaded from; None if it was generated now."""


def shift_versions(spans: Iterable[VersionSpan], by: int) -> list[VersionSpan]:
    """The spans with `by` added to their versions, but none below 0; adjacent spans of one version are merged."""
    result: list[VersionSpan] = []
    for span in spans:
        version, start = max(0, span.version + by), span.start
        keys = None if (oldest := max(0, span.oldest + by)) == version else oldest
        if result and (result[-1].version, result[-1].oldest_keys, result[-1].end) == (version, keys, start):
            start = result.pop().start
        result.append(VersionSpan(version, start, span.end, keys))
    return result


def is_first_attempt(group: Group) -> bool:
    """Whether no token of the group exists yet. Later and continued attempts are always generated, never replayed."""
    return group.attempt == 0 and all(
        sample.status is SampleStatus.PENDING and not sample.response_length for sample in group
    )

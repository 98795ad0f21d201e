"""The buffer of groups that external generators post (slime calls it the rollout buffer).

A posted group is a list of `n_samples_per_prompt` samples, each with a `reward`. A sample names the `session` in which
it was generated; the session holds its tokens, log-probabilities and weight versions. Alternatively, the sample holds
them itself: `tokens`, `response_length`, `rollout_log_probs`, `weight_versions` as SGLang reports them, and an optional
`loss_mask`. If the run samples with top-p or top-k, it also holds `sampling_mask`, as SGLang reports it. A list in
place of a sample holds the segments of a trajectory. A segment without a reward gets that of another one.

A group is acknowledged when it is stored, so a group that was acknowledged is not lost with the rollout worker. A
generator that receives no answer repeats its request with the same idempotency key, and the group is added once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.json_values import UnrepresentableError, finite_number, json_value, plain_text
from miles_async.parsing import parse
from miles_async.sample_schema import PostedSample, check_sample
from miles_async.sampling_mask import SamplingMask
from miles_async.stored_run import StoredRun
from miles_async.types import Group, Sample, SampleStatus, VersionSpan

MAX_KEYS = 10_000
"""Idempotency keys that are remembered; the oldest one is forgotten first."""
MAX_KEY_CHARACTERS = 255


class BufferFullError(Exception):
    """The buffer has no room for another group; the generator should try again after the next batch."""


class NotStoredError(Exception):
    """A group was added, but it cannot be stored now; the generator should repeat the request with the same key."""


class PostedGroupLog(Protocol):
    """Stores posted groups (`pipeline/journal.py`)."""

    def post(self, group: Group, number: int, key: str | None) -> None:
        """Record the `number`-th group with its idempotency key."""
        ...

    def forget_key(self, key: str) -> None: ...

    async def flush(self) -> bool:
        """Store everything that was recorded. Returns whether it is stored."""
        ...

    async def load_posted(self, feed_index: str) -> list[Sample]:
        """Return the samples of a group that is stored."""
        ...


@dataclass(eq=False, repr=False)
class TrajectoryBuffer:
    """Holds at most `capacity` groups of `group_size` samples until they are trained."""

    capacity: int
    group_size: int
    log: PostedGroupLog
    limits: SampleLimits = NO_LIMITS
    newest_version: Callable[[], int] | None = None
    """Returns the newest weight version; without it, versions are not checked."""
    stored: StoredRun | None = None
    """The state of the run that a lost rollout worker has left."""

    def __post_init__(self) -> None:
        # Restored groups may exceed the capacity, because groups of the lost batch are among them.
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._added: int = 0 if self.stored is None else self.stored.progress.get("posted", 0)
        """Groups that were added since the run began."""
        self._names: dict[str, str] = {} if self.stored is None else dict(self.stored.keys)
        """Names of groups by idempotency key, the oldest first."""

    async def add(
        self,
        posted: Any,
        lookup: Callable[[str], list[Sample]],
        claim: Callable[[str], None],
        *,
        key: str | None = None,
    ) -> str:
        """Add a posted group, and return its name when it is stored.

        If `key` was used before, no group is added, and the name of the earlier group is returned. `lookup` returns the
        segments of a session that can be posted, and `claim` closes the session.

        Raises InvalidRequestError if the group is invalid, and BufferFullError if there is no room. No session is
        closed in either case. Raises NotStoredError if the group was added but is not stored.
        """
        if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise InvalidRequestError(f"an idempotency key has 1 to {MAX_KEY_CHARACTERS} characters, not {len(key)}")
        if key is not None and plain_text(key) != key:
            raise InvalidRequestError("the idempotency key is not valid UTF-8: use ASCII characters")
        name = None if key is None else self._names.get(key)
        if name is None:
            group = self._group_of(posted, lookup, claim)
            name = group.feed_index
            self.log.post(group, self._added, key)
            if key is not None:
                self._remember(key, name)
            self._groups.put_nowait(group)
        if not await self.log.flush():
            raise NotStoredError(
                f"group {name} was added, but the store of the run cannot be written: repeat the request with the same "
                "Idempotency-Key; without one, the group would be added again"
            )
        return name

    def restore(self, names: Sequence[str]) -> None:
        """Add the posted groups of a restored run. Their samples stay in the store until they are taken."""
        for name in names:
            self._groups.put_nowait(Group(feed_index=name))

    async def take(self) -> Group:
        """Remove and return the oldest group; wait if the buffer is empty."""
        group = await self._groups.get()
        if not group:
            group[:] = await self.log.load_posted(group.feed_index)
        return group

    def _remember(self, key: str, name: str) -> None:
        self._names[key] = name
        if len(self._names) > MAX_KEYS:
            oldest = next(iter(self._names))
            del self._names[oldest]
            self.log.forget_key(oldest)

    def _group_of(self, posted: Any, lookup: Callable[[str], list[Sample]], claim: Callable[[str], None]) -> Group:
        """Check a posted group, and close its sessions. Raises the errors of `add`."""
        if not isinstance(posted, list) or len(posted) != self.group_size:
            count = len(posted) if isinstance(posted, list) else 0
            raise InvalidRequestError(f"a group has n_samples_per_prompt={self.group_size} samples, not {count}")
        if self._groups.qsize() >= self.capacity:
            raise BufferFullError("the buffer is full: try again after the next batch")
        # All samples are checked before the first session is closed: the generator can correct and repeat the request.
        try:
            trajectories = [self._trajectory(values, index, lookup) for index, values in enumerate(posted)]
        except TrajectoryError as error:
            raise InvalidRequestError(str(error)) from error
        sessions = [entry.session for parts in trajectories for entry, _ in parts if entry.session is not None]
        if len(set(sessions)) < len(sessions):
            raise InvalidRequestError("a session is posted twice: each sample needs its own session")
        for session in sessions:
            claim(session)
        number = self._added
        self._added += 1
        group = Group(feed_index=f"external_{number}")
        for index, parts in enumerate(trajectories):
            several = sum(len(samples) for _, samples in parts) > 1
            for entry, samples in parts:
                for sample in samples:
                    sample.index, sample.trajectory = number * self.group_size + index, index if several else None
                    sample.reward = None if entry.reward is None else float(entry.reward)
                    sample.metadata |= {**entry.metadata, "feed_index": group.feed_index}
                group += samples
        group.share_rewards()
        return group

    def _trajectory(
        self, values: Any, index: int, lookup: Callable[[str], list[Sample]]
    ) -> list[tuple[PostedSample, list[Sample]]]:
        """Check what was posted in place of sample `index`; returns its entries with the samples that they name."""
        newest = None if self.newest_version is None else self.newest_version()
        parts = []
        for value in values if isinstance(values, list) else [values]:
            entry = parse(value, PostedSample, f"sample {index}")
            if entry.reward is not None and finite_number(entry.reward) is None:
                raise InvalidRequestError(f"sample {index}: the reward {entry.reward} is not finite or too large")
            try:
                entry.metadata = json_value(entry.metadata)
            except UnrepresentableError as error:
                raise InvalidRequestError(f"sample {index}: its metadata {error}") from error
            samples = [_sample(entry, index)] if entry.session is None else lookup(entry.session)
            for sample in samples:
                check_sample(sample, self.limits, newest)
            parts.append((entry, samples))
        if all(entry.reward is None for entry, _ in parts):
            raise InvalidRequestError(f"sample {index}: it has no reward; add the field reward")
        return parts


def _sample(entry: PostedSample, index: int) -> Sample:
    """Convert a sample that holds its own tokens."""
    length, tokens = entry.response_length, len(entry.tokens)
    if not 0 < length < tokens:
        raise InvalidRequestError(
            f"sample {index} has {tokens} tokens, {length} of them response: name a session, or post a prompt and a "
            "response of at least one token each"
        )
    if len(entry.rollout_log_probs) != length:
        raise InvalidRequestError(
            f"sample {index} has {len(entry.rollout_log_probs)} rollout_log_probs, but response_length is {length}"
        )
    covered = sum(span.end - span.start for span in entry.weight_versions)
    if not 0 < covered <= length:
        raise InvalidRequestError(f"sample {index} has weight_versions for {covered} of its {length} response tokens")
    try:
        spans = [
            VersionSpan(
                int(span.version), span.start, span.end, None if span.oldest_keys is None else int(span.oldest_keys)
            )
            for span in entry.weight_versions
        ]
    except ValueError as error:
        raise InvalidRequestError(f"sample {index}: a weight version is not a number: {error}") from error
    return Sample(
        index=index,
        tokens=entry.tokens,
        response=entry.response,
        response_length=length,
        rollout_log_probs=entry.rollout_log_probs,
        loss_mask=entry.loss_mask,
        sampling_mask=None if entry.sampling_mask is None else SamplingMask.from_rows(entry.sampling_mask),
        spans=spans,
        columns=dict(entry.columns),
        status=SampleStatus.COMPLETED,
    )

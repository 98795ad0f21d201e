"""The buffer of groups that external generators post (slime calls it the rollout buffer).

A posted group is a list of `n_samples_per_prompt` samples, each with a `reward`. A sample names the `session` in which
it was generated; the session holds its tokens, log-probabilities and weight versions. Alternatively, the sample holds
them itself: `tokens`, `response_length`, `rollout_log_probs`, `weight_versions` as SGLang reports them, and an optional
`loss_mask`. If the run samples with top-p or top-k, it also holds `sampling_mask`, as SGLang reports it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.errors import TrajectoryError
from miles_async.sample_schema import NO_LIMITS, PostedSample, SampleLimits, check_sample, parse
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


class BufferFullError(Exception):
    """The buffer has no room for another group; the generator should try again after the next batch."""


class TrajectoryBuffer:
    """Holds at most `capacity` groups of `group_size` samples until they are trained."""

    def __init__(
        self,
        capacity: int,
        group_size: int,
        *,
        limits: SampleLimits = NO_LIMITS,
        newest_version: Callable[[], int] | None = None,
    ) -> None:
        """`newest_version` returns the newest weight version; without it, versions are not checked."""
        self._groups: asyncio.Queue[Group] = asyncio.Queue(capacity)
        self._group_size = group_size
        self._limits = limits
        self._newest_version = newest_version
        self._numbers = itertools.count()

    def add(self, posted: Any, lookup: Callable[[str], Sample], claim: Callable[[str], Sample]) -> str:
        """Add a posted group and return its name.

        `lookup` returns the sample of a session that can be posted, and `claim` also closes the session. Raises
        InvalidRequestError if the group is invalid, and BufferFullError if there is no room. No session is closed in
        either case.
        """
        if not isinstance(posted, list) or len(posted) != self._group_size:
            count = len(posted) if isinstance(posted, list) else 0
            raise InvalidRequestError(f"a group has n_samples_per_prompt={self._group_size} samples, not {count}")
        if self._groups.full():
            raise BufferFullError("the buffer is full: try again after the next batch")
        newest = None if self._newest_version is None else self._newest_version()
        entries, samples = [], []
        # All samples are checked before the first session is closed: the generator can correct and repeat the request.
        try:
            for index, values in enumerate(posted):
                entry = parse(values, PostedSample, f"sample {index}")
                sample = _sample(entry, index) if entry.session is None else lookup(entry.session)
                check_sample(sample, self._limits, newest)
                entries.append(entry)
                samples.append(sample)
        except TrajectoryError as error:
            raise InvalidRequestError(str(error)) from error
        sessions = [entry.session for entry in entries if entry.session is not None]
        if len(set(sessions)) < len(sessions):
            raise InvalidRequestError("a session is posted twice: each sample needs its own session")
        for session in sessions:
            claim(session)
        number = next(self._numbers)
        name = f"external_{number}"
        for index, (sample, entry) in enumerate(zip(samples, entries, strict=True)):
            sample.index = number * self._group_size + index
            sample.reward = float(entry.reward)
            sample.metadata |= {**entry.metadata, "feed_index": name}
        self._groups.put_nowait(Group(samples, feed_index=name))
        return name

    async def take(self) -> Group:
        """Remove and return the oldest group; wait if the buffer is empty."""
        return await self._groups.get()


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
        spans = [VersionSpan(int(span.version), span.start, span.end) for span in entry.weight_versions]
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
        status=SampleStatus.COMPLETED,
    )

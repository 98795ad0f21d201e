"""The buffer of groups that external generators post (slime calls it the rollout buffer).

A posted group is a list of `n_samples_per_prompt` samples, each with a `reward`. A sample names the `session` in which
it was generated; the session holds its tokens, log-probabilities and weight versions. Alternatively, the sample holds
them itself: `tokens`, `response_length`, `rollout_log_probs`, `weight_versions` as SGLang reports them, and an optional
`loss_mask`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


class BufferFullError(Exception):
    """The buffer has no room for another group; the generator should try again after the next batch."""


class TrajectoryBuffer:
    """Holds at most `capacity` groups of `group_size` samples until they are trained."""

    def __init__(self, capacity: int, group_size: int) -> None:
        self._groups: asyncio.Queue[Group] = asyncio.Queue(capacity)
        self._group_size = group_size
        self._numbers = itertools.count()

    def add(self, posted: Any, claim: Callable[[str], Sample]) -> str:
        """Add a posted group and return its name. `claim` closes a session and returns its sample.

        Raises InvalidRequestError if the group is invalid, and BufferFullError if there is no room. No session is
        closed in either case.
        """
        if not isinstance(posted, list) or len(posted) != self._group_size:
            count = len(posted) if isinstance(posted, list) else 0
            raise InvalidRequestError(f"a group has n_samples_per_prompt={self._group_size} samples, not {count}")
        if self._groups.full():
            raise BufferFullError("the buffer is full: try again after the next batch")
        # All samples are checked before the first session is closed: the generator can correct and repeat the request.
        for index, entry in enumerate(posted):
            _check(entry, index)
        number = next(self._numbers)
        name = f"external_{number}"
        samples = [claim(entry["session"]) if "session" in entry else _sample(entry) for entry in posted]
        for index, (sample, entry) in enumerate(zip(samples, posted, strict=True)):
            sample.index = number * self._group_size + index
            sample.reward = float(entry["reward"])
            sample.metadata |= {**entry.get("metadata", {}), "feed_index": name}
        self._groups.put_nowait(Group(samples, feed_index=name))
        return name

    async def take(self) -> Group:
        """Remove and return the oldest group; wait if the buffer is empty."""
        return await self._groups.get()


def _check(entry: Any, index: int) -> None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("reward"), int | float):
        raise InvalidRequestError(f"sample {index} needs a number as reward")
    if not isinstance(metadata := entry.get("metadata", {}), Mapping):
        raise InvalidRequestError(f"sample {index}: metadata is a {type(metadata).__name__}, not an object")
    if "session" in entry:
        return
    try:
        tokens, length = len(entry["tokens"]), entry["response_length"]
        columns = {"rollout_log_probs": entry["rollout_log_probs"], "loss_mask": entry.get("loss_mask", [1] * length)}
        covered = sum(int(span["end"]) - int(span["start"]) for span in entry["weight_versions"])
        versions = [int(span["version"]) for span in entry["weight_versions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"sample {index} has neither a session nor the fields of a complete sample: it lacks {error}"
        ) from error
    for name, column in columns.items():
        if len(column) != length:
            raise InvalidRequestError(f"sample {index} has {len(column)} {name}, but response_length is {length}")
    if not 0 < length < tokens:
        raise InvalidRequestError(
            f"sample {index} has {tokens} tokens, {length} of them response: prompt and response each need at least one"
        )
    if not versions or not 0 < covered <= length:
        raise InvalidRequestError(f"sample {index} has weight_versions for {covered} of its {length} response tokens")


def _sample(entry: Mapping[str, Any]) -> Sample:
    spans: Sequence[Mapping[str, Any]] = entry["weight_versions"]
    return Sample(
        tokens=list(entry["tokens"]),
        response=str(entry.get("response", "")),
        response_length=entry["response_length"],
        rollout_log_probs=list(entry["rollout_log_probs"]),
        loss_mask=entry.get("loss_mask"),
        spans=[VersionSpan(int(span["version"]), span["start"], span["end"]) for span in spans],
        status=SampleStatus.COMPLETED,
    )

"""Finished trajectories that an external generator posts (the seed's rollout buffer), waiting to be trained.

A group is a list of `n_samples_per_prompt` samples. Each names the `session` it was sampled in, which has its tokens,
versions and log-probabilities, or brings them itself: `tokens`, `response_length`, `rollout_log_probs`,
`weight_versions` as SGLang reports them, and perhaps a `loss_mask`. All bring a `reward`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


class BufferFullError(Exception):
    """There is no room for another group; try again when a batch was taken."""


class TrajectoryBuffer:
    def __init__(self, capacity: int, group_size: int) -> None:
        self._groups: asyncio.Queue[Group] = asyncio.Queue(capacity)
        self._size = group_size
        self._numbers = itertools.count()

    def add(self, posted: Any, claim: Callable[[str], Sample]) -> str:
        """Take a group in and return its name; `claim` ends a session and gives its sample.

        Raises Full, and Refused with what is wrong; then no session was ended.
        """
        if not isinstance(posted, list) or len(posted) != self._size:
            count = len(posted) if isinstance(posted, list) else 0
            raise InvalidRequestError(f"a group has n_samples_per_prompt={self._size} samples, not {count}")
        if self._groups.full():
            raise BufferFullError("the buffer is full: try again after the next batch")
        for place, entry in enumerate(posted):
            _check(entry, place)
        number = next(self._numbers)
        name = f"external_{number}"
        samples = [claim(entry["session"]) if "session" in entry else _sample(entry) for entry in posted]
        for place, (sample, entry) in enumerate(zip(samples, posted, strict=True)):
            sample.index = number * self._size + place
            sample.reward = float(entry["reward"])
            sample.metadata |= {**entry.get("metadata", {}), "feed_index": name}
        self._groups.put_nowait(Group(samples, feed_index=name))
        return name

    async def take(self) -> Group:
        """The group that waits longest; waits for one where there is none."""
        return await self._groups.get()


def _check(entry: Any, place: int) -> None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("reward"), int | float):
        raise InvalidRequestError(f"sample {place} has no number as its reward")
    if not isinstance(metadata := entry.get("metadata", {}), Mapping):
        raise InvalidRequestError(f"sample {place}: its metadata is a {type(metadata).__name__}, not an object")
    if "session" in entry:
        return
    try:
        tokens, length = len(entry["tokens"]), entry["response_length"]
        columns = {"rollout_log_probs": entry["rollout_log_probs"], "loss_mask": entry.get("loss_mask", [1] * length)}
        covered = sum(int(span["end"]) - int(span["start"]) for span in entry["weight_versions"])
        versions = [int(span["version"]) for span in entry["weight_versions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"sample {place} names no session, and as a sample of its own lacks {error}"
        ) from error
    for name, column in columns.items():
        if len(column) != length:
            raise InvalidRequestError(f"sample {place} has {len(column)} {name}: response_length is {length}")
    if not 0 < length < tokens:
        raise InvalidRequestError(
            f"sample {place} has {tokens} tokens, {length} of them response: both parts need one at least"
        )
    if not versions or not 0 < covered <= length:
        raise InvalidRequestError(f"sample {place} has weight_versions for {covered} of its {length} response tokens")


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

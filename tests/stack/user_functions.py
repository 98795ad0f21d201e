"""Functions such as a user would write, with slime's signatures."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from miles_async.types import Sample


def share_of_even_bytes(args: Any, sample: Sample) -> float:
    """A reward that an untrained model earns in part, so that every step has something to learn from."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)


def shares_of_even_bytes(args: Any, samples: list[Sample]) -> list[dict[str, float]]:
    """The same for a group at once, as an entry of a dictionary."""
    return [{"even": share_of_even_bytes(args, sample), "length": float(sample.response_length)} for sample in samples]


def reward_of_another_schema(args: Any, sample: Sample) -> float:
    """A reward that reads a key which no row has."""
    return float(sample.metadata["score"])


def lose_a_reward(args: Any, groups: list[list[Sample]]) -> None:
    """A sample filter that leaves one sample of each batch without a finite reward."""
    groups[0][0].reward = math.nan if groups[0][0].index else math.inf


_newer_weights = asyncio.Event()


async def held_until_a_publish(args: Any, sample: Sample) -> float:
    """Past the first batch nothing is graded before an answer comes that newer weights than the first ones gave.

    Were a publish to wait for the second batch, both would wait forever, and the run would end as one without progress.
    """
    if any(span.version > 0 for span in sample.spans):
        _newer_weights.set()
    assert sample.index is not None
    if sample.index >= args.rollout_batch_size * args.n_samples_per_prompt:
        await _newer_weights.wait()
    return share_of_even_bytes(args, sample)

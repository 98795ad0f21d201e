"""What a user might bring, in slime's shape."""

from __future__ import annotations

from typing import Any

from miles_async.types import Sample


def share_of_even_bytes(args: Any, sample: Sample) -> float:
    """A reward that an untrained model earns in part, so that every step has something to learn from."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)


def shares_of_even_bytes(args: Any, samples: list[Sample]) -> list[dict[str, float]]:
    """The same for a group at once, as an entry of a dictionary."""
    return [{"even": share_of_even_bytes(args, sample), "length": float(sample.response_length)} for sample in samples]

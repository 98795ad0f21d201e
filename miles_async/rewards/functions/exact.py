"""The reward `exact`."""

from __future__ import annotations

from typing import Any

from miles_async.rewards.answers import label_of
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample


class Exact(Reward):
    """1 if the response equals the label, apart from surrounding white space, and 0 otherwise."""

    name = "exact"
    compares = True

    def score(self, args: Any, sample: Sample) -> float:
        return float(sample.response.strip() == label_of(sample).strip())

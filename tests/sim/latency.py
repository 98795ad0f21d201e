"""How long a request takes: seeded models, named in a scenario as `{kind: log_normal, mean: 1.0, sigma: 0.7}`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

from miles_async.types import Group
from tests.sim.engines import Latency


def constant(mean: float) -> Latency:
    return lambda group, rng: mean


def log_normal(mean: float, sigma: float, longest: float = math.inf) -> Latency:
    """`mean` is that of the distribution before it is cut at `longest`."""
    median = math.log(mean) - sigma * sigma / 2
    return lambda group, rng: min(longest, rng.lognormvariate(median, sigma))


def pareto(mean: float, shape: float, longest: float = math.inf) -> Latency:
    """A tail that thins out with `shape` (above 1: the mean exists), cut at `longest`, as a token limit cuts it."""
    shortest = mean * (shape - 1) / shape
    return lambda group, rng: min(longest, shortest * rng.paretovariate(shape))


def difficulty(mean: float, spread: float, noise: float) -> Latency:
    """Hard prompts take longer in every attempt: a prompt's own factor, uniform in 1 ± `spread`, times noise."""
    noisy = log_normal(mean, noise)
    return lambda group, rng: noisy(group, rng) * (1 + spread * (2 * hardness(group) - 1))


def hardness(group: Group) -> float:
    """0 to 1, the same for a prompt in every attempt and every process."""
    return crc32(group.feed_index.encode()) / 0xFFFFFFFF


_KINDS: Mapping[str, Callable[..., Latency]] = {
    "constant": constant,
    "log_normal": log_normal,
    "pareto": pareto,
    "difficulty": difficulty,
}


def latency_of(settings: Mapping[str, Any], stuck: Mapping[str, Any] | None = None) -> Latency:
    """The model that `settings` name; the prompt `stuck["prompt"]` takes `stuck["seconds"]` in its first attempts.

    `stuck["attempts"]` are those: a straggler by bad luck is quick the second time, a poisoned prompt never.
    """
    model = _KINDS[settings["kind"]](**{key: value for key, value in settings.items() if key != "kind"})
    if stuck is None:
        return model
    feed_index, seconds, attempts = f"sample_0_{stuck['prompt']}", float(stuck["seconds"]), int(stuck["attempts"])

    def with_stuck(group: Group, rng: random.Random) -> float:
        usual = model(group, rng)  # drawn always, so that the other groups are the same with and without
        return seconds if group.feed_index == feed_index and group.attempt < attempts else usual

    return with_stuck

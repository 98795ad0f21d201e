"""The contracts of `ports.Learner` and `ports.WeightChannel` (`tests/contracts`), on Megatron and a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.adapters.weights.channel import Channel
from miles_async.ports import Learner, WeightChannel
from tests.contracts import test_learner as of_learners
from tests.contracts import test_weight_channel as of_channels
from tests.contracts.test_learner import Saved
from tests.stack.conftest import Stack, settings

# Pytest runs the tests of a contract here with the fixtures of this file.
globals().update({name: test for name, test in vars(of_learners).items() if name.startswith("test_")})
globals().update({name: test for name, test in vars(of_channels).items() if name.startswith("test_")})


@pytest.fixture
def ranks(stack: Stack) -> Iterator[list[Any]]:
    """The ranks of the cluster. They count batches and versions from the beginning, as those of a new run."""
    ranks = list(stack.cluster.handles.learner_ranks)

    async def begin() -> None:
        for rank in ranks:
            await rank.begin.remote(-1, 0, False)

    stack.do(begin())
    yield ranks
    stack.do(begin())


@pytest.fixture
def learner(ranks: list[Any], tmp_path: Path) -> tuple[Callable[[], Learner], Saved]:
    sizes = ("--n-samples-per-prompt", "2", "--rollout-batch-size", "2", "--save", str(tmp_path))
    config = settings("train_async.py", *sizes)

    def read(rollout: int) -> dict[str, Any]:
        [path] = tmp_path.rglob(f"*{rollout}/**/progress.json")
        return dict(json.loads(path.read_text()))

    return lambda: RayLearner(config, RayRanks(ranks), "run"), read


@pytest.fixture
def create(stack: Stack, ranks: list[Any]) -> Iterator[Callable[[], WeightChannel]]:
    """Creates channels to the engine of the cluster, which has two names here, and is a part of the cluster again."""
    handles = stack.cluster.handles
    [engine] = handles.engines
    addresses = {"a": engine.url, "b": engine.url.replace("127.0.0.1", "localhost"), engine.name: engine.url}

    def create() -> WeightChannel:
        return Channel(
            handles.weight_transports, RayRanks(ranks), lambda name: replace(engine, name=name, url=addresses[name])
        )

    yield create
    stack.do(create().connect([engine.name]))

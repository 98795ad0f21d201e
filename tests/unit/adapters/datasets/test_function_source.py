"""Prompts come from a class of the user with the methods of slime's data source."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.errors import UserError
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.types import Sample
from tests.configuration import run_config
from workers.functions import data_source


class Countdown:
    """Returns the numbers below ten as prompts, the largest first."""

    def __init__(self, args: Arguments) -> None:
        self._size, self._left = args.n_samples_per_prompt, 10

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(min(num_samples, self._left)):
            self._left -= 1
            groups.append([Sample(prompt=f"{self._left}", label=self._left) for _ in range(self._size)])
        return groups


class Halves(Countdown):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [group[:1] for group in super().get_samples(num_samples)]


class Broken(Countdown):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise OSError("the server is down")


class Shorter(Countdown):
    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        self._left = 2


def source(name: str) -> BufferedSource:
    path = f"{__name__}.{name}"
    own: dict[str, Any] = {"data_source_path": path, "disable_rollout_global_dataset": True, "n_samples_per_prompt": 2}
    config = run_config(reasoning_gym_task=None, **own)
    return open_data(config, create=data_source(config, flat_args(config)))


def prompts(made: BufferedSource, number: int) -> list[Any]:
    return [group[0].prompt for group in made.get_samples(number)]


def test_the_prompts_are_those_of_the_users_class() -> None:
    made = source("Countdown")
    first, second = made.get_samples(2)
    assert [(sample.prompt, sample.label, sample.index) for sample in first] == [("9", 9, 0), ("9", 9, 1)]
    assert [sample.index for sample in second] == [2, 3]
    assert (second.feed_index, second[1].metadata["feed_index"]) == ("sample_0_1", "sample_0_1")
    made.add_samples([first])
    assert prompts(made, 20) == ["9", *(str(number) for number in range(7, -1, -1))], "returned groups come first"
    assert made.get_samples(1) == [], "the class has no more"


def test_a_restored_source_continues_after_the_prompts_that_were_drawn() -> None:
    made = source("Countdown")
    made.get_samples(3)
    state = json.loads(json.dumps(made.position()))
    for other in (source("Countdown"), made):
        other.seek(state)
        assert (prompts(other, 1), other.sample_index) == (["6"], 8)


def test_a_class_that_has_fewer_prompts_than_before_is_named() -> None:
    made = source("Countdown")
    made.get_samples(3)
    with pytest.raises(UserError, match="data_source_path returned 2 groups, and 3 before the run was stopped"):
        source("Shorter").seek(made.position())


@pytest.mark.parametrize(
    "name, sentence",
    [
        (
            "Halves",
            r"returned \[\[Sample.* from get_samples\(1\): return a list with one group of n_samples_per_prompt=2",
        ),
        ("Broken", r"raised OSError\('the server is down'\): correct the class"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(name: str, sentence: str) -> None:
    made = source(name)
    with pytest.raises(UserError, match=f"^data_source_path {sentence}"):
        made.get_samples(1)

"""Generate functions in Miles' form, which take one argument, on an engine whose answers are scripted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from miles_async.compat.miles.forms import in_slimes_form
from miles_async.config.user_functions import load_function, with_keywords
from miles_async.types import Sample, SampleStatus
from tests.unit.compat.slime_names import names_of_slime, of_miles
from tests.unit.rollout.test_generate_functions import generating_with, one


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    with names_of_slime():
        yield


def load(name: str, *, evaluation: bool = False) -> Any:
    """A function of this module as the run calls it."""
    function = load_function(f"{__name__}.{name}", setting="custom_generate_function_path")
    return with_keywords(function, {"evaluation": evaluation})


async def asks_twice(input: Any) -> Any:
    """A function of a user that calls one of Miles for each turn."""
    single_turn, sample = of_miles("generate_hub.single_turn"), input.sample
    assert input.args.rollout_max_response_len == 200
    await single_turn.generate(input)
    input.args.turns.observe(sample, "? ")
    output = await single_turn.generate(input)
    sample.metadata["evaluation"] = input.evaluation
    return of_miles("base_types").GenerateFnOutput(samples=output.samples)


class Counts:
    """One object generates all samples."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, input: Any) -> Any:
        self.calls += 1
        input.sample.metadata["call"] = self.calls
        return await of_miles("generate_hub.single_turn").generate(input)


async def without_output(input: Any) -> Any:
    return await input.args.turns.sample(input.sample, input.sampling_params)


async def two_segments(input: Any) -> Any:
    first = await input.args.turns.sample(input.sample, input.sampling_params)
    second = Sample(prompt=first.prompt, tokens=[1, 2], response_length=1, status=SampleStatus.COMPLETED, reward=0.0)
    return of_miles("base_types").GenerateFnOutput([first, second])


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_function_that_takes_an_input_generates_a_sample(evaluation: bool) -> None:
    function = load("asks_twice", evaluation=evaluation)
    async with generating_with(function, "Ja", "42", rollout_max_response_len=200) as (generator, engine):
        group = one()
        await generator.generate(group)
    [sample] = group
    assert (sample.response, sample.metadata["evaluation"]) == ("Ja? 42", evaluation)
    assert (len(engine.asked), len(sample.spans), engine.rated) == (2, 2, [])


async def test_one_object_of_a_class_generates_all_samples() -> None:
    async with generating_with(load("Counts"), "a", "b") as (generator, _):
        first, second = one(), one()
        await generator.generate(first)
        await generator.generate(second)
    assert [group[0].metadata["call"] for group in (first, second)] == [1, 2]


async def test_a_sample_without_an_output_around_it_is_accepted() -> None:
    async with generating_with(load("without_output"), "42") as (generator, _):
        group = one()
        await generator.generate(group)
    assert group[0].response == "42"


async def test_several_samples_are_the_segments_of_a_trajectory() -> None:
    async with generating_with(load("two_segments"), "42") as (generator, _):
        group = one()
        await generator.generate(group)
    assert [sample.response_length for sample in group] == [2, 1]
    assert len(group.trajectories) == 1


async def of_slime(args: Any, sample: Any, sampling_params: Any) -> Any: ...
async def of_slime_with_evaluation(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any: ...
async def of_any(*arguments: Any, **keywords: Any) -> Any: ...
async def named_otherwise(request: Any) -> Any: ...
async def with_others(input: Any, first: Any = None, second: Any = None) -> Any: ...


@pytest.mark.parametrize(
    "function, is_of_miles",
    [
        (of_slime, False),
        (of_slime_with_evaluation, False),
        (of_any, False),
        (named_otherwise, True),
        (with_others, True),
        (Counts, True),
    ],
)
def test_the_form_is_recognised_by_the_arguments(function: Any, is_of_miles: bool) -> None:
    found = in_slimes_form(function, "a function", "custom_generate_function_path")
    assert (found is not None) is is_of_miles


def test_classes_of_other_settings_keep_their_form() -> None:
    assert in_slimes_form(Counts, "a class", "data_source_path") is None

"""Problems of reasoning-gym: which ones are fed, held out and used for the warm start, and how answers are scored."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from miles_async.errors import UserError
from miles_async.types import Group, Sample
from tests.unit.gym import open_gym


def asked(groups: list[Group]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_an_epoch_has_the_configured_number_of_problems() -> None:
    data = open_gym(reasoning_gym_size=3, eval_size=0)
    assert [group.feed_index for group in data.get_samples(5)][2:] == ["sample_0_2", "sample_1_3", "sample_1_4"]


def test_no_held_out_question_occurs_in_training_or_warm_start() -> None:
    source = open_gym()
    held_out = {sample.metadata["entry"]["question"] for [sample] in source.eval_problems()}
    fed = {sample.metadata["entry"]["question"] for [sample] in source.get_samples(2500)}
    warm_start = {sample.metadata["entry"]["question"] for sample in islice(source.warm_start_problems(), 1000)}
    assert len(held_out) == 64
    assert not held_out & fed
    assert not held_out & warm_start


def test_holding_out_problems_does_not_exhaust_small_strata() -> None:
    fed = [sample.metadata["entry"]["metadata"]["num_digits"] for [sample] in open_gym(eval_size=512).get_samples(2000)]
    assert 0.4 < fed.count(1) / len(fed) < 0.5


def test_held_out_problems_do_not_depend_on_the_seed_of_the_run() -> None:
    assert asked(open_gym().eval_problems()) == asked(open_gym(rollout_seed=7).eval_problems())
    assert asked(open_gym().get_samples(9)) != asked(open_gym(rollout_seed=7).get_samples(9))


def test_the_template_takes_the_question_or_the_expression_after_its_last_colon() -> None:
    group = open_gym(prompt_template="Q: {expression} {").get_samples(1)[0]
    entry = group[0].metadata["entry"]
    assert group[0].prompt == f"Q: {entry['metadata']['expression']} = {{"
    assert group[0].label == entry["answer"]
    whole = open_gym(prompt_template="{question}\n").get_samples(1)[0]
    assert whole[0].prompt == entry["question"] + "\n"


@pytest.mark.parametrize(
    "data, complaint",
    [
        ({"reasoning_gym_task": "chain_sun"}, "'chain_sun' is unknown; did you mean chain_sum"),
        ({"reasoning_gym_settings": {"min_term": 2}}, "do not fit chain_sum.*min_term"),
        ({"reasoning_gym_settings": {"min_terms": 0}}, "do not fit chain_sum.*min_terms must be positive"),
        ({"reasoning_gym_settings": {"seed": 1}}, "has seed: set rollout_seed"),
        (
            {"reasoning_gym_settings": {"max_terms": 2, "max_digits": 1}},
            "too few different questions to hold out 64: set eval_size to at most",
        ),
    ],
)
def test_an_invalid_task_is_refused_in_one_sentence(data: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        open_gym(**data)


def test_a_task_without_single_answers_cannot_warm_start() -> None:
    source = open_gym(reasoning_gym_task="propositional_logic", reasoning_gym_settings={}, eval_size=0)
    assert isinstance(source.get_samples(1)[0][0], Sample)
    with pytest.raises(UserError, match="or warm_start_max_steps to 0"):
        next(source.warm_start_problems())

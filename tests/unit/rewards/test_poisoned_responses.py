"""Responses that keep a parser busy. A parser whose time grows with the square of the length would take hours here."""

from __future__ import annotations

from typing import Any

import pytest

from examples import tool_reward
from miles_async.rewards.answers import numerals, split_modulus, split_unit, tidy, words_of
from miles_async.rewards.functions.gpqa import Gpqa
from miles_async.rewards.instructions import follows
from miles_async.rollout.tools.calculator import calculate
from miles_async.types import Sample

MANY = 1_000_000


@pytest.mark.parametrize("response", ["answer is" + "\n" * MANY, "option" + " " * MANY, "answer" * (MANY // 6)])
def test_a_multiple_choice_answer_is_found_in_linear_time(response: str) -> None:
    assert Gpqa().score(None, Sample(response=response, label="A")) == 0.0


@pytest.mark.parametrize("part", ["\\,", "\\text{", "\\text{ }", "{", "1_", "1e", "5,", "5 million ", "\\pmod", "a,"])
@pytest.mark.parametrize("end", ["!", "5", "}"])
def test_an_answer_is_read_in_linear_time(part: str, end: str) -> None:
    answer = tidy("5" + part * (MANY // len(part)) + end)
    assert words_of(answer) is None
    assert not split_unit(answer)[1]
    assert numerals(answer) is None
    assert split_modulus(answer)[1] is None


@pytest.mark.parametrize(
    "name, arguments, response",
    [
        ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "a" + "\n" * MANY + "b"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "a" * MANY),
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"}, "b" + "\n" + " " * MANY),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[" * MANY),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "a" + "\n" * MANY + "b"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*" * MANY + "a"),
        ("detectable_format:title", {}, "<" * MANY),
        ("detectable_format:json_format", {}, "[" * MANY),
        ("detectable_format:multiple_sections", {"section_spliter": "S", "num_sections": 2}, "S" + " " * MANY),
        *(("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, text)
          for text in ("A" * MANY + "é", "A" + "." * MANY, "A" + ".)" * MANY + "b", "a'" * MANY)),
    ],
)  # fmt: skip
def test_an_instruction_is_checked_in_linear_time(name: str, arguments: dict[str, Any], response: str) -> None:
    assert not follows(response, name, arguments)


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<<Title>>", True),
        ("a > b << c\n<<<Title>>>", True),
        ("<<a<b>>", True),
        ("<<>>", False),
        ("<<a> >b>>", True),
        ("<<a\nb>>", False),
        ("<< >>", False),
        (">><<a>>", True),
    ],
)
def test_a_title_is_between_double_angle_brackets_on_one_line(response: str, expected: bool) -> None:
    assert follows(response, "detectable_format:title", {}) == expected


def test_an_unfinished_result_scores_zero_and_the_last_result_counts() -> None:
    metadata = {"tool_calls": 1, "answer": "4"}
    assert tool_reward.reward(None, Sample(response="<result>" * MANY, metadata=metadata)) == 0.0
    assert tool_reward.reward(None, Sample(response="<result>3</result><result>4</result>", metadata=metadata)) == 1.0


@pytest.mark.parametrize("expression", ["9**9**9", "round(1,-10000000)", "round(1,-10**99)", "round(1.5, 10**50)"])
def test_the_calculator_refuses_numbers_that_would_occupy_a_core(expression: str) -> None:
    assert calculate(expression).startswith("error: ")


def test_the_calculator_rounds() -> None:
    assert [calculate(text) for text in ("round(2.5)", "round(2.345, 2)", "round(1234, -2)")] == ["2", "2.35", "1200"]

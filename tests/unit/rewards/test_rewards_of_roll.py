"""The rewards of ROLL's rows: constraints of RLVR-IFeval, letters of choices, formulas, and repeated words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_async.errors import TrajectoryError
from miles_async.rewards.answers import after_reasoning
from miles_async.rewards.constraints import satisfies
from tests.scoring import scored


@pytest.mark.parametrize(
    "name, arguments, right, wrong",
    [
        ("verify_keywords", {"keyword_list": ["Tea", "C++"]}, "tea or c++", "tea"),
        ("verify_keyword_frequency", {"word": "Tea", "N": 2}, "Tea and tea, no teapot", "tea"),
        ("validate_forbidden_words", {"forbidden_words": ["Tea"]}, "coffee", "a teapot"),
        ("verify_letter_frequency", {"letter": "a", "N": 2}, "banAna", "banana"),
        ("validate_response_language", {"language": "de"}, "Das ist ein schöner Tag im Garten.", "It is a nice day."),
        ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n* * *\n * * *\nb"),
        ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
        ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
        ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "Mr. A is. B is.", "Mr. A is."),
        ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So a\n\nb"),
        ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
        ("validate_placeholders", {"N": 2}, "[a] [b]", "[a] [b"),
        ("verify_bullet_points", {"N": 2}, "* a\n - b", "* a"),
        ("validate_title", {}, "<<a>>\nb", "<<a\n>>"),
        ("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, "My answer is no.", "no or yes"),
        ("validate_highlighted_sections", {"N": 2}, "*a* and *b*", "*a* and *b\n*"),
        ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1\nPart 2", "Part 1"),
        ("validate_json_format", {}, '{"a": 1}', "[" * 100_000),
        ("validate_repeat_prompt", {"original_prompt": "Say it"}, "Say it. Done", "Done. Say it"),
        ("validate_two_responses", {}, "a ****** b", "a ****** a"),
        ("validate_uppercase", {}, "A 1", "A b"),
        ("validate_lowercase", {}, "a 1", "A b"),
        ("validate_frequency_capital_words", {"N": 1, "quantifier": "around"}, "A b", "A B"),
        ("validate_end", {"end_phrase": "The end"}, "a. The end", "The end."),
        ("validate_quotation", {}, '"a"', '"a" b'),
        ("validate_no_commas", {}, "a b", "a, b"),
    ],
)
def test_a_constraint_holds_or_not_whatever_other_arguments_the_row_has(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    others = {"N": None, "word": None, "unused": 7} | arguments
    assert (satisfies(right, name, others), satisfies(wrong, name, others)) == (True, False)
    assert satisfies(" \n", name, others) is False


async def test_an_ifeval_row_of_roll_is_scored_after_the_reasoning_without_special_tokens() -> None:
    label = json.dumps({"func_name": "validate_end", "end_phrase": "The end", "N": None})
    rewards = await scored("hm</think>\n\nThe end<|im_end|>", "The end, no", label=label, rm_type="roll_ifeval")
    assert rewards == [{"score": 1.0, "acc": 1.0}, {"score": 0.0, "acc": 0.0}]


@pytest.mark.parametrize(
    "label, complaint",
    [
        ('{"func_name": "verify_taste"}', "constraint 'verify_taste' is unknown; known are validate_choice, "),
        ('{"func_name": "validate_end", "end_phrase": null}', "constraint validate_end needs end_phrase"),
        ('{"func_name": "validate_word_constraint", "N": 1, "quantifier": "over"}', "quantifier 'over' is unknown"),
        ("{}", "the label '{}' is not an object with func_name"),
        ("B", "JSONDecodeError"),
    ],
)
async def test_an_ifeval_row_that_cannot_be_scored_is_an_error(label: str, complaint: str) -> None:
    with pytest.raises(TrajectoryError, match=complaint):
        await scored("a", label=label, rm_type="roll_ifeval")


@pytest.mark.parametrize(
    "response, reward",
    [
        (r"A or C? \boxed{C}", (1.0, 1.0)),
        (r"\boxed{A} no \boxed{\text{C}}", (1.0, 1.0)),
        ("Answer is C", (0.5, 1.0)),
        ("Perhaps A. The answer is (C).", (0.5, 1.0)),
        ("C", (0.5, 1.0)),
        (r"\boxed{A} C", (-0.5, 0.0)),
        ("The answer is C", (0.5, 1.0)),
        ("I choose C", (-1.0, 0.0)),
        ("", (-1.0, 0.0)),
    ],
)
async def test_a_choice_is_the_first_capital_letter_and_a_box_is_worth_half(
    response: str, reward: tuple[float, float]
) -> None:
    [found] = await scored(response, label="C) 5 cm", rm_type="roll_choice")
    assert (found["score"], found["acc"]) == reward


async def test_a_choice_needs_a_letter_in_its_label() -> None:
    with pytest.raises(TrajectoryError, match="the label '3' has no capital letter"):
        await scored("A", label="3", rm_type="roll_choice")


@pytest.mark.parametrize("rm_type, label", [("roll_choice", "A"), ("roll_ifeval", {"func_name": "validate_no_commas"})])
async def test_repeated_words_cost_the_share_of_repeated_triples(rm_type: str, label: Any) -> None:
    """The first response has four different triples of words; of the second one, two in four repeat the others."""
    fresh, repeated = await scored(r"\boxed{A} a b c d e", r"\boxed{A} x x x x x", label=label, rm_type=rm_type)
    assert (fresh["score"], repeated["score"]) == (1.0, 0.75)
    assert repeated["acc"] == 1.0


@pytest.mark.parametrize(
    "response, reward",
    [
        ("Hm.</think>The answer is \\boxed{5}.<|im_end|>", 1.0),
        ("<think>Hm, \\boxed{6}.</think>$5$", 1.0),
        ("2 + 3\n\n\\boxed{5}", 1.0),
        ("So \\boxed{5}.\n\nI hope this helps.", 0.0),
        ("\\boxed{5}", 0.0),
        ("Hm.</think>\\boxed{5}</think>", 0.0),
        ("I <think>hm</think>\\boxed{5}", 0.0),
    ],
)
async def test_an_answer_counts_only_after_the_reasoning_or_in_the_last_paragraph(response: str, reward: float) -> None:
    assert await scored(response, label="5", rm_type="roll_math") == [reward]


def test_text_without_reasoning_is_read_as_a_whole() -> None:
    assert after_reasoning(" a<|endoftext|><pad>") == "a"

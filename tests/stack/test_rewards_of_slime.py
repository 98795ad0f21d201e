"""Rewards that slime also has give its rewards, which `tests/oracles` recorded, except for listed differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from miles_async.rewards.functions.f1 import F1
from miles_async.rewards.functions.gpqa import Gpqa
from miles_async.rewards.mathematics import dapo, deepscaler, math
from miles_async.types import Sample
from tests.oracles.answer_pairs import chosen, lines, pairs
from tests.oracles.slime_reasons import REASONS
from tests.oracles.slime_rewards import VERDICTS, cases

RECORDED: dict[str, Any] = json.loads(VERDICTS.read_text(encoding="utf-8"))
REWARDS: dict[str, Callable[[Any, Sample], Any]] = {
    "math": math,
    "deepscaler": deepscaler,
    "dapo": lambda args, sample: dapo(args, sample)["score"],
    "f1": F1().score,
    "gpqa": Gpqa().score,
}
FAMILIES: dict[str, list[tuple[str, bool | None]]] = {
    "math": [(pair.family, pair.right) for pair in pairs()],
    "deepscaler": [(pair.family, pair.right) for pair in pairs()],
    "dapo": [(pair.family, pair.right) for pair in lines()],
    "f1": [("f1", None) for _ in cases("f1")],
    "gpqa": [(response, right) for response, _, _, right in chosen()],
}
"""The family of each case, and whether the answer is right; None where that is disputed."""
NEVER_RIGHT = [("i", r"\sqrt{-1}"), (r"\sqrt{-1}", "i")]
"""Right answers that neither project accepts: math-verify takes the letter i for a variable."""


def ours(kind: str) -> list[float]:
    return [
        REWARDS[kind](None, Sample(response=response, label=label, metadata=metadata))
        for response, label, metadata in cases(kind)
    ]


@pytest.mark.parametrize("kind", REWARDS)
def test_rewards_equal_those_of_slime_except_for_listed_differences_and_are_never_worse(kind: str) -> None:
    recorded = RECORDED[kind]
    assert [tuple(case[:3]) for case in recorded] == cases(kind)
    assert len(recorded) >= 500
    rewards = ours(kind)
    differences = Counter(
        (family, reward, given[3])
        for (family, _), reward, given in zip(FAMILIES[kind], rewards, recorded, strict=True)
        if reward != pytest.approx(given[3])
    )
    listed = {(family, reward, theirs): count for name, family, reward, theirs, count, _ in REASONS if name == kind}
    assert differences == listed
    wrong = [
        (response, label)
        for (response, label, _), (_, right), reward in zip(cases(kind), FAMILIES[kind], rewards, strict=True)
        if right is not None and (reward == 1.0) != right
    ]
    known = [
        (response, label)
        for response, label, _ in cases(kind)
        if any(label == expected and f"\\boxed{{{answer}}}" in response for answer, expected in NEVER_RIGHT)
    ]
    assert wrong == (known if kind in ("math", "deepscaler") else [])


def test_half_of_the_answers_are_right_and_half_wrong() -> None:
    """Otherwise a reward that accepts everything would pass."""
    for kind in ("math", "dapo", "gpqa"):
        verdicts = Counter(right for _, right in FAMILIES[kind])
        assert min(verdicts[True], verdicts[False]) > 150


@pytest.mark.parametrize(
    "response, label",
    [
        (r"\boxed{5.}", "5"),
        (r"\boxed 5", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{5\,000}", "5000"),
        (r"\boxed{1e-3}", "0.001"),
        (r"\boxed{ba}", "ab"),
        (r"\boxed{\text{5 cm}}", "5"),
        (r"\boxed{\triangle ABC}", "ABC"),
        (r"The answer is $\frac{1}{2}$.", "0.5"),
        (r"\boxed{5\text{ million dollars}}", "5,000,000"),
        ("He earns 5 million.", "5000000"),
        (r"\boxed{5\mathrm{~cm}}", r"5\text{ cm}"),
        (r"\boxed{5\text{ kilowatts}}", "5 kW"),
        (r"\boxed{5 euros}", "€5"),
        (r"\boxed{x\equiv 5\pmod 7}", "x = 5 (mod 7)"),
        (r"\boxed{2020-1-31}", "2020-01-31"),
    ],
)
def test_common_ways_to_write_the_answer_are_right(response: str, label: str) -> None:
    assert math(None, Sample(response=response, label=label)) == 1.0


@pytest.mark.parametrize(
    "response, label",
    [
        (r"\boxed{AB}", "BA"),
        (r"\boxed{NO}", "ON"),
        (r"\boxed{listen}", "silent"),
        (r"\boxed{5 cm}", "5 m"),
        (r"\boxed{\text{5 cm}}", "5 m"),
        (r"\boxed{\angle BAC}", r"\angle ABC"),
        (r"\boxed{12_8}", "12"),
        (r"\boxed{2}", "2t"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2} b h"),
        (r"\boxed{5\text{ kW}}", r"5\text{ MW}"),
        (r"\boxed{5\text{ mV}}", r"5\text{ V}"),
        (r"\boxed{5\text{ ms}}", r"5\text{ m}"),
        (r"\boxed{€5}", "$5"),
        (r"\boxed{10:30\text{ a.m.}}", r"10:30\text{ p.m.}"),
        (r"\boxed{2020-02-01}", "2020-01-02"),
        (r"\boxed{1:3:2}", "1:2:3"),
        (r"\boxed{x\equiv 3\pmod 7}", r"x\equiv 5\pmod 7"),
        (r"\boxed{x\equiv 5\pmod 7}", "7"),
        (r"\boxed{5\mod 8}", r"5\mod 7"),
        (r"\boxed{5}", "5 million"),
        (r"\boxed{5 million}", "5 billion"),
        (r"\boxed{}", ""),
        ("", ""),
        (r"\boxed{5} and then \boxed{}", "5"),
    ],
)
def test_answers_that_a_parser_of_formulas_confuses_are_wrong(response: str, label: str) -> None:
    assert math(None, Sample(response=response, label=label)) == 0.0

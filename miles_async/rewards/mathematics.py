r"""Rewards for mathematics: math-verify decides whether two answers are the same number, set or expression.

The parsers of math-verify and sympy can run for minutes on some answers, so these rewards run in grader processes with
a deadline (`rewards/grader_pool.py`). math-verify's own timeouts are off, because they need signals in the main thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from miles_async.rewards.answers import (
    after_thinking,
    answer_line,
    in_digits,
    is_text,
    label_of,
    last_boxed,
    last_part,
    numerals,
    split_modulus,
    split_unit,
    tidy,
    words_of,
)
from miles_async.types import Sample


def math(args: Any, sample: Sample) -> float:
    """Return 1 if the final answer equals the label, and 0 otherwise. A boxed answer takes precedence."""
    boxed = last_boxed(sample.response)
    return float(same(sample.response if boxed is None else boxed, label_of(sample), latex=boxed is not None))


def roll_math(args: Any, sample: Sample) -> float:
    """Return what `math` returns for the last part of the response."""
    return math(args, replace(sample, response=last_part(sample.response)))


def deepscaler(args: Any, sample: Sample) -> float:
    """Return 1 if the boxed answer after the reasoning equals one of the labels, and 0 otherwise.

    The reward is also 0 if the reasoning never ends.
    """
    boxed = last_boxed(after_thinking(sample.response) or "")
    labels = sample.label if isinstance(sample.label, list) else [label_of(sample)]
    return float(boxed is not None and any(same(boxed, last_boxed(str(label)) or str(label)) for label in labels))


def dapo(args: Any, sample: Sample) -> dict[str, Any]:
    """Return `score` (1 or -1), `acc` (1 or 0) and `pred`, the answer of the last `Answer:` line (arXiv 2503.14476)."""
    answer = answer_line(sample.response)
    correct = answer is not None and same(last_boxed(answer) or answer, label_of(sample))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": answer or ""}


def same(answer: str, label: str, *, latex: bool = True) -> bool:
    """Return whether answer and label are equal: as text, in their units, bases and moduli, and mathematically.

    `latex=True` reads the whole answer as one formula; `latex=False` searches for a formula in the answer. An empty
    answer or label equals nothing. A unit may be left out.
    """
    given, gold = tidy(answer), tidy(last_boxed(label) or label)
    if not given or not gold:
        return False
    if given == gold:
        return True
    if not latex:
        return _equal(split_unit(gold)[0], in_digits(answer))
    if is_text(given) or is_text(gold):
        return words_of(given) == words_of(gold) is not None
    if numerals(given) or numerals(gold):
        return numerals(given) == numerals(gold)
    (given, modulus), (gold, expected_modulus) = split_modulus(given), split_modulus(gold)
    if modulus != expected_modulus:
        return False
    (given, unit), (gold, expected) = split_unit(given), split_unit(gold)
    # Two nouns may name the same thing, and one of the units may be left out.
    if unit != expected and unit is not None and expected is not None:
        return False
    return _equal(gold, f"\\boxed{{{given}}}")


def _equal(gold: str, given: str) -> bool:
    """Return whether the formula `gold` equals the one that math-verify finds in the text `given`."""
    expected, found = (parse(text, _FORMS, parsing_timeout=None) for text in (f"\\boxed{{{gold}}}", given))
    # A label [1,2] also accepts 1 <= x <= 2, as a label 1 <= x <= 2 accepts [1,2].
    return bool(verify(expected, found, allow_set_relation_comp=True, timeout_seconds=None))


_DEFAULT = LatexExtractionConfig()
# The units of math-verify include variables: it takes 2t for 2.
_LATEX = LatexExtractionConfig(normalization_config=replace(_DEFAULT.normalization_config, units=False))
# The second form is for plain numbers such as 1,000.
_FORMS = [_LATEX, ExprExtractionConfig()]

r"""Rewards for mathematics: math-verify decides whether two answers are the same number, set or expression.

The parsers of math-verify and sympy can run for minutes on some answers, so these rewards run in grader processes with
a deadline (`rewards/graders.py`). The timeouts of math-verify are off, because they need signals in the main thread.
"""

from __future__ import annotations

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from miles_async.rewards.answers import after_thinking, answer_line, label_of, last_boxed
from miles_async.types import Sample


def math(args: Any, sample: Sample) -> float:
    """Return 1 if the final answer equals the label, and 0 otherwise. A boxed answer takes precedence."""
    boxed = last_boxed(sample.response)
    return float(same(sample.response if boxed is None else boxed, label_of(sample), latex=boxed is not None))


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
    """Return whether answer and label are mathematically equal.

    `latex=True` reads the whole answer as one formula; `latex=False` searches for a formula in the answer.
    """
    if answer.strip() == label.strip():
        return True
    gold = _parse(f"\\boxed{{{last_boxed(label) or label}}}")
    given = _parse(f"\\boxed{{{answer}}}") if latex else parse(answer, parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def _parse(formula: str) -> Any:
    # By default, math-verify also tries an expression parser, which reads plain numbers such as 1,000.
    return parse(formula, parsing_timeout=None) or parse(formula, [LatexExtractionConfig()], parsing_timeout=None)

r"""Rewards for mathematics; math-verify decides whether two answers are the same number, set or expression.

Its parsers and sympy can run for minutes on an unlucky answer, so these rewards run in a grader process with a
deadline (`rewards/graders.py`), and math-verify's own timeouts, which need signals in the main thread, stay off.
"""

from __future__ import annotations

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from miles_async.rewards.answers import after_thinking, answer_line, label_of, last_boxed
from miles_async.types import Sample


def math(args: Any, sample: Sample) -> float:
    """1 where the response's final answer equals the label, else 0; the last boxed answer counts most."""
    boxed = last_boxed(sample.response)
    return float(same(sample.response if boxed is None else boxed, label_of(sample), latex=boxed is not None))


def deepscaler(args: Any, sample: Sample) -> float:
    """1 where the boxed answer behind the reasoning equals one of the labels; 0 too where the reasoning never ends."""
    boxed = last_boxed(after_thinking(sample.response) or "")
    labels = sample.label if isinstance(sample.label, list) else [label_of(sample)]
    return float(boxed is not None and any(same(boxed, last_boxed(str(label)) or str(label)) for label in labels))


def dapo(args: Any, sample: Sample) -> dict[str, Any]:
    """`score` 1 or -1, `acc` 1 or 0, and `pred`, the answer that the last `Answer:` line gives."""
    answer = answer_line(sample.response)
    right = answer is not None and same(last_boxed(answer) or answer, label_of(sample))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer or ""}


def same(answer: str, label: str, *, latex: bool = True) -> bool:
    """`latex`: the answer is one formula, not a text that holds one somewhere."""
    if answer.strip() == label.strip():
        return True
    gold = _parsed(f"\\boxed{{{last_boxed(label) or label}}}")
    given = _parsed(f"\\boxed{{{answer}}}") if latex else parse(answer, parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def _parsed(formula: str) -> Any:
    # The expression parser beside the LaTeX one reads plain numbers such as 1,000.
    return parse(formula, parsing_timeout=None) or parse(formula, [LatexExtractionConfig()], parsing_timeout=None)

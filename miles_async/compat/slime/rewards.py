"""slime's names for rewards of single texts, for users' rewards that compose them.

They score as the built-in rewards of this project do. The parsers of formulas can run for minutes on some answers: set
`custom_rm_isolated` for a reward that calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_async.rewards.answers import last_boxed
from miles_async.rewards.functions.f1 import f1_score
from miles_async.rewards.functions.gpqa import Gpqa
from miles_async.types import Sample

__all__ = [
    "compute_gpqa_reward",
    "compute_score",
    "extract_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
]


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 if the boxed answer after the reasoning equals one of the labels, and 0 otherwise."""
    from miles_async.rewards.mathematics import deepscaler  # takes seconds, and few rewards need it

    return int(deepscaler(None, Sample(response=response, label=label)))


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """`score` (1 or -1), `acc` and `pred`, from the last `Answer:` line (arXiv 2503.14476).

    With `strict_box_verify`, the text in the last box must be the text of the answer. `pause_tokens_index` has four
    indices; the box then follows the last of them, less 100 characters.
    """
    if not strict_box_verify:
        from miles_async.rewards.mathematics import dapo

        return dapo(None, Sample(response=solution_str, label=ground_truth))
    start = -100 if pause_tokens_index is None else pause_tokens_index[-1] - 100
    found = last_boxed(solution_str[-300:][start:])
    return {"score": 1.0 if found == ground_truth else -1.0, "acc": found == ground_truth, "pred": found}


def extract_answer(passage: str) -> str | None:
    """The contents of the last box; None if there is none."""
    return last_boxed(passage)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the boxed answer equals the label."""
    from miles_async.rewards.mathematics import same

    boxed = last_boxed(solution_str)
    return boxed is not None and same(boxed, str(ground_truth))


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 if the response chooses the letter of the label, and 0 otherwise. Raises TypeError if it names no choice."""
    return Gpqa().score(None, Sample(response=response, label=label, metadata=dict(metadata or {})))

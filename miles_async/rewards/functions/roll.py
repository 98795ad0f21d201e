"""The rewards `roll_ifeval` and `roll_choice`, for rows of ROLL."""

from __future__ import annotations

import json
import re
from typing import Any

from miles_async.rewards.answers import after_reasoning, label_of, last_boxed
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample

_ANSWER_IS = re.compile("(?i)answer is")
_WORST = 0.5
"""What a response loses in which all sequences of three words are the same."""


class RollIfeval(Reward):
    """A dictionary. `acc` is 1 if the response satisfies the constraint of its row and 0 otherwise. `score` is this,
    less up to 0.5 for repeated words.

    The label is an object or JSON: `func_name`, one of the 25 constraints of RLVR-IFeval, and its arguments.
    """

    name = "roll_ifeval"
    compares = True
    may_be_dictionary = True
    wrong = {"score": 0.0, "acc": 0.0}

    def score(self, args: Any, sample: Sample) -> dict[str, float]:
        """Raises KeyError for an unknown constraint, and ValueError if the label is invalid or lacks an argument."""
        from miles_async.rewards.constraints import satisfies

        asked = json.loads(sample.label) if isinstance(sample.label, str) else sample.label
        if not isinstance(asked, dict) or not isinstance(name := asked.get("func_name"), str):
            raise ValueError(f"the label {sample.label!r:.80} is not an object with func_name")
        acc = float(satisfies(after_reasoning(sample.response), name, asked))
        return {"score": acc - _repetition(sample.response), "acc": acc}


class RollChoice(Reward):
    """A dictionary. `acc` is 1 if the response chooses the letter of the label and 0 otherwise. `score` is 1 for the
    right letter in a box, 0.5 without a box, -0.5 for a wrong one in a box and else -1, less up to 0.5 for repeated
    words.

    The first capital letter counts: of the last box, or else behind the last `answer is`, or else of the response.
    """

    name = "roll_choice"
    compares = True
    may_be_dictionary = True
    wrong = {"score": -1.0, "acc": 0.0}

    def score(self, args: Any, sample: Sample) -> dict[str, float]:
        """Raises ValueError if the label has no capital letter."""
        if (right := _letter(label_of(sample))) is None:
            raise ValueError(f"the label {sample.label!r:.80} has no capital letter")
        text = after_reasoning(sample.response)
        boxed = last_boxed(text)
        answer = _ANSWER_IS.split(text)[-1] if boxed is None else boxed
        is_right = _letter(answer) == right
        soft = (1.0 if is_right else -0.5) if boxed is not None else (0.5 if is_right else -1.0)
        return {"score": soft - _repetition(sample.response), "acc": float(is_right)}


def _letter(text: str) -> str | None:
    return next(filter(str.isupper, text), None)


def _repetition(response: str) -> float:
    """What repeated sequences of three words cost, from 0 to `_WORST`."""
    words = response.lower().split()
    found = list(zip(words, words[1:], words[2:], strict=False))
    return _WORST * (1 - len(set(found)) / len(found)) if found else 0.0

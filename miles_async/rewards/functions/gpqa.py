"""The reward `gpqa`."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from miles_async.rewards.answers import last_boxed
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample

_LETTER = r"([A-Z]|[a-z](?=[^\S\n]*+(?:[).,:*]|$)))"
_CHOICES = (
    re.compile(rf"(?m)(?i:answer)(?:[^\S\n]++(?i:is))?+(?:\s*+[:=]\s*+|[^\S\n]*+)\**+\(?+{_LETTER}\b\)?"),
    re.compile(rf"(?m)\b(?i:option|choice)[^\S\n]++\(?+{_LETTER}\b\)?"),
    re.compile(r"\b([A-Z])[^\S\n]++is[^\S\n]++(?:the[^\S\n]++)?+(?:correct|right)\b"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\b([A-Z])\b"),
)
"""Patterns for the chosen letter of a multiple-choice answer, the most specific first.

The repetitions are possessive (`*+`): otherwise 800 newlines after "answer is" take minutes of backtracking.
"""
_ANSWER_IS = re.compile(r"(?i)\banswer(?: is)?\b")
_DEFAULT_LETTERS = string.ascii_uppercase[:10]


class Gpqa(Reward):
    """1 if the response chooses the letter of the label, and 0 otherwise (GPQA, arXiv 2311.12022).

    `metadata["correct_letter"]` or the label names the right choice. The label is a letter, the index of a choice, or
    the text of a choice. `metadata["choices"]` is a list, or a dictionary whose keys may be the letters. Only the
    letters of choices count: those of `metadata["valid_letters"]`, of the choices, or else A to J. A response without
    such a letter is right if it is the text of the right choice.
    """

    name = "gpqa"

    def score(self, args: Any, sample: Sample) -> float:
        """Raises TypeError if the label names no choice."""
        choices = _lettered_choices(sample.metadata)
        expected = _expected_letter(sample, choices)
        text = sample.response.rpartition("</think>")[2]
        text = last_boxed(text) or text
        for pattern in _CHOICES:
            if found := [letter for letter in map(str.upper, pattern.findall(text)) if letter in choices]:
                return float(found[-1] == expected)
        said = _plain(_ANSWER_IS.split(text)[-1])
        return float(bool(said) and said == _plain(choices[expected]))


def _lettered_choices(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the text of each choice by its letter; the texts are empty if the metadata has no choices."""
    choices = metadata.get("choices") or {}
    keys = [str(key).strip().upper() for key in choices] if isinstance(choices, Mapping) else []
    texts = [str(text) for text in (choices.values() if isinstance(choices, Mapping) else choices)]
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if not letters and keys and all(len(key) == 1 and key.isalpha() for key in keys):
        letters = keys
    letters = letters or list(string.ascii_uppercase[: len(texts)] or _DEFAULT_LETTERS)
    return dict(zip_longest(letters, texts[: len(letters)], fillvalue=""))


def _expected_letter(sample: Sample, choices: dict[str, str]) -> str:
    label, given = sample.label, sample.metadata.get("correct_letter")
    if isinstance(label, (int, float)) and not isinstance(label, bool) and not given and 0 <= label < len(choices):
        return list(choices)[int(label)]
    letter = str(given or label).strip("() ").upper()
    if letter in choices:
        return letter
    for letter, text in choices.items():
        if isinstance(label, str) and _plain(text) and _plain(text) == _plain(label):
            return letter
    raise TypeError(
        f"the label {given or label!r} is neither one of the letters {', '.join(choices)}, nor the number or text of a "
        "choice in metadata['choices']"
    )


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))

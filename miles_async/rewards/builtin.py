"""Built-in rewards that compare text: fast functions `fn(args, sample)` without side effects.

The setting `rm_type` selects a reward by name; `args` is the flat view of the configuration, which these ignore.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from miles_async.rewards.answers import label_of, last_boxed
from miles_async.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHOICES = (
    re.compile(r"(?i)answer(?:\s++is)?+\s*+[:=]?+\s*+\**+\s*+\(?+([A-Z])\b\)?"),
    re.compile(r"(?i)\b(?:option|choice)\s++\(?+([A-Z])\b\)?"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\b([A-Z])\b"),
)
"""Patterns for the chosen letter of a multiple-choice answer, the most specific first.

The repetitions are possessive (`*+`): otherwise 800 newlines after "answer is" take minutes of backtracking.
"""


def exact(args: Any, sample: Sample) -> float:
    """Return 1 if the response equals the label, apart from surrounding white space, and 0 otherwise."""
    return float(sample.response.strip() == label_of(sample).strip())


def f1(args: Any, sample: Sample) -> float:
    """Return the F1 score over words, without articles and punctuation (SQuAD, arXiv 1606.05250).

    If the label is a list of accepted answers, the best score over the list counts.
    """
    labels = sample.label if isinstance(sample.label, list) else [label_of(sample)]
    return max(_f1(sample.response, str(label)) for label in labels)


def _f1(response: str, label: str) -> float:
    given, expected = _words(response), _words(label)
    # A yes-or-no answer is right or wrong: "yes and no" gets no partial credit for containing "yes".
    if given != expected and {"yes", "no", "noanswer"} & {" ".join(given), " ".join(expected)}:
        return 0.0
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected)) if common else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def gpqa(args: Any, sample: Sample) -> float:
    """Return 1 if the response chooses the letter of the label, and 0 otherwise (GPQA, arXiv 2311.12022).

    The label is a letter, the index of a choice, or the text of a choice in `metadata["choices"]`. Raises TypeError for
    any other label.
    """
    expected = _expected_letter(sample)
    text = last_boxed(sample.response) or sample.response.rpartition("</think>")[2]
    for pattern in _CHOICES:
        if found := pattern.findall(text):
            return float(found[-1].upper() == expected)
    return 0.0


def _expected_letter(sample: Sample) -> str:
    label, choices = sample.label, sample.metadata.get("choices", [])
    if isinstance(label, int) and not isinstance(label, bool):
        return string.ascii_uppercase[label]
    if isinstance(label, str) and len(label.strip("() ")) == 1:
        return label.strip("() ").upper()
    if label in choices:
        return string.ascii_uppercase[choices.index(label)]
    raise TypeError(f"the label {label!r} is neither a letter, nor a number, nor one of metadata['choices']")

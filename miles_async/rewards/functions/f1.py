"""The reward `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from miles_async.rewards.answers import label_of
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class F1(Reward):
    """The F1 score over words, without articles and punctuation (SQuAD, arXiv 1606.05250).

    If the label is a list of accepted answers, the best score over the list counts.
    """

    name = "f1"
    compares = True

    def score(self, args: Any, sample: Sample) -> float:
        labels = sample.label if isinstance(sample.label, list) else [label_of(sample)]
        return max(f1_score(sample.response, str(label))[0] for label in labels)


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """The F1 score over words, the precision and the recall."""
    given, expected = _words(prediction), _words(ground_truth)
    # A yes-or-no answer is right or wrong: "yes and no" gets no partial credit for containing "yes".
    if given != expected and {"yes", "no", "noanswer"} & {" ".join(given), " ".join(expected)}:
        return 0.0, 0.0, 0.0
    common = sum((Counter(given) & Counter(expected)).values())
    if not common:
        return 0.0, 0.0, 0.0
    return 2 * common / (len(given) + len(expected)), common / len(given), common / len(expected)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()

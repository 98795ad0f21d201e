"""The built-in rewards that `rm_type` names, those that need nothing but text: `fn(args, sample)`, quick and pure."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from miles_async.errors import UserError
from miles_async.rewards.answers import label_of, last_boxed
from miles_async.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHOICES = (
    re.compile(r"(?i)answer(?:\s+is)?\s*[:=]?\s*\**\s*\(?([A-Z])\b\)?"),
    re.compile(r"(?i)\b(?:option|choice)\s+\(?([A-Z])\b\)?"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\b([A-Z])\b"),
)
"""How a choice is named, the surest way first."""


def exact(args: Any, sample: Sample) -> float:
    """1 where the stripped response is the label, else 0."""
    return float(sample.response.strip() == label_of(sample).strip())


def f1(args: Any, sample: Sample) -> float:
    """Harmonic mean of precision and recall over words, articles and punctuation aside (SQuAD, 1606.05250).

    The best over several labels, where the label is a list.
    """
    labels = sample.label if isinstance(sample.label, list) else [label_of(sample)]
    return max(_f1(sample.response, str(label)) for label in labels)


def _f1(response: str, label: str) -> float:
    said, wanted = _words(response), _words(label)
    # A yes or no is right or wrong: half a word of it is nothing.
    if said != wanted and {"yes", "no", "noanswer"} & {" ".join(said), " ".join(wanted)}:
        return 0.0
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def gpqa(args: Any, sample: Sample) -> float:
    """1 where the response chooses the label's letter (GPQA, 2311.12022).

    A label that is no letter is looked up in `metadata["choices"]`. Raises TypeError where that does not help.
    """
    wanted = _letter(sample)
    text = last_boxed(sample.response) or sample.response.rpartition("</think>")[2]
    for pattern in _CHOICES:
        if found := pattern.findall(text):
            return float(found[-1].upper() == wanted)
    return 0.0


def _letter(sample: Sample) -> str:
    label, choices = sample.label, sample.metadata.get("choices", [])
    if isinstance(label, int) and not isinstance(label, bool):
        return string.ascii_uppercase[label]
    if isinstance(label, str) and len(label.strip("() ")) == 1:
        return label.strip("() ").upper()
    if label in choices:
        return string.ascii_uppercase[choices.index(label)]
    raise TypeError(f"the label {label!r} is neither a letter, nor a number, nor one of metadata['choices']")


class ReasoningGymReward:
    """reasoning-gym's own scorer of one task, on the stripped response; 1 is right, many tasks give partial credit.

    Needs the entry that the data source left in `sample.metadata["entry"]`.
    """

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Raises UserError when the task is unknown or the settings do not fit it."""
        # Importing reasoning_gym takes seconds: only runs that use it pay.
        import reasoning_gym

        try:
            self._score = reasoning_gym.create_dataset(task, **settings).score_answer
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"rm_type reasoning_gym cannot score {task!r} with {dict(settings)}: {error}") from error

    def __call__(self, args: Any, sample: Sample) -> float:
        return float(self._score(sample.response.strip(), sample.metadata["entry"]))

"""The reward `data_source`, which is another one for each data set, and the rewards that only rows of verl need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_async.errors import UserError
from miles_async.rewards.answers import label_of
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample

_REWARDS = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "dapo"),
    **dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"), "math"),
    **dict.fromkeys(("numina_cn_k12", "numina_olympiads"), "math"),
}
"""The reward of each data set; those of AIME, whose names begin with `aime`, have `dapo`."""
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_LAST_CHARACTERS = 300


class DataSource(Reward):
    """The reward that verl gives a row by the name of its data set, `data_source`."""

    name = "data_source"
    compares = True
    may_be_dictionary = True

    def of_row(self, metadata: Mapping[str, Any]) -> str:
        source = metadata.get("data_source")
        if isinstance(source, str) and source.startswith("aime"):
            return "dapo"
        if source not in _REWARDS:
            given = "no data_source" if source is None else f"data_source {source!r}, which has no reward"
            raise UserError(f"a row has {given}: set another rm_type than data_source, or custom_rm_path")
        return _REWARDS[source]

    def score(self, args: Any, sample: Sample) -> float:
        raise UserError(
            f"rm_type data_source only chooses another reward: set rm_type to {self.of_row(sample.metadata)}"
        )


class Gsm8k(Reward):
    """1 if the number after the last `####` at the end of the response equals the label, and 0 otherwise."""

    name = "gsm8k"
    compares = True

    def score(self, args: Any, sample: Sample) -> float:
        answers = _ANSWER.findall(sample.response[-_LAST_CHARACTERS:])
        return float(bool(answers) and answers[-1].replace(",", "") == label_of(sample).strip())

"""The reward `ifeval`."""

from __future__ import annotations

from typing import Any

from miles_async.rewards.plugin import Reward
from miles_async.types import Sample


class IfEval(Reward):
    """The fraction of instructions that the response follows, from 0 to 1 (IFEval, arXiv 2311.07911).

    The fraction is 1 exactly if the response counts in the prompt-level accuracy of the benchmark.
    """

    name = "ifeval"

    def score(self, args: Any, sample: Sample) -> float:
        """Raises KeyError for an unknown instruction, and ValueError if names and arguments differ in number or
        arguments are missing."""
        from miles_async.rewards.instructions import follows

        names: list[str] = sample.metadata["instruction_id_list"]
        arguments: list[dict[str, Any] | None] = sample.metadata.get("kwargs") or [{}] * len(names)
        if len(arguments) != len(names):
            raise ValueError(f"metadata has {len(names)} instructions, but {len(arguments)} kwargs")
        followed = [follows(sample.response, name, given or {}) for name, given in zip(names, arguments, strict=True)]
        return sum(followed) / len(followed)

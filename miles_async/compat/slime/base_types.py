"""slime's names for the results of rollout and evaluation functions. A function may return the contents directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.types import Sample

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn"]


@dataclass
class RolloutFnTrainOutput:
    """The groups of a batch; `metrics` are written to the log."""

    samples: Sequence[Sequence[Sample]]
    metrics: Mapping[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The scores of an evaluation by data set; `metrics` are written to the log."""

    data: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a plain rollout function. What it returns without metrics gets the form of this module."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)

"""slime's names for the results of rollout and evaluation functions. A function may return the contents directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.types import Sample


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

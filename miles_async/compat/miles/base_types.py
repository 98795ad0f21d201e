"""Miles' names for what its functions take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from miles_async.compat.slime.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Sample

if TYPE_CHECKING:
    from miles_async.compat.miles.inference_rollout import GenerateState

__all__ = [
    "GenerateFnInput",
    "GenerateFnOutput",
    "RolloutFnBaseInput",
    "RolloutFnConstructorInput",
    "RolloutFnEvalInput",
    "RolloutFnEvalOutput",
    "RolloutFnInput",
    "RolloutFnOutput",
    "RolloutFnTrainInput",
    "RolloutFnTrainOutput",
    "call_rollout_fn",
]


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What an object that generates batches is created with."""

    args: Arguments
    data_source: RolloutSource


@dataclass(frozen=True)
class RolloutFnBaseInput:
    """What `RolloutFnTrainInput` and `RolloutFnEvalInput` have in common."""

    evaluation: ClassVar[bool]
    """Whether an evaluation is asked for instead of a batch."""
    rollout_id: int


@dataclass(frozen=True)
class RolloutFnTrainInput(RolloutFnBaseInput):
    """Asks for the groups of a batch."""

    evaluation = False
    weight_version: int | None = None
    """The newest weight version on every engine."""


@dataclass(frozen=True)
class RolloutFnEvalInput(RolloutFnBaseInput):
    """Asks for the scores of an evaluation. A run sets `rollout_id` only, because its own engines evaluate."""

    evaluation = True
    generate_state: GenerateState | None = None
    weight_version: str | None = None
    hf_dir: str | None = None


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput
RolloutFnOutput = RolloutFnTrainOutput | RolloutFnEvalOutput


@dataclass(frozen=True)
class GenerateFnInput:
    """What a generate function is called with."""

    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    """SGLang's dictionary."""
    evaluation: bool

    @property
    def args(self) -> Arguments:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """The finished sample, or the list of the samples that are the segments of its trajectory."""

    samples: Sample | list[Sample]

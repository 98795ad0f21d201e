"""Calls rollout classes and generate functions of Miles (`forms.py`)."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from miles_async.compat.miles.base_types import (
    GenerateFnInput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnTrainInput,
)
from miles_async.compat.miles.inference_rollout import GenerateState
from miles_async.compat.slime.async_utils import run
from miles_async.modes.mode import mode_of
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Sample

Function = Callable[..., Any]
_creating = threading.Lock()
"""Held while an object is created, because a batch and an evaluation may begin at the same time."""


class _Created(NamedTuple):
    rollout: Function
    args: Arguments
    """The arguments that the object was created with, which it keeps."""


def rollout_function(rollout_class: type) -> Function:
    """A plain function that calls the object of a class, which all such functions of a run share.

    As in Miles, coroutines of all objects run in one event loop in a separate thread.
    """

    def created(args: Arguments, source: RolloutSource) -> _Created:
        states = args.sample_service.states
        with _creating:
            if rollout_class not in states:
                own = args.with_values()
                states[rollout_class] = _Created(rollout_class(RolloutFnConstructorInput(own, source)), own)
        found: _Created = states[rollout_class]
        return found

    def call(args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False) -> Any:
        rollout, own = created(args, data_source)
        if evaluation:
            output = rollout(RolloutFnEvalInput(rollout_id))
        else:
            # A call that replaces groups of a batch asks for fewer groups than the first call.
            own.take_values(args)
            output = rollout(RolloutFnTrainInput(rollout_id, data_source.live_version))
        return run(output) if inspect.iscoroutine(output) else output

    mode_of(rollout_class)(call)
    return call


def generate_function(function: Any) -> Function:
    """A generate function with slime's arguments that calls one of Miles, or an object of a class."""

    @cache
    def called() -> Any:
        return function() if inspect.isclass(function) else function

    async def generate(
        args: Arguments, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        output = await called()(GenerateFnInput(GenerateState(args), sample, sampling_params, evaluation))
        match output:
            case object(samples=samples):
                return samples
            case _:
                return output

    return generate

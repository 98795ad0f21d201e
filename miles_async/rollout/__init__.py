"""Rollout functions: the shipped ones, and what users' own functions are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from miles_async.modes.mode import RolloutMode
from miles_async.modes.shipped import OwnWorker, Stream

__all__ = ["RolloutMode", "fully_async"]

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def fully_async(function: Function) -> Function: ...


@overload
def fully_async(*, keeps_groups: bool = False) -> RolloutMode: ...


def fully_async(function: Any = None, *, keeps_groups: bool = False) -> Any:
    """Declare that a rollout function is fully asynchronous, which is the default of `--schedule` for it.

        @fully_async
        async def rollout(args, rollout_id, data_source, evaluation=False):
            return await data_source.drain_stream(rollout_id, args.rollout_batch_size)

    With `keeps_groups`, the function has a worker that generates between calls. The prompts that it takes with
    `data_source.get_samples` are in flight until the function returns them; the pipeline's producer does not run.
    """
    mode = OwnWorker() if keeps_groups else Stream()
    return mode if function is None else mode(function)

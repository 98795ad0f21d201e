"""Recognises functions in the form of Miles' classes, which take one argument `input`.

    class Rollout:                                        # rollout_function_path, eval_function_path
        def __init__(self, input): ...                    # input.args, input.data_source
        async def __call__(self, input): ...              # input.rollout_id, input.evaluation

    async def generate(input) -> GenerateFnOutput: ...    # custom_generate_function_path, or a class

A rollout class has one object per rollout worker. If it both generates and evaluates, it is the same object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from miles_async.errors import UserError

Function = Callable[..., Any]


def in_slimes_form(function: Any, name: str, setting: str) -> Function | None:
    """A function with slime's arguments that calls one of Miles; None if `function` is not one.

    `name` begins error messages. Raises UserError for a class whose objects cannot be called.
    """
    is_class = inspect.isclass(function)
    if setting in ("rollout_function_path", "eval_function_path") and is_class:
        _check_class(function, name, created_with=1)
        if _has(function, "evaluate_checkpoint"):
            raise UserError(
                f"{name} evaluates exported checkpoints, which a run does not pass to functions: unset it, and set "
                "save_hf to evaluate the checkpoints with another program"
            )
        # Only here, because most runs need none of what this module imports.
        from miles_async.compat.miles.functions import rollout_function

        return rollout_function(function)
    if setting == "custom_generate_function_path" and (is_class or _takes_input(function)):
        if is_class:
            _check_class(function, name, created_with=0)
        if inspect.iscoroutinefunction(function.__call__ if is_class else function):
            from miles_async.compat.miles.functions import generate_function

            return generate_function(function)
    return None


def _check_class(function: Any, name: str, *, created_with: int) -> None:
    """Raises UserError unless objects are created with this number of arguments, and called with one."""
    if not (_takes(function, created_with) and _has(function, "__call__") and _takes(function.__call__, 2)):
        parameters = ", ".join(["self", *["input"] * created_with])
        raise UserError(
            f"{name} is a class: define __init__({parameters}) and __call__(self, input), or name a function"
        )


def _has(function: Any, method: str) -> bool:
    return any(method in vars(base) for base in function.__mro__)


def _takes_input(function: Function) -> bool:
    """Whether a generate function has Miles' form. Others take three arguments, and the first is not `input`."""
    if not _takes(function, 1):
        return False
    return next(iter(inspect.signature(function).parameters)) == "input" or not _takes(function, 3)


def _takes(function: Function, count: int) -> bool:
    """Whether a function can be called with this number of arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):  # ValueError: a callable without a signature, such as one written in C
        return False
    return True

"""Calls of users' functions, and what they may raise."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from miles_async.errors import UserError
from miles_async.json_values import shown

USER_CODE_ERRORS = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""What a user's function may raise. SystemExit and KeyboardInterrupt would end the process, perhaps with exit code 0.
CancelledError, for example of a task that the function awaits, would end the task that calls the function, without a
word. A handler around an `await` passes real cancellations on (`is_cancellation`).

Python raises KeyboardInterrupt for Ctrl-C only in the main thread, and no process of a run handles Ctrl-C there.
"""


def is_cancellation(error: BaseException) -> bool:
    """Whether the current task is being cancelled, so that `error` is not that of the user's function it awaits."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def call_plain_or_async(
    function: Callable[..., Any],
    *arguments: Any,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread,
    **keywords: Any,
) -> Any:
    """Call a user's function, and await its result if it is awaitable.

    `in_thread` calls a plain function in a thread, because the function may block.
    """
    if is_async(function):
        return await function(*arguments, **keywords)
    result = await in_thread(partial(function, *arguments, **keywords))
    return await result if inspect.isawaitable(result) else result


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the call of such an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call_in_thread(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a user's function in a thread, because it may write files. What it returns has no effect.

    Raises UserError, which begins with `name`, if the function raises.
    """
    try:
        await asyncio.to_thread(function, *arguments)
    except USER_CODE_ERRORS as error:
        if is_cancellation(error):
            raise
        raise UserError(f"{name} raised {shown(error)}: correct the function") from error

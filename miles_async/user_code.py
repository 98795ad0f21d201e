"""What a function of a user may raise."""

from __future__ import annotations

import asyncio

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

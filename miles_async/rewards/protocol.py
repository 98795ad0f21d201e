"""What a grader process answers: JSON objects, one per line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Cause = Literal["limit", "infrastructure", "function"]


class Started(msgspec.Struct):
    """The first answer of a grader process."""

    calls_restricted: bool = False
    """The process that scores can use only the system calls that computing needs."""
    files_restricted: bool = False
    """It can read only the files of Python."""


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The reward of a sample or group, or the reason why there is none."""

    reward: Any = None
    error: str | None = None
    """The end of a sentence."""
    cause: Cause | None = None
    """`limit` if the process reached a limit, `infrastructure`, or `function` for any other error of the function."""


def failure(sentence: str, cause: Cause) -> bytes:
    """Return the answer for a sample or group without a reward."""
    return msgspec.json.encode(Answer(error=sentence, cause=cause))


def ended(exit_code: int) -> str:
    """Say how a process ended, as the end of a sentence."""
    if exit_code < 0:
        return f"ended its process by signal {-exit_code}"
    return f"ended its process with exit code {exit_code}"

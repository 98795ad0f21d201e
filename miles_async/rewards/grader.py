"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads one JSON object per line from standard input and answers each line with one JSON object on standard
output. The first line holds `path` (of the reward function), `setting` (that names it) and `args`; the answer is sent
once the function is imported. Every further line is a sample, or a list of samples if the function scores groups. The
process ends when its standard input is closed, so it never outlives the run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import msgspec

from miles_async.config.user_functions import load_function
from miles_async.types import Sample


def main() -> None:
    """Answer lines from standard input until it is closed."""
    # Standard output carries only answers. Text that the user's function prints is redirected to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = msgspec.json.decode(sys.stdin.buffer.readline())
    function = load_function(task["path"], setting=task["setting"])
    args = SimpleNamespace(**task["args"])
    answers.write(b'{"ready":true}\n')
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(grade(function, args, msgspec.json.decode(line)) + b"\n")
        answers.flush()


def grade(function: Any, args: Any, message: Any) -> bytes:
    """Return `{"reward": ...}` as JSON, or `{"error": ...}` if the function raises or returns no JSON value."""
    try:
        if isinstance(message, list):
            reward = function(args, [Sample.from_dict(values) for values in message])
        else:
            reward = function(args, Sample.from_dict(message))
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        return msgspec.json.encode({"reward": reward}, enc_hook=float)
    except Exception as error:
        # User code, or a parser that reads text from a model, can raise any exception.
        return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()

"""A process that grades: `python -m miles_async.rewards.grader`. One JSON line in, one JSON line out.

The first line names the function and the arguments it is to see, and is answered when the function is imported; every
further one is a sample, or a group of samples where the function scores groups. The process ends with its standard
input, so it never outlives the run, whatever became of that.
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
    """Whatever the function prints goes to stderr: stdout is the answers' alone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = msgspec.json.decode(sys.stdin.buffer.readline())
    function = load_function(task["path"], setting=task["setting"])
    args = SimpleNamespace(**task["args"])
    answers.write(b'{"ready":true}\n')
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(graded(function, args, msgspec.json.decode(line)) + b"\n")
        answers.flush()


def graded(function: Any, args: Any, work: Any) -> bytes:
    """`{"reward": ...}`, or `{"error": ...}` where the function raised or its answer is no reward."""
    try:
        given = [Sample.from_dict(each) for each in work] if isinstance(work, list) else Sample.from_dict(work)
        reward = function(args, given)
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        return msgspec.json.encode({"reward": reward}, enc_hook=float)
    except Exception as error:
        # It is the user's code, or a parser over a model's text: it may raise anything.
        return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()

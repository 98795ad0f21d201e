"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads pickled requests from standard input and answers each with one JSON object per line on standard
output. Pickle keeps every type of a sample's metadata; only the parent process writes requests. Answers are JSON,
because the parent does not trust them. The first request is a dictionary with the fields of `Graders`; the answer is
sent once the function is imported and the process is confined. Every further request is the list of the samples of a
group. The process ends when its standard input is closed, so it never outlives the run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import msgspec

from miles_async.config.user_functions import install_slime_imports, load_function
from miles_async.rewards.confinement import confine, limit_cpu
from miles_async.types import Sample


def main() -> None:
    """Answer requests from standard input until it is closed."""
    # The reward function must not read requests or write answers: its standard input is empty, and what it prints is
    # redirected to standard error.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = pickle.load(requests)
    if task["args"].get("slime_imports"):
        install_slime_imports()
    function: Any = load_function(task["path"], setting=task["setting"])
    args = SimpleNamespace(**task["args"])
    if isinstance(function, type):
        function = function(args)
    confined = task["memory_bytes"] is not None
    network_closed = confined and confine(task["memory_bytes"])
    answers.write(msgspec.json.encode({"network_closed": network_closed}) + b"\n")
    answers.flush()
    while True:
        try:
            samples = pickle.load(requests)
        except EOFError:
            return
        if confined:
            limit_cpu(task["timeout_seconds"])
        answers.write(grade(function, args, samples, whole_groups=task["whole_groups"]) + b"\n")
        answers.flush()


def grade(function: Any, args: Any, samples: list[Sample], *, whole_groups: bool) -> bytes:
    """Return `{"rewards": [...]}` as JSON, or `{"error": ...}` if the function raises or returns no JSON value."""
    try:
        rewards = asyncio.run(_rewards(function, args, samples, whole_groups))
        return msgspec.json.encode({"rewards": rewards}, enc_hook=float)
    except SampleError as error:
        return msgspec.json.encode({"error": str(error)})
    except Exception as error:
        return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


class SampleError(Exception):
    """The reward function raised for one sample; the message names the error and the sample."""


async def _rewards(function: Any, args: Any, samples: list[Sample], whole_groups: bool) -> Any:
    if whole_groups:
        return await _call(function, args, samples)
    return await asyncio.gather(*(_score(function, args, sample) for sample in samples))


async def _score(function: Any, args: Any, sample: Sample) -> Any:
    try:
        return await _call(function, args, sample)
    except Exception as error:
        # User code, or a parser that reads text from a model, can raise any exception.
        raise SampleError(f"{type(error).__name__}: {error} (sample {sample.index})") from error


async def _call(function: Any, args: Any, scored: Sample | list[Sample]) -> Any:
    reward = function(args, scored)
    return await reward if inspect.isawaitable(reward) else reward


if __name__ == "__main__":
    main()

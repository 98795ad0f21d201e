"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads pickled requests from standard input and answers each with one JSON object per line on standard
output. Pickle keeps every type of a sample's metadata; only the parent process writes requests. Answers are JSON,
because the parent does not trust them. The first request is a dictionary with the fields of `Graders`; the answer is
sent once the function is imported and the process is confined. Every further request is a list of samples. The process
ends when its standard input is closed, so it never outlives the run.
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
from miles_async.errors import is_infrastructure
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
        answers.write(grade(function, args, samples, task["whole_groups"], task["timeout_seconds"]) + b"\n")
        answers.flush()


def grade(function: Any, args: Any, samples: list[Sample], whole_groups: bool, timeout_seconds: float) -> bytes:
    """Return one JSON object: `results` has `{"reward": ...}` or `{"error": ..., "cause": ...}` for each sample.

    `cause` is one of those in `cause_of`. With `whole_groups`, an error takes the place of `results`. An async function
    has `timeout_seconds` for each sample; the parent process enforces the deadline of a plain one.
    """
    answer = asyncio.run(_grade(function, args, samples, whole_groups, timeout_seconds))
    return msgspec.json.encode(answer)


def cause_of(error: BaseException) -> str:
    """`limit` if the process reached a limit, `infrastructure`, or `function` for any other error of the function."""
    if isinstance(error, MemoryError | RecursionError):
        return "limit"
    return "infrastructure" if is_infrastructure(error) else "function"


async def _grade(
    function: Any, args: Any, samples: list[Sample], whole_groups: bool, timeout_seconds: float
) -> dict[str, Any]:
    if not whole_groups:
        scores = (_score(function, args, sample, timeout_seconds) for sample in samples)
        return {"results": await asyncio.gather(*scores)}
    answer = await _score(function, args, samples, None)
    if "error" in answer:
        return answer
    rewards = msgspec.json.decode(answer["reward"])
    if not isinstance(rewards, list):
        return _failure(TypeError(f"it returned a {type(rewards).__name__}, not a list"))
    return {"results": [{"reward": reward} for reward in rewards]}


async def _score(
    function: Any, args: Any, scored: Sample | list[Sample], timeout_seconds: float | None
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            reward = await _call(function, args, scored)
        # Encoded here, so that a reward that is no JSON value fails its own sample only.
        return {"reward": msgspec.Raw(msgspec.json.encode(reward, enc_hook=float))}
    except Exception as error:
        # User code, or a parser that reads text from a model, can raise any exception.
        if limit.expired():
            sentence = f"took longer than {timeout_seconds:g} s (reward_timeout_seconds)"
            return {"error": sentence, "cause": "infrastructure"}
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": f"raised {type(error).__name__}: {error}", "cause": cause_of(error)}


async def _call(function: Any, args: Any, scored: Sample | list[Sample]) -> Any:
    reward = function(args, scored)
    return await reward if inspect.isawaitable(reward) else reward


if __name__ == "__main__":
    main()

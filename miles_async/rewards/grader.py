"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads pickled requests from standard input and answers each with one JSON object per line on standard
output. Pickle keeps every type of a sample's metadata; only the parent process writes requests. Answers are JSON,
because the parent does not trust them. The first request is a dictionary with the fields of `Graders`; the answer is
sent once the function is imported and the process is confined. Every further request is a list of samples, and has one
answer for each sample, or one for all with `whole_groups`. The process ends when its standard input is closed, so it
never outlives the run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
from collections.abc import Awaitable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from miles_async import cpu_compat
from miles_async.config.user_functions import install_slime_imports, load_function
from miles_async.errors import is_infrastructure
from miles_async.json_values import shown_error
from miles_async.rewards.confinement import confine, limit_cpu
from miles_async.types import Sample
from miles_async.user_code import USER_CODE_ERRORS


def main() -> None:
    """Answer requests from standard input until it is closed."""
    # The reward function must not read requests or write answers: its standard input is empty, and what it prints is
    # redirected to standard error.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    cpu_compat.install()
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
        # Each sample has the whole CPU time.
        if confined:
            limit_cpu(task["timeout_seconds"])
        for answer in grade(function, args, samples, task):
            answers.write(answer + b"\n")
            answers.flush()
            if confined:
                limit_cpu(task["timeout_seconds"])


def grade(function: Any, args: Any, samples: list[Sample], task: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a JSON object for each sample, or one for the group with `whole_groups`: `reward`, or `error` and `cause`.

    `cause` is one of those in `cause_of`. A plain function scores one sample after the other. An async function scores
    all at once, and has `timeout_seconds` for each; the parent process enforces the deadline of a plain one.
    """
    if task["is_async"] and not task["whole_groups"]:
        yield from asyncio.run(_grade_at_once(function, args, samples, task["timeout_seconds"]))
        return
    for scored in [samples] if task["whole_groups"] else samples:
        try:
            reward = function(args, scored)
            yield _answer(asyncio.run(_awaited(reward)) if inspect.isawaitable(reward) else reward)
        except USER_CODE_ERRORS as error:
            # User code, or a parser that reads text from a model, can raise any exception.
            yield _failure(f"raised {shown_error(error)}", cause_of(error))


def cause_of(error: BaseException) -> str:
    """`limit` if the process reached a limit, `infrastructure`, or `function` for any other error of the function."""
    if isinstance(error, MemoryError | RecursionError):
        return "limit"
    return "infrastructure" if is_infrastructure(error) else "function"


async def _grade_at_once(function: Any, args: Any, samples: list[Sample], timeout_seconds: float) -> list[bytes]:
    async def score(sample: Sample) -> bytes:
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                return _answer(await function(args, sample))
        except USER_CODE_ERRORS as error:
            if limit.expired():
                return _failure(f"took longer than {timeout_seconds:g} s (reward_timeout_seconds)", "infrastructure")
            return _failure(f"raised {shown_error(error)}", cause_of(error))

    return await asyncio.gather(*map(score, samples))


async def _awaited(reward: Awaitable[Any]) -> Any:
    return await reward


def _answer(reward: Any) -> bytes:
    """Raises TypeError if the reward is not a JSON value."""
    return msgspec.json.encode({"reward": reward}, enc_hook=float)


def _failure(sentence: str, cause: str) -> bytes:
    return msgspec.json.encode({"error": sentence, "cause": cause})


if __name__ == "__main__":
    main()

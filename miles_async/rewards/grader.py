"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads pickled requests from standard input, each behind a nonce, and answers with one JSON object per line
on standard output. Each line begins with the nonce of its request, so that what a reward writes to the pipe is no
answer to a later request. Pickle keeps every type of a sample's metadata; only the parent process writes requests.
Answers are JSON, because the parent does not trust them. The first request is a dictionary with the fields of
`GraderPool`; the answer, `Started`, is sent once the function is imported. Every further request is a list of samples,
and has one `Answer` for each sample, or one for all with `whole_groups`. The process ends when its standard input is
closed, so it never outlives the run.

A reward that evaluates text of the model scores each sample in a confined child process. What the text changes there is
gone with the answer, and this process, which never runs it, holds the pipes: a text cannot touch the reward of another
sample. Other built-in rewards evaluate nothing, and confine this process.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from miles_async import cpu_compat
from miles_async.config.user_functions import install_guests, load_function
from miles_async.errors import is_infrastructure
from miles_async.json_values import shown_error
from miles_async.rewards.child import Children
from miles_async.rewards.confinement import confine, protect, python_files, refuse_code
from miles_async.rewards.plugin import Reward
from miles_async.rewards.protocol import Cause, Started, failure
from miles_async.types import Sample
from miles_async.user_code import USER_CODE_ERRORS


def main() -> None:
    """Answer requests from standard input until it is closed."""
    # The reward function must not read requests or write answers: its standard input is empty, and what it prints is
    # redirected to standard error.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    cpu_compat.install()
    nonce, task = pickle.load(requests), pickle.load(requests)
    if task["setting"] == "custom_rm_path":
        install_guests(task["args"])
    function: Any = load_function(task["path"], setting=task["setting"])
    args = SimpleNamespace(**task["args"])
    if isinstance(function, type) and issubclass(function, Reward):
        function = function().open(args)
    elif isinstance(function, type):
        function = function(args)
    started = Started()
    score: Callable[[list[Sample]], Iterator[bytes]] = partial(grade, function, args, task=task)
    if task["memory_bytes"] is not None:
        protect()
        files = python_files()
        enter = partial(confine, task["memory_bytes"], files, evaluates=task["evaluates"])
        if task["evaluates"]:
            # What a text prints goes nowhere: it could fill the disk with log lines.
            os.dup2(nothing, sys.stdout.fileno())
            os.dup2(nothing, sys.stderr.fileno())
            gc.freeze()
            children = Children(enter, score, task["timeout_seconds"], task["allow_unconfined"])
            started, score = children.started(), children.grade
        else:
            sys.addaudithook(refuse_code)
            started = Started(*enter())
    answers.write(nonce + msgspec.json.encode(started) + b"\n")
    answers.flush()
    while True:
        try:
            nonce, samples = pickle.load(requests), pickle.load(requests)
        except EOFError:
            return
        for answer in score(samples):
            answers.write(nonce + answer + b"\n")
            answers.flush()


def grade(function: Any, args: Any, samples: list[Sample], task: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield an `Answer` for each sample, or one for the group with `whole_groups`.

    A plain function scores one sample after the other. An async function scores
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
            yield failure(f"raised {shown_error(error)}", cause_of(error))


def cause_of(error: BaseException) -> Cause:
    """Return the cause that an `Answer` gives for an error of the function."""
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
                return failure(f"took longer than {timeout_seconds:g} s (reward_timeout_seconds)", "infrastructure")
            return failure(f"raised {shown_error(error)}", cause_of(error))

    return await asyncio.gather(*map(score, samples))


async def _awaited(reward: Awaitable[Any]) -> Any:
    return await reward


def _answer(reward: Any) -> bytes:
    """Raises TypeError if the reward is not a JSON value."""
    return msgspec.json.encode({"reward": reward}, enc_hook=float)


if __name__ == "__main__":
    main()

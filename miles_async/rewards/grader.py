"""The program of a grader process: `python -m miles_async.rewards.grader`.

The process reads pickled requests from standard input, each behind a nonce, and answers with one JSON object per line
on standard output. Each line begins with the nonce of its request, so that what a reward writes to the pipe does not
answer a later request. Pickle keeps every type of a sample's metadata; only the parent process writes requests.
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
import math
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from miles_async import cpu_compat
from miles_async.config.user_functions import install_guests, load_function
from miles_async.errors import is_infrastructure
from miles_async.json_values import shown_error
from miles_async.parsing import decode_json
from miles_async.rewards.confinement import confine, limit_cpu, protect, python_files, refuse_code
from miles_async.rewards.plugin import Reward
from miles_async.types import Sample
from miles_async.user_code import USER_CODE_ERRORS

Cause = Literal["limit", "infrastructure", "function"]
MAX_TEXT_ANSWER_BYTES = 1 << 20
"""The rest of a longer answer is lost."""
FIRST_SECONDS = 60.0
"""Time limit for a child process that only confines itself."""


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


@dataclass(eq=False, repr=False)
class Children:
    """Scores each sample in a forked process that ends with its answer, so nothing that a text changes outlives it."""

    enter: Callable[[], tuple[bool, bool]]
    """Confines a process; returns whether its files and its calls are restricted."""
    score: Callable[[list[Sample]], Iterator[bytes]]
    """Yields one answer for each sample."""
    timeout_seconds: float
    allow_unconfined: bool

    def started(self) -> Started:
        """Return how far the kernel confines a child. Raises OSError or ValueError if a child cannot say so."""
        answer, _ = answer_of_child(lambda: msgspec.json.encode(Started(*self.enter())), FIRST_SECONDS)
        return msgspec.json.decode(answer, type=Started)

    def grade(self, samples: list[Sample]) -> Iterator[bytes]:
        """Yield the answer for each sample."""
        for sample in samples:
            yield self._grade_one(sample)

    def _grade_one(self, sample: Sample) -> bytes:
        deadline = time.monotonic() + self.timeout_seconds
        answer, exit_code = b"", 0
        try:
            for _ in range(2):
                left = max(deadline - time.monotonic(), 0.0)
                answer, exit_code = answer_of_child(partial(self._in_child, sample), left)
                if exit_code != -signal.SIGKILL:
                    break
                # The system may have killed the process for a reason outside of the sample.
        except TimeoutError:
            seconds = f"{self.timeout_seconds:g} s (reward_timeout_seconds)"
            return failure(f"took longer than {seconds}; its process was killed", "limit")
        if exit_code or not answer:
            # The response has ended the process, or the kernel has.
            return failure(ended(exit_code), "limit")
        try:
            decode_json(answer, Answer)
        except ValueError as error:
            return failure(f"gave an answer that cannot be read ({error})", "function")
        # A line feed would end the answer, and begin that of the next sample.
        return answer.replace(b"\n", b" ")

    def _in_child(self, sample: Sample) -> bytes:
        protect()
        limit_cpu(math.ceil(self.timeout_seconds) + 1)
        calls_restricted, _ = self.enter()
        if not calls_restricted and not self.allow_unconfined:
            raise PermissionError("the kernel does not confine this process any more")
        [answer] = self.score([sample])
        return answer


def answer_of_child(function: Callable[[], bytes], seconds: float) -> tuple[bytes, int]:
    """Return what `function` returned in a child process, and the exit code of this process; -N is signal N.

    Standard input, output and error of the child are those of this process. It has no other open files but the pipe
    for its answer. Raises TimeoutError after `seconds`. The child has ended when this function returns or raises.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.closerange(3, writer)
            os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
            # The pipe closes when the process has ended, so that its exit code is known.
            with open(writer, "wb", closefd=False) as answers:
                answers.write(function())
            os._exit(0)
        finally:
            # No error may reach the caller of `answer_of_child`: it would go on in two processes.
            os._exit(1)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + seconds)
    finally:
        # A child that has closed its pipe may still run.
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reader)
    return answer, os.waitstatus_to_exitcode(status)


def _read(reader: int, deadline: float) -> bytes:
    answer, poll = b"", select.poll()
    poll.register(reader, select.POLLIN)
    while len(answer) <= MAX_TEXT_ANSWER_BYTES:
        # `poll` accepts 24 days at most.
        left = min(deadline - time.monotonic(), 3600.0)
        if left <= 0:
            raise TimeoutError
        if poll.poll(left * 1e3):
            part = os.read(reader, 1 << 16)
            if not part:
                break
            answer += part
    return answer


if __name__ == "__main__":
    main()

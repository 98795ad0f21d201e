"""Scores each sample in a forked process that ends with its answer, so nothing that a text changes outlives it."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from miles_async.rewards.confinement import limit_cpu, protect
from miles_async.rewards.protocol import Answer, Started, ended, failure
from miles_async.sample_schema import decode_json
from miles_async.types import Sample

MAX_ANSWER_BYTES = 1 << 20
"""The rest of a longer answer is lost."""
FIRST_SECONDS = 60.0
"""Time limit for a child process that only confines itself."""


class Children:
    """Scores each sample in a separate child process."""

    def __init__(
        self,
        enter: Callable[[], tuple[bool, bool]],
        score: Callable[[list[Sample]], Iterator[bytes]],
        timeout_seconds: float,
        allow_unconfined: bool,
    ) -> None:
        """`enter` confines a process, and `score` yields one answer for each sample."""
        self._enter = enter
        self._score = score
        self._timeout_seconds = timeout_seconds
        self._allow_unconfined = allow_unconfined

    def started(self) -> Started:
        """Return how far the kernel confines a child. Raises OSError or ValueError if a child cannot say so."""
        answer, _ = answer_of_child(lambda: msgspec.json.encode(Started(*self._enter())), FIRST_SECONDS)
        return msgspec.json.decode(answer, type=Started)

    def grade(self, samples: list[Sample]) -> Iterator[bytes]:
        """Yield the answer for each sample."""
        for sample in samples:
            yield self._grade_one(sample)

    def _grade_one(self, sample: Sample) -> bytes:
        deadline = time.monotonic() + self._timeout_seconds
        answer, exit_code = b"", 0
        try:
            for _ in range(2):
                left = max(deadline - time.monotonic(), 0.0)
                answer, exit_code = answer_of_child(partial(self._in_child, sample), left)
                if exit_code != -signal.SIGKILL:
                    break
                # The system may have killed the process for a reason outside of the sample.
        except TimeoutError:
            seconds = f"{self._timeout_seconds:g} s (reward_timeout_seconds)"
            return failure(f"took longer than {seconds}; its process was killed", "limit")
        if exit_code:
            return failure(ended(exit_code), "limit" if exit_code < 0 else "function")
        try:
            decode_json(answer, Answer)
        except ValueError as error:
            return failure(f"gave an answer that cannot be read ({error})", "function")
        # A line feed would end the answer, and begin that of the next sample.
        return answer.replace(b"\n", b" ")

    def _in_child(self, sample: Sample) -> bytes:
        protect()
        limit_cpu(math.ceil(self._timeout_seconds) + 1)
        calls_restricted, _ = self._enter()
        if not calls_restricted and not self._allow_unconfined:
            raise PermissionError("the kernel does not confine this process any more")
        [answer] = self._score([sample])
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
    while len(answer) <= MAX_ANSWER_BYTES:
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

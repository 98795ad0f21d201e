"""A pool of grader processes. A process that misses its deadline or dies is replaced."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeVar

import structlog

from miles_async.errors import InfrastructureError, UserError
from miles_async.json_values import readable_entries
from miles_async.observability.redacted_log import child_stderr
from miles_async.parsing import decode_json
from miles_async.rewards.confinement import scrubbed_environment
from miles_async.rewards.grader import Answer, Started, ended
from miles_async.time_limit import permit
from miles_async.types import Sample

START_SECONDS = 120.0
"""Time limit for a process to start and import the function; not part of the deadline of a reward."""
MAX_ANSWER_BYTES = 1 << 26
"""Limit for one line that a grader process answers."""
GRACE_SECONDS = 5.0
"""An async function enforces its deadlines in its process. The process is killed if it exceeds them by so much."""

log = structlog.get_logger(__name__)
T = TypeVar("T")


class GraderError(Exception):
    """The reward function raised, or ended its process; the message states which."""


class UnfinishedError(GraderError):
    """The reward of a response exceeded its limits of time, memory or recursion, or crashed its process."""


class UnavailableError(GraderError, InfrastructureError):
    """The process could not be started, or something that the function asks did not answer; no sample is at fault."""


@dataclass
class GraderPool:
    """Calls a reward function in up to `processes` processes, with `timeout_seconds` for each sample.

    Processes are started on demand. A response whose reward never ends costs one process. With `whole_groups`, the
    deadline is that of a group.
    """

    path: str
    """The reward, as `module.function`, or the class of a reward plug-in. Of any other class, each process creates one
    object with `args` and calls it."""
    setting: str
    """The setting that names the function, for messages."""
    args: dict[str, Any]
    """The attributes of the first argument of the function."""
    processes: int
    timeout_seconds: float
    whole_groups: bool = False
    """The function scores a list of samples per call, not one sample."""
    is_async: bool = False
    """The function is async: a process scores all samples of a group at once, each with its own deadline."""
    memory_bytes: int | None = None
    """Confine the processes and limit the memory of each; see `rewards/confinement.py`. None trusts the function."""
    evaluates: bool = False
    """The function evaluates text of the model as code: each sample is scored in a separate process."""
    allow_unconfined: bool = False
    """Evaluate text of the model even where the kernel cannot confine the process."""
    _idle: list[Process] = field(default_factory=list)
    _all: set[Process] = field(default_factory=set)
    _warned: bool = False

    def __post_init__(self) -> None:
        self._permits = asyncio.Semaphore(self.processes)

    async def grade(self, samples: Sequence[Sample]) -> list[Any]:
        """Return, for each sample, its reward or a GraderError in its place."""
        results: list[Any] = []
        while len(results) < len(samples):
            results += await self._grade_some(list(samples[len(results) :]))
        return results

    async def grade_group(self, samples: Sequence[Sample]) -> list[Any]:
        """Return what the function returns for a group. Raises GraderError; `whole_groups` must be set."""
        results, error = await self._ask(list(samples), answers=1)
        for failure in [error, *results]:
            if isinstance(failure, GraderError):
                raise failure
        [rewards] = results
        return list(rewards)

    async def _grade_some(self, samples: list[Sample], again: bool = True) -> list[Any]:
        """Grade samples in order up to the first one that ends its process, whose result is the error."""
        results, error = await self._ask(samples, answers=len(samples))
        if error is None:
            return results
        if isinstance(error, UnavailableError):
            return [*results, *[error] * (len(samples) - len(results))]
        if self.is_async and len(samples) > 1:
            # All were being scored, so any of them may be at fault.
            alone = await asyncio.gather(*(self.grade([sample]) for sample in samples))
            return list(chain.from_iterable(alone))
        if again and isinstance(error, _KilledError):
            # The system may have killed the process for a reason outside of the sample.
            return [*results, *await self._grade_some([samples[len(results)]], again=False)]
        return [*results, error]

    async def _ask(self, samples: list[Sample], *, answers: int) -> tuple[list[Any], GraderError | None]:
        """Return the results up to the first one that did not come, and the reason why it did not.

        A process that gave no answer has been killed by then.
        """
        nonce = _nonce()
        request = pickle.dumps(nonce) + _request_of(list(map(self._sent, samples)))
        seconds = self.timeout_seconds + (GRACE_SECONDS if self.is_async or self.evaluates else 0.0)
        results: list[Any] = []
        try:
            async with permit(self._permits):
                process = self._idle_process() or await self._start()
                while len(results) < answers:
                    answer = await self._request(process, nonce, request, Answer, seconds, "reward_timeout_seconds")
                    results.append(answer.reward if answer.error is None else self._error(answer))
                    request = b""
                self._idle.append(process)
        except GraderError as error:
            return results, error
        return results, None

    def _sent(self, sample: Sample) -> Sample:
        """Return what a process gets of a sample."""
        if self.memory_bytes is None:
            return sample
        # Rewards that evaluate nothing read no metadata. A confined process could not import the classes of a user's
        # objects. Serialising tens of thousands of tokens for a text reward would be wasted time.
        sent = replace(sample, metadata=sample.metadata if self.evaluates else {})
        sent.discard_columns()
        return sent

    def _error(self, answer: Answer) -> GraderError:
        sentence = str(answer.error)
        if answer.cause == "limit":
            return UnfinishedError(sentence)
        # A confined process reaches no infrastructure, whatever it answers.
        if answer.cause == "infrastructure" and self.memory_bytes is None:
            return UnavailableError(sentence)
        return GraderError(sentence)

    async def close(self) -> None:
        """Kill all processes and wait until they have ended."""
        for process in self._all:
            self._kill(process)
            assert process.stdout is not None, "started with a pipe"
            await process.stdout.read()
            await process.wait()
        self._all.clear()

    def _idle_process(self) -> Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def _start(self) -> Process:
        """Raises UnavailableError if the process cannot be started, which is never the fault of a sample."""
        try:
            return await self._launch()
        except GraderError as error:
            raise UnavailableError(f"could not be started: it {error}") from error

    async def _launch(self) -> Process:
        confined = self.memory_bytes is not None
        with child_stderr() as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "miles_async.rewards.grader",
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                limit=MAX_ANSWER_BYTES,
                env=scrubbed_environment() if confined else None,
                # `_kill` ends the whole session, which includes the processes that the function has started.
                start_new_session=True,
            )
        self._all = {other for other in self._all if other.returncode is None} | {process}
        task = {entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.name.startswith("_")}
        nonce = _nonce()
        request = pickle.dumps(nonce) + pickle.dumps(task)
        started = await self._request(process, nonce, request, Started, START_SECONDS, "limit for starting")
        if confined:
            self._check(process, started)
        return process

    def _check(self, process: Process, started: Started) -> None:
        """Say once what the kernel does not confine. Raises UserError if text must not be evaluated for this reason."""
        if not started.calls_restricted and self.evaluates and not self.allow_unconfined:
            self._kill(process)
            raise UserError(
                f"{self.setting} {self.path} evaluates text of the model as code, and this system cannot confine it: "
                "the kernel permits no seccomp filter, or its architecture is neither x86-64 nor AArch64. Run on a "
                "system that permits one, or set allow_unconfined_rewards if you trust the model"
            )
        if self._warned:
            return
        self._warned = True
        if not started.calls_restricted:
            log.warning(
                "grader processes are not confined: the system permits no seccomp filter",
                reward=self.path,
            )
        elif not started.files_restricted:
            log.warning(
                "the kernel has no Landlock: text of the model is evaluated without access to any file"
                if self.evaluates
                else "the kernel has no Landlock: grader processes can read the files of the user",
                reward=self.path,
            )

    async def _request(
        self, process: Process, nonce: bytes, request: bytes, schema: type[T], seconds: float, limit: str
    ) -> T:
        """Send a request, or nothing if it is empty, and return the next answer, which begins with `nonce`."""
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(seconds):
                await self._send(process, request)
                line = await process.stdout.readline()
            if not line:
                raise _end_of(await process.wait())
            if not line.startswith(nonce):
                # Something other than the grader's loop has written to its pipe. No sample of this request is at fault.
                raise _KilledError("gave an answer that nobody asked for; its process was killed")
            return decode_json(line[len(nonce) :], schema)
        except BaseException as error:
            # This includes cancellation. The process must not be used again: its next answer belongs to this request.
            self._kill(process)
            if isinstance(error, TimeoutError):
                raise UnfinishedError(f"took longer than {seconds:g} s ({limit}); its process was killed") from None
            if isinstance(error, ValueError):
                raise GraderError(f"gave an answer that cannot be read ({error}); its process was killed") from error
            raise

    async def _send(self, process: Process, request: bytes) -> None:
        assert process.stdin is not None, "started with a pipe"
        # A process that has died is detected when its answer is read: the answer is then empty.
        with suppress(ConnectionError):
            process.stdin.write(request)
            await process.stdin.drain()

    def _kill(self, process: Process) -> None:
        assert process.stdin is not None, "started with a pipe"
        process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _KilledError(UnfinishedError):
    """The process ended for a reason that may be outside of the sample, such as a system without memory."""


def _end_of(exit_code: int) -> GraderError:
    return (_KilledError if exit_code < 0 else GraderError)(ended(exit_code))


def _nonce() -> bytes:
    """Return what the answers to one request begin with. Nothing that was written before the request contains it."""
    return secrets.token_hex(8).encode()


def _request_of(samples: Sequence[Sample]) -> bytes:
    try:
        return pickle.dumps(samples)
    except Exception:
        # A generate function may leave any object in the metadata, and most can be pickled.
        return pickle.dumps([replace(sample, metadata=readable_entries(sample.metadata)) for sample in samples])

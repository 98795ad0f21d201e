"""A pool of grader processes. A process that misses its deadline or dies is replaced."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import structlog

from miles_async.errors import InfrastructureError
from miles_async.json_values import readable_entries
from miles_async.observability.redacted_log import child_stderr
from miles_async.rewards.confinement import scrubbed_environment
from miles_async.sample_schema import decode_json
from miles_async.time_limit import permit
from miles_async.types import Sample

START_SECONDS = 120.0
"""Time limit for a process to start and import the function; not part of the deadline of a reward."""
MAX_ANSWER_BYTES = 1 << 26
"""Limit for one line that a grader process answers."""
GRACE_SECONDS = 5.0
"""An async function enforces its deadlines in its process. The process is killed if it exceeds them by so much."""

log = structlog.get_logger(__name__)


class GraderError(Exception):
    """The reward function raised, or ended its process; the message states which."""


class UnfinishedError(GraderError):
    """The reward of a response exceeded its limits of time, memory or recursion, or crashed its process."""


class UnavailableError(GraderError, InfrastructureError):
    """The process could not be started, or something that the function asks did not answer; no sample is at fault."""


@dataclass
class Graders:
    """Calls a reward function in up to `processes` processes, with `timeout_seconds` for each sample.

    Processes are started on demand. A response whose reward never ends costs one process. With `whole_groups`, the
    deadline is that of a group.
    """

    path: str
    """The reward, as `module.function`. If it is a class, each process creates one object with `args` and calls it."""
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
        confined = self.memory_bytes is not None
        request = _request_of([_without_tokens(sample) for sample in samples] if confined else samples)
        seconds = self.timeout_seconds + (GRACE_SECONDS if self.is_async else 0.0)
        results: list[Any] = []
        try:
            async with permit(self._permits):
                process = self._idle_process() or await self._start()
                while len(results) < answers:
                    answer = await self._request(process, request, seconds, "reward_timeout_seconds")
                    results.append(self._error(answer) if "error" in answer else answer["reward"])
                    request = b""
                self._idle.append(process)
        except GraderError as error:
            return results, error
        return results, None

    def _error(self, answer: dict[str, Any]) -> GraderError:
        if answer["cause"] == "limit":
            return UnfinishedError(answer["error"])
        # A confined process reaches no infrastructure, whatever it answers.
        if answer["cause"] == "infrastructure" and self.memory_bytes is None:
            return UnavailableError(answer["error"])
        return GraderError(answer["error"])

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
        task = {
            "path": self.path,
            "setting": self.setting,
            "args": self.args,
            "timeout_seconds": self.timeout_seconds,
            "whole_groups": self.whole_groups,
            "is_async": self.is_async,
            "memory_bytes": self.memory_bytes,
        }
        answer = await self._request(process, pickle.dumps(task), START_SECONDS, "limit for starting")
        if confined and not answer["network_closed"] and not self._warned:
            self._warned = True
            log.warning(
                "grader processes can reach the network: the kernel permits neither a seccomp filter nor a network "
                "namespace",
                reward=self.path,
            )
        return process

    async def _request(self, process: Process, request: bytes, seconds: float, limit: str) -> dict[str, Any]:
        """Send a request, or nothing if it is empty, and return the next answer."""
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(seconds):
                await self._send(process, request)
                line = await process.stdout.readline()
            if not line:
                raise _end_of(await process.wait())
            return decode_json(line, dict[str, Any])
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
    """A signal ended the process, for example because the system had no memory left."""


def _end_of(exit_code: int) -> GraderError:
    if exit_code == -signal.SIGXCPU:
        return UnfinishedError("used more CPU time than reward_timeout_seconds; its process was killed")
    if exit_code < 0:
        return _KilledError(f"ended its process by signal {-exit_code}")
    return GraderError(f"ended its process with exit code {exit_code}")


def _request_of(samples: Sequence[Sample]) -> bytes:
    try:
        return pickle.dumps(samples)
    except Exception:
        # A generate function may leave any object in the metadata, and most can be pickled.
        return pickle.dumps([replace(sample, metadata=readable_entries(sample.metadata)) for sample in samples])


def _without_tokens(sample: Sample) -> Sample:
    """Return a copy with text only: serialising tens of thousands of tokens for a text reward is wasted time."""
    return replace(sample, tokens=[], rollout_log_probs=[], sampling_mask=None, spans=[], loss_mask=None)

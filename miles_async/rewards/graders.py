"""A pool of grader processes. A process that misses its deadline or dies is replaced."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from miles_async.rewards.confinement import scrubbed_environment
from miles_async.types import Sample

START_SECONDS = 120.0
"""Time limit for a process to start and import the function; not part of the deadline of a reward."""
MAX_ANSWER_BYTES = 1 << 26
"""Limit for one line that a grader process answers."""

log = structlog.get_logger(__name__)


class GraderError(Exception):
    """The reward function raised, missed its deadline, or its process died; the message states which."""


@dataclass
class Graders:
    """Calls a reward function in up to `processes` processes, with `timeout_seconds` for each group of samples.

    Processes are started on demand. One process scores a whole group, so a poisoned group costs one process.
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
    memory_bytes: int | None = None
    """Confine the processes and limit the memory of each; see `rewards/confinement.py`. None trusts the function."""
    _idle: list[Process] = field(default_factory=list)
    _all: set[Process] = field(default_factory=set)
    _warned: bool = False

    def __post_init__(self) -> None:
        self._permits = asyncio.Semaphore(self.processes)

    async def grade(self, samples: list[Sample]) -> list[Any]:
        """Return one reward for each sample of a group.

        Raises GraderError. A process that gave no answer has been killed by then.
        """
        request = pickle.dumps(samples)
        async with self._permits:
            process = self._idle_process() or await self._launch()
            answer = await self._request(process, request, self.timeout_seconds, "reward_timeout_seconds")
            self._idle.append(process)
        if "error" in answer:
            raise GraderError(f"raised {answer['error']}")
        rewards: list[Any] = answer["rewards"]
        return rewards

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

    async def _launch(self) -> Process:
        confined = self.memory_bytes is not None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "miles_async.rewards.grader",
            stdin=PIPE,
            stdout=PIPE,
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
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(seconds):
                await self._send(process, request)
                line = await process.stdout.readline()
            if not line:
                raise GraderError(f"ended its process with exit code {await process.wait()}")
            answer: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            return answer
        except BaseException as error:
            # This includes cancellation. The process must not be used again: its next answer belongs to this request.
            self._kill(process)
            if isinstance(error, TimeoutError):
                raise GraderError(f"took longer than {seconds:g} s ({limit}); its process was killed") from None
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

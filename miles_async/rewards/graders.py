"""A pool of grader processes. A process that misses its deadline or dies is replaced."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from miles_async.types import Sample

START_SECONDS = 120.0
"""Time limit for a process to start and import the function; not part of the deadline of a reward."""
MAX_ANSWER_BYTES = 1 << 26
"""Limit for one line that a grader process answers."""


class GraderError(Exception):
    """The reward function raised, missed its deadline, or its process died; the message states which."""


@dataclass
class Graders:
    """Calls a reward function in up to `processes` processes, with `timeout_seconds` for each call.

    `path` is the function as `module.function`, and `setting` the setting that names it, for messages. `args` is passed
    to the function as its first argument and must be serialisable as JSON. Processes are started on demand.
    """

    path: str
    setting: str
    args: dict[str, Any]
    processes: int
    timeout_seconds: float
    _idle: list[Process] = field(default_factory=list)
    _all: set[Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._permits = asyncio.Semaphore(self.processes)

    async def grade(self, samples: Sample | Sequence[Sample]) -> Any:
        """Return what the reward function returns for one sample, or for a whole group.

        Raises GraderError. A process that gave no answer has been killed by then.
        """
        async with self._permits:
            process = self._idle.pop() if self._idle else await self._launch()
            answer = await self._request(process, samples, self.timeout_seconds)
            self._idle.append(process)
        if "error" in answer:
            raise GraderError(f"raised {answer['error']}")
        return answer["reward"]

    async def close(self) -> None:
        """Kill all processes and wait until they have ended."""
        for process in self._all:
            self._kill(process)
            assert process.stdout is not None, "started with a pipe"
            await process.stdout.read()
            await process.wait()
        self._all.clear()

    async def _launch(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "miles_async.rewards.grader", stdin=PIPE, stdout=PIPE, limit=MAX_ANSWER_BYTES
        )
        self._all = {other for other in self._all if other.returncode is None} | {process}
        await self._request(process, {"path": self.path, "setting": self.setting, "args": self.args}, START_SECONDS)
        return process

    async def _request(self, process: Process, message: Any, seconds: float) -> dict[str, Any]:
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(seconds):
                await self._send(process, message)
                line = await process.stdout.readline()
        except BaseException as error:
            # This includes cancellation. The process must not be used again: its next answer belongs to this request.
            self._kill(process)
            if isinstance(error, TimeoutError):
                raise GraderError(
                    f"took longer than {seconds:g} s (reward_timeout_seconds); its process was killed"
                ) from None
            raise
        if not line:
            raise GraderError(f"ended its process with exit code {await process.wait()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def _send(self, process: Process, message: Any) -> None:
        assert process.stdin is not None, "started with a pipe"
        # A process that has died is detected when its answer is read: the answer is then empty.
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(message, enc_hook=str) + b"\n")
            await process.stdin.drain()

    def _kill(self, process: Process) -> None:
        assert process.stdin is not None, "started with a pipe"
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()

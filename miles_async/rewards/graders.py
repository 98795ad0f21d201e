"""A few grader processes, each ended and replaced when it misses a deadline or dies."""

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
"""For Python and the function's module to load; the deadline of a reward does not count it."""
LONGEST_LINE = 1 << 26
"""Bytes of one answer at most."""


class GraderError(Exception):
    """The grader raised, was late or died; the message says which."""


@dataclass
class Graders:
    """`await graders.grade(sample)`: at most `processes` at once, each call within `timeout_seconds` of its start.

    `path` is the function that grades, `setting` what named it; `args` is what it sees as its arguments, and must be
    JSON. A process is started when it is first needed.
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

    async def grade(self, work: Sample | Sequence[Sample]) -> Any:
        """Raises GraderError; a process that failed to answer is gone by then."""
        async with self._permits:
            process = self._idle.pop() if self._idle else await self._launch()
            answer = await self._ask(process, work, self.timeout_seconds)
            self._idle.append(process)
        if "error" in answer:
            raise GraderError(f"raised {answer['error']}")
        return answer["reward"]

    async def close(self) -> None:
        for process in self._all:
            self._end(process)
            assert process.stdout is not None, "started with a pipe"
            await process.stdout.read()
            await process.wait()
        self._all.clear()

    async def _launch(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "miles_async.rewards.grader", stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE
        )
        self._all = {other for other in self._all if other.returncode is None} | {process}
        await self._ask(process, {"path": self.path, "setting": self.setting, "args": self.args}, START_SECONDS)
        return process

    async def _ask(self, process: Process, message: Any, seconds: float) -> dict[str, Any]:
        assert process.stdout is not None, "started with a pipe"
        try:
            async with asyncio.timeout(seconds):
                await self._tell(process, message)
                line = await process.stdout.readline()
        except BaseException as error:
            # Also when the group is given up meanwhile: what the process answers next would be another's.
            self._end(process)
            if isinstance(error, TimeoutError):
                raise GraderError(
                    f"took longer than {seconds:g} s (reward_timeout_seconds); its process was ended"
                ) from None
            raise
        if not line:
            raise GraderError(f"ended its process with code {await process.wait()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def _tell(self, process: Process, message: Any) -> None:
        assert process.stdin is not None, "started with a pipe"
        # A process that ended meanwhile is told of by its answer, which does not come.
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(message, enc_hook=str) + b"\n")
            await process.stdin.drain()

    def _end(self, process: Process) -> None:
        assert process.stdin is not None, "started with a pipe"
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()

"""Injects faults at the fault points of a run. Each fault happens once per run folder."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Sequence
from glob import glob
from math import nan
from pathlib import Path
from typing import Any

import psutil
import structlog

from miles_async.adapters.system.run_processes import of_part
from miles_async.config.schema.faults import Fault, RunProcess
from miles_async.errors import EngineLostError, FatalError, MilesError, StoreError, TrajectoryError, UserError
from miles_async.ports import Clock

_ERRORS: dict[str, type[MilesError]] = {
    "store": StoreError,
    "generator": EngineLostError,
    "rewarder": TrajectoryError,
    "learner": FatalError,
    "channel": EngineLostError,
    "fleet": EngineLostError,
}
"""The error that the calls of each port raise if the other side fails."""

log = structlog.get_logger(__name__)


class JumpingClock:
    """A clock whose wall-clock time can be moved by `offset` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.offset = 0.0

    def time(self) -> float:
        return self._clock.time() + self.offset

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


class FaultEffects:
    """Lets faults happen, and lists them in a file: one line per fault, written before the fault happens."""

    def __init__(self, listed: Path, clock: JumpingClock) -> None:
        self._listed = listed
        self._clock = clock

    def happened(self) -> set[int]:
        """Return the numbers of the faults that are listed in the file."""
        if not self._listed.exists():
            return set()
        return {json.loads(line)["number"] for line in self._listed.read_text().splitlines()}

    def happen(self, number: int, fault: Fault, point: str, arguments: Sequence[Any]) -> float:
        """Let fault `number` happen. Returns the seconds by which it delays the call. Raises the error of the fault."""
        line = {"number": number, "kind": fault.kind, "point": point, "time": self._clock.time()}
        with self._listed.open("a") as file:
            file.write(json.dumps(line) + "\n")
        log.warning("injecting a configured fault", **line)
        match fault.kind:
            case "kill" | "stop":
                _signal(fault.process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            case "delay":
                return fault.seconds
            case "clock_jump":
                self._clock.offset += fault.seconds
            case "corrupt":
                corrupt(fault.file or "")
            case "poison":
                _poison(point, arguments)
            case "error" | "disk_full":
                cause = "a configured fault" if fault.kind == "error" else os.strerror(errno.ENOSPC)
                raise _ERRORS[point.partition(".")[0]](f"{point}: {cause}")
        return 0.0


def corrupt(pattern: str) -> None:
    """Change the byte in the middle of the newest file that matches `pattern`. Raises UserError if none matches."""
    files = sorted((Path(name) for name in glob(pattern, recursive=True)), key=lambda path: path.stat().st_mtime)
    if not files or not files[-1].stat().st_size:
        raise UserError(f"inject_faults: no file with contents matches {pattern!r}, so none can be damaged: set file")
    with files[-1].open("r+b") as file:
        file.seek(files[-1].stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


def _poison(point: str, arguments: Sequence[Any]) -> None:
    [sample, *_] = arguments[0]
    if point.startswith("rewarder."):
        sample.reward = nan
    elif sample.rollout_log_probs:
        sample.rollout_log_probs[0] = nan


def _signal(part: RunProcess, number: signal.Signals) -> None:
    """Send a signal to a process of this run; to all of them if there are several."""
    if part == "rollout_worker":
        os.kill(os.getpid(), number)
        return
    # The driver starts Ray's daemons, and the raylet starts this process. If the driver has died, process 1 has taken
    # its place.
    driver = psutil.Process().parents()[1]
    found = [driver] if part == "driver" else of_part(part, driver.children(recursive=True))
    if driver.pid == 1 or not found:
        raise UserError(f"inject_faults: this machine runs no {part} of this run: set another process")
    for process in found:
        process.send_signal(number)

"""The real command line as a separate process; a mark in the environment identifies its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
MAIN_JOB = (
    "--config",
    "configs/arithmetic-cpu.yaml",
    "--rollout-function-path",
    "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async",
)
MARK = "MILES_ASYNC_TEST_JOB"
"""Environment variable whose value identifies the processes of a job."""


@dataclass
class Job:
    """`python train_async.py` with the main job's settings and further `flags`, as the leader of a new session."""

    folder: Path
    flags: tuple[str, ...]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        run_dir = ("--run-dir", str(self.folder / "runs"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "train_async.py", *MAIN_JOB, *run_dir, *self.flags],
                cwd=ROOT,
                env={**os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def _out(self) -> Path:
        return self.folder / "stdout"

    @property
    def _err(self) -> Path:
        return self.folder / "stderr"

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def alarms(self) -> list[str]:
        """The lines in which Ray has reported a process that ended unexpectedly."""
        return [line for line in (self.out + self.err).splitlines() if "worker died or was killed" in line]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, within: float) -> int:
        """Return the exit code. Raises TimeoutExpired if the job does not end `within` so many seconds."""
        return self._process.wait(within)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to every process of the foreground group, like a terminal."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the driver alone, without a chance to clean up."""
        self._process.kill()
        self._process.wait()

    def says(self, words: str, within: float) -> None:
        """Wait until `words` appear on its stdout."""
        self._until(lambda: words in self.out, f"say {words!r}", within)

    def says_again(self, words: str, within: float) -> None:
        """Wait until `words` appear on its stdout once more than now."""
        count = self.out.count(words)
        self._until(lambda: self.out.count(words) > count, f"say {words!r} again", within)

    def complains(self, words: str, within: float, *, times: int = 1) -> None:
        """Wait until `words` appear on its stderr at least so many `times`."""
        self._until(lambda: self.err.count(words) >= times, f"complain {words!r}", within)

    def runs(self, command: str, within: float) -> None:
        """Wait until it runs a process with `command` in its command line."""
        self._until(lambda: any(command in line for line in self.left_running().values()), f"run {command}", within)

    def _until(self, reached: Callable[[], bool], what: str, within: float) -> None:
        def reached_or_ended() -> bool:
            if reached():
                return True
            assert self._process.poll() is None, f"it ended before it could {what}: {self.err}"
            return False

        wait_until(reached_or_ended, f"the job can {what}", within=within)

    def process(self, command: str) -> int:
        """The pid of its only process whose command contains `command`."""
        # A process that is just starting has no command line yet.
        [pid] = [pid for pid, line in self.left_running().items() if command in line.partition(" ")[0]]
        return pid

    def left_running(self, patience: float = 0.0) -> dict[int, str]:
        """Wait up to `patience` seconds; return pid and command line of each remaining process of the job."""
        deadline = time.monotonic() + patience
        while left := dict(marked(self.mark)):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        return left


@contextmanager
def job(folder: Path, *flags: str) -> Iterator[Job]:
    """A job whose remaining processes are killed at the end."""
    started = Job(folder, flags)
    try:
        yield started
    finally:
        for pid in started.left_running():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Pid and command line of each process with this mark in its environment."""
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # A zombie has ended; its environment reads as empty.
                if needle in (entry / "environ").read_bytes():
                    yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

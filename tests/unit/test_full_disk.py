"""A disk that cannot be written ends neither the run nor a process of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO

import pytest

from miles_async.observability.trace.event_log import EventLogWriter, read_events
from tests.disks import run_on_a_small_disk
from tests.unit.example_events import RUN

OBSERVES_A_RUN = """
    from miles_async.events import QueueChanged, RunEnded
    from miles_async.observability.run_folder import RunFolder
    from miles_async.observability.subscribers import EventSubscribers
    from tests.configuration import run_config
    from tests.unit.example_events import RUN

    config = run_config(run_dir="runs", trace=True, reasoning_gym_task="chain_sum")
    folder = RunFolder.create(config)
    with EventSubscribers(config, folder) as subscribers:
        subscribers.emit(RUN)
        for second in range(100):
            subscribers.emit(*[QueueChanged(time=100.0 + second, depth=n, blocked=0) for n in range(100)])
            subscribers.tick(100.0 + second)
            subscribers.update_scrape_targets({"engine": f"127.0.0.1:{second}"})
        subscribers.emit(RunEnded(time=300.0, reason="done"))
    print("the end")
"""


def test_a_run_on_a_full_file_system_continues_with_one_warning(tmp_path: Path) -> None:
    printed = run_on_a_small_disk(tmp_path, textwrap.dedent(OBSERVES_A_RUN), "256k")
    assert printed.count("cannot be written") == 1
    assert "No space left on device" in printed
    assert "done" in printed
    assert printed.rstrip().endswith("the end")


class FailingFile:
    """Stands in for an open file whose writes fail from now on."""

    closed = False

    def __init__(self, file: IO[bytes], number: int) -> None:
        self._file = file
        self._number = number

    def write(self, data: bytes) -> int:
        raise OSError(self._number, os.strerror(self._number))

    def close(self) -> None:
        self._file.close()
        self.closed = True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_an_event_log_that_cannot_be_written_ends_with_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    errors: list[tuple[Path, int | None]] = []
    path = tmp_path / "events.jsonl"
    writer = EventLogWriter(
        path, rotate_bytes=1 << 20, max_bytes=1 << 30, on_error=lambda file, error: errors.append((file, error.errno))
    )
    writer.observe(RUN)
    writer.tick(100.0)
    monkeypatch.setattr(writer, "_file", FailingFile(writer._file, number))
    for second in range(3):
        writer.observe(RUN)
        writer.tick(101.0 + second)
    writer.close()
    assert errors == [(path, number)]
    assert list(read_events(path)) == [RUN]


PRINTS_AND_LOGS = """
import os, sys
from pathlib import Path
import structlog
from miles_async.observability.console.logging import configure_worker_logging
logs, report = Path(sys.argv[1]), os.dup(1)
configure_worker_logging(logs, "rollout", "r")
for number in range(100):
    print("x" * 1000, flush=True)
    print("x" * 1000, flush=True, file=sys.stderr)
    structlog.get_logger("workers").warning("a line")
os.write(report, b"still here")
"""


def test_a_process_whose_log_files_are_on_a_full_disk_prints_and_logs_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "rollout.log").symlink_to("/dev/full")
    (tmp_path / "rollout.jsonl").symlink_to("/dev/full")
    command = [sys.executable, "-c", PRINTS_AND_LOGS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "still here")

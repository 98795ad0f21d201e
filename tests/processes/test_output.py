"""A process survives the loss of the pipe that reads its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from miles_async.events import GroupMoved, encode

PRINTS_TO_A_CLOSED_PIPE = """
import sys
from miles_async.observability.console.logging import configure_logging, report_lost_output
from miles_async.observability.output import protect_output
protect_output(report_lost_output)
configure_logging("console")
sys.stdin.readline()
for number in range(3):
    print(number, flush=True)
print("still here", file=sys.stderr)
"""


def test_output_to_a_closed_pipe_is_discarded_with_one_log_line() -> None:
    command = [sys.executable, "-c", PRINTS_TO_A_CLOSED_PIPE]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    first, second = errors.splitlines()
    assert "standard output was lost" in first
    assert "Broken pipe" in first
    assert second == "still here"


def test_the_list_of_groups_may_be_read_in_part(tmp_path: Path) -> None:
    moves = [
        GroupMoved(
            time=0.0, sequence=number, feed_index="a", attempt=0, before=None, after="fed", reason=None, counts={}
        )
        for number in range(10_000)
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(encode(move) + b"\n" for move in moves))
    command = f"{sys.executable} -m miles_async.observability.trace.groups {tmp_path} --group a | head -1; "
    done = subprocess.run(
        ["bash", "-c", f"{command} exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "     0.00 s  attempt 0 fed as group 0\n"
    assert (done.returncode, done.stderr) == (0, "")

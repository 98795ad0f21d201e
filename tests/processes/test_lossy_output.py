"""A process survives the loss of the pipe that reads its output."""

from __future__ import annotations

import subprocess
import sys

PRINTS_TO_A_CLOSED_PIPE = """
import sys
from miles_async.observability.console.lossy_output import survive_lost_output
from miles_async.observability.console.logging import configure_logging
survive_lost_output()
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

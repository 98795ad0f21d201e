"""The processes of a run are found by their command lines, and so is whether one is stopped or was killed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil

from miles_async.adapters.system.run_processes import has_ended, is_stopped, of_part, run_process
from tests.waiting import wait_until


def test_a_raylet_is_found_among_the_children_of_the_driver_and_is_stopped_or_has_ended_after_a_signal(
    tmp_path: Path,
) -> None:
    program = tmp_path / "raylet" / "raylet"
    program.parent.mkdir()
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as started:
        # Other tests of this process may have started a raylet, too.
        [raylet] = [each for each in of_part("raylet", psutil.Process().children()) if each.pid == started.pid]
        assert not has_ended(raylet)
        assert not is_stopped(raylet)
        started.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(raylet), "the process is stopped")
        assert not has_ended(raylet)
        started.kill()
        raylet.wait(60)
        assert has_ended(raylet)
    assert has_ended(raylet)
    assert not is_stopped(raylet)
    assert run_process(raylet) is None

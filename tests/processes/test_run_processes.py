"""The processes of a run are found by their command lines, and so is whether one is stopped or was killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from miles_async.adapters.system.run_processes import has_ended, is_stopped, of_part, run_process
from tests.waiting import wait_until
from workers.heartbeats import Heartbeat, Heartbeats


@contextmanager
def raylet_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a raylet. It is killed at the end of the block."""
    program = folder / "raylet" / "raylet"
    program.parent.mkdir(exist_ok=True)
    program.unlink(missing_ok=True)
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_raylet_is_found_among_the_children_of_the_driver_and_is_stopped_or_has_ended_after_a_signal(
    tmp_path: Path,
) -> None:
    with raylet_process(tmp_path) as started:
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


async def look_twice(process: subprocess.Popen[bytes], node: str) -> Heartbeats:
    """The heartbeats of a process that answered at 100 s."""

    async def probe() -> Heartbeat:
        return Heartbeat(node, process.pid, None)

    heartbeats = Heartbeats({"engine-0": probe}, "this node")
    for now in (99.0, 100.0):
        heartbeats.look(now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    heartbeats.look(100.1)
    return heartbeats


async def test_a_process_that_is_stopped_and_silent_is_killed_so_that_another_one_takes_its_place(
    tmp_path: Path,
) -> None:
    with raylet_process(tmp_path) as stopped, raylet_process(tmp_path) as running, raylet_process(tmp_path) as distant:
        all_heartbeats = [
            await look_twice(stopped, "this node"),
            await look_twice(running, "this node"),
            await look_twice(distant, "another node"),
        ]
        for process in (stopped, distant):
            process.send_signal(signal.SIGSTOP)
            wait_until(partial(is_stopped, psutil.Process(process.pid)), "the process is stopped")
        for heartbeats in all_heartbeats:
            heartbeats.kill_stopped(silent=10.0, now=105.0)
        assert [process.poll() for process in (stopped, running, distant)] == [None] * 3
        for heartbeats in all_heartbeats:
            heartbeats.kill_stopped(silent=10.0, now=111.0)
        assert stopped.wait(60) == -signal.SIGKILL
        assert [process.poll() for process in (running, distant)] == [None] * 2

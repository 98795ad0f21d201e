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

from miles_async.adapters.system.run_processes import (
    has_ended,
    is_stopped,
    kill_remaining,
    of_part,
    raylets_of,
    run_process,
)
from tests.waiting import wait_until
from workers.heartbeats import Heartbeat, Heartbeats, Probe


@contextmanager
def raylet_process(folder: Path, program: str = "/bin/sleep", *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a raylet. It is killed at the end of the block."""
    raylet = folder / "raylet" / "raylet"
    raylet.parent.mkdir(exist_ok=True)
    raylet.unlink(missing_ok=True)
    raylet.symlink_to(program)
    with subprocess.Popen([raylet, *(arguments or ("600",))]) as started:
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


def test_the_raylet_that_has_started_an_actor_is_found(tmp_path: Path) -> None:
    with raylet_process(tmp_path, "/bin/sh", "-c", "sleep 600 & wait") as started:
        raylet = psutil.Process(started.pid)
        wait_until(raylet.children, "the actor is started")
        actors = raylet.children()
        assert raylets_of(actors) == [raylet]
        kill_remaining(actors, patience=0.0)
        wait_until(lambda: raylets_of(actors) == [], "the actor has ended")


def test_processes_that_remain_are_killed(tmp_path: Path) -> None:
    with raylet_process(tmp_path) as ended, raylet_process(tmp_path) as remaining:
        processes = [psutil.Process(process.pid) for process in (ended, remaining)]
        ended.terminate()
        kill_remaining(processes, patience=0.1)
        assert ended.wait(60) != -signal.SIGKILL
        assert remaining.wait(60) == -signal.SIGKILL


def answers(process: subprocess.Popen[bytes], node: str = "this node") -> dict[str, Probe]:
    """The probe of a process that answers."""

    async def probe() -> Heartbeat:
        return Heartbeat(node, process.pid, None)

    return {"engine-0": probe}


async def look_twice(probes: dict[str, Probe]) -> Heartbeats:
    """The heartbeats of processes that answered at 100 s."""
    heartbeats = Heartbeats(probes, "this node")
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
            await look_twice(answers(stopped)),
            await look_twice(answers(running)),
            await look_twice(answers(distant, "another node")),
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


async def test_a_process_that_is_stopped_before_it_was_ever_watched_is_killed(tmp_path: Path) -> None:
    with raylet_process(tmp_path) as stopped:
        probes = answers(stopped)
        heartbeats = Heartbeats(probes, "this node")
        await heartbeats.wait_for_answer("engine-0")
        stopped.send_signal(signal.SIGSTOP)
        wait_until(partial(is_stopped, psutil.Process(stopped.pid)), "the process is stopped")
        heartbeats.look(100.0)
        heartbeats.kill_stopped(silent=10.0, now=111.0)
        assert stopped.wait(60) == -signal.SIGKILL
        heartbeats.close()


async def test_a_process_that_was_replaced_is_remembered_until_the_end_of_the_run(tmp_path: Path) -> None:
    with raylet_process(tmp_path) as replaced:
        probes = answers(replaced)
        heartbeats = await look_twice(probes)
        probes.clear()
        heartbeats.look(101.0)
        assert heartbeats.local_processes() == [psutil.Process(replaced.pid)]

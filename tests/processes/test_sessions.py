"""Sessions are killed when the process that started them ends, even if it was killed itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from miles_async.adapters.system.sessions import SessionReaper, kill_sessions, members
from tests.waiting import wait_until

LEADER_WITH_CHILD = (
    "import os, time; os.fork() or os.setpgid(0, 0); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
)
"""The child moves to another process group, as the workers of Ray do, and stays in the session."""


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[str]]:
    """The first process of a session with two processes, both of which run."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER_WITH_CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert {int(process.stdout.readline()), int(process.stdout.readline())} == members({process.pid})
        yield process
    finally:
        kill_sessions({process.pid})
        process.communicate()


def test_close_kills_all_processes_of_a_session(leader: subprocess.Popen[str]) -> None:
    reaper = SessionReaper()
    reaper.add(leader.pid)
    reaper.close(grace=0)
    wait_until(lambda: not members({leader.pid}), "all killed processes ended")


def test_processes_whose_parent_has_ended_are_killed_too(leader: subprocess.Popen[str]) -> None:
    reaper = SessionReaper()
    reaper.add(leader.pid)
    leader.kill()
    leader.wait()
    assert len(members({leader.pid})) == 1
    reaper.close(grace=0)
    wait_until(lambda: not members({leader.pid}), "all killed processes ended")


def test_sessions_are_killed_if_their_owner_is_killed(leader: subprocess.Popen[str]) -> None:
    code = (
        "import sys, time; from miles_async.adapters.system.sessions import SessionReaper; "
        f"SessionReaper().add({leader.pid}); print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        os.kill(owner.pid, signal.SIGKILL)
    assert leader.wait(timeout=60) == -signal.SIGKILL

"""Kills whole sessions of processes, even after the process that started them was killed.

A session (see setsid(2)) holds a process and its descendants, except those that start a session themselves. Unlike the
tree of processes, a session keeps its members if a process in the middle of the tree ends.

Run as a script, this module is the process that kills the sessions. It imports only the standard library, so that it
starts quickly and needs little memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.05
_KILLER = (sys.executable, "-I", "-S", __file__)
"""Kills the sessions in its arguments and in the lines of its standard input, as soon as the input ends."""


class SessionReaper:
    """Kills sessions as soon as this process ends, even by SIGKILL, or calls `close`.

    A separate process holds the read end of a pipe, whose write end is closed by the kernel when this process ends.
    That process leads another session, so that a signal to the process group of this process does not reach it.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(_KILLER, stdin=subprocess.PIPE, start_new_session=True)
        self._sessions: set[int] = set()

    def add(self, session: int) -> None:
        """Add a session. Its id is the process id of its first process."""
        assert self._process.stdin is not None, "created with a pipe"
        self._sessions.add(session)
        self._process.stdin.write(b"%d\n" % session)
        self._process.stdin.flush()

    def close(self, grace: float) -> None:
        """Wait up to `grace` seconds until all processes of the sessions have ended, then kill the others."""
        deadline = time.monotonic() + grace
        while members(self._sessions) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._process.communicate()


def kill_own_session_at_end_of_input() -> None:
    """Kill the session that this process leads as soon as the standard input of this process ends; returns at once.

    A separate process waits for the end. A thread could not: it would wait for the interpreter lock, which
    sglang-router holds while it serves. The process leads another session, which a SIGSTOP to this one does not reach.
    """
    command, nowhere = (*_KILLER, str(os.getpid())), subprocess.DEVNULL
    subprocess.Popen(command, stdin=0, stdout=nowhere, stderr=nowhere, start_new_session=True)


def members(sessions: Collection[int]) -> set[int]:
    """Return the ids of all processes of the sessions, without zombies."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process may have ended meanwhile
                if os.getsid(int(entry.name)) in sessions and not _is_zombie(entry):
                    found.add(int(entry.name))
    return found


def kill_sessions(sessions: Collection[int]) -> None:
    """Kill all processes of the sessions with SIGKILL, including those that they start meanwhile."""
    killed: set[int] = set()
    while running := members(sessions) - killed:
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed |= running


def _is_zombie(process: Path) -> bool:
    # The name of the program, in parentheses, may itself contain spaces and parentheses.
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


if __name__ == "__main__":
    kill_sessions({int(session) for session in (*sys.argv[1:], *sys.stdin)})

"""The API key of a server process, and the pipe that hands it over and ties the process to its parent.

The parent holds the write end of the server's standard input and writes the key into it. Command lines and environment
variables would be visible to other processes. When the parent ends, even by SIGKILL, the pipe closes and the whole
process group of the server is killed.

A forked child watches the pipe. A thread could not: it would wait for the interpreter lock, which sglang-router holds
while it serves. A parent-death signal (`PR_SET_PDEATHSIG`) would not do either: it is sent when the *thread* that
started this process ends, and Ray's actors change threads.
"""

from __future__ import annotations

import os
import secrets
import signal


def new_key() -> str:
    """Return a random API key."""
    return secrets.token_urlsafe(32)


def authorization(key: str) -> dict[str, str]:
    """Return the HTTP header that carries an API key; no header for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def receive_key() -> str:
    """Return the key, which is the first line of standard input. Kill the process group when the parent ends."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("the parent ended before it sent the key")
        line += byte
    _kill_group_with_parent()
    return line.decode().strip()


def _kill_group_with_parent() -> None:
    """Watch standard input in a forked child; returns at once in this process."""
    if os.fork() == 0:
        # A polite end of the group must not end the watcher before the servers.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

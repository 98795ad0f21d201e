"""The API key of a server process, and the pipe that hands it over and ties the process to its parent.

The parent holds the write end of the server's standard input and writes the key into it. Command lines and environment
variables would be visible to other processes. When the parent ends, even by SIGKILL, the pipe closes and all processes
of the server are killed.

A parent-death signal (`PR_SET_PDEATHSIG`) would not do: it is sent when the *thread* that started this process ends,
and Ray's actors change threads.
"""

from __future__ import annotations

import os
import secrets

from miles_async.adapters.system.sessions import kill_own_session_at_end_of_input


def new_key() -> str:
    """Return a random API key."""
    return secrets.token_urlsafe(32)


def authorization(key: str) -> dict[str, str]:
    """Return the HTTP header that carries an API key; no header for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def receive_key() -> str:
    """Return the first line of standard input, the key. The session of this process is killed when the parent ends."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("the parent ended before it sent the key")
        line += byte
    kill_own_session_at_end_of_input()
    return line.decode().strip()

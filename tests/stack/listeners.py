"""The sockets on which processes listen, and from where they accept connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

ELSEWHERE = "127.0.0.9"
"""A listener at all addresses accepts connections here, one at 127.0.0.1 does not. No network leads here."""
DROPPED_SECONDS = 0.5
"""A dropped packet is never answered, so a connection attempt only ends by its time limit."""


class Listener(NamedTuple):
    """A listening TCP socket."""

    process: str
    """The command line of its process."""
    address: str
    port: int


def listeners_of(parent: psutil.Process) -> Iterator[Listener]:
    """All TCP sockets on which a process and its descendants listen."""
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield Listener(" ".join(process.cmdline()), connection.laddr.ip, connection.laddr.port)


def is_reachable(listener: Listener) -> bool:
    """Whether the socket accepts connections that do not go to 127.0.0.1."""
    host = ELSEWHERE if listener.address in ("0.0.0.0", "::") else listener.address
    if host in ("127.0.0.1", "::1"):
        return False
    try:
        socket.create_connection((host, listener.port), timeout=DROPPED_SECONDS).close()
    except OSError:
        return False
    return True

"""Ports that no two processes of ours are given at once.

Looking for a free port and binding it later leaves seconds in which somebody else may take it. So each port is also
claimed by a name that the kernel gives out only once per network namespace, as it does ports themselves, and takes back
when the claiming process ends, however it ends: an abstract Unix socket. Against strangers there is the second attempt
of `EngineServer` and `RouterServer`.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FIRST, LAST = 20_000, 32_000
"""Outside the range that the kernel and Ray hand out by themselves."""


class ClaimedPort:
    """`number` is ours until `release`, or until this process ends."""

    def __init__(self, number: int) -> None:
        """Raises OSError when another process has claimed it."""
        self.number = number
        self._claim = socket.socket(socket.AF_UNIX)
        try:
            self._claim.bind(f"\0miles_async/port/{number}")
        except OSError:
            self._claim.close()
            raise

    def release(self) -> None:
        self._claim.close()


def claim_port(host: str = "127.0.0.1") -> ClaimedPort:
    """A port on which nobody listens at `host` and that nobody else of ours has claimed."""
    while True:
        with suppress(OSError):
            port = ClaimedPort(random.SystemRandom().randrange(FIRST, LAST))
            if _bindable(host, port.number):
                return port
            port.release()


def free_port() -> int:
    """Such a port, for someone who binds it in a moment and needs no claim."""
    port = claim_port()
    port.release()
    return port.number


def _bindable(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

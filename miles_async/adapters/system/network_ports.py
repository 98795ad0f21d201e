"""Free network ports that are given to one process at a time.

Seconds pass between the search for a free port and the moment a server binds it, and another process may take the port
in between. To protect against other processes of this project, each port is claimed with an abstract Unix socket named
after it: the kernel allows each name once per network namespace, and releases it when the claiming process ends. To
protect against unrelated processes, `EngineServer` and `RouterServer` try again with another port.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FIRST, LAST = 20_000, 32_000
"""Range of ports that neither the kernel nor Ray assigns automatically."""


class ClaimedPort:
    """A port that no other process of this project uses until `release` is called or this process ends."""

    def __init__(self, number: int) -> None:
        """Raises OSError if another process has claimed the port."""
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
    """Claim a random port that is free at the address `host`."""
    while True:
        with suppress(OSError):
            port = ClaimedPort(random.SystemRandom().randrange(FIRST, LAST))
            if _is_free(host, port.number):
                return port
            port.release()


def free_port() -> int:
    """Return a free port without a claim, for a caller that binds it immediately."""
    port = claim_port()
    port.release()
    return port.number


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connection is in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

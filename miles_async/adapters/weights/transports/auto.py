"""The value `auto` of `weight_transfer`."""

from __future__ import annotations

from miles_async.transports import AUTO, Transport


class Auto(Transport):
    """Measures memory, p2p and broadcast at start-up, and uses the fastest one that works, or disk if none does. It
    chooses memory only if that saves about 10 ms.

    It is never opened: `find_transports` of `adapters/weights/channel.py` measures the others.
    """

    name = AUTO

"""The interface of all weight transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from miles_async.adapters.weights.engine import EngineMemory
from miles_async.adapters.weights.layout import TensorPlan
from miles_async.adapters.weights.staging import Staging


class Transport(Protocol):
    """Moves the staged weights of one source to engines. All calls block, in foreign code that releases the GIL."""

    def connect(self, engine: EngineMemory) -> None:
        """Connect to an engine, also to one that was restarted. Raises EngineLostError if it is out of reach."""
        ...

    def disconnect(self, name: str) -> None:
        """Disconnect an engine; does nothing if it is not connected."""
        ...

    def prepare(self, staging: Staging) -> None:
        """Do the work on a newly staged version that needs no paused engine.

        Raises EngineLostError if another transport may work, and FatalError if none can.
        """
        ...

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Send all that is staged to a connected engine; return the number of bytes.

        Raises EngineLostError if some of it may not have arrived. The caller verifies what did arrive.
        """
        ...

    def close(self) -> None:
        """Release all connections and memory."""
        ...


def segments(staging: Staging, bucket: Sequence[TensorPlan], rank: int) -> Iterator[tuple[int, str, int, int]]:
    """Yield the one-sided writes that bring a bucket to an engine rank.

    Each is the first byte in the staging buffer, the parameter, the first byte in the parameter, and the bytes.
    """
    for plan in bucket:
        width, base = staging.element_size(plan.name), staging.offset(plan.name)
        for copy in plan.copies:
            if copy.rank == rank and copy.numel:
                yield base + copy.source * width, copy.parameter, copy.target * width, copy.numel * width

"""What every way of moving weights has in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from miles_async.adapters.weights.engine import Engine
from miles_async.adapters.weights.layout import Placement
from miles_async.adapters.weights.staging import Staging


class Transport(Protocol):
    """One source rank's part of a way; each call blocks, in foreign code that lets go of the interpreter lock."""

    def connect(self, engine: Engine) -> None:
        """Meet an engine, anew after a restart. Raises EngineLostError when it cannot be reached this way."""
        ...

    def forget(self, name: str) -> None:
        """Let go of an engine, known or not."""
        ...

    def stage(self, staging: Staging) -> None:
        """What can be done before the pause. Raises Fatal."""
        ...

    def write(self, staging: Staging, engine: Engine) -> int:
        """Send all that is staged here; bytes sent. Raises EngineLostError when some of it may not have arrived."""
        ...

    def close(self) -> None: ...


def segments(staging: Staging, bucket: list[Placement], rank: int) -> Iterator[tuple[int, str, int, int]]:
    """The one-sided writes of a bucket to one rank: byte here, parameter, byte there, bytes."""
    for placement in bucket:
        width, base = staging.width(placement.name), staging.start(placement.name)
        for copy in placement.copies:
            if copy.rank == rank and copy.numel:
                yield base + copy.source * width, copy.parameter, copy.target * width, copy.numel * width

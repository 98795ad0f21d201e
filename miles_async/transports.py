"""What a weight transport provides: it moves the staged weights of one learner rank to engines.

A transport is a subclass of `Transport` (see `miles_async/plugins.py`). Its name is a value of `weight_transfer`:

    [project.entry-points."miles_async.adapters.weights.transports"]
    carrier_pigeon = "my_package:CarrierPigeon"

The checksums after each write, the retry and the fallback do not depend on the transport. `--help` imports the module
of a transport, which therefore imports torch and other large libraries inside methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from miles_async.plugins import Kind, Plugin

if TYPE_CHECKING:
    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.staging import Staging

AUTO = "auto"
"""The value of `weight_transfer` that measures transports and uses the fastest one."""
ADAPTER = "adapter"
"""The transport of a run that trains an adapter: engines load it from a file."""
LOAD_ONLY = {"flush_cache": False, "abort_all_requests": False}
"""Fields of each request with which an engine loads weights. `SGLangFleet.commit` flushes the cache: SGLang's scheduler
exits if a flush inside this request is refused."""
ADVANTAGE = 1.2
"""A transport must be faster than p2p by this factor for `auto` to prefer it: smaller differences are noise."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The weight source (learner rank) whose weights a transport sends."""

    rank: int
    folder: Path
    """Belongs to this source alone. Engines see it under the same path."""
    bucket: int
    """Bytes to send at a time (`update_weight_buffer_size`)."""
    timeout: float
    """Seconds per request to an engine."""
    settings: Any = None
    """The section `weights` of the configuration, which has the settings of all transports."""


class Transport(Plugin):
    """Moves the staged weights of one source to engines. All calls block, in foreign code that releases the GIL.

    Each source creates one object and opens it before any other call.
    """

    measured: ClassVar[bool] = False
    """Whether `auto` measures the transport."""
    fallback: ClassVar[int | None] = None
    """When the transport replaces another one that fails: the lowest number first. None if it never does. `auto` keeps
    the transport with the highest number as its last resort."""
    optional: ClassVar[bool] = False
    """Whether a run goes on with the fallbacks, with a warning, if this transport is configured and does not work."""
    uses_loader: ClassVar[bool] = False
    """Whether SGLang's loader loads what the transport sends, so that the transport works for every model."""
    needs_transfer_engine: ClassVar[bool] = False
    """Whether engines must start Mooncake's TransferEngine."""

    device: str = "cpu"
    """Where the transport reads the staged bytes: `cpu`, or `cuda` for the learner's GPU. `open` may change it."""

    def cost(self, seconds: float) -> float:
        """What `auto` minimises, if a send takes `seconds`."""
        return seconds * ADVANTAGE

    def open(self, source: SourceOptions) -> None:
        """Prepare to send the weights of a source. Raises EngineLostError if this process lacks what that needs."""
        self.source = source

    def connect(self, engine: EngineMemory) -> None:
        """Connect to an engine, and again after a failed send or if the engine was restarted.

        Raises EngineLostError if it is out of reach.
        """

    def disconnect(self, name: str) -> None:
        """Disconnect an engine; does nothing if it is not connected."""

    def prepare(self, staging: Staging) -> None:
        """Do the work on a newly staged version that needs no paused engine.

        Raises EngineLostError if another transport may work, and FatalError if none can.
        """

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Send all that is staged to a connected engine; return the number of bytes.

        Raises EngineLostError if some of it may not have arrived. The caller verifies what did arrive.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release all connections and memory."""


class Transports(Kind[Transport]):
    """The weight transports."""

    def measured(self) -> list[str]:
        """The transports that `auto` measures."""
        return [name for name, transport in self.usable().items() if transport.measured]

    def fallbacks(self) -> list[str]:
        """The transports that replace one that fails, in order."""
        ranks = {name: one.fallback for name, one in self.usable().items() if one.fallback is not None}
        return sorted(ranks, key=ranks.__getitem__)

    def needs_transfer_engine(self, wanted: str) -> bool:
        """Whether engines must start Mooncake's TransferEngine if `weight_transfer` is `wanted`."""
        names = self.measured() if wanted == AUTO else [] if wanted == ADAPTER else [wanted]
        return any(self.find(name).needs_transfer_engine for name in names)


TRANSPORTS = Transports("weight transport", Transport, "miles_async.adapters.weights.transports")

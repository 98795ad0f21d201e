"""One source rank's side of publishing: what it stages, and how it sends that to an engine and checks it.

Every rank of the learner is a source of its share of the tensors, and sends it by itself; see `staging.share`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import Engine, meet, sums
from miles_async.adapters.weights.layout import Shape, place
from miles_async.adapters.weights.staging import NamedTensors, Staging, share
from miles_async.adapters.weights.transports.broadcast import BroadcastTransport
from miles_async.adapters.weights.transports.disk import DeltaTransport, DiskTransport
from miles_async.adapters.weights.transports.memory import MemoryTransport
from miles_async.adapters.weights.transports.p2p import P2PTransport
from miles_async.adapters.weights.transports.transport import Transport
from miles_async.errors import EngineLostError, FatalError
from miles_async.types import WriteOutcome

SIGN_OF_LIFE_SECONDS = 5.0

Layout = tuple[list[dict[str, Shape]], dict[str, str]]
"""An engine's parameters: their shapes on each of its ranks, and their dtypes."""


class Source:
    """Calls block; `stage` must not run beside any other, `write` may run for several engines at once.

    `tensors` are the Hugging Face names and shapes of all weights, `folder` is where the disk ways keep files, `bucket`
    is in bytes. `everything`: compare all bytes after a write, not samples.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, Shape]],
        folder: Path,
        *,
        rank: int = 0,
        sources: int = 1,
        bucket: int = 512 << 20,
        everything: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self._tensors = tensors
        self._rank, self._sources = rank, sources
        self.bucket, self.everything, self.timeout = bucket, everything, timeout
        folder /= f"source_{rank}"
        self._make: dict[str, Callable[[], Transport]] = {
            "memory": MemoryTransport,
            "p2p": lambda: P2PTransport(bucket=bucket, timeout=timeout),
            "broadcast": lambda: BroadcastTransport(bucket=bucket, timeout=timeout, source=rank),
            "disk": lambda: DiskTransport(folder, bucket=bucket, timeout=timeout),
            "disk_delta": lambda: DeltaTransport(folder, bucket=bucket, timeout=timeout),
        }
        self._transports: dict[str, Transport] = {}
        self._engines: dict[str, Engine] = {}
        self._layout: Layout | None = None
        """Of the engines that were met."""
        self._staging: Staging | None = None
        self._ready: dict[str, int] = {}
        """What each way has prepared, by the fill of the staging."""
        self._reached: set[tuple[str, str]] = set()
        """Ways and the engines that they are connected to."""
        self._preparing = Lock()

    def meet(self, engines: Sequence[EngineInfo]) -> None:
        """These are the engines from now on; what is staged stays so while their layout does.

        Raises EngineLostError when one does not answer or holds its weights in another layout than the others, Fatal
        when it serves another model.
        """
        for info in engines:
            if [other.name for other in engines].count(info.name) > 1 or [e.url for e in engines].count(info.url) > 1:
                raise FatalError(
                    f"engine {info.name} at {info.url} is there twice; give every engine its own name and port"
                )
        wanted = {info.name: info for info in engines}
        for name, engine in list(self._engines.items()):
            if wanted.get(name) != engine.info:
                self._forget(name)
        for name, info in wanted.items():
            if name not in self._engines:
                self._engines[name] = self._fitting(meet(info, timeout=self.timeout))

    def reach(self, transport: str, name: str) -> None:
        """Connect a way to an engine. Raises EngineLostError with what to do about it."""
        with self._preparing:
            if (transport, name) in self._reached:
                return
            try:
                if transport not in self._transports:
                    self._transports[transport] = self._make[transport]()
            except ImportError as failure:
                raise EngineLostError(_advice(failure)) from failure
            self._transports[transport].connect(self._engines[name])
            self._reached.add((transport, name))

    def stage(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy this rank's share aside as `version`; the tensors may change afterwards."""
        assert self._staging is not None, "meet() comes before stage()"
        self._staging.fill(version, named_tensors)

    def prepare(self, transport: str) -> None:
        """Do what this way can do before the pause. A write does it where this was not called."""
        assert self._staging is not None, "meet() comes first"
        with self._preparing:
            if transport in self._transports and self._ready.get(transport) != self._staging.fills:
                self._transports[transport].stage(self._staging)
                self._ready[transport] = self._staging.fills

    def write(self, version: int, name: str, transport: str) -> WriteOutcome:
        """Write the staged version to one engine and check it. Never raises for what happens to an engine."""
        assert self._staging is not None, "meet() comes before write()"
        started, size = time.perf_counter(), 0
        error = None
        try:
            if self._staging.version != version:
                raise EngineLostError(f"version {version} is not staged (version {self._staging.version} is)")
            if self._staging.placements:  # there may be more sources than tensors
                self.reach(transport, name)
                self.prepare(transport)
                size = self._transports[transport].write(self._staging, self._engines[name])
                self._check(self._engines[name])
        except (EngineLostError, FatalError) as failure:
            error = f"engine {name}: {failure}"
        seconds = time.perf_counter() - started
        # Whatever waits for an engine gives up after the timeout, and may leave something behind that goes on.
        final = error is not None and (seconds > 0.9 * self.timeout or not self._answers(name))
        return WriteOutcome(engine=name, seconds=seconds, bytes=size, error=error, final=final)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._transports, self._reached, self._ready = {}, set(), {}

    def _forget(self, name: str) -> None:
        del self._engines[name]
        for transport in self._transports.values():
            transport.forget(name)
        self._reached = {(transport, other) for transport, other in self._reached if other != name}

    def _fitting(self, engine: Engine) -> Engine:
        """The engine, once it is certain that what is staged, for it as for the others, fits it."""
        layout = [rank.shapes for rank in engine.ranks], engine.ranks[0].dtypes
        if layout == self._layout:
            return engine
        if self._engines:
            raise EngineLostError(
                f"engine {engine.name} holds its weights in another layout than {min(self._engines)}; start all with "
                "the same model, dtype and tensor-parallel size"
            )
        mine = share(place(self._tensors, layout[0]), self._rank, self._sources)
        self._layout, self._staging, self._ready = layout, Staging(mine, layout[1]), {}
        return engine

    def _answers(self, name: str) -> bool:
        """Whether all ranks of the engine are there; if not, no other way needs to be tried while others wait."""
        engine = self._engines[name]
        try:
            sums(engine, [[] for _ in engine.ranks], timeout=min(SIGN_OF_LIFE_SECONDS, self.timeout))
        except EngineLostError:
            return False
        return True

    def _check(self, engine: Engine) -> None:
        """Compare what stands in the engine's memory with what was sent. Raises EngineLostError where it differs."""
        assert self._staging is not None, "meet() comes first"
        windows, expected = self._staging.windows(len(engine.ranks), everything=self.everything)
        found = sums(engine, windows, timeout=self.timeout)
        for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            for (parameter, _, _), here, there in zip(windows[rank], ours, theirs, strict=True):
                if here != there:
                    raise EngineLostError(f"{parameter} of rank {rank} differs from what was sent")


def _advice(failure: ImportError) -> str:
    if "libibverbs" in str(failure):
        return "Mooncake needs libibverbs; install it with: apt-get install libibverbs1"
    return f"Mooncake could not be loaded ({failure}); install mooncake-transfer-engine-non-cuda"

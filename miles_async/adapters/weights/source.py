"""A weight source: stages one learner rank's part of the weights, sends it to engines and verifies it there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import torch

from miles_async.adapters.sglang.engine_weights import Shape
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import (
    EngineMemory,
    compare_logprobs,
    read_checksums,
    read_engine_memory,
    read_layouts,
    read_received,
    verify_checksums,
    watch_loader,
)
from miles_async.adapters.weights.layout import TensorDescription, plan_tensors, plans_by_name
from miles_async.adapters.weights.staging import NamedTensors, Staging, plans_of_source
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError, FatalError
from miles_async.transports import TRANSPORTS, SourceOptions, Transport
from miles_async.types import SendOutcome

SIGN_OF_LIFE_SECONDS = 5.0
"""Time for an engine to answer after a failed send."""
LAYOUT_SECONDS = 600.0
"""Time for an engine to find out where SGLang's loader puts the weights."""

Layout = tuple[list[dict[str, Shape]], dict[str, str]]
"""An engine's parameters: their shapes on each of its ranks, and their dtypes."""


class WeightSource:
    """Sends one learner rank's part of the weights, in three steps: `connect`, `stage`, `send`.

    All calls block. `send` may run for several engines at once; `connect` and `stage` must not run beside another call.
    """

    def __init__(
        self,
        tensors: Sequence[TensorDescription],
        folder: Path,
        settings: Weights,
        *,
        rank: int = 0,
        sources: int = 1,
        by_name: str | None = None,
    ) -> None:
        """`tensors` are all weights, including those of other sources.

        `folder` is where the disk transports write; engines must see it under the same path. This source is number
        `rank` of `sources`. `by_name` says why SGLang's loader has to load the weights; None if it need not.
        """
        self._tensors = tensors
        self._rank, self._sources = rank, sources
        self.bucket, self.verify_all = settings.update_weight_buffer_size, settings.check_weight_update_equal
        self.timeout = settings.update_weight_timeout_seconds
        """In seconds, per request to an engine."""
        self._options = SourceOptions(rank, folder / f"source_{rank}", self.bucket, self.timeout, settings)
        self._transports: dict[str, Transport] = {}
        self._engines: dict[str, EngineMemory] = {}
        self._layout: Layout | None = None
        """The layout that all connected engines share."""
        self._why = by_name
        self._by_name: str | None = None
        """Why SGLang's loader has to load the weights; None if they can be written into the engines' memory."""
        self._staging: Staging | None = None
        self._prepared: dict[str, int] = {}
        """By transport: the fill of the staging buffer (`Staging.fill_count`) that it was prepared for."""
        self._connections: set[tuple[str, str]] = set()
        """Pairs of a transport and an engine that it is connected to."""
        self._lock = Lock()
        """Sends to several engines run in threads; only one of them may connect or prepare a transport at a time."""
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        """For sends, so that they do not wait for a training step, nor the step for them."""

    def connect(self, engines: Sequence[EngineInfo], transports: Mapping[str, str]) -> None:
        """Connect to exactly these engines: read the layout of new ones, disconnect all others.

        `transports` gives the transport of an engine by the engine's name; it is connected now. A transport that is not
        in `transports` is connected by the first `send` that uses it. The staged version remains valid unless the
        layout changes.

        Raises EngineLostError if an engine does not answer, has another layout than the others or is out of reach of
        its transport, and FatalError if an engine serves another model or is given twice.
        """
        for info in engines:
            if [other.name for other in engines].count(info.name) > 1 or [e.url for e in engines].count(info.url) > 1:
                raise FatalError(
                    f"engine {info.name} at {info.url} is there twice; give every engine its own name and port"
                )
        wanted = {info.name: info for info in engines}
        for name, engine in list(self._engines.items()):
            if wanted.get(name) != engine.info:
                self._disconnect(name)
        for name, info in wanted.items():
            if name not in self._engines:
                engine = read_engine_memory(info, timeout=self.timeout)
                self._adopt_layout(engine)
                if self._by_name is not None:
                    watch_loader(engine, whole=self.verify_all, timeout=self.timeout)
                self._engines[name] = engine
        for name, transport in transports.items():
            self._connect_transport(transport, name)

    def stage(self, version: int, named_tensors: NamedTensors, transports: Sequence[str], adapter: str = "") -> None:
        """Copy this source's tensors into the staging buffer as `version`; the tensors may change afterwards.

        `transports` do the work now that they can do before the engines are paused. Another transport does that work in
        `send`. `adapter` is that of `AdapterSource.stage`, and has no effect here. Raises FatalError if a tensor is
        missing.
        """
        staging = self._require_staging()
        devices = {self._transports[one].device for one in transports if one in self._transports}
        staging.move("cuda" if devices == {"cuda"} else "cpu")
        staging.fill(version, named_tensors)
        for transport in transports:
            self._prepare(transport)

    def send(self, version: int, name: str, transport: str) -> SendOutcome:
        """Send the staged version to the engine `name` and verify it. Failures of the engine are in the outcome."""
        staging = self._require_staging()
        started, size = time.perf_counter(), 0
        error = None
        try:
            if staging.version != version:
                raise EngineLostError(f"version {version} is not staged (version {staging.version} is)")
            if staging.plans:  # there may be more sources than tensors
                # A transport that became the fallback after staging is neither connected nor prepared yet.
                self._connect_transport(transport, name)
                self._prepare(transport)
                with torch.cuda.stream(self._stream):
                    size = self._transports[transport].send(staging, self._engines[name])
                    self._verify(self._engines[name])
        except (EngineLostError, FatalError) as failure:
            error = f"engine {name}: {failure}"
            # A repeated send connects again, because a failure may have broken the connection.
            with self._lock:
                self._connections.discard((transport, name))
        seconds = time.perf_counter() - started
        # A send that ran into the timeout may still be writing in the background, so no other send may follow it.
        final = error is not None and (seconds > 0.9 * self.timeout or not self._is_alive(name))
        return SendOutcome(engine=name, seconds=seconds, bytes=size, error=error, final=final)

    @property
    def compared(self) -> bool:
        """Whether the log-probabilities of engines and learner are to be compared for the staged version.

        The first one shows whether the engines compute the learner's model. Later ones are compared if SGLang's loader
        loads the weights, because only the bytes that it receives can be verified then.
        """
        return self._by_name is not None or self._require_staging().fill_count == 1

    def compare(self, name: str, logprobs: Sequence[float]) -> float:
        """Return the mean difference in nats between an engine's log-probabilities of `TOKENS` and `logprobs`.

        Raises EngineLostError if the engine does not answer.
        """
        return compare_logprobs(self._engines[name].info, logprobs, timeout=self.timeout)

    def drop(self, name: str) -> None:
        """Engines hold one version of the weights, so there is nothing to drop."""

    def close(self) -> None:
        """Close all transports."""
        for transport in self._transports.values():
            transport.close()
        self._transports, self._connections, self._prepared = {}, set(), {}

    def _require_staging(self) -> Staging:
        assert self._staging is not None, "connect() comes first"
        return self._staging

    def _connect_transport(self, transport: str, name: str) -> None:
        with self._lock:
            if (transport, name) in self._connections:
                return
            if self._by_name is not None and not TRANSPORTS.find(transport).uses_loader:
                raise EngineLostError(f"it writes into the engine's memory, but {self._by_name}")
            if transport not in self._transports:
                self._transports[transport] = self._open(transport)
            self._transports[transport].connect(self._engines[name])
            self._connections.add((transport, name))

    def _open(self, transport: str) -> Transport:
        opened = type(TRANSPORTS.find(transport))()
        opened.open(self._options)
        return opened

    def _disconnect(self, name: str) -> None:
        del self._engines[name]
        for transport in self._transports.values():
            transport.disconnect(name)
        self._connections = {(transport, other) for transport, other in self._connections if other != name}

    def _prepare(self, transport: str) -> None:
        """Let a transport that is in use prepare what is staged, once per fill of the buffer."""
        staging = self._require_staging()
        with self._lock:
            if transport in self._transports and self._prepared.get(transport) != staging.fill_count:
                if self._transports[transport].device == "cpu":
                    staging.move("cpu")
                self._transports[transport].prepare(staging)
                self._prepared[transport] = staging.fill_count

    def _adopt_layout(self, engine: EngineMemory) -> None:
        """Check that the staging buffer fits a new engine; allocate a buffer if no engine is connected.

        Raises EngineLostError if engines are connected that have another layout.
        """
        # There is one staging buffer, laid out and converted for the engines, so all engines must have the same layout.
        layout = [rank.shapes for rank in engine.ranks], engine.ranks[0].dtypes
        if layout == self._layout:
            return
        if self._engines:
            raise EngineLostError(
                f"engine {engine.name} holds its weights in another layout than {min(self._engines)}; start all with "
                "the same model, dtype and tensor-parallel size"
            )
        layouts = read_layouts(engine, self._tensors, timeout=max(self.timeout, LAYOUT_SECONDS))
        self._by_name = self._why or next((one.unknown for one in layouts if one.unknown is not None), None)
        if self._by_name is None:
            plans = plan_tensors(self._tensors, layouts, layout[1])
        else:
            plans = plans_by_name(self._tensors)
        staging = Staging(plans_of_source(plans, self._rank, self._sources))
        self._layout, self._staging, self._prepared = layout, staging, {}

    def _is_alive(self, name: str) -> bool:
        """Whether all ranks of an engine answer; a send to a dead engine is not repeated while others are paused."""
        engine = self._engines[name]
        try:
            read_checksums(engine, [[] for _ in engine.ranks], timeout=min(SIGN_OF_LIFE_SECONDS, self.timeout))
        except EngineLostError:
            return False
        return True

    def _verify(self, engine: EngineMemory) -> None:
        """Compare the engine's memory, or what its loader received, with the staging buffer.

        Raises EngineLostError if a checksum differs.
        """
        staging = self._require_staging()
        if self._by_name is not None:
            sent_tensors = staging.received(verify_all=self.verify_all)
            for rank, found in enumerate(read_received(engine, list(sent_tensors), timeout=self.timeout)):
                for name, checksum in sent_tensors.items():
                    if found[name] != checksum:
                        raise EngineLostError(f"{name} on rank {rank} differs from what was sent")
            return
        windows, expected = staging.checksums(len(engine.ranks), verify_all=self.verify_all)
        verify_checksums(engine, windows, expected, complaint="differs from what was sent", timeout=self.timeout)

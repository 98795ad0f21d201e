"""One-sided writes into the engines' memory through Mooncake's TransferEngine: TCP on one machine, RDMA on clusters.

The engine takes no part in a write: its parameters' addresses were told when it started. So nothing on its side
notices a write that broke off; each is checked by reading samples back.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.layout import FusedStaging, Piece
from miles_async.adapters.weights.writer import NamedTensors, call_engine
from miles_async.errors import EngineLost
from miles_async.types import WriteOutcome

SAMPLE_BYTES = 4096
"""Read back from each parameter after a write."""

Region = tuple[int, int, int]
"""Address, elements, bytes per element."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine rank's memory: Mooncake's session and the region of each parameter."""

    session: str
    regions: dict[str, Region]


class P2PWriter:
    """Implements `WeightWriter`; Mooncake lets go of the interpreter lock while it writes.

    `protocol` is `tcp` or `rdma`. Raises ImportError when Mooncake cannot be loaded.
    """

    name = "p2p"

    def __init__(
        self, *, protocol: str = "tcp", host: str = "127.0.0.1", device: str = "", timeout: float = 60.0
    ) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise EngineLost(f"Mooncake could not start on {host} with protocol {protocol}")
        self._timeout = timeout
        self._peers: dict[str, list[Peer]] = {}
        self._staging: FusedStaging | None = None
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        """Staged weights and what was read back, both registered."""
        self._staged: int | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        self._peers = {engine.name: [self._peer(engine, rank) for rank in range(engine.tp)] for engine in engines}
        sizes = {
            name: [{parameter: region[1] for parameter, region in peer.regions.items()} for peer in peers]
            for name, peers in self._peers.items()
        }
        first = next(iter(sizes.values()))
        for name, others in sizes.items():
            if others != first:
                raise EngineLost(
                    f"engine {name} holds its weights in another layout than the first one; start all alike"
                )
        if self._staging is None or self._staging.sizes != first:
            self._prepare(FusedStaging(first, self._dtype()))

    def stage(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy into the engine's layout, in memory that is registered already. Raises Fatal where a tensor misfits."""
        assert self._staging is not None, "connect() comes before stage()"
        self._staged = None
        self._staging.fill(named_tensors)
        self._staged = version

    def write(self, version: int, engine: str) -> WriteOutcome:
        started = time.perf_counter()
        size, error = 0, None
        if self._staged != version:
            error = f"version {version} is not staged (version {self._staged} is)"
        else:
            for rank, peer in enumerate(self._peers[engine]):
                error = self._write_rank(rank, peer)
                if error:
                    error = f"engine {engine}, rank {rank}: {error}"
                    break
                size += sum(numel * width for _, numel, width in peer.regions.values())
        return WriteOutcome(engine=engine, seconds=time.perf_counter() - started, bytes=size, error=error)

    def close(self) -> None:
        if self._buffers is not None:
            for tensor in self._buffers:
                self._engine.unregister_memory(tensor.data_ptr())
        self._staging = self._buffers = None
        self._peers = {}

    def _peer(self, engine: EngineInfo, rank: int) -> Peer:
        path = f"/remote_instance_transfer_engine_info?rank={rank}"
        session, regions = call_engine(engine.url, path, timeout=self._timeout)["remote_instance_transfer_engine_info"]
        return Peer(session, {parameter: (region[0], region[1], region[2]) for parameter, region in regions.items()})

    def _dtype(self) -> torch.dtype:
        widths = {width for peers in self._peers.values() for peer in peers for _, _, width in peer.regions.values()}
        known = {4: torch.float32, 2: torch.bfloat16}
        if len(widths) != 1 or not widths <= known.keys():
            raise EngineLost(f"p2p writes float32 or bfloat16 engines, not elements of {widths} bytes; use broadcast")
        return known[widths.pop()]

    def _prepare(self, staging: FusedStaging) -> None:
        peers = self._peers
        self.close()
        self._peers, self._staging = peers, staging
        width = staging.buffer.element_size()
        samples = torch.empty(len(staging.pieces) * SAMPLE_BYTES // width, dtype=staging.buffer.dtype)
        for tensor in (staging.buffer, samples):
            size = tensor.numel() * width
            if self._engine.register_memory(tensor.data_ptr(), size) != 0:
                raise EngineLost(f"Mooncake could not register {size} bytes; raise the memlock limit (ulimit -l)")
        self._buffers = (staging.buffer, samples)

    def _write_rank(self, rank: int, peer: Peer) -> str | None:
        """Write one rank's parameters and check them; what went wrong, or None."""
        assert self._staging is not None, "connect() comes before write()"
        width = self._staging.buffer.element_size()
        base = self._staging.buffer.data_ptr()
        pieces = [piece for piece in self._staging.pieces if piece.rank == rank]
        status = self._engine.batch_transfer_sync_write(
            peer.session,
            [base + piece.offset * width for piece in pieces],
            [peer.regions[piece.parameter][0] for piece in pieces],
            [piece.numel * width for piece in pieces],
        )
        if status != 0:
            return f"Mooncake's write broke off with status {status}"
        return self._differs(peer, pieces)

    def _differs(self, peer: Peer, pieces: Sequence[Piece]) -> str | None:
        """Read a window of every parameter back, at another place each time, and compare it with what was staged."""
        assert self._buffers is not None, "connect() comes before write()"
        staged, read = self._buffers
        width = staged.element_size()
        window = SAMPLE_BYTES // width
        starts = [random.randrange(max(1, piece.numel - window + 1)) for piece in pieces]
        lengths = [min(window, piece.numel) for piece in pieces]
        status = self._engine.batch_transfer_sync_read(
            peer.session,
            [read.data_ptr() + place * SAMPLE_BYTES for place in range(len(pieces))],
            [peer.regions[piece.parameter][0] + start * width for piece, start in zip(pieces, starts, strict=True)],
            [length * width for length in lengths],
        )
        if status != 0:
            return f"the weights could not be read back (Mooncake status {status})"
        for place, (piece, start, length) in enumerate(zip(pieces, starts, lengths, strict=True)):
            there = read[place * window : place * window + length]
            ours = staged[piece.offset + start : piece.offset + start + length]
            # As bits: a weight that is not a number must compare equal to itself.
            if not torch.equal(there.view(torch.uint8), ours.view(torch.uint8)):
                return f"{piece.parameter} differs from what was written"
        return None

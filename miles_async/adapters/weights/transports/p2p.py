"""One-sided writes into the engines' memory through Mooncake's TransferEngine: TCP on one machine, RDMA on clusters.

The engine takes no part in a write, so nothing on its side notices one that broke off.
"""

from __future__ import annotations

import os

import torch

from miles_async.adapters.weights.engine import Engine, address_towards, call_engine
from miles_async.adapters.weights.staging import Staging
from miles_async.adapters.weights.transports.transport import segments
from miles_async.errors import EngineLostError


class P2PTransport:
    """Implements `Transport`. `bucket` is in bytes per call; the protocol is that of the engines, `MOONCAKE_PROTOCOL`.

    Raises ImportError when Mooncake cannot be loaded.
    """

    def __init__(self, *, bucket: int, timeout: float) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(1, round(timeout)))
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._running = False
        self._bucket = bucket
        self._timeout = timeout
        self._sessions: dict[str, list[str]] = {}
        """Of each engine's ranks."""
        self._registered: tuple[int, int] | None = None
        """Address and bytes of the staged weights."""

    def connect(self, engine: Engine) -> None:
        if not self._running:
            self._start(address_towards(engine.info.url))
        told = [
            call_engine(engine.info.url, f"/remote_instance_transfer_engine_info?rank={rank}", timeout=self._timeout)
            for rank in range(engine.info.tp)
        ]
        self._sessions[engine.name] = [answer["remote_instance_transfer_engine_info"][0] for answer in told]

    def forget(self, name: str) -> None:
        self._sessions.pop(name, None)

    def stage(self, staging: Staging) -> None:
        wanted = (staging.buffer.data_ptr(), staging.buffer.numel())
        if self._registered == wanted or not self._running:
            return
        self._unregister()
        if self._engine.register_memory(*wanted) != 0:
            raise EngineLostError(f"Mooncake could not register {wanted[1]} bytes; raise the memlock limit (ulimit -l)")
        self._registered = wanted

    def write(self, staging: Staging, engine: Engine) -> int:
        here = staging.buffer.data_ptr()
        size = 0
        for rank, session in enumerate(self._sessions[engine.name]):
            regions = engine.ranks[rank].regions
            for bucket in staging.buckets(self._bucket):
                pieces = list(segments(staging, bucket, rank))
                status = self._engine.batch_transfer_sync_write(
                    session,
                    [here + source for source, _, _, _ in pieces],
                    [regions[parameter].address + target for _, parameter, target, _ in pieces],
                    [length for _, _, _, length in pieces],
                )
                if status != 0:
                    raise EngineLostError(f"Mooncake's write to rank {rank} broke off with status {status}")
                size += sum(length for _, _, _, length in pieces)
        return size

    def close(self) -> None:
        self._unregister()
        self._sessions = {}

    def _start(self, host: str) -> None:
        # SGLang's own default, and what it is told on a machine without CUDA.
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "rdma" if torch.cuda.is_available() else "tcp")
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise EngineLostError(f"Mooncake could not start on {host} with protocol {protocol}")
        self._running = True

    def _unregister(self) -> None:
        if self._registered is not None:
            self._engine.unregister_memory(self._registered[0])
            self._registered = None

"""One-sided writes into the engines' memory through Mooncake's TransferEngine: TCP on one machine, RDMA on clusters.

The engine takes no part in a write, so nothing on its side notices one that broke off.
"""

from __future__ import annotations

import os

from miles_async.adapters.weights.engine import Engine, call_engine
from miles_async.adapters.weights.staging import Staging
from miles_async.adapters.weights.way import segments
from miles_async.errors import EngineLost


class P2PWay:
    """Implements `Way`. `protocol` is `tcp` or `rdma`, `bucket` is in bytes per call.

    Raises ImportError when Mooncake cannot be loaded, EngineLost when it cannot start.
    """

    def __init__(
        self, *, bucket: int, timeout: float, protocol: str = "tcp", host: str = "127.0.0.1", device: str = ""
    ) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(1, round(timeout)))
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise EngineLost(f"Mooncake could not start on {host} with protocol {protocol}")
        self._bucket = bucket
        self._timeout = timeout
        self._sessions: dict[str, list[str]] = {}
        """Of each engine's ranks."""
        self._registered: tuple[int, int] | None = None
        """Address and bytes of the staged weights."""

    def connect(self, engine: Engine) -> None:
        told = [
            call_engine(engine.info.url, f"/remote_instance_transfer_engine_info?rank={rank}", timeout=self._timeout)
            for rank in range(engine.info.tp)
        ]
        self._sessions[engine.name] = [answer["remote_instance_transfer_engine_info"][0] for answer in told]

    def forget(self, name: str) -> None:
        self._sessions.pop(name, None)

    def stage(self, staging: Staging) -> None:
        wanted = (staging.buffer.data_ptr(), staging.buffer.numel())
        if self._registered == wanted:
            return
        self._unregister()
        if self._engine.register_memory(*wanted) != 0:
            raise EngineLost(f"Mooncake could not register {wanted[1]} bytes; raise the memlock limit (ulimit -l)")
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
                    raise EngineLost(f"Mooncake's write to rank {rank} broke off with status {status}")
                size += sum(length for _, _, _, length in pieces)
        return size

    def close(self) -> None:
        self._unregister()
        self._sessions = {}

    def _unregister(self) -> None:
        if self._registered is not None:
            self._engine.unregister_memory(self._registered[0])
            self._registered = None

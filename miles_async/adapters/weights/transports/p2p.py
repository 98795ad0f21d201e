"""One-sided writes into the engines' memory through Mooncake's TransferEngine: TCP on one machine, RDMA on clusters.

The engine takes no part in a write and does not notice one that breaks off, so every send has to be verified.
"""

from __future__ import annotations

import os

from miles_async.adapters.sglang.launch import mooncake_protocol
from miles_async.adapters.system.listeners import confined_listeners, local_address
from miles_async.adapters.weights.engine import EngineMemory, call_engine
from miles_async.adapters.weights.staging import Staging
from miles_async.adapters.weights.transports.transport import segments
from miles_async.errors import EngineLostError


class P2PTransport:
    """Implements `Transport`.

    `bucket` is the number of bytes per call of Mooncake, `timeout` is in seconds. The protocol is
    `mooncake_protocol()`, as in the engines. Raises ImportError if Mooncake cannot be loaded.
    """

    def __init__(self, *, bucket: int, timeout: float) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(1, round(timeout)))
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._initialized = False
        self._bucket = bucket
        self._timeout = timeout
        self._sessions: dict[str, list[str]] = {}
        """By engine: Mooncake's session of each of its ranks."""
        self._registered: tuple[int, int] | None = None
        """Address and bytes of the staging buffer that is registered with Mooncake."""

    def connect(self, engine: EngineMemory) -> None:
        if not self._initialized:
            # The first engine decides which of this machine's networks the transfers use.
            self._initialize(local_address(engine.info.host))
        answers = [
            call_engine(engine.info, f"/remote_instance_transfer_engine_info?rank={rank}", timeout=self._timeout)
            for rank in range(engine.info.tp)
        ]
        self._sessions[engine.name] = [answer["remote_instance_transfer_engine_info"][0] for answer in answers]

    def disconnect(self, name: str) -> None:
        self._sessions.pop(name, None)

    def prepare(self, staging: Staging) -> None:
        """Register the staging buffer with Mooncake, which is slow and needed only once per buffer."""
        wanted = (staging.buffer.data_ptr(), staging.buffer.numel())
        if self._registered == wanted or not self._initialized:
            return
        self._unregister()
        if self._engine.register_memory(*wanted) != 0:
            raise EngineLostError(f"Mooncake could not register {wanted[1]} bytes; raise the memlock limit (ulimit -l)")
        self._registered = wanted

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        local = staging.buffer.data_ptr()
        size = 0
        for rank, session in enumerate(self._sessions[engine.name]):
            regions = engine.ranks[rank].regions
            for bucket in staging.buckets(self._bucket):
                writes = list(segments(staging, bucket, rank))
                status = self._engine.batch_transfer_sync_write(
                    session,
                    [local + source for source, _, _, _ in writes],
                    [regions[parameter].address + target for _, parameter, target, _ in writes],
                    [length for _, _, _, length in writes],
                )
                if status != 0:
                    raise EngineLostError(f"Mooncake's write to rank {rank} broke off with status {status}")
                size += sum(length for _, _, _, length in writes)
        return size

    def close(self) -> None:
        self._unregister()
        self._sessions = {}

    def _initialize(self, host: str) -> None:
        protocol = mooncake_protocol()
        with confined_listeners(host):
            status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if status != 0:
            raise EngineLostError(f"Mooncake could not start on {host} with protocol {protocol}")
        self._initialized = True

    def _unregister(self) -> None:
        if self._registered is not None:
            self._engine.unregister_memory(self._registered[0])
            self._registered = None

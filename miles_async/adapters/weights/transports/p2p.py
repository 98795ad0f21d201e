"""One-sided writes into the engines' memory through Mooncake's TransferEngine: TCP on one machine, RDMA on clusters.

The engine takes no part in a write and does not notice one that breaks off, so every send has to be verified.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miles_async.errors import EngineLostError
from miles_async.transports import SourceOptions, Transport

if TYPE_CHECKING:
    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.staging import Staging


class P2PTransport(Transport):
    """Sends the weights by one-sided Mooncake writes. If they do not work, the run uses broadcast or disk instead.

    The protocol is `mooncake_protocol()`, as in the engines.
    """

    name = "p2p"
    measured = True
    fallback = 1
    # p2p is the default and needs a system library.
    optional = True
    needs_transfer_engine = True

    def cost(self, seconds: float) -> float:
        return seconds

    def open(self, source: SourceOptions) -> None:
        """Raises EngineLostError if Mooncake cannot be loaded."""
        super().open(source)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(1, round(source.timeout)))
        try:
            from mooncake.engine import TransferEngine
        except ImportError as failure:
            raise EngineLostError(mooncake_advice(failure)) from failure
        self._engine = TransferEngine()
        self._initialized = False
        self._sessions: dict[str, list[str]] = {}
        """By engine: Mooncake's session of each of its ranks."""
        self._registered: tuple[int, int] | None = None
        """Address and bytes of the staging buffer that is registered with Mooncake."""

    def connect(self, engine: EngineMemory) -> None:
        from miles_async.adapters.system.listeners import local_address
        from miles_async.adapters.weights.engine import call_engine

        if not self._initialized:
            # The first engine decides which of this machine's networks the transfers use.
            self._initialize(local_address(engine.info.host))
        answers = [
            call_engine(engine.info, f"/remote_instance_transfer_engine_info?rank={rank}", timeout=self.source.timeout)
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
            for bucket in staging.buckets(self.source.bucket):
                writes = list(staging.segments(bucket, rank))
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
        from miles_async.adapters.sglang.launch import mooncake_protocol
        from miles_async.adapters.system.listeners import confined_listeners

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


def mooncake_advice(failure: ImportError) -> str:
    """What to install if Mooncake cannot be imported."""
    if "libibverbs" in str(failure):
        return "Mooncake needs libibverbs; install it with: apt-get install libibverbs1"
    return f"Mooncake could not be loaded ({failure}); install mooncake-transfer-engine-non-cuda"

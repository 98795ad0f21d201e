"""Sends weights by a torch.distributed broadcast: gloo on CPU, NCCL on CUDA, one bucket of tensors at a time.

Each pair of a source and an engine forms a process group: rank 0 is the source, the engine's ranks follow. The group is
separate from the learner's default group and Megatron's groups, so that a lost engine breaks no other group.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

from miles_async.errors import EngineLostError
from miles_async.transports import SourceOptions, Transport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, TCPStore
    from torch.distributed.distributed_c10d import GroupName

    from miles_async.adapters.sglang.launch import EngineInfo
    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.layout import TensorPlan
    from miles_async.adapters.weights.staging import Staging

_group_numbers = count()
"""torch.distributed refuses a group name that this process has used before, even after the engine was restarted."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The process group of this source and one engine."""

    name: GroupName
    group: ProcessGroup
    store: TCPStore
    """Serves the rendezvous; it has to live as long as the group."""


class BroadcastTransport(Transport):
    """Sends the weights by a torch.distributed collective, one bucket at a time.

    The engine has to hold a bucket besides its weights.
    """

    name = "broadcast"
    measured = True
    fallback = 2
    uses_loader = True

    def open(self, source: SourceOptions) -> None:
        import torch

        super().open(source)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._backend = "nccl" if self._device == "cuda" else "gloo"
        self._groups: dict[str, EngineGroup] = {}

    def connect(self, engine: EngineMemory) -> None:
        """Form the process group. Both sides join at the same time: the engine is asked in a thread."""
        from torch.distributed import Backend, PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper

        from miles_async.adapters.system.listeners import confined_listeners, local_address
        from miles_async.adapters.weights.engine import call_engine

        size, host = 1 + engine.info.tp, local_address(engine.info.host)
        name = GroupName(f"weights-{engine.name}-{engine.info.pid}-{self.source.rank}-{next(_group_numbers)}")
        seconds = self.source.timeout
        timeout = timedelta(seconds=seconds)
        with confined_listeners(host):
            store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        request = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                call_engine, engine.info, "/init_weights_update_group", request, timeout=self.source.timeout
            )
            try:
                # torch has no public function for a group outside the default group; SGLang calls the same helper.
                group, _ = _new_process_group_helper(
                    size, 0, [], Backend(self._backend), PrefixStore(name, store), group_name=name, timeout=timeout
                )
            except RuntimeError as failure:
                raise EngineLostError(f"engine {engine.name} did not join the weight group: {failure}") from failure
            joined.result()
        self._groups[engine.name] = EngineGroup(name, group, store)

    def disconnect(self, name: str) -> None:
        self._groups.pop(name, None)

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Broadcast every bucket. The engine answers when all its ranks have received and loaded the bucket."""
        size = 0
        for bucket in staging.buckets(self.source.bucket):
            # One collective per bucket instead of one per tensor.
            flat = staging.flat(bucket).to(self._device)
            try:
                self._broadcast(self._groups[engine.name], engine.info, staging, bucket, flat)
            except RuntimeError as failure:
                raise EngineLostError(str(failure)) from failure
            size += flat.numel()
        return size

    def close(self) -> None:
        self._groups.clear()

    def _broadcast(
        self, group: EngineGroup, engine: EngineInfo, staging: Staging, bucket: Sequence[TensorPlan], flat: torch.Tensor
    ) -> None:
        from torch.distributed import BroadcastOptions

        from miles_async.adapters.weights.engine import call_engine

        request = {
            "names": [plan.name for plan in bucket],
            "dtypes": [plan.dtype for plan in bucket],
            "shapes": [list(plan.shape) for plan in bucket],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            # `SGLangFleet.commit` flushes. SGLang's scheduler exits if a flush inside this call is refused.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self.source.timeout)
        # The engine joins the collective while it handles the request, so the request must not be awaited first.
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(
                call_engine, engine, "/update_weights_from_distributed", request, timeout=self.source.timeout
            )
            group.group.broadcast([flat], options).wait()
            loaded.result()

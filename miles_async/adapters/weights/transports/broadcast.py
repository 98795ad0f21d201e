"""Weights over a collective, gloo on CPU and NCCL on CUDA, a bucket of tensors at a time.

Source and engine ranks form a process group of their own, beside the learner's default group and those of Megatron:
rank 0 is this process, the engine's ranks follow. There is a group per source and engine, so that a lost one takes no
other along.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
from torch.distributed import Backend, BroadcastOptions, PrefixStore, ProcessGroup, TCPStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper

from miles_async.adapters.weights.engine import Engine, address_towards, call_engine
from miles_async.adapters.weights.layout import Placement
from miles_async.adapters.weights.staging import Staging
from miles_async.errors import EngineLostError

_generation = count()
"""A group name may not come back in one process, not even after a restart of the engine."""


@dataclass(frozen=True, slots=True)
class Link:
    group_name: GroupName
    group: ProcessGroup
    store: TCPStore


class BroadcastTransport:
    """Implements `Transport`; the collective runs in torch's own threads. `bucket` is in bytes, and bounds the
    engine's room.

    `source` tells this process' groups from those of other source ranks.
    """

    def __init__(self, *, bucket: int, timeout: float, source: int = 0) -> None:
        self._bucket = bucket
        self._source = source
        self._timeout = timeout
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._backend = "nccl" if self._device == "cuda" else "gloo"
        self._links: dict[str, Link] = {}

    def connect(self, engine: Engine) -> None:
        """Form the group: the engine is asked to join in one thread while this process joins in another."""
        size, host = 1 + engine.info.tp, address_towards(engine.info.url)
        name = GroupName(f"weights-{engine.name}-{engine.info.pid}-{self._source}-{next(_generation)}")
        patience = timedelta(seconds=self._timeout)
        store = TCPStore(host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        invitation = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                call_engine, engine.info.url, "/init_weights_update_group", invitation, timeout=self._timeout
            )
            try:
                # torch has no public way to a group outside the default one's ranks; SGLang's side does the same.
                group, _ = _new_process_group_helper(
                    size, 0, [], Backend(self._backend), PrefixStore(name, store), group_name=name, timeout=patience
                )
            except RuntimeError as failure:
                raise EngineLostError(f"engine {engine.name} did not join the weight group: {failure}") from failure
            joined.result()
        self._links[engine.name] = Link(name, group, store)

    def forget(self, name: str) -> None:
        self._links.pop(name, None)

    def stage(self, staging: Staging) -> None: ...

    def write(self, staging: Staging, engine: Engine) -> int:
        """The engine answers after every one of its ranks has received and loaded every tensor of a bucket."""
        size = 0
        for bucket in staging.buckets(self._bucket):
            flat = staging.flat(bucket).to(self._device)
            try:
                self._send(self._links[engine.name], engine.info.url, staging, bucket, flat)
            except RuntimeError as failure:
                raise EngineLostError(str(failure)) from failure
            size += flat.numel()
        return size

    def close(self) -> None:
        self._links.clear()

    def _send(self, link: Link, url: str, staging: Staging, bucket: Sequence[Placement], flat: torch.Tensor) -> None:
        request = {
            "names": [placement.name for placement in bucket],
            "dtypes": [str(staging.dtype(placement.name)).removeprefix("torch.") for placement in bucket],
            "shapes": [list(placement.shape) for placement in bucket],
            "group_name": link.group_name,
            "load_format": "flattened_bucket",
            # The fleet's commit flushes; SGLang ends its scheduler where a flush inside this call is refused.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout)
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(call_engine, url, "/update_weights_from_distributed", request, timeout=self._timeout)
            link.group.broadcast([flat], options).wait()
            loaded.result()

"""Weights over a collective, gloo on CPU and NCCL on CUDA, in one flat piece per engine.

Learner and engine ranks form a process group of their own, beside the learner's default group and those of Megatron:
rank 0 is this process, the engine's ranks follow. There is a group per engine, so that a lost one takes no other along.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
from torch.distributed import Backend, BroadcastOptions, PrefixStore, ProcessGroup, TCPStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.writer import NamedTensors, call_engine
from miles_async.errors import EngineLost
from miles_async.types import WriteOutcome

_generation = count()
"""A group name may not come back in one process, not even after a restart of the engine."""


@dataclass(frozen=True, slots=True)
class Link:
    engine: EngineInfo
    group_name: GroupName
    group: ProcessGroup
    store: TCPStore


@dataclass(frozen=True, slots=True)
class Bucket:
    """All weights of a version, flat, and what the engine needs to take them apart again."""

    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor
    """Bytes, shape [total]."""


class BroadcastWriter:
    """Implements `WeightWriter`; the collective runs in torch's own threads, without the interpreter lock."""

    name = "broadcast"

    def __init__(self, *, host: str = "127.0.0.1", timeout: float = 60.0) -> None:
        self._host = host
        self._timeout = timeout
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._links: dict[str, Link] = {}
        self._bucket: Bucket | None = None

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        wanted = {engine.name: engine for engine in engines}
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.engine:
                del self._links[name]
        for name, engine in wanted.items():
            if name not in self._links:
                self._links[name] = self._meet(engine)

    def stage(self, version: int, named_tensors: NamedTensors) -> None:
        device = "cuda" if self._backend == "nccl" else "cpu"
        tensors = [(name, tensor.detach().to(device)) for name, tensor in named_tensors]
        self._bucket = Bucket(
            version=version,
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]),
        )

    def write(self, version: int, engine: str) -> WriteOutcome:
        """Verified by the engine's own answer, given after every rank has received and loaded every tensor."""
        started = time.perf_counter()
        size, error = 0, None
        bucket = self._bucket
        if bucket is None or bucket.version != version:
            error = f"version {version} is not staged"
        else:
            try:
                self._send(self._links[engine], bucket)
                size = bucket.flat.numel()
            except (EngineLost, RuntimeError) as failure:
                error = f"engine {engine}: {failure}"
        return WriteOutcome(engine=engine, seconds=time.perf_counter() - started, bytes=size, error=error)

    def close(self) -> None:
        self._links.clear()
        self._bucket = None

    def _meet(self, engine: EngineInfo) -> Link:
        """Form the group: the engine is asked to join in one thread while this process joins in another."""
        size = 1 + engine.tp
        name = GroupName(f"weights-{engine.name}-{engine.pid}-{next(_generation)}")
        patience = timedelta(seconds=self._timeout)
        store = TCPStore(self._host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        invitation = {
            "master_address": self._host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                call_engine, engine.url, "/init_weights_update_group", invitation, timeout=self._timeout
            )
            try:
                # torch has no public way to a group outside the default one's ranks; SGLang's side does the same.
                group, _ = _new_process_group_helper(
                    size, 0, [], Backend(self._backend), PrefixStore(name, store), group_name=name, timeout=patience
                )
            except RuntimeError as failure:
                raise EngineLost(f"engine {engine.name} did not join the weight group: {failure}") from failure
            joined.result()
        return Link(engine, name, group, store)

    def _send(self, link: Link, bucket: Bucket) -> None:
        request = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
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
            loaded = pool.submit(
                call_engine, link.engine.url, "/update_weights_from_distributed", request, timeout=self._timeout
            )
            link.group.broadcast([bucket.flat], options).wait()
            loaded.result()

"""Sends weights by a torch.distributed broadcast: gloo on CPU, NCCL on CUDA, one bucket of tensors at a time.

Each pair of a source and an engine forms a group: rank 0 is the source, the engine's ranks follow. One group of a
source and all engines would send each tensor only once. But engines join, fail and are sent to again independently,
and a lost engine would break the group for all others.

A group is a bare backend of torch.distributed, so it is in none of torch's tables: the learner's groups do not see it,
and nothing remains of it once it is dropped.

Sends to several engines run at once, and an engine handles one request after the other, in the order in which the
sources ask. A GPU runs a limited number of kernels at once, and NCCL's kernels occupy it until the other side takes
part. If each source ran only broadcasts that its engines have queued behind those of another source, all would wait
forever. So a source has at most one broadcast under way, and asks an engine to take part when its bucket is ready on
the GPU: whichever request an engine handles, its source takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from miles_async.adapters.system.environment import variables_set
from miles_async.errors import EngineLostError
from miles_async.transports import LOAD_ONLY, SourceOptions, Transport

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import GroupName

    from miles_async.adapters.sglang.launch import EngineInfo
    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.layout import TensorPlan
    from miles_async.adapters.weights.staging import Staging

T = TypeVar("T")
LEAVE_SECONDS = 5.0
"""Time for an engine to leave a group. It may have died."""
POLL_SECONDS = 0.001
"""Time between two looks at whether a broadcast has ended."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The process group of this source and one engine."""

    name: str
    engine: EngineInfo
    backend: Backend
    """Keeps the store of the rendezvous alive, too."""


class BroadcastTransport(Transport):
    """Sends the weights by a torch.distributed collective, one bucket at a time.

    The engine has to hold a bucket besides its weights, and so does this rank on a GPU.
    """

    name = "broadcast"
    measured = True
    fallback = 2
    uses_loader = True

    def open(self, source: SourceOptions) -> None:
        import torch

        super().open(source)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._stream = torch.cuda.Stream() if self._device == "cuda" else None
        """For copies and broadcasts, so that they do not wait for a training step, nor the step for them."""
        self._groups: dict[str, EngineGroup] = {}
        self._turn = Lock()
        """Held during a broadcast."""

    def connect(self, engine: EngineMemory) -> None:
        """Form the process group. Both sides join at the same time."""
        from torch.distributed import TCPStore
        from torch.distributed.distributed_c10d import GroupName

        from miles_async.adapters.system.listeners import confined_listeners, local_address

        self.disconnect(engine.name)
        size, host = 1 + engine.info.tp, local_address(engine.info.host)
        # An engine refuses a name that it knows, even from a source that has died.
        name = GroupName(f"weights-{engine.name}-{self.source.rank}-{uuid4().hex}")
        timeout = timedelta(seconds=self.source.timeout)
        with confined_listeners(host):
            store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        request = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": "nccl" if self._device == "cuda" else "gloo",
        }
        join = partial(self._join, store, name, size)
        backend, joined = self._with_engine(engine.info, "/init_weights_update_group", request, join)
        _result(joined)
        self._groups[engine.name] = EngineGroup(name, engine.info, backend)

    def disconnect(self, name: str) -> None:
        from miles_async.adapters.weights.engine import call_engine

        group = self._groups.pop(name, None)
        if group is None:
            return
        engine, request = group.engine, {"group_name": group.name}
        _abort(group.backend)
        # An engine that still waits for a broadcast answers no request before the connection is closed.
        del group
        with suppress(EngineLostError):
            call_engine(
                engine,
                "/destroy_weights_update_group",
                request,
                timeout=min(LEAVE_SECONDS, self.source.timeout),
            )

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Broadcast every bucket. The engine answers when all its ranks have received and loaded the bucket."""
        group = self._groups[engine.name]
        return sum(self._send_bucket(group, staging, bucket) for bucket in staging.buckets(self.source.bucket))

    def close(self) -> None:
        for name in list(self._groups):
            self.disconnect(name)

    def _join(self, store: TCPStore, name: GroupName, size: int) -> Backend:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        timeout = timedelta(seconds=self.source.timeout)
        # SGLang's `init_custom_process_group` adds the first prefix, torch's `_new_process_group_helper` the others.
        keys = PrefixStore(f"{self._device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        if self._device == "cpu":
            return ProcessGroupGloo(keys, 0, size, timeout)
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, name
        # By default, a watchdog thread ends the learner when an engine dies. The constructor of ProcessGroupNCCL reads
        # this variable and says: "TORCH_NCCL_BLOCKING_WAIT is enabled, NO watchdog thread is created."
        with variables_set({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
            return ProcessGroupNCCL(keys, 0, size, options)

    def _send_bucket(self, group: EngineGroup, staging: Staging, bucket: Sequence[TensorPlan]) -> int:
        """Broadcast a bucket and return its bytes when the engine has loaded it."""
        import torch

        request = {
            "names": [plan.name for plan in bucket],
            "dtypes": [plan.dtype for plan in bucket],
            "shapes": [list(plan.shape) for plan in bucket],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **LOAD_ONLY,
        }
        with self._turn, torch.cuda.stream(self._stream):
            # One collective per bucket instead of one per tensor.
            flat = staging.flat(bucket).to(self._device)
            broadcast = partial(self._broadcast, group.backend, flat)
            try:
                _, loaded = self._with_engine(group.engine, "/update_weights_from_distributed", request, broadcast)
            except EngineLostError:
                # Frees the GPU from a broadcast that nobody receives.
                _abort(group.backend)
                raise
        # The next engine may receive while this one loads.
        _result(loaded)
        return flat.numel()

    def _broadcast(self, backend: Backend, flat: torch.Tensor) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self.source.timeout)
        with torch.cuda.stream(self._stream):
            work = backend.broadcast([flat], options)  # type: ignore[attr-defined]  # torch's stub lacks it
            # `wait` alone would also let the stream wait. With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron may need,
            # the kernels of a training step might queue behind that.
            while not work.is_completed():
                time.sleep(POLL_SECONDS)
            work.wait()

    def _with_engine(
        self, engine: EngineInfo, path: str, request: Mapping[str, Any], ours: Callable[[], T]
    ) -> tuple[T, Future[dict[str, Any]]]:
        """Do this side's part of a collective while the engine handles a request; return also the engine's answer.

        Raises EngineLostError if either side fails or this side has not ended in time. It may then go on in its thread,
        because NCCL cannot be interrupted while it forms a communicator.
        """
        from miles_async.adapters.weights.engine import call_engine

        deadline = time.monotonic() + self.source.timeout
        answered = _in_thread(partial(call_engine, engine, path, request, timeout=self.source.timeout))
        done = _in_thread(ours)
        both: list[Future[Any]] = [answered, done]
        wait(both, self.source.timeout, FIRST_COMPLETED)
        if answered.done():
            _result(answered)
        try:
            return _result(done, max(0.0, deadline - time.monotonic())), answered
        except TimeoutError as late:
            sentence = f"{engine.url}{path}: the engine did not take part for {self.source.timeout:g} s"
            raise EngineLostError(sentence) from late


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()
    Thread(target=_run, args=(future, call), name="broadcast", daemon=True).start()
    return future


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except Exception as failure:
        future.set_exception(failure)
        # The traceback contains this frame: a reference cycle would keep the group, with its threads and connections.
        del future, call


def _result(future: Future[T], timeout: float | None = None) -> T:
    """Wait for a result. Raises EngineLostError if the collective or the engine failed, TimeoutError if it is late."""
    failure = future.exception(timeout)
    if isinstance(failure, (EngineLostError, RuntimeError)):
        # Another exception than the one that the future keeps: its traceback would contain the frame with the future.
        raise EngineLostError(str(failure))
    return future.result()


def _abort(backend: Backend) -> None:
    """End what a backend is doing. Gloo has nothing to abort: it notices that a connection is closed."""
    # Raised if NCCL could not abort in time, such as while it forms the communicator.
    with suppress(RuntimeError):
        backend.abort()

"""A rank's part of a Megatron distributed checkpoint (`torch_dist`): first copied to host memory, then written.

Megatron's own asynchronous saving forks the process. That is unsafe in a process with many threads, and on a CPU the
fork would write the live tensors. Here every tensor is copied while training pauses, and a thread writes the copies
while training goes on. Megatron plans the checkpoint and torch writes it, so the files have their standard format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from miles_async.adapters.megatron.model.host_memory import HostMemory

_BACKEND, _VERSION = "torch_dist", 1


class StateCopy:
    """A copy, in host memory, of this rank's part of one model's state. `copy_to_host` creates it.

    On a CPU the memory is freed when the copy has been written; with a GPU it is kept for the next copy.
    """

    def __init__(self, folder: Path, writer: _CopyWriter, metadata: Metadata | None) -> None:
        self._folder = folder
        self._writer = writer
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write and flush this rank's files; may run in any thread. Raises OSError if the disk is full."""
        try:
            return self._writer.write_copies()
        except RuntimeError as error:  # torch's writer reports a failed write as a RuntimeError
            cause = error.__context__ or error
            raise OSError(f"cannot write to {self._folder} ({cause}); check whether the disk is full") from error

    def finish(self, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all ranks have written: write the index, which names the file of each tensor."""
        assert self._metadata is not None, "only rank 0 has the plan of all ranks"
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self._folder))


class CheckpointCopy:
    """This rank's copies for one checkpoint: policy, critic and Hugging Face export, as far as they are saved."""

    def __init__(self, models: list[StateCopy], export: Callable[[], None] | None = None) -> None:
        """`export` writes the model in Hugging Face format. Only rank 0 has it, with a copy of the whole model."""
        self._models = models
        self._export = export

    def write(self) -> list[list[WriteResult]]:
        """Write all copies and return the results by model; see `StateCopy.write`."""
        if self._export is not None:
            self._export()
            self._export = None  # frees the copy of the whole model
        return [model.write() for model in self._models]

    def finish(self, results: list[list[list[WriteResult]]]) -> None:
        """On rank 0: complete the checkpoint; `results[rank]` is what `write` returned on that rank."""
        for model, rank_results in zip(self._models, zip(*results, strict=True), strict=True):
            model.finish(list(rank_results))


@contextmanager
def without_dtensor_warnings() -> Iterator[None]:
    """Silence torch's warnings that ShardedTensor, on which Megatron's format is built, is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
        yield


def copy_to_host(shards: dict[str, ShardedBase], notes: dict[str, Any], folder: Path, memory: HostMemory) -> StateCopy:
    """Plan a checkpoint of `shards` and `notes` with the other ranks, and copy this rank's part to `memory`.

    This is a collective operation of all ranks. The copy must be written before the next one is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    strategy = _CopyStrategy(memory)
    with without_dtensor_warnings():
        dist_checkpointing.save(dict(shards), str(folder), strategy, async_sharded_save=True, content_metadata=notes)
    return StateCopy(folder, strategy.writer, strategy.metadata)


class _CopyStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy, except that tensors are copied and nothing is written yet."""

    writer: _CopyWriter
    metadata: Metadata | None

    def __init__(self, memory: HostMemory) -> None:
        super().__init__(_BACKEND, _VERSION)
        self._memory = memory

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str, *_: Any) -> AsyncRequest:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self.writer = _CopyWriter(checkpoint_dir, self._memory)
        planner = _CopyPlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key, False), self.writer, planner=planner)
        self.metadata = planned[1]  # None except on rank 0
        # Megatron's caller would run this request in a forked process. An empty one leaves the writing to `StateCopy`.
        return AsyncRequest(None, (), [])


class _CopyPlanner(MCoreSavePlanner):  # type: ignore[misc]
    """Save planner that copies the tensors of its plan, and then refers to the copies only."""

    def copy(self, plan: SavePlan, memory: HostMemory) -> None:
        self._copies = {item.index: self.resolve_data(item) for item in plan.items}
        tensors = {index: value for index, value in self._copies.items() if isinstance(value, Tensor)}
        self._copies |= zip(tensors, memory.copy(list(tensors.values())), strict=True)
        self.state_dict: dict[str, Any] = {}  # drops the references to live tensors

    def copied(self, item: WriteItem) -> Any:
        return self._copies[item.index]

    def clear(self) -> None:
        self._copies.clear()


class _CopyWriter(FileSystemWriter):
    """torch's writer with its work split in two: copying at planning time and writing later."""

    def __init__(self, path: str, memory: HostMemory) -> None:
        super().__init__(path)
        self._memory = memory

    def prepare_write_data(self, plan: SavePlan, planner: _CopyPlanner) -> None:
        """Called by Megatron when the plan is ready, while training pauses."""
        self._plan = plan
        planner.copy(plan, self._memory)
        # torch's `write_data` asks the planner for each tensor. From now on it gets the copies.
        planner.resolve_data = planner.copied
        self._planner = planner

    def write_copies(self) -> list[WriteResult]:
        written: list[WriteResult] = self.write_data(self._plan, self._planner).value()
        self._planner.clear()
        return written

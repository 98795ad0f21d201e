"""A rank's part of a Megatron distributed checkpoint (`torch_dist`), copied aside first and written later.

Megatron's own asynchronous saving forks the trainer, which a process full of threads does not survive well, and on a
CPU it writes the live tensors. Here every tensor is copied while training stands still, and a thread writes the copies
while it goes on. Planning is Megatron's, writing is torch's; the files are theirs.
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
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

_BACKEND, _VERSION = "torch_dist", 1


class StateCopy:
    """What `copy_to_host` returns. Holds a copy of the rank's share in host memory until it is written."""

    def __init__(self, folder: Path, writer: _Writer, metadata: Metadata | None) -> None:
        self._folder = folder
        self._writer = writer
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write and flush this rank's files, in any thread. Raises OSError when the disk is full."""
        try:
            return self._writer.write_copies()
        except RuntimeError as error:  # how torch's writer reports a stream that takes no more
            raise OSError(f"{self._folder} takes no more ({error.__context__ or error}); is the disk full?") from error

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Rank 0, when all ranks have written: the files that say where in theirs each tensor lies."""
        assert self._metadata is not None, "only rank 0 knows the whole plan"
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self._folder))


class CheckpointCopy:
    """This rank's copies of all that is saved at once."""

    def __init__(self, models: list[StateCopy], export: Callable[[], None] | None = None) -> None:
        """`export` writes the model in Hugging Face format, on the rank that keeps it whole."""
        self._models = models
        self._export = export

    def write(self) -> list[list[WriteResult]]:
        """By model; see `StateCopy.write`."""
        if self._export is not None:
            self._export()
            self._export = None  # it holds the whole model
        return [model.write() for model in self._models]

    def finish(self, results: list[list[list[WriteResult]]]) -> None:
        """Rank 0, with what `write` returned on each rank."""
        for model, of_ranks in zip(self._models, zip(*results, strict=True), strict=True):
            model.finish(list(of_ranks))


@contextmanager
def without_dtensor_warnings() -> Iterator[None]:
    """Megatron's format is built upon a tensor type that torch means to replace, and says so at every use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
        yield


def copy_to_host(parts: dict[str, ShardedBase], notes: dict[str, Any], folder: Path) -> StateCopy:
    """Plan a checkpoint of `parts` with the other ranks, and copy this rank's share. All ranks, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    strategy = _Copying()
    with without_dtensor_warnings():
        dist_checkpointing.save(dict(parts), str(folder), strategy, async_sharded_save=True, content_metadata=notes)
    return StateCopy(folder, strategy.writer, strategy.metadata)


class _Copying(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's `TorchDistSaveShardedStrategy` with another writer."""

    writer: _Writer
    metadata: Metadata | None

    def __init__(self) -> None:
        super().__init__(_BACKEND, _VERSION)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str) -> AsyncRequest:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self.writer = _Writer(checkpoint_dir)
        planner = _CopyingPlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key, False), self.writer, planner=planner)
        self.metadata = planned[1]
        return AsyncRequest(None, (), [])


class _CopyingPlanner(MCoreSavePlanner):  # type: ignore[misc]
    def copy(self, plan: SavePlan) -> None:
        self._copies = {item.index: _copied(self.resolve_data(item)) for item in plan.items}
        self.state_dict: dict[str, Any] = {}  # the live tensors

    def copied(self, item: WriteItem) -> Any:
        return self._copies[item.index]

    def forget(self) -> None:
        self._copies.clear()


class _Writer(FileSystemWriter):
    def prepare_write_data(self, plan: SavePlan, planner: _CopyingPlanner) -> None:
        """Megatron's second of three stages: what torch's writer would write at once."""
        self._plan = plan
        planner.copy(plan)
        # From here on the planner answers with the copies.
        planner.resolve_data = planner.copied
        self._planner = planner

    def write_copies(self) -> list[WriteResult]:
        written: list[WriteResult] = self.write_data(self._plan, self._planner).value()
        self._planner.forget()
        return written


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

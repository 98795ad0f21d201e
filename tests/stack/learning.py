"""Checkpoints of learners that run without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from miles_async.adapters.megatron.learner import MegatronLearner


def save_state(learner: MegatronLearner, folder: Path) -> None:
    """Copy, write and finish a checkpoint, on all ranks at once."""
    copy = learner.copy_state(str(folder))
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, copy.write())
    if dist.get_rank() == 0:
        copy.finish(written)
    dist.barrier()

"""A profile of chosen steps, as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from miles_async.config.schema import Debug


@contextmanager
def profiled(debug: Debug, rollout_id: int, rank: int) -> Iterator[None]:
    """Write what happens within to `profile_dir`, if `rollout_id` is one of those asked for. Raises OSError."""
    if not (debug.use_pytorch_profiler and debug.profile_step_start <= rollout_id < debug.profile_step_end):
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True, record_shapes=True) as trace:
        yield
    folder = Path(debug.profile_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / f"rollout_{rollout_id:07d}_rank_{rank}.json.gz"))

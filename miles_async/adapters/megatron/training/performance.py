"""Performance of training steps: memory, model FLOPs utilization, and traces of chosen steps."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import structlog
import torch
from megatron.core import parallel_state
from torch.profiler import ProfilerActivity, profile

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel
from miles_async.batching.batch import TrainStep
from miles_async.batching.flops import training_flops
from miles_async.config.schema import Debug

log = structlog.get_logger(__name__)

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}
"""Dense bf16 operations per second, by a part of the device's name (NVIDIA's data sheets, without sparsity)."""


def performance_metrics(model: MegatronModel, steps: Sequence[TrainStep], seconds: float) -> dict[str, float]:
    """Measure the machine's use while `steps` were trained in `seconds`.

    - `memory_gib`: Peak memory of a rank in GiB since the process started; a run reports that of the rank with the
      highest. Worry if it is near the memory of the device: lower `--max-tokens-per-gpu`, and see `make plan`.
    - `mfu`: Model FLOPs utilization, only for bf16 on GPUs of known speed: operations of forward and backward passes
      over the device's peak (PaLM, arXiv 2204.02311, appendix B). Recomputation, passes without gradients and the
      critic take time but do not count.
    """
    if on_cpu():
        return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    metrics = {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    device = torch.cuda.get_device_name()
    peak = next((flops for name, flops in _PEAK_FLOPS.items() if name in device), None)
    if peak is not None and model.config.bf16:
        batches = [batch for step in steps for batch in step.micro_batches]
        lengths = np.concatenate([batch.lengths for batch in batches]).tolist()
        shared = np.concatenate(
            [np.zeros_like(batch.lengths) if batch.shared is None else batch.shared for batch in batches]
        ).tolist()
        logits = sum(len(batch.targets) for batch in batches)
        # All ranks of a model replica work on the same sequences.
        ranks_per_replica = torch.distributed.get_world_size() // parallel_state.get_data_parallel_world_size()
        flops = training_flops(lengths, model.source.shape, shared=shared, logits=logits)
        metrics["mfu"] = flops / (seconds * peak * ranks_per_replica)
    return metrics


@contextmanager
def profiled(debug: Debug, rollout_id: int, rank: int) -> Iterator[None]:
    """Write a trace of the context to `profile_dir` if `rollout_id` is one of the steps to profile.

    Perfetto and chrome://tracing open the trace. A trace that cannot be written is left out with a warning.
    """
    if not (debug.use_pytorch_profiler and debug.profile_step_start <= rollout_id < debug.profile_step_end):
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True, record_shapes=True) as trace:
        yield
    path = Path(debug.profile_dir).expanduser() / f"rollout_{rollout_id:07d}_rank_{rank}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
    except OSError as error:
        log.warning("the profile cannot be written; training continues", file=str(path), error=error.strerror)

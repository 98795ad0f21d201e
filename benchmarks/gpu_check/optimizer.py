"""Optimizer steps whose state is on the GPU, in main memory, or in fewer bits: weights, memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from torch import Tensor

from benchmarks.gpu_check.measure import report_peak, start_peak, timed
from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.step import learner_config
from benchmarks.gpu_check.surroundings import DEVICE, LARGE, ON_GPU, SMALL, Surroundings, require_gpu
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import (
    Snapshot,
    apply_gradients,
    distinct_storages,
    model_tensors,
)
from tests.stack.learning import learning, weights_of

LEARNING_RATE = 1e-3
"""A step changes weights by more than bfloat16 rounds them."""
LIMIT = 0.02
"""Norm of the difference of weights, relative to the norm of what the steps have changed."""
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "on the GPU": {},
    "offloaded": {"optimizer_cpu_offload": True},
    "offloaded, overlapped": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "half offloaded": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "moments in bf16": {"use_precision_aware_optimizer": True, **MOMENTS},
}


def check(report: Report, surroundings: Surroundings) -> None:
    small, large = surroundings.checkpoint(SMALL), surroundings.checkpoint(LARGE if ON_GPU else SMALL)
    with learning(small, learner_config()) as learner:
        before = weights_of(learner)
        for seed in (0, 1, 3):
            step(learner, seed)
        expected = weights_of(learner)
    for part, settings in VARIANTS.items():
        with report.part(part):
            if settings:
                require_gpu("an optimizer that is offloaded or of Transformer Engine")
            if "use_precision_aware_optimizer" in settings and not gpt_layer_specs.HAVE_TE:
                raise NotPossibleError("transformer_engine is not installed")
            with learning(small, learner_config(**settings)) as learner:
                found = with_detours(learner, surroundings.folder / part)
            error = norm(found, expected) / norm(expected, before)
            report.figure(f"{part}: weights, after a rollback and a checkpoint", error, "relative", at_most=LIMIT)
            with learning(large, learner_config(**settings)) as learner:
                cost(report, part, learner)


def with_detours(learner: MegatronLearner, folder: Path) -> dict[str, Tensor]:
    """The weights after the steps 0, 1 and 3, between which others are rolled back, or forgotten by a checkpoint."""
    for seed in (0, 1):
        step(learner, seed)
    snapshot = Snapshot(learner._model)
    step(learner, 2)
    snapshot.restore()
    copy = learner.copy_state(str(folder))
    copy.finish([copy.write()])
    step(learner, 2)
    learner.load_state(str(folder))
    step(learner, 3)
    return weights_of(learner)


def cost(report: Report, part: str, learner: MegatronLearner) -> None:
    """Report memory and time of a step."""
    step(learner, 0)  # creates the state
    sizes = {"the memory of the GPU": 0, "main memory": 0}
    for storage in distinct_storages(model_tensors(learner._model)).values():
        sizes["main memory" if storage.device.type == "cpu" else "the memory of the GPU"] += storage.nbytes()
    for memory, size in sizes.items():
        report.figure(f"{part}: weights and state in {memory}", size / 2**30, "GiB")
    fill_gradients(learner, 1)
    before = start_peak()
    seconds = timed(partial(apply_gradients, learner._model, LEARNING_RATE))
    report.figure(f"{part}: step, time", 1e3 * seconds, "ms")
    report_peak(report, f"{part}: step, memory", before)


def step(learner: MegatronLearner, seed: int) -> None:
    """Take a step with random gradients, the same for every optimizer."""
    fill_gradients(learner, seed)
    apply_gradients(learner._model, LEARNING_RATE)


def fill_gradients(learner: MegatronLearner, seed: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for chunk in learner._model.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.normal_(generator=generator)


def norm(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Of the difference of all weights."""
    parts = [(tensor.float() - theirs[name].float()).norm() for name, tensor in ours.items()]
    return torch.stack(parts).norm().item()

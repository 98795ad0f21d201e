"""A layer of experts in bfloat16, computed one after the other and as grouped products, against float32."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from benchmarks.gpu_check.measure import report_cost
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Surroundings, require_transformer_engine
from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.megatron.training.optimizer import clear_gradients
from tests.configuration import run_config
from tests.stack.learning import gradients_by_name, learning

TOKENS = 8192 if ON_GPU else 256
LIMIT = 2e-2
"""Largest distance from float32, relative to the norm."""
EXACT: dict[str, Any] = {"precision": "fp32", "transformer_impl": "local", "moe_router_dtype": "fp32"}
LOCAL: dict[str, Any] = EXACT | {"precision": "bf16"}
GROUPED: dict[str, Any] = LOCAL | {"transformer_impl": "transformer_engine"}


def recomputed(module: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [module]}


VARIANTS: dict[str, dict[str, Any]] = {
    "one by one": LOCAL,
    "one by one, recomputed": LOCAL | recomputed("moe"),
    "grouped": GROUPED,
    "grouped, permutation not fused": GROUPED | {"moe_permute_fusion": False},
    "grouped, recomputed": GROUPED | recomputed("moe"),
    "grouped, activation recomputed": GROUPED | recomputed("moe_act"),
}
FUSED_ROUTER = "grouped, router fused"


def check(report: Report, surroundings: Surroundings) -> None:
    """Compare results and gradients of each variant, and report speed and memory of its forward and backward pass."""
    checkpoint = surroundings.experts()
    with report.part("float32"):
        with learning(checkpoint, run_config(**EXACT)) as learner:
            exact = computed(learner)
        for part, settings in VARIANTS.items():
            gc.collect()
            with report.part(part):
                measure(report, part, checkpoint, settings, exact)


def measure(report: Report, part: str, checkpoint: Path, settings: dict[str, Any], exact: Mapping[str, Tensor]) -> None:
    if settings["transformer_impl"] == "transformer_engine":
        require_transformer_engine()
    with learning(checkpoint, run_config(**settings)) as learner:
        compare(report, part, learner, exact)
        if settings == GROUPED:
            with report.part(FUSED_ROUTER):
                learner._model.config.moe_router_fusion = True  # the router reads it in each forward pass
                compare(report, FUSED_ROUTER, learner, exact)


def compare(report: Report, part: str, learner: MegatronLearner, exact: Mapping[str, Tensor]) -> None:
    found = computed(learner)
    for name, tensor in exact.items():
        report.figure(f"{part}: {name}", distance(found[name], tensor), "relative", at_most=LIMIT)
    seconds = report_cost(report, part, lambda: forward_backward(learner))
    report.figure(f"{part}: speed", TOKENS / seconds, "tokens/s")


def computed(learner: MegatronLearner) -> dict[str, Tensor]:
    """The layer's result, and the gradients of its input, its router and its experts."""
    clear_gradients(learner._model)
    result, of_input = forward_backward(learner)
    gradients = {name: one for name, one in gradients_by_name(learner).items() if name.startswith("model.layers.0.mlp")}
    router = gradients.pop("model.layers.0.mlp.gate.weight")
    # Grouped experts are exported in another order.
    of_experts = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
    return {
        "result": result,
        "gradient of the input": of_input,
        "gradient of the router": router,
        "gradient of the experts": of_experts,
    }


def forward_backward(learner: MegatronLearner) -> tuple[Tensor, Tensor]:
    """[t, 1, h] the result of the first layer's experts and the gradient of their input."""
    config, [chunk] = learner._model.config, learner._model.chunks
    layer: Any = unwrap_model(chunk).decoder.layers[0].mlp
    hidden, upstream = (one.to(config.params_dtype) for one in inputs(config.hidden_size))
    with redirect_cuda_to_cpu():
        result, _ = layer(hidden.requires_grad_())
        result.backward(upstream)
    assert hidden.grad is not None
    return result.detach(), hidden.grad


def inputs(width: int) -> list[Tensor]:
    """[t, 1, h] normalized tokens and the gradient of the result, which bfloat16 holds exactly."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(TOKENS, 1, width, device=DEVICE, generator=draw).bfloat16() for _ in range(2)]


def distance(ours: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to that of `exact`."""
    return float((ours.float() - exact.float()).norm() / exact.float().norm())

"""Checks of Megatron's switches: what they need, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.memory import planned_model
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import RunConfig
from miles_async.models.layers import Attention, FeedForward, LatentAttention

_MOMENTS = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Types of what the optimizer holds."""


def _optimizer(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    chosen = learner.model_dump(include={*_MOMENTS, "main_grads_dtype"}, exclude_defaults=True)
    if not learner.optimizer_holds_masters:
        if chosen.keys() == {"main_grads_dtype"}:
            yield (
                f"use_precision_aware_optimizer and optimizer_cpu_offload are off, but {_named(chosen)}: set one of "
                "them, or unset main_grads_dtype"
            )
        elif chosen:
            yield (
                f"use_precision_aware_optimizer is off, but {_named(chosen)}: set it, or unset {' and '.join(chosen)}"
            )
        return
    ignored = {name: value for name, value in chosen.items() if name in _MOMENTS}
    if learner.optimizer_cpu_offload and ignored:
        yield (
            f"optimizer_cpu_offload keeps the state of the optimizer in fp32, but {_named(ignored)}: unset "
            f"{' and '.join(ignored)}, or unset optimizer_cpu_offload"
        )
    name = "optimizer_cpu_offload" if learner.optimizer_cpu_offload else "use_precision_aware_optimizer"
    if learner.precision == "fp32":
        yield f"{name} needs bf16 weights, beside which the optimizer holds others: set precision to bf16, or unset it"
    if learner.use_distributed_optimizer is False:
        yield (
            f"{name} shards the state of the optimizer over the data-parallel ranks: set use_distributed_optimizer, or "
            f"unset {name}"
        )


def _named(values: dict[str, str]) -> str:
    return " and ".join(f"{name} is {value}" for name, value in values.items())


def _overlap(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if not learner.overlap_param_gather:
        return
    if not learner.overlap_grad_reduce:
        yield "overlap_param_gather needs overlap_grad_reduce: set it, or unset overlap_param_gather"
    if learner.use_distributed_optimizer is False and not learner.optimizer_holds_masters:
        yield "overlap_param_gather needs use_distributed_optimizer: set it, or unset overlap_param_gather"


def _router(config: RunConfig) -> Iterator[str]:
    learner, shape = config.learner, shape_of(config.model)
    if not learner.moe_router_fusion:
        return
    if shape is not None and shape.experts is None:
        yield "moe_router_fusion needs a mixture-of-experts model, but this model is dense: unset it"
    if learner.moe_router_dtype == "fp64":
        yield "moe_router_fusion has no kernel for moe_router_dtype fp64: unset one of them"


def _layers(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if needs := learner.of_transformer_engine:
        is_local = learner.transformer_impl == "local" or learner.precision == "fp32"
        if is_local:
            yield (
                f"only the layers of Transformer Engine have {' and '.join(needs)}: unset this, or set "
                "transformer_impl to transformer_engine and precision to bf16"
            )
    if learner.recompute_granularity != "selective":
        return
    for module, lack in _lacking(config):
        if module in (learner.recompute_modules or ()):
            yield f"recompute_modules {module} recomputes nothing, because this model has no {lack}: remove {module}"


def _lacking(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The modules that the model does not have, and what it lacks, as far as its layers are known."""
    model, shape = planned_model(config), shape_of(config.model)
    if shape is not None and shape.experts is None:
        yield from (("moe", "experts"), ("moe_act", "experts"), ("shared_experts", "experts"))
    if model is None:
        return
    if model.experts is not None and not model.experts.shared:
        yield "shared_experts", "shared experts"
    if not any(isinstance(kind.feed_forward, FeedForward) for kind in model.kinds):
        yield "mlp", "dense feed-forward layers"
    if not any(isinstance(kind.attention, LatentAttention) for kind in model.kinds):
        yield "mla_up_proj", "multi-head latent attention"
    if model.experts is None and all(isinstance(kind.attention, Attention) for kind in model.kinds):
        # Transformer Engine computes the others within the product behind them.
        yield "layernorm", "experts or latent attention, whose norms are computed alone"


CHECKS = (_optimizer, _overlap, _router, _layers)

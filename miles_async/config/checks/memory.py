"""Checks that a job fits into the memory of its devices, if the settings say how much there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from miles_async.config.checks.layouts import layout_problems, trains_with_layout
from miles_async.config.fields import with_settings
from miles_async.config.memory import (
    MemoryPlan,
    gib_text,
    longest_sample,
    memory_plan,
    plan_of,
    planned_model,
    split_of,
)
from miles_async.config.schema import RunConfig
from miles_async.models.layers import ModelShape
from miles_async.planning.plan import GIB

Change = Mapping[str, Any]
"""Other values of settings."""


def recomputation_problems(config: RunConfig) -> Iterator[str]:
    """A recomputation of more layers than a stage has, which Megatron refuses when it builds the model."""
    learner, model = config.learner, planned_model(config)
    number = learner.recompute_num_layers
    if model is None or number is None or learner.recompute_granularity != "full":
        return
    of_stages = split_of(learner).layers_of_stages(len(model.layers), learner.pipeline_model_parallel_size)
    layers = min(of_stages) // (learner.virtual_pipeline_model_parallel_size or 1)
    if number > layers:
        yield (
            f"recompute_num_layers {number} is more than the {layers} layers of a pipeline stage: set it to {layers} "
            "or less, or lower pipeline_model_parallel_size"
        )


def memory_problems(config: RunConfig) -> Iterator[str]:
    """One sentence if the learner, an engine or the host has too little memory, with settings that would work."""
    model = planned_model(config)
    if config.cluster.gpu_memory_gib is None or model is None or any(layout_problems(config)):
        return
    plan = memory_plan(config)
    assert plan is not None, "the model and the memory are known"
    yield from _device_problems(config, model, plan)
    host = config.cluster.host_memory_gib
    if host is not None and plan.host > host * GIB:
        yield (
            f"the learner ranks of a node need {gib_text(plan.host)} of host memory, but host_memory_gib is {host:g}: "
            f"{_host_advice(config)}"
        )


def _device_problems(config: RunConfig, model: ModelShape, plan: MemoryPlan) -> Iterator[str]:
    card, engine, learner = f"gpu_memory_gib {plan.card / GIB:g}", plan.engine, plan.learner
    if learner is not None and not plan.learner_fits:
        parts = {
            "weights": learner.weights,
            "gradients": learner.gradients,
            "optimizer": learner.optimizer,
            "activations": learner.activations,
            "logits": learner.logits,
        }
        most = " and ".join(sorted(parts, key=lambda part: -parts[part])[:2])
        yield (
            f"a learner rank needs {gib_text(learner.peak)}, mostly for {most}, but {card} leaves "
            f"{gib_text(plan.room)}: {_advice(config, model, plan.card, _learner_changes(config), of_learner=True)}"
        )
    if engine is not None and not plan.engine_fits:
        need = engine.weights + engine.adapters + int(plan.longest * engine.per_token)
        adapters = f", {gib_text(engine.adapters)} of buffers for adapters" if engine.adapters else ""
        yield (
            f"an engine rank needs {gib_text(need)} for its weights{adapters} and the {plan.longest} tokens of the "
            f"longest sample, but {card} leaves {gib_text(int(engine.fraction * plan.card))} for them "
            f"(mem_fraction_static {engine.fraction:g}): "
            f"{_advice(config, model, plan.card, _engine_changes(config), of_learner=False)}"
        )


def _advice(config: RunConfig, model: ModelShape, card: int, changes: list[Change], *, of_learner: bool) -> str:
    """The first change with which the job fits, and a second one; or two that must be made together."""
    fitting = [change for change in changes if _fits(config, model, card, change, of_learner=of_learner)]
    if fitting:
        other = next((one for one in fitting[1:] if one.keys() != fitting[0].keys()), None)
        return f"set {_named(fitting[0])}" + (f", or {_named(other)}" if other else "")
    pairs = sorted(itertools.combinations(range(len(changes)), 2), key=sum)
    for one, other in ((changes[first], changes[second]) for first, second in pairs):
        both = {**one, **other}
        disjoint = not one.keys() & other.keys()
        if disjoint and _fits(config, model, card, both, of_learner=of_learner):
            return f"set {_named(one)}, and {_named(other)}"
    return "use more devices, or a smaller model: no two settings make it fit"


def _fits(config: RunConfig, model: ModelShape, card: int, change: Change, *, of_learner: bool) -> bool:
    changed = with_settings(config, **change)
    learner = changed.learner
    if learner.micro_batch_tokens < longest_sample(changed) or not trains_with_layout(changed, model):
        return False
    plan, host = plan_of(changed, model, card), config.cluster.host_memory_gib
    if not of_learner:
        return plan.engine_fits
    too_much_on_host = learner.optimizer_cpu_offload and host is not None and plan.host > host * GIB
    return plan.learner_fits and not too_much_on_host


def _named(change: Change) -> str:
    return " with ".join(f"{name} {_value(value)}" for name, value in change.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _learner_changes(config: RunConfig) -> list[Change]:
    """Changes that lower the memory of learner ranks, those first that cost the least time."""
    learner = config.learner
    changes: list[Change] = []
    if learner.precision == "fp32":
        changes.append({"precision": "bf16"})
    if learner.use_distributed_optimizer is False:
        changes.append({"use_distributed_optimizer": True})
    if learner.tensor_model_parallel_size > 1 and not learner.sequence_parallel:
        changes.append({"sequence_parallel": True})
    if learner.save is not None and not learner.distrib_optim_fully_reshardable_mem_efficient:
        changes.append({"distrib_optim_fully_reshardable_mem_efficient": True})
    least, tokens = learner.least_tokens_per_gpu(longest_sample(config)), learner.max_tokens_per_gpu
    halves = itertools.takewhile(lambda size: size > least, (tokens >> number for number in range(1, 20)))
    changes += [{"max_tokens_per_gpu": size} for size in [*halves, *([least] if least < tokens else [])]]
    if learner.recompute_granularity != "full" or learner.recompute_num_layers != 1:
        changes.append({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
    for number in range(1, 7):
        times = 1 << number
        expert = learner.expert_model_parallel_size * times
        changes.append({"expert_model_parallel_size": expert})
        if (tensor := learner.tensor_model_parallel_size * times) <= 8:
            changes.append({"tensor_model_parallel_size": tensor, "sequence_parallel": True})
            if learner.expert_model_parallel_size > 1:
                changes.append({**changes[-1], "expert_tensor_parallel_size": 1})
        context = learner.context_parallel_size * times
        fewer = learner.model_copy(update={"context_parallel_size": context}).least_tokens_per_gpu(
            longest_sample(config)
        )
        changes.append({"context_parallel_size": context, "max_tokens_per_gpu": min(tokens, fewer)})
        changes.append({"pipeline_model_parallel_size": learner.pipeline_model_parallel_size * times})
    may_hold_masters = learner.precision != "fp32" and learner.use_distributed_optimizer is not False
    if may_hold_masters and not learner.optimizer_holds_masters:
        changes.append({"optimizer_cpu_offload": True})
    changes += [{"actor_num_nodes": learner.actor_num_nodes << number} for number in range(1, 7)]
    return changes


def _engine_changes(config: RunConfig) -> list[Change]:
    engine = config.engine
    changes: list[Change] = [
        {"rollout_num_gpus_per_engine": size, "rollout_num_gpus": max(size, engine.rollout_num_gpus)}
        for size in (engine.rollout_num_gpus_per_engine << number for number in range(1, 6))
        if max(size, engine.rollout_num_gpus) % size == 0
    ]
    arguments = engine.sglang_server_args
    for fraction in (0.85, 0.9):
        changes.append({"sglang_server_args": arguments | {"mem_fraction_static": fraction}})
    if config.learner.lora_rank:
        limit = config.rollout.max_weight_staleness or 0
        changes += [{"max_weight_staleness": limit >> number} for number in range(1, limit.bit_length())]
        changes.append({"lora_rank": config.learner.lora_rank // 2})
    return changes


def _host_advice(config: RunConfig) -> str:
    found = []
    if config.learner.save is not None and config.learner.use_distributed_optimizer is not False:
        if not config.learner.distrib_optim_fully_reshardable_mem_efficient:
            found.append("set distrib_optim_fully_reshardable_mem_efficient, so that only one rank gathers the state")
        if not config.learner.optimizer_holds_masters:
            found.append("set use_distributed_optimizer to false, so that no rank gathers the state of others")
    if config.learner.optimizer_cpu_offload:
        found.append("lower optimizer_offload_fraction, so that more of the optimizer's state stays on the GPU")
    if config.cluster.colocate:
        found.append("unset colocate, which copies the learner's state")
    elif config.steps_per_pass > 1 and not config.learner.segments_are_samples:
        found.append("set num_steps_per_rollout to 1, which needs no copy for a rollback")
    found.append("raise actor_num_nodes and lower actor_num_gpus_per_node")
    return ", or ".join(found[:2])


CHECKS = (recomputation_problems, memory_problems)

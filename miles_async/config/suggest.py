"""`--suggest-layout MODEL --gpus N`: the settings of devices and layout with which a model trains on N GPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from miles_async.config.checks.layouts import trains_with_layout
from miles_async.config.fields import SETTINGS, with_settings
from miles_async.config.memory import longest_sample, plan_of, planned_model
from miles_async.config.schema import RunConfig
from miles_async.config.table import memory_table
from miles_async.errors import UserError
from miles_async.models.layers import DeltaRule, ModelShape
from miles_async.planning.plan import GIB

PER_NODE = 8
"""GPUs of a node."""
CACHED_SAMPLES = 16
"""Samples of full length for which the KV cache of an engine should have room."""
COSTS = {
    "tensor_model_parallel_size": 1.05,
    "pipeline_model_parallel_size": 1.10,
    "context_parallel_size": 1.05,
    "expert_model_parallel_size": 1.03,
}
"""Assumed factor of the time of a step when a size doubles. They order layouts, and were not measured."""
RECOMPUTING = 4 / 3
"""Factor of the operations of a step if all layers are computed twice in the forward direction."""


def suggestion(config: RunConfig, gpus: int) -> str:
    """The flags, one per line, and their memory plan.

    `config` has the model, `gpu_memory_gib` and everything else that the run sets. Raises UserError if no layout fits.
    """
    model, memory = planned_model(config), config.cluster.gpu_memory_gib
    if model is None:
        raise UserError(
            f"suggest_layout {config.model.hf_checkpoint}: the memory plan of this model is not known; set it to the "
            "folder of a checkpoint whose family docs/how-to/memory.md lists"
        )
    if memory is None:
        raise UserError("suggest_layout needs the memory of a GPU: set gpu_memory_gib, such as 80 or 141")
    config = with_settings(config, precision="bf16")
    found = _engines_and_learner(config, model, int(memory * GIB), gpus)
    if found is None:
        raise UserError(
            f"no layout of {config.model.hf_checkpoint} with micro-batches of the longest sample "
            f"({longest_sample(config)} tokens) fits on {gpus} GPUs of {memory:g} GiB: use more GPUs or a smaller "
            "model, or lower rollout_max_response_len"
        )
    chosen = with_settings(config, **found)
    flags = {"hf_checkpoint": config.model.hf_checkpoint, "precision": "bf16", "gpu_memory_gib": f"{memory:g}"} | found
    if config.cluster.colocate:
        flags["colocate"] = True
    plan = plan_of(chosen, model, int(memory * GIB))
    lines = [_flag(name, value) for name, value in flags.items()]
    return "\n".join([*(f"  {line} \\" for line in lines[:-1]), f"  {lines[-1]}", "", memory_table(plan, "bf16")])


def _flag(name: str, value: Any) -> str:
    flag = SETTINGS[name].flag
    return flag if value is True else f"{flag} {value}"


def _engines_and_learner(config: RunConfig, model: ModelShape, card: int, gpus: int) -> dict[str, Any] | None:
    """The settings of the best layout.

    The learner gets half of the GPUs, or three quarters if it needs them, or all of them with `colocate`. Transformer
    Engine is set for models with linear attention, and if the model only fits with its optimizer.
    """
    shares = (gpus,) if config.cluster.colocate else (gpus // 2, 3 * gpus // 4)
    layers_of_run: list[dict[str, Any]] = [{}, {"transformer_impl": "transformer_engine"}]
    if any(isinstance(kind.attention, DeltaRule) for kind in model.kinds):
        del layers_of_run[0]
    for learners, layers in itertools.product(dict.fromkeys(shares), layers_of_run):
        per_node = min(PER_NODE, learners)
        if learners % per_node:
            continue
        devices = {"actor_num_nodes": learners // per_node, "actor_num_gpus_per_node": per_node, **layers}
        based = with_settings(config, **devices)
        learner = _learner(based, model, card)
        engine = None
        if learner is not None:
            engine = _engine(based, model, card, gpus if config.cluster.colocate else gpus - learners)
        if learner is not None and engine is not None:
            return devices | learner | engine
    return None


def _engine(config: RunConfig, model: ModelShape, card: int, gpus: int) -> dict[str, Any] | None:
    """The smallest engine whose KV cache has room for `CACHED_SAMPLES`, else the one with the most room."""
    fitting = []
    for size in (size for size in _powers(gpus) if gpus % size == 0):
        settings = {"rollout_num_gpus": gpus, "rollout_num_gpus_per_engine": size}
        plan = plan_of(with_settings(config, **settings), model, card)
        if plan.engine is not None and plan.engine_fits:
            fitting.append(settings)
            if not plan.engine.per_token or plan.engine.tokens >= CACHED_SAMPLES * plan.longest:
                return settings
    return fitting[-1] if fitting else None


def _learner(config: RunConfig, model: ModelShape, card: int) -> dict[str, Any] | None:
    """The layout that fits at the lowest cost."""
    for _, settings in sorted(_layouts(config), key=lambda priced: priced[0]):
        changed = with_settings(config, **settings)
        if trains_with_layout(changed, model) and plan_of(changed, model, card).learner_fits:
            return settings
    return None


def _layouts(config: RunConfig) -> Iterator[tuple[float, dict[str, Any]]]:
    """Costs and settings of the layouts whose sizes divide the ranks."""
    ranks, per_node = config.learner.ranks, config.learner.actor_num_gpus_per_node
    sizes = itertools.product(_powers(per_node), _powers(ranks), _powers(PER_NODE), _powers(ranks), (False, True))
    for tensor, stages, context, expert, recomputes in sizes:
        if ranks % (tensor * stages * context) or ranks % (expert * stages):
            continue
        settings: dict[str, Any] = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
            "context_parallel_size": context,
            "expert_model_parallel_size": expert,
        }
        cost = math.prod(COSTS[name] ** math.log2(size) for name, size in settings.items())
        settings = {name: size for name, size in settings.items() if size > 1}
        if tensor > 1:
            settings["sequence_parallel"] = True
            if expert > 1:
                settings["expert_tensor_parallel_size"] = 1
        learner = with_settings(config, **settings).learner
        least = learner.least_tokens_per_gpu(longest_sample(config))
        settings["max_tokens_per_gpu"] = max(least, min(config.learner.max_tokens_per_gpu, 2 * least))
        if recomputes:
            settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            cost *= RECOMPUTING
        yield cost, settings


def _powers(most: int) -> list[int]:
    return [1 << number for number in range(most.bit_length()) if 1 << number <= most]

"""Devices, batch sizes, recomputation and engines of ROLL's roles."""

from __future__ import annotations

import re

from miles_async.compat.roll.table import LOAD_FORMAT, VLLM
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.translation import Refused, sets
from miles_async.models.layers import parts_of

_ROLES = ("actor_train", "actor_infer")
_STRATEGY = "actor_train.strategy_args.strategy_config"
_OF_TRAINING = ("actor_train.device_mapping", "actor_train.training_args.", "actor_train.strategy_args.")
"""The beginnings of keys that only a file has which trains."""

# More digits than a cluster has devices would fill the memory.
_RANGE = re.compile(r"(?:list\()?range\((?:(\d{1,6}),)?(\d{1,6})\)\)?")
_NUMBERS = re.compile(r"(?:list\()?\[((?:\d{1,6}(?:,|(?=\])))*)\]\)?")


def environment(keys: CombinedKeys) -> None:
    """Environment variables: those of a role extend those of all roles."""
    shared = keys.section("system_envs")
    for role, setting in (
        ("actor_train", "learner.train_env_vars"),
        ("actor_infer", "engine.engine_env_vars"),
        ("reference", "learner.ref_env_vars"),
    ):
        key = f"{role}.system_envs"
        # The reference runs in the learner's processes, which have the shared variables.
        variables = {**({} if role == "reference" else shared), **keys.section(key)}
        if variables:
            keys.set(setting, variables, key, "system_envs")


def devices(keys: CombinedKeys) -> None:
    """The numbers of devices of learner and engines, and whether they share devices.

    Engines that ROLL gives devices of their own and some of the learner's have only the former here: engines either
    share devices with the learner, or they do not.
    """
    train, infer = (_device_numbers(keys, f"{role}.device_mapping") for role in _ROLES)
    per_node = keys.whole_number("num_gpus_per_node")
    if train:
        key = "actor_train.device_mapping"
        key += " num_gpus_per_node" if per_node is not None else ""
        per_node = min(per_node or len(train), len(train))
        nodes, rest = divmod(len(train), per_node)
        if rest:
            keys.refuse(
                f"actor_train.device_mapping has {len(train)} devices, which is not a multiple of num_gpus_per_node "
                f"{per_node}: set actor_num_nodes and actor_num_gpus_per_node"
            )
        keys.set("learner.actor_num_nodes", nodes, key)
        keys.set("learner.actor_num_gpus_per_node", per_node, key)
    elif infer and not any(key.startswith(_OF_TRAINING) for key in keys.values):
        keys.set("debug.debug_rollout_only", True, "actor_infer.device_mapping")
        keys.note("has no effect: actor_train has no devices, so nothing is trained", "num_gpus_per_node")
    elif per_node is not None and "actor_train.device_mapping" not in keys.values:
        keys.refuse("num_gpus_per_node needs actor_train.device_mapping: set both, or remove it")
    if not infer:
        return
    key, own = "actor_infer.device_mapping", set(infer) - set(train)
    if 0 < len(own) < len(infer):
        taken = f"{len(infer) - len(own)} devices of {key}"
        why = f"are the learner's alone, because actor_train.device_mapping has them: engines have the other {len(own)}"
        keys.translator.idle[taken] = why
    keys.set("engine.rollout_num_gpus", len(own or infer), key)
    if train:
        keys.set("cluster.colocate", not own, key)


def _device_numbers(keys: CombinedKeys, key: str) -> list[int]:
    """The devices of a mapping such as `list(range(0,4)) + [6, 7]`; none if the file does not set it."""
    mapping = keys.values.get(key)
    text = str([] if mapping is None else mapping).replace(" ", "")
    numbers: list[int] = []
    for part in text.split("+"):
        if limits := _RANGE.fullmatch(part):
            numbers += range(int(limits[1] or 0), int(limits[2]))
        elif listed := _NUMBERS.fullmatch(part):
            numbers += [int(device) for device in listed[1].split(",") if device]
        else:
            keys.refuse(f"{key} {mapping!r:.80} is not a list of devices: write it as list(range(0,8))")
            return []
    if mapping is not None and (not numbers or len(set(numbers)) < len(numbers)):
        keys.refuse(f"{key} {mapping!r:.80} has no device, or has a device twice: write it as list(range(0,8))")
        return []
    return numbers


def stages(keys: CombinedKeys) -> None:
    """As Megatron-core does, find the number of virtual stages from a layout that names the layers of each."""
    key = f"{_STRATEGY}.pipeline_model_parallel_layout"
    layout = keys.values.get(key)
    parts = parts_of(layout) if isinstance(layout, str) else None
    if parts is not None and (chunks := len(parts) // keys.size("learner.pipeline_model_parallel_size")) > 1:
        keys.set("learner.virtual_pipeline_model_parallel_size", chunks, key)


def batch_sizes(keys: CombinedKeys) -> None:
    """The samples of an optimizer step over all replicas of the model, and those of a micro-batch."""
    size_key = "actor_train.training_args.per_device_train_batch_size"
    steps_key = "actor_train.training_args.gradient_accumulation_steps"
    samples, steps = keys.whole_number(size_key), keys.whole_number(steps_key)
    if keys.values.get("actor_train.strategy_args.strategy_name", "megatron_train") != "megatron_train":
        keys.note("depends on strategy_name", steps_key)
    elif samples is not None:
        ranks = keys.size("learner.actor_num_nodes") * keys.size("learner.actor_num_gpus_per_node")
        ranks_per_replica = (
            keys.size("learner.tensor_model_parallel_size")
            * keys.size("learner.pipeline_model_parallel_size")
            * keys.size("learner.context_parallel_size")
        )
        step = samples * (steps or 1) * max(1, ranks // ranks_per_replica)
        keys.set("learner.global_batch_size", step, f"{size_key} * {steps_key} * data-parallel ranks")
    elif steps is not None and size_key not in keys.values:
        keys.refuse(f"{steps_key} needs {size_key}: set both, or set global_batch_size instead")
    # With dynamic batching and with packing, tokens limit a micro-batch instead of samples.
    packed_key = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
    packs = keys.switch("actor_train.use_sequence_packing")
    if packs:
        keys.set("learner.use_dynamic_batch_size", True, "actor_train.use_sequence_packing")
        if (tokens := keys.whole_number(packed_key)) is not None:
            keys.set("learner.max_tokens_per_gpu", tokens, packed_key)
    else:
        keys.note("has no effect without use_sequence_packing", packed_key)
        if samples and not keys.switch("actor_train.use_dynamic_batching_in_train"):
            keys.set("learner.micro_batch_size", samples, size_key)
            keys.set("learner.use_dynamic_batch_size", False, size_key)


def recomputation(keys: CombinedKeys) -> None:
    """Gradient checkpointing of the learner: the granularity if it is set, else whole layers."""
    disabled_key = "actor_train.model_args.disable_gradient_checkpointing"
    granularity_key, modules_key, experts_key = (
        f"{_STRATEGY}.{name}" for name in ("recompute_granularity", "recompute_modules", "moe_layer_recompute")
    )
    disabled, granularity = keys.switch(disabled_key), keys.values.get(granularity_key)
    modules, experts = keys.values.get(modules_key), keys.switch(experts_key)
    if disabled and granularity is not None:
        keys.refuse(
            f"{disabled_key} true and {granularity_key} {granularity!r} contradict each other: remove one of them"
        )
    if isinstance(modules, str):
        modules = [module.strip() for module in modules.split(",")]
    if granularity is None and not disabled and (modules or experts):
        granularity = "selective"
    if granularity == "selective" and experts:
        modules = sorted({*(modules or ["core_attn"]), "moe"})
    if granularity == "selective" and modules:
        keys.set("learner.recompute_modules", modules, modules_key, experts_key)
    if granularity != "selective":
        keys.note("has no effect without recompute_granularity selective", modules_key)
    if granularity != "selective" or not experts or modules_key in keys.values:
        keys.note("has no effect beside recompute_granularity and recompute_modules", experts_key)
    if disabled is None and granularity is None:
        return
    key = disabled_key if granularity is None else granularity_key
    granularity = None if disabled else granularity or "full"
    keys.set("learner.recompute_granularity", granularity, key)
    if granularity == "full":
        keys.set("learner.recompute_method", "uniform", key)
        keys.set("learner.recompute_num_layers", 1, key)
    if key != disabled_key:
        keys.note("has no effect beside recompute_granularity", disabled_key)


def engine(keys: CombinedKeys) -> None:
    """The arguments of the engines: vLLM's by a table, SGLang's under their own names."""
    name_key, key = (f"actor_infer.strategy_args.strategy_{part}" for part in ("name", "config"))
    strategy = keys.values.get(name_key)
    if strategy == "vllm":
        keys.translator.idle[name_key] = (
            "is vllm, but the engines run SGLang, with vLLM's arguments under SGLang's names"
        )
    if keys.values.get(precision_key := "actor_infer.model_args.dtype") == "fp16":
        keys.note("is fp16, but the engines compute in bf16, as the learner does", precision_key)
    arguments = keys.section(key)
    for name, value in arguments.items():
        no_counterpart = Refused("set SGLang's argument in sglang_server_args")
        if strategy != "sglang":
            rule = VLLM.get(name, no_counterpart)
        elif name in ("tensor_parallel_size", "tp_size"):
            rule = VLLM["tensor_parallel_size"]
        elif name == "load_format":
            rule = LOAD_FORMAT
        else:
            rule = sets(f"engine.sglang_server_args.{name}")
        keys.translator.follow(rule, f"{key}.{name}", value)
    per_worker = "actor_infer.num_gpus_per_worker"
    if "engine.rollout_num_gpus_per_engine" in keys.translator.translation:
        keys.note("has no effect beside tensor_parallel_size", per_worker)
    elif (devices_per_engine := keys.whole_number(per_worker)) is not None:
        keys.set("engine.rollout_num_gpus_per_engine", devices_per_engine, per_worker)

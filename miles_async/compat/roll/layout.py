"""Devices, batch sizes, recomputation and engines of ROLL's roles."""

from __future__ import annotations

import re

from miles_async.compat.roll.table import LOAD_FORMAT, VLLM
from miles_async.compat.roll.values import Values, note, section, size, switch, whole_number
from miles_async.config.translation import Refused, Translator, sets

_ROLES = ("actor_train", "actor_infer")
_STRATEGY = "actor_train.strategy_args.strategy_config"

# More digits than a cluster has devices would fill the memory.
_RANGE = re.compile(r"(?:list\()?range\((?:(\d{1,6}),)?(\d{1,6})\)\)?")
_NUMBERS = re.compile(r"(?:list\()?\[((?:\d{1,6}(?:,|(?=\])))*)\]\)?")


def environment(translator: Translator, values: Values) -> None:
    """Environment variables: those of a role extend those of all roles."""
    shared = section(translator, values, "system_envs")
    for role, setting in (
        ("actor_train", "learner.train_env_vars"),
        ("actor_infer", "engine.engine_env_vars"),
        ("reference", "learner.ref_env_vars"),
    ):
        key = f"{role}.system_envs"
        # The reference runs in the learner's processes, which have the shared variables.
        variables = {**({} if role == "reference" else shared), **section(translator, values, key)}
        if variables:
            translator.set(setting, variables, key if key in values else "system_envs")


def devices(translator: Translator, values: Values) -> None:
    """The numbers of devices of learner and engines, and whether they share devices."""
    train, infer = (_device_numbers(translator, values, f"{role}.device_mapping") for role in _ROLES)
    per_node = whole_number(translator, values, "num_gpus_per_node")
    if train:
        key = "actor_train.device_mapping"
        key += " num_gpus_per_node" if per_node is not None else ""
        per_node = min(per_node or len(train), len(train))
        nodes, rest = divmod(len(train), per_node)
        if rest:
            translator.problems.append(
                f"actor_train.device_mapping has {len(train)} devices, which is not a multiple of num_gpus_per_node "
                f"{per_node}: set actor_num_nodes and actor_num_gpus_per_node"
            )
        translator.set("learner.actor_num_nodes", nodes, key)
        translator.set("learner.actor_num_gpus_per_node", per_node, key)
    elif per_node is not None and "actor_train.device_mapping" not in values:
        translator.problems.append("num_gpus_per_node needs actor_train.device_mapping: set both, or remove it")
    if infer:
        translator.set("engine.rollout_num_gpus", len(infer), "actor_infer.device_mapping")
    if train and infer:
        shared = set(train) & set(infer)
        if shared and not set(infer) <= set(train):
            translator.problems.append(
                "actor_infer.device_mapping has some of the devices of actor_train.device_mapping: give the engines "
                "devices of their own, or only devices of the learner, which sets colocate"
            )
        translator.set("cluster.colocate", bool(shared), "actor_infer.device_mapping")


def _device_numbers(translator: Translator, values: Values, key: str) -> list[int]:
    """The devices of a mapping such as `list(range(0,4)) + [6, 7]`; none if the file does not set it."""
    mapping = values.get(key)
    text = str([] if mapping is None else mapping).replace(" ", "")
    numbers: list[int] = []
    for part in text.split("+"):
        if limits := _RANGE.fullmatch(part):
            numbers += range(int(limits[1] or 0), int(limits[2]))
        elif listed := _NUMBERS.fullmatch(part):
            numbers += [int(device) for device in listed[1].split(",") if device]
        else:
            translator.problems.append(f"{key} {mapping!r:.80} is not a list of devices: write it as list(range(0,8))")
            return []
    if mapping is not None and (not numbers or len(set(numbers)) < len(numbers)):
        translator.problems.append(
            f"{key} {mapping!r:.80} has no device, or has a device twice: write it as list(range(0,8))"
        )
        return []
    return numbers


def batch_sizes(translator: Translator, values: Values) -> None:
    """The samples of an optimizer step over all replicas of the model, and those of a micro-batch."""
    size_key = "actor_train.training_args.per_device_train_batch_size"
    steps_key = "actor_train.training_args.gradient_accumulation_steps"
    samples, steps = whole_number(translator, values, size_key), whole_number(translator, values, steps_key)
    if values.get("actor_train.strategy_args.strategy_name", "megatron_train") != "megatron_train":
        note(translator, values, "depends on strategy_name", steps_key)
    elif samples is not None:
        ranks = size(translator, "learner.actor_num_nodes") * size(translator, "learner.actor_num_gpus_per_node")
        ranks_per_replica = (
            size(translator, "learner.tensor_model_parallel_size")
            * size(translator, "learner.pipeline_model_parallel_size")
            * size(translator, "learner.context_parallel_size")
        )
        step = samples * (steps or 1) * max(1, ranks // ranks_per_replica)
        translator.set("learner.global_batch_size", step, f"{size_key} * {steps_key} * data-parallel ranks")
    elif steps is not None and size_key not in values:
        translator.problems.append(f"{steps_key} needs {size_key}: set both, or set global_batch_size instead")
    # With dynamic batching and with packing, tokens limit a micro-batch instead of samples.
    packed_key = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
    packs = switch(translator, values, "actor_train.use_sequence_packing")
    if packs:
        translator.set("learner.use_dynamic_batch_size", True, "actor_train.use_sequence_packing")
        if (tokens := whole_number(translator, values, packed_key)) is not None:
            translator.set("learner.max_tokens_per_gpu", tokens, packed_key)
    else:
        note(translator, values, "has no effect without use_sequence_packing", packed_key)
        if samples and not switch(translator, values, "actor_train.use_dynamic_batching_in_train"):
            translator.set("learner.micro_batch_size", samples, size_key)
            translator.set("learner.use_dynamic_batch_size", False, size_key)


def recomputation(translator: Translator, values: Values) -> None:
    """Gradient checkpointing of the learner: the granularity if it is set, else whole layers."""
    disabled_key = "actor_train.model_args.disable_gradient_checkpointing"
    granularity_key, modules_key, experts_key = (
        f"{_STRATEGY}.{name}" for name in ("recompute_granularity", "recompute_modules", "moe_layer_recompute")
    )
    disabled, granularity = switch(translator, values, disabled_key), values.get(granularity_key)
    modules, experts = values.get(modules_key), switch(translator, values, experts_key)
    if disabled and granularity is not None:
        translator.problems.append(
            f"{disabled_key} true and {granularity_key} {granularity!r} contradict each other: remove one of them"
        )
    if isinstance(modules, str):
        modules = [module.strip() for module in modules.split(",")]
    if granularity is None and not disabled and (modules or experts):
        granularity = "selective"
    if granularity == "selective" and experts:
        modules = sorted({*(modules or ["core_attn"]), "moe"})
    if granularity == "selective" and modules:
        translator.set("learner.recompute_modules", modules, modules_key if modules_key in values else experts_key)
    if granularity != "selective":
        note(translator, values, "has no effect without recompute_granularity selective", modules_key)
    if granularity != "selective" or not experts or modules_key in values:
        note(translator, values, "has no effect beside recompute_granularity and recompute_modules", experts_key)
    if disabled is None and granularity is None:
        return
    key = disabled_key if granularity is None else granularity_key
    granularity = None if disabled else granularity or "full"
    translator.set("learner.recompute_granularity", granularity, key)
    if granularity == "full":
        translator.set("learner.recompute_method", "uniform", key)
        translator.set("learner.recompute_num_layers", 1, key)
    if key != disabled_key:
        note(translator, values, "has no effect beside recompute_granularity", disabled_key)


def engine(translator: Translator, values: Values) -> None:
    """The arguments of the engines: vLLM's by a table, SGLang's under their own names."""
    name_key, key = (f"actor_infer.strategy_args.strategy_{part}" for part in ("name", "config"))
    strategy = values.get(name_key)
    if strategy == "vllm":
        translator.idle[name_key] = "is vllm, but the engines run SGLang, with vLLM's arguments under SGLang's names"
    if values.get(precision_key := "actor_infer.model_args.dtype") == "fp16":
        translator.idle[precision_key] = "is fp16, but the engines compute in bf16, as the learner does"
    arguments = section(translator, values, key)
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
        translator.follow(rule, f"{key}.{name}", value)
    per_worker = "actor_infer.num_gpus_per_worker"
    if "engine.rollout_num_gpus_per_engine" in translator.translation:
        note(translator, values, "has no effect beside tensor_parallel_size", per_worker)
    elif (devices_per_engine := whole_number(translator, values, per_worker)) is not None:
        translator.set("engine.rollout_num_gpus_per_engine", devices_per_engine, per_worker)

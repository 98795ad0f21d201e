"""Translates ROLL's configuration file: roles such as `actor_train`, each with its strategy, devices and batching."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_async.compat.roll import ROLES
from miles_async.config.translation import (
    Combined,
    Only,
    Outcome,
    Refused,
    Rule,
    Table,
    Translator,
    converts,
    entries,
    sets,
)

_PRECISIONS = {"bf16": "bf16", "fp32": "fp32"}
_ENGINE_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DECAYS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_DYNAMIC_BATCHING = ("use_dynamic_batching", "max_tokens_per_microbatch", "sequence_length_round")

_ATTENTION = Only(
    ("fa2", "flash_attention_2", "auto", None),
    "Transformer Engine chooses the attention on GPUs; set NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN in "
    "train_env_vars",
)
_MODEL_TYPE = Only((None,), "config.json of hf_checkpoint defines the type of the model")
_ENVIRONMENTS = Refused("write the environment as a generate function, and set custom_generate_function_path")
_MODEL_OF_THE_REWARD = Refused("set rm_type, or custom_rm_path to a function that asks the reward model")


def _below(prefix: str, rules: Mapping[str, Rule]) -> Table:
    return {f"{prefix}.{key}": rule for key, rule in rules.items()}


_TOP: Table = {
    "exp_name": sets("observability.experiment_name"),
    "output_dir": sets("observability.run_dir"),
    "logging_dir": Refused("logs are in the folder of the run, set run_dir"),
    "logging_steps": Only((1,), "every step is logged, set it to 1"),
    "track_with": Refused("set use_tensorboard or use_wandb"),
    "tracker_kwargs": Refused("set wandb_project and wandb_group"),
    "hydra": Refused("set run_dir"),
    "defaults": Refused("pass several files, each with its own --config"),
    "seed": sets("learner.seed", "data.rollout_seed"),
    "system_envs": Combined(),
    "num_gpus_per_node": Combined(),
    "pretrain": sets("model.hf_checkpoint"),
    "reward_pretrain": _MODEL_OF_THE_REWARD,
    "rewards": _MODEL_OF_THE_REWARD,
    "critic": Refused("set advantage_estimator to ppo, and critic_lr, critic_lr_warmup_steps and critic_load"),
    "validation": Refused("set eval_datasets"),
    "train_env_manager": _ENVIRONMENTS,
    "val_env_manager": _ENVIRONMENTS,
    "custom_envs": _ENVIRONMENTS,
    "checkpoint_config.type": Only(("file_system",), "checkpoints are written to a folder, set save"),
    "checkpoint_config.output_dir": sets("learner.save"),
    "resume_from_checkpoint": Only((False, None), "set load to the folder of the earlier run's checkpoints"),
    "max_steps": sets("rollout.num_rollout"),
    "save_steps": sets("learner.save_interval"),
    "eval_steps": sets("rollout.eval_interval"),
    "val_batch_size": Refused("set eval_datasets"),
    "rollout_batch_size": sets("rollout.rollout_batch_size"),
    "num_return_sequences_in_group": sets("rollout.n_samples_per_prompt"),
    "prompt_length": sets("rollout.rollout_max_prompt_len"),
    "response_length": sets("rollout.rollout_max_response_len"),
    "sequence_length": Refused("set rollout_max_prompt_len and rollout_max_response_len"),
    "async_generation_ratio": Refused("set max_weight_staleness to a number of weight versions"),
    "adv_estimator": converts("algorithm.advantage_estimator", {"grpo": "grpo", "gae": "ppo"}),
    "ppo_epochs": Only((1,), "each batch is trained once; set global_batch_size for several optimizer steps per batch"),
    "pg_clip": sets("algorithm.eps_clip"),
    "value_clip": sets("algorithm.value_clip"),
    "whiten_advantages": Refused("set normalize_advantages with advantage_estimator ppo, or remove it"),
    "add_token_level_kl": Refused("set kl_coef, the coefficient of the KL penalty on the reward of each token"),
    "init_kl_coef": sets("algorithm.kl_coef"),
    "use_kl_loss": sets("algorithm.use_kl_loss"),
    "kl_loss_coef": sets("algorithm.kl_loss_coef"),
    "entropy_loss_coef": sets("algorithm.entropy_coef"),
    "max_grad_norm": sets("learner.clip_grad"),
    "global_template": sets("data.apply_chat_template"),
}

_ACTOR_TRAIN: Table = {
    "system_envs": Combined(),
    "model_args.attn_implementation": _ATTENTION,
    "model_args.disable_gradient_checkpointing": Combined(),
    "model_args.dtype": converts("learner.precision", _PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "training_args.learning_rate": sets("learner.lr"),
    "training_args.weight_decay": sets("learner.weight_decay"),
    "training_args.adam_beta1": sets("learner.adam_beta1"),
    "training_args.adam_beta2": sets("learner.adam_beta2"),
    "training_args.per_device_train_batch_size": Combined(),
    "training_args.gradient_accumulation_steps": Combined(),
    "training_args.warmup_steps": sets("learner.lr_warmup_steps"),
    "training_args.warmup_ratio": Refused("set lr_warmup_steps to a number of optimizer steps"),
    "training_args.lr_scheduler_type": converts("learner.lr_decay_style", _DECAYS),
    "training_args.num_train_epochs": Refused("set num_rollout to a number of batches"),
    "data_args.template": sets("data.apply_chat_template"),
    "data_args.file_name": Combined(),
    "data_args.messages": sets("data.input_key"),
    "data_args.dataset_dir": Refused("set prompt_data to the path of the file"),
    "data_args.domain_interleave_probs": Refused(
        "write all rows to one file, in the order of training, and set prompt_data"
    ),
    "data_args.interleave_probs": Refused("write all rows to one file, in the order of training, and set prompt_data"),
    "data_args.preprocessing_num_workers": Refused("rows are read when they are needed, remove it"),
    "strategy_args.strategy_name": Only(
        ("megatron_train",), "the learner runs Megatron-core, set it to megatron_train"
    ),
    **{f"strategy_args.strategy_config.{size}": sets(f"learner.{size}") for size in _PARALLEL_SIZES},
    "strategy_args.strategy_config.sequence_parallel": sets("learner.sequence_parallel"),
    "strategy_args.strategy_config.use_distributed_optimizer": sets("learner.use_distributed_optimizer"),
    "strategy_args.strategy_config.recompute_granularity": Combined(),
    "device_mapping": Combined(),
    "infer_batch_size": Combined(),
    **{
        f"{name}_in_{phase}": sets(f"learner.{name}_in_{phase}")
        for name in _DYNAMIC_BATCHING
        for phase in ("train", "infer")
    },
}

_ACTOR_INFER: Table = {
    "system_envs": Combined(),
    "model_args.attn_implementation": Only((None, "auto"), "set --sglang-attention-backend"),
    "model_args.disable_gradient_checkpointing": Only((True,), "engines compute no gradients, set it to true"),
    "model_args.dtype": converts("engine.sglang_server_args.dtype", _ENGINE_PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "generating_args.max_new_tokens": sets("rollout.rollout_max_response_len"),
    "generating_args.top_p": sets("rollout.rollout_top_p"),
    "generating_args.top_k": sets("rollout.rollout_top_k"),
    "generating_args.temperature": sets("rollout.rollout_temperature"),
    "generating_args.stop_strings": sets("rollout.rollout_stop"),
    "generating_args.num_beams": Only((1,), "engines sample, set it to 1"),
    "generating_args.num_return_sequences": Combined(),
    "data_args.template": sets("data.apply_chat_template"),
    "strategy_args.strategy_name": Only(("vllm", "sglang"), "the engines run SGLang, set it to sglang or vllm"),
    "strategy_args.strategy_config": Combined(),
    "device_mapping": Combined(),
    "infer_batch_size": Only((1,), "the engines batch requests themselves, set sglang_server_concurrency"),
}
_VLLM: Table = {
    "gpu_memory_utilization": sets("engine.sglang_server_args.mem_fraction_static"),
    "block_size": sets("engine.sglang_server_args.page_size"),
    "load_format": sets("engine.sglang_server_args.load_format"),
    "max_model_len": sets("engine.sglang_server_args.context_length"),
    "enforce_eager": sets("engine.sglang_server_args.disable_cuda_graph"),
    "enable_prefix_caching": converts("engine.sglang_server_args.disable_radix_cache", {True: False, False: True}),
    "tensor_parallel_size": sets("engine.rollout_num_gpus_per_engine"),
}
"""vLLM's arguments under the names of SGLang, which runs the engines here."""

_REFERENCE: Table = {
    "system_envs": Combined(),
    "model_args.attn_implementation": _ATTENTION,
    "model_args.disable_gradient_checkpointing": Only((True,), "the reference computes no gradients, set it to true"),
    "model_args.dtype": converts("learner.precision", _PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "data_args.template": sets("data.apply_chat_template"),
    "strategy_args.strategy_name": Only(
        ("megatron_infer",), "the learner runs the reference, set it to megatron_infer"
    ),
    **{f"strategy_args.strategy_config.{size}": Combined() for size in _PARALLEL_SIZES},
    "device_mapping": Combined(),
    "infer_batch_size": Combined(),
    **{f"{name}_in_infer": sets(f"learner.ref_{name}_in_infer") for name in _DYNAMIC_BATCHING},
}

TABLE: Table = {
    **_TOP,
    **_below("actor_train", _ACTOR_TRAIN),
    **_below("actor_infer", _ACTOR_INFER),
    **_below("reference", _REFERENCE),
}

_TEMPLATES = frozenset({"global_template", *(f"{role}.data_args.template" for role in ROLES)})
# More digits than a cluster has devices would fill the memory.
_RANGE = re.compile(r"(?:list\()?range\((?:(\d{1,6}),)?(\d{1,6})\)\)?")
_NUMBERS = re.compile(r"\[((?:\d{1,6}(?:,|(?=\])))*)\]")
_INTERPOLATION = re.compile(r"\$\{([^}]*)\}")


def translate(content: Mapping[str, Any]) -> Outcome:
    """What the content of a file means here.

    `${key}` stands for the value of another key, as in OmegaConf.
    """
    translator = Translator("ROLL", TABLE)
    written = dict(entries(content, TABLE))
    values = {}
    for key, value in written.items():
        known = len(translator.problems)
        resolved = value if isinstance(TABLE.get(key), Refused) else _interpolated(translator, key, value, written)
        if len(translator.problems) == known:
            values[key] = resolved
    for key, value in values.items():
        # A template of ROLL has a name; the tokenizer of a checkpoint has at most one.
        translator.apply(key, value is not None if key in _TEMPLATES else value)
    for combine in (_environment, _devices, _batch_sizes, _reference_layout, _recomputation, _data, _sampling, _engine):
        combine(translator, values)
    return translator


def _interpolated(translator: Translator, key: str, value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _interpolated(translator, f"{key}.{name}", entry, values) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    for name in _INTERPOLATION.findall(value):
        if name not in values:
            translator.problems.append(f"{key} refers to ${{{name}}}, which this file does not set: write the value")
            return value
        if _INTERPOLATION.search(str(values[name])):
            translator.problems.append(f"{key} refers to ${{{name}}}, which refers to another key: write the value")
            return None
    if whole := _INTERPOLATION.fullmatch(value):
        return values[whole[1]]
    return _INTERPOLATION.sub(lambda match: str(values[match[1]]), value)


def _environment(translator: Translator, values: Mapping[str, Any]) -> None:
    """Environment variables: those of a role extend those of all roles."""
    shared = _section(translator, values, "system_envs")
    for role, setting in (
        ("actor_train", "learner.train_env_vars"),
        ("actor_infer", "engine.engine_env_vars"),
        ("reference", "learner.ref_env_vars"),
    ):
        key = f"{role}.system_envs"
        # The reference runs in the learner's processes, which have the shared variables.
        variables = {**({} if role == "reference" else shared), **_section(translator, values, key)}
        if variables:
            translator.set(setting, variables, key if key in values else "system_envs")


def _devices(translator: Translator, values: Mapping[str, Any]) -> None:
    """The numbers of devices of learner and engines, and whether they share devices."""
    devices = {role: _device_numbers(translator, values, f"{role}.device_mapping") for role in ROLES}
    train, infer, reference = (devices[role] for role in ROLES)
    if reference and train and set(reference) != set(train):
        translator.problems.append(
            "reference.device_mapping differs from actor_train.device_mapping, but the learner runs the reference on "
            "its own devices: set both to the same devices"
        )
    per_node = _whole_number(translator, values, "num_gpus_per_node")
    if train:
        per_node = min(per_node or len(train), len(train))
        nodes, rest = divmod(len(train), per_node)
        if rest:
            translator.problems.append(
                f"actor_train.device_mapping has {len(train)} devices, which is not a multiple of num_gpus_per_node "
                f"{per_node}: set actor_num_nodes and actor_num_gpus_per_node"
            )
        translator.set("learner.actor_num_nodes", nodes, "actor_train.device_mapping")
        translator.set("learner.actor_num_gpus_per_node", per_node, "actor_train.device_mapping")
    elif per_node is not None:
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


def _device_numbers(translator: Translator, values: Mapping[str, Any], key: str) -> list[int]:
    """The devices of a mapping such as `list(range(0,4)) + [6, 7]`; none if the file does not set it."""
    mapping = values.get(key)
    text = str([] if mapping is None else mapping).replace(" ", "")
    devices: list[int] = []
    for part in text.split("+"):
        if limits := _RANGE.fullmatch(part):
            devices += range(int(limits[1] or 0), int(limits[2]))
        elif numbers := _NUMBERS.fullmatch(part):
            devices += [int(number) for number in numbers[1].split(",") if number]
        else:
            translator.problems.append(f"{key} {mapping!r:.80} is not a list of devices: write it as list(range(0,8))")
            return []
    if mapping is not None and (not devices or len(set(devices)) < len(devices)):
        translator.problems.append(
            f"{key} {mapping!r:.80} has no device, or has a device twice: write it as list(range(0,8))"
        )
        return []
    return devices


def _batch_sizes(translator: Translator, values: Mapping[str, Any]) -> None:
    """The samples of an optimizer step over all replicas of the model, and those of a micro-batch."""
    size_key = "actor_train.training_args.per_device_train_batch_size"
    steps_key = "actor_train.training_args.gradient_accumulation_steps"
    size = _whole_number(translator, values, size_key)
    steps = _whole_number(translator, values, steps_key)
    if size is not None:
        ranks = _size(translator, "learner.actor_num_nodes") * _size(translator, "learner.actor_num_gpus_per_node")
        ranks_per_replica = (
            _size(translator, "learner.tensor_model_parallel_size")
            * _size(translator, "learner.pipeline_model_parallel_size")
            * _size(translator, "learner.context_parallel_size")
        )
        samples = size * (steps or 1) * max(1, ranks // ranks_per_replica)
        translator.set("learner.global_batch_size", samples, f"{size_key} * {steps_key} * data-parallel ranks")
    elif steps is not None and size_key not in values:
        translator.problems.append(f"{steps_key} needs {size_key}: set both, or set global_batch_size instead")
    # With dynamic batching, tokens limit a micro-batch instead of samples.
    for key, dynamic_batching in (
        (size_key, "actor_train.use_dynamic_batching_in_train"),
        ("actor_train.infer_batch_size", "actor_train.use_dynamic_batching_in_infer"),
        ("reference.infer_batch_size", "reference.use_dynamic_batching_in_infer"),
    ):
        if (samples_per_micro_batch := _whole_number(translator, values, key)) and not _switch(
            translator, values, dynamic_batching
        ):
            translator.set("learner.micro_batch_size", samples_per_micro_batch, key)
            translator.set("learner.use_dynamic_batch_size", False, key)


def _reference_layout(translator: Translator, values: Mapping[str, Any]) -> None:
    """The reference has the parallel layout of the learner, in whose processes it runs."""
    for size in _PARALLEL_SIZES:
        key = f"reference.strategy_args.strategy_config.{size}"
        learner_size = values.get(f"actor_train.strategy_args.strategy_config.{size}") or 1
        if (values.get(key) or learner_size) != learner_size:
            translator.problems.append(
                f"{key} {values[key]} differs from the learner's {learner_size}, but the learner runs the reference in "
                f"its own layout: set it to {learner_size}"
            )


def _recomputation(translator: Translator, values: Mapping[str, Any]) -> None:
    """Gradient checkpointing of the learner: the granularity if it is set, else whole layers."""
    disabled_key = "actor_train.model_args.disable_gradient_checkpointing"
    granularity_key = "actor_train.strategy_args.strategy_config.recompute_granularity"
    disabled, granularity = _switch(translator, values, disabled_key), values.get(granularity_key)
    if disabled is None and granularity is None:
        return
    if disabled and granularity is not None:
        translator.problems.append(
            f"{disabled_key} true and {granularity_key} {granularity!r} contradict each other: remove one of them"
        )
    key = disabled_key if granularity is None else granularity_key
    granularity = None if disabled else granularity or "full"
    translator.set("learner.recompute_granularity", granularity, key)
    if granularity == "full":
        translator.set("learner.recompute_method", "uniform", key)
        translator.set("learner.recompute_num_layers", 1, key)


def _data(translator: Translator, values: Mapping[str, Any]) -> None:
    key = "actor_train.data_args.file_name"
    match values.get(key):
        case None:
            pass
        case str() as file:
            translator.set("data.prompt_data", file, key)
        case [str() as file]:
            translator.set("data.prompt_data", file, key)
        case _:
            translator.problems.append(f"{key} is not one file: write all rows to one file, and set prompt_data")


def _sampling(translator: Translator, values: Mapping[str, Any]) -> None:
    """The samples of a group. 1 is the number of responses to a request in a multi-turn rollout, not to a prompt."""
    key = "actor_infer.generating_args.num_return_sequences"
    if (samples := _whole_number(translator, values, key)) not in (None, 1):
        translator.set("rollout.n_samples_per_prompt", samples, key)


def _engine(translator: Translator, values: Mapping[str, Any]) -> None:
    """The arguments of the engines: vLLM's by a table, SGLang's under their own names."""
    section = "actor_infer.strategy_args.strategy_config"
    is_sglang = values.get("actor_infer.strategy_args.strategy_name") == "sglang"
    for name, value in _section(translator, values, section).items():
        no_counterpart = Refused("set SGLang's argument in sglang_server_args")
        rule = sets(f"engine.sglang_server_args.{name}") if is_sglang else _VLLM.get(name, no_counterpart)
        translator.follow(rule, f"{section}.{name}", value)


def _section(translator: Translator, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        translator.problems.append(f"{key} is a section, but its value is {value!r}: put settings below it")
        return {}
    return value or {}


def _switch(translator: Translator, values: Mapping[str, Any], key: str) -> bool | None:
    """The value of a key, which must be true or false; None if the file does not set it.

    ROLL reads YAML 1.1, in which `yes`, `on`, `no` and `off` are true and false, too.
    """
    value = values.get(key)
    if isinstance(value, str):
        value = {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return value
    translator.problems.append(f"{key} {value!r} is neither true nor false: set it to true or false")
    return None


def _whole_number(translator: Translator, values: Mapping[str, Any], key: str) -> int | None:
    """The value of a key, which must be a whole number from 1 on; None if the file does not set it."""
    value = values.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    problem = f"{key} {value!r} is not a number of 1 or more: write a whole number"
    if problem not in translator.problems:
        translator.problems.append(problem)
    return None


def _size(translator: Translator, setting: str) -> int:
    """A size that the file has set; 1 if it has not, or if the value is invalid, which is reported later."""
    value = translator.translation[setting].value if setting in translator.translation else 1
    return value if isinstance(value, int) and value > 0 else 1

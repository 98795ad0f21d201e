"""The rule of each flag of slime that is not a flag of this project."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_async.config.translation import Combined, Flag, Idle, Only, Refused, Rule, Translator, converts, sets
from miles_async.config.yaml_text import read_keys
from miles_async.errors import collected
from miles_async.json_values import shown

_DISTILLATION = Refused("on-policy distillation is not supported: remove it")
_LOGS = Idle("has no effect: the metrics of a run are always complete")
_TEST = Idle("belongs to slime's own tests")
_OFFLOAD = Idle(
    "has no effect: colocate lets learner and engines release their devices in turns, and nothing else does"
)

EVAL_FIELDS = {
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_temperature": "temperature",
    "eval_top_p": "top_p",
    "eval_top_k": "top_k",
    "eval_max_response_len": "max_response_len",
    "n_samples_per_eval_prompt": "n_samples",
    "eval_reward_key": "reward_key",
    "eval_tool_key": "tool_key",
}
"""Flags of all data sets, and the fields of `eval_datasets` that they set."""
_SWITCHES: Mapping[str, Rule] = {
    "disable_grpo_std_normalization": converts("algorithm.grpo_std_normalization", {True: False}),
    "disable_rewards_normalization": converts("algorithm.rewards_normalization", {True: False}),
    "use_tis": converts("algorithm.off_policy_correction", {True: "tis"}),
    "offload": _OFFLOAD,
    "offload_train": _OFFLOAD,
    "offload_rollout": _OFFLOAD,
    "no_offload_train": _OFFLOAD,
    "no_offload_rollout": _OFFLOAD,
    "release_train": _OFFLOAD,
    "use_fault_tolerance": Idle("has no effect: engines that fail are always restarted"),
    "log_multi_turn": _LOGS,
    "log_passrate": _LOGS,
    "log_correct_samples": _LOGS,
    **dict.fromkeys(
        ("use_gated_attention", "post_self_attn_layernorm", "post_mlp_layernorm"),
        Idle("describes a part of the model, which hf_checkpoint defines"),
    ),
    "ci_test": _TEST,
    "ci_disable_kl_checker": _TEST,
    "disable_compute_advantages_and_returns": Idle("has no effect: loss_type sft_loss needs no advantages"),
    "keep_old_actor": Idle("has no effect: the log-probabilities of the engines' weights come with each sample"),
    "use_distributed_post": Idle("has no effect: each rollout worker sends its own requests"),
    "disable_wandb_random_suffix": Idle("has no effect: the run's name has no random suffix"),
    "recompute_loss_function": Idle("has no effect: the loss is always computed in chunks"),
    "balance_by_flops": converts("learner.balance_data", {True: True}),
    "skip_eval_before_train": Refused("an evaluation before training is part of every run that evaluates: remove it"),
    "use_unbiased_kl": Refused("the KL loss is not weighted by the ratio of probabilities: remove it"),
    "use_rollout_entropy": Refused("entropies are not computed before the training step: remove it"),
    "reset_optimizer_states": Refused("the optimizer keeps its state between batches: remove it"),
    "use_stateless_adam": Refused("the learner uses AdamW: remove it"),
    "use_routing_replay": Refused("routing replay is not supported: remove it"),
    "use_rollout_routing_replay": Refused("routing replay is not supported: remove it"),
    "mask_offpolicy_in_partial_rollout": Refused("set off_policy_correction to weight older tokens"),
    "use_opd": _DISTILLATION,
    "allgather_cp": Idle("has no effect: context parallelism exchanges keys and values as Megatron does"),
    "freeze_indexer": Refused("all parameters are trained: remove it"),
    "update_weight_disk_keep_files": Refused("the files of a publish are removed after the next one: set save_hf"),
}
_VALUES: Mapping[str, Rule] = {
    "train_backend": Only(("megatron",), "the learner runs Megatron-core"),
    "num_gpus_per_node": Idle("has no effect: Ray knows the GPUs of each node"),
    "rollout_max_context_len": Combined(),
    "model_name": Idle("has no effect: config.json of hf_checkpoint names the model"),
    "qwen_gdn_backend": Idle("has no effect: Megatron-Bridge chooses the kernel of linear attention"),
    "log_probs_max_tokens_per_gpu": Combined(),
    "log_probs_chunk_size": Idle("has no effect: log-probabilities are always computed in chunks that fit the memory"),
    "rollout_health_check_interval": sets("engine.engine_health_interval_seconds"),
    "rollout_health_check_timeout": sets("engine.engine_health_timeout_seconds"),
    "rollout_health_check_first_wait": Idle("has no effect: an engine is checked once it has answered"),
    "rollout_data_transport": Only(("object-store",), "samples travel through Ray's object store"),
    "start_rollout_id": Refused("load continues after the last checkpoint: remove it"),
    "update_weight_mode": Combined(),
    "update_weight_transport": Combined(),
    "update_weight_disk_dir": Combined(),
    "update_weight_local_checkpoint_dir": Idle("has no effect: engines change their weights in place"),
    "update_weight_delta_encoding": Idle("has no effect: disk_delta writes the changed values"),
    "update_weight_delta_checksum": Idle("has no effect: weights are always compared with their checksums"),
    "data_pad_size_multiplier": Idle("has no effect: sequences are packed without padding"),
    "loss_mask_type": Idle("has no effect: the chat template marks what is trained"),
    "ref_ckpt_step": Refused("set ref_load to a Hugging Face checkpoint"),
    "ref_update_interval": Refused("the reference model stays as it is: remove it"),
    "opd_type": _DISTILLATION,
    "opd_kl_coef": _DISTILLATION,
    "opd_teacher_load": _DISTILLATION,
    "opd_teacher_ckpt_step": _DISTILLATION,
    "wandb_dir": Idle("has no effect: the files of Weights & Biases are in the folder of the run"),
    "wandb_run_id": Refused("set the environment variable WANDB_RUN_ID"),
    "log_reward_category": _LOGS,
    "tb_project_name": sets("observability.project_name"),
    "tb_experiment_name": sets("observability.experiment_name"),
    "http_proxy": Refused("set the environment variable HTTP_PROXY"),
    "memory_snapshot_dir": Idle("has no effect without record_memory_history"),
    "memory_snapshot_num_steps": Idle("has no effect without record_memory_history"),
    "memory_recorder": Idle("has no effect without record_memory_history"),
    "profile_target": Idle("has no effect without a profiler of slime"),
    "save_debug_train_data": Refused("trace a run and read its events instead: remove it"),
    "load_debug_rollout_data_subsample": Refused("write fewer samples into the file: remove it"),
    "load_forge_rollout_data": Refused("a recording of Forge cannot be read: set load_debug_rollout_data"),
    "ci_train_rollout_logprob_abs_diff_threshold": _TEST,
    "ci_save_grad_norm": _TEST,
    "ci_load_grad_norm": _TEST,
    "rollout_buffer_url": Refused("set agent_port, and let the generator use the endpoint for agents"),
    "fetch_trajectory_retry_times": Idle("belongs to slime's rollout buffer"),
    "min_batch_collection_ratio": Idle("belongs to slime's rollout buffer"),
    "rollout_task_type": Idle("belongs to slime's rollout buffer"),
    "megatron_config_path": Refused("set critic_load, critic_lr and critic_lr_warmup_steps"),
    "custom_config_path": Combined(),
    "custom_model_provider_path": Refused(
        "engines and exports need the names of the weights too: write a model plug-in, docs/how-to/model-plugin.md"
    ),
    "custom_update_weight_post_write_path": Refused(
        "a publish is written, verified and made live without a step for functions: set save_hf for files with weights"
    ),
    # The evaluation, which `_evaluation` reads.
    **dict.fromkeys(("eval_config", *EVAL_FIELDS), Combined()),
    "eval_max_prompt_len": Refused("prompts of an evaluation may have any length: remove it"),
    "eval_min_new_tokens": Refused("responses may end at any token: remove it"),
    "eval_max_context_len": Combined(),
}
_LISTS: Mapping[str, Rule] = {
    "eval_prompt_data": Combined(),
    "rollout_external_engine_addrs": Refused("the run starts its own engines: remove it"),
    "only_train_params_name_list": Refused("all parameters are trained: remove it"),
    "freeze_params_name_list": Refused("all parameters are trained: remove it"),
    "multimodal_keys": Refused("models are trained on text: remove it"),
    "megatron_deepgemm_forward_layers": Refused("the learner computes in bf16 or fp32: remove it"),
    "megatron_deepgemm_forward_modules": Refused("the learner computes in bf16 or fp32: remove it"),
    "megatron_deepgemm_moe_forward_layers": Refused("the learner computes in bf16 or fp32: remove it"),
    "megatron_deepgemm_moe_forward_modules": Refused("the learner computes in bf16 or fp32: remove it"),
}
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(rule, "nothing") for name, rule in _SWITCHES.items()},
    **{name: Flag(rule) for name, rule in _VALUES.items()},
    **{name: Flag(rule, "values") for name, rule in _LISTS.items()},
}
"""All flags by name."""

_DATASET_FIELDS = {
    **{field: field for field in (*EVAL_FIELDS.values(), "path", "rm_type", "custom_rm_path")},
    **{field: field for field in ("metadata_key", "metadata_overrides", "apply_chat_template_kwargs")},
    "n_samples_per_eval_prompt": "n_samples",
}
"""Keys of a data set in the file of `--eval-config`."""


def combine(values: Mapping[str, Any], translator: Translator) -> None:
    """Translate the flags that need more than their own value."""
    _evaluation(values, translator)
    _weights(values, translator)
    _context_lengths(values, translator)
    if "log_probs_max_tokens_per_gpu" in values:
        translator.idle["--log-probs-max-tokens-per-gpu"] = "has no effect: max_tokens_per_gpu limits all passes"
    if "custom_config_path" in values:
        _custom_config(Path(str(values["custom_config_path"])).expanduser(), translator)


def _context_lengths(values: Mapping[str, Any], translator: Translator) -> None:
    """Only functions of users read the two limits, so they get them. Engines have the context of the model."""
    flag, rollout = "--rollout-max-context-len", values.get("rollout_max_context_len")
    if isinstance(rollout, int) and rollout < 2:
        translator.problems.append(f"{flag} {rollout} leaves no room for a response: set it to 2 or more")
    if rollout is not None:
        translator.set("rollout.custom_args.rollout_max_context_len", rollout, flag)
    if (evaluation := values.get("eval_max_context_len", rollout)) is not None:
        source = "--eval-max-context-len" if "eval_max_context_len" in values else flag
        translator.set("rollout.custom_args.eval_max_context_len", evaluation, source)


def _evaluation(values: Mapping[str, Any], translator: Translator) -> None:
    """`--eval-prompt-data NAME PATH …` or the file of `--eval-config`, and what holds for all data sets."""
    common = {field: values[flag] for flag, field in EVAL_FIELDS.items() if flag in values}
    if "eval_config" in values:
        datasets, key = _eval_file(Path(str(values["eval_config"])).expanduser(), translator), "--eval-config"
        if "eval_prompt_data" in values:
            translator.idle["--eval-prompt-data"] = "has no effect with --eval-config"
    else:
        names, key = [str(one) for one in values.get("eval_prompt_data", [])], "--eval-prompt-data"
        if len(names) == 1:
            names = ["aime", *names]
        if len(names) % 2:
            translator.problems.append(f"{key} needs a name and a path for each data set, such as aime aime.jsonl")
            return
        datasets = {name: {"path": path} for name, path in zip(names[::2], names[1::2], strict=True)}
    if datasets:
        entries = {name: {"n_samples": 1, **common, **fields} for name, fields in datasets.items()}
        translator.set("rollout.eval_datasets", entries, key)
    elif key == "--eval-prompt-data":
        for flag in EVAL_FIELDS:
            if flag in values:
                translator.idle[f"--{flag.replace('_', '-')}"] = "has no effect without --eval-prompt-data"


def _eval_file(path: Path, translator: Translator) -> Mapping[str, Mapping[str, Any]]:
    """The data sets of slime's file for evaluations, which has `defaults` and `datasets`."""
    content = _read(path, f"--eval-config {path}", translator)
    if not content:
        return {}
    section = content.get("eval", content)
    if not isinstance(section, Mapping):
        translator.problems.append(f"--eval-config {path}: eval holds no keys: write eval.datasets")
        return {}
    defaults, listed = section.get("defaults") or {}, section.get("datasets") or []
    for name, value, kinds, wanted in (
        ("defaults", defaults, Mapping, "a section"),
        ("datasets", listed, Mapping | list, "a list of sections"),
    ):
        if not isinstance(value, kinds):
            translator.problems.append(f"--eval-config {path}: {name} is {shown(value)}: write {wanted}")
            return {}
    for other in section.keys() - {"defaults", "datasets"}:
        translator.idle[f"{other} of --eval-config"] = "has no effect: only the data sets of the file are evaluated"
    found: dict[str, Mapping[str, Any]] = {}
    datasets = _named(listed)
    if len(datasets) < len(listed):
        translator.problems.append(f"--eval-config {path}: each data set needs a section with name and path")
    for dataset in datasets:
        fields = {**defaults, **dataset}
        name = str(fields.pop("name", len(found)))
        unknown = [key for key in fields if key not in _DATASET_FIELDS]
        if unknown:
            known = ", ".join(_DATASET_FIELDS)
            translator.problems.append(f"--eval-config {path}: {name} has {', '.join(unknown)}: use only {known}")
        found[name] = {_DATASET_FIELDS[key]: value for key, value in fields.items() if key in _DATASET_FIELDS}
    if not found:
        translator.problems.append(f"--eval-config {path} names no data sets: write them below eval.datasets")
    return found


def _custom_config(path: Path, translator: Translator) -> None:
    """slime sets an attribute of `args` for each key of the file, whatever flags say. Keys that are settings or flags
    set these, too."""
    from miles_async.config import guest_flags
    from miles_async.config.fields import SETTINGS

    key = f"--custom-config-path {path}"
    file = Translator(translator.project, {})
    for name, value in _read(path, key, translator).items():
        source = f"{key}: {name}"
        if name in SETTINGS:
            file.set(SETTINGS[name].dotted, value, source)
            continue
        file.set(f"rollout.custom_args.{name}", value, source)
        if (found := guest_flags.find_flag(name)) is None:
            continue
        if value is False:
            translator.turned_off[guest_flags.shown(name)] = source
        elif isinstance(found[1].rule, Combined):
            file.problems.append(f"{source} has no effect in this file: pass {guest_flags.shown(name)} instead")
        else:
            file.follow(found[1].rule, source, value)
    translator.problems += file.problems
    translator.idle |= file.idle
    translator.over_flags |= file.translation


def _read(path: Path, key: str, translator: Translator) -> Mapping[str, Any]:
    """The content of a YAML file; empty after a problem."""
    with collected(translator.problems):
        return read_keys(key, lambda: _text_of(path))
    return {}


def _text_of(path: Path) -> str:
    """The text of a file, or of `base64:TEXT`, as Miles' launchers pass it."""
    inline = str(path)
    if inline.startswith("base64:"):
        return b64decode(inline.removeprefix("base64:"), validate=True).decode()
    return path.read_text()


def _named(listed: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(listed, Mapping):
        return [{"name": name, **fields} for name, fields in listed.items() if isinstance(fields, Mapping)]
    return [one for one in listed if isinstance(one, Mapping)]


def _weights(values: Mapping[str, Any], translator: Translator) -> None:
    """How weights reach the engines."""
    mode, carrier = values.get("update_weight_mode"), values.get("update_weight_transport")
    if "update_weight_disk_dir" in values:
        translator.idle["--update-weight-disk-dir"] = "has no effect: weights are written into the folder of the run"
    if mode is None and carrier is None:
        return
    transports = {("full", "nccl"): "broadcast", ("full", "disk"): "disk", ("delta", "disk"): "disk_delta"}
    chosen = transports.get((mode or "full", carrier or "nccl"))
    if chosen is None:
        translator.problems.append(
            f"--update-weight-mode {mode} with --update-weight-transport {carrier or 'nccl'} does not exist: set "
            "weight_transfer"
        )
        return
    names = {"--update-weight-mode": mode, "--update-weight-transport": carrier}
    key = " ".join(name for name, value in names.items() if value is not None)
    translator.set("weights.weight_transfer", chosen, key)

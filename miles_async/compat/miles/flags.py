"""The rule of each flag that Miles adds to slime's and Megatron-LM's, if it is no flag of this project."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.config.translation import Flag, Idle, Refused, Rule, converts, sets

_FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
_EXPERTS_LORA = Refused("every expert has its own adapters: remove it")
_FSDP = Refused("the learner runs Megatron-core, not FSDP: remove it")
_DISTILLATION = Refused("on-policy distillation is not supported: remove it")
_SESSIONS = Idle("has no effect: the endpoint for agents keeps the tokens of each session")
_EVALUATION = Idle("has no effect: the engines evaluate beside training samples, which have priority")
_MODEL = Idle("describes a part of the model, which hf_checkpoint defines")
_TEST = Idle("belongs to Miles' own tests")
_REPLAY = Refused("indexer replay is not supported: remove it")

_SWITCHES: Mapping[str, Rule] = {
    "fully_async": converts("rollout.rollout_function_path", {True: _FULLY_ASYNC}),
    "use_prometheus": Idle("has no effect: metrics are always exported"),
    "use_session_server": _SESSIONS,
    "gradient_checkpointing": _FSDP,
    "experts_shared_outer_loras": _EXPERTS_LORA,
    "lora_base_cpu_backup": Idle("has no effect: engines keep the weights of the base model"),
    "fsdp_cpu_offload": _FSDP,
    "use_miles_dashboard": Idle("has no effect: each run has a live page"),
    "true_on_policy_mode": Refused("engines and learner use kernels of their own: remove it"),
    "recompute_logprobs_via_prefill": Refused("log-probabilities come from decoding: remove it"),
    "eval_drop_on_overflow": _EVALUATION,
    "use_indexer_replay": _REPLAY,
    "use_rollout_indexer_replay": _REPLAY,
    "use_miles_router": Idle("has no effect: the run starts sglang-router"),
}
_VALUES: Mapping[str, Rule] = {
    # A group that is too old or failed has no further attempt with drop. Our default is that of retry.
    "async_unused_samples_handler": converts("rollout.max_attempts", {"drop": 1, "retry": 3}),
    "async_max_concurrent_samples": Refused("set over_sampling_batch_size to this number / n_samples_per_prompt"),
    "custom_async_data_buffer_path": Refused("groups wait in the queue of the run: set queue_capacity"),
    "chat_template_path": Refused("set apply_chat_template_kwargs to {chat_template: TEXT} with the text of the file"),
    "rollout_submission_granularity": Idle("has no effect: over_sampling_batch_size limits the groups in flight"),
    "update_weight_transfer_mode": converts(
        "weights.weight_transfer", {"broadcast": "broadcast", "p2p": "p2p", "disk-delta": "disk_delta"}
    ),
    **dict.fromkeys(
        ("eval_hf_dir", "eval_num_gpus", "eval_num_gpus_per_engine", "eval_keep_snapshots", "eval_max_in_flight"),
        _EVALUATION,
    ),
    "session_server_ip": Idle("has no effect: the endpoint for agents listens on 127.0.0.1"),
    "session_server_port": sets("rollout.agent_port"),
    "session_message_matcher": _SESSIONS,
    "tito_model": _SESSIONS,
    "generate_tool_call_parser": sets("rollout.tool_call_parser"),
    "custom_megatron_post_save_hook_path": Refused("this project has no such hook: remove it"),
    "prometheus_port": sets("observability.metrics_port"),
    "prometheus_run_name": Idle("has no effect: the metrics carry the name of the run"),
    "qkv_format": Idle("has no effect: sequences are packed, without padding"),
    "linear_attention_backend": Idle("has no effect: Megatron-Bridge chooses the kernel of linear attention"),
    "attn_implementation": _FSDP,
    "train_memory_margin_bytes": Idle("has no effect: the memory plan leaves 5 % of each GPU free"),
    "original_max_position_embeddings": _MODEL,
    "beta_fast": _MODEL,
    "beta_slow": _MODEL,
    "lora_adapter_path": sets("learner.lora_load"),
    "opd_log_prob_top_k": _DISTILLATION,
    "opd_top_k_strategy": _DISTILLATION,
    "opd_reward_weight_mode": _DISTILLATION,
    "ci_metric_checker_key": _TEST,
    "ci_metric_checker_threshold": _TEST,
}
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(rule, "nothing") for name, rule in _SWITCHES.items()},
    **{name: Flag(rule) for name, rule in _VALUES.items()},
    "target_modules": Flag(sets("learner.lora_target_modules"), "values"),
    "exclude_modules": Flag(sets("learner.lora_exclude_modules"), "values"),
}
"""All flags by name."""

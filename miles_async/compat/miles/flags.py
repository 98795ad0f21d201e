"""The rule of each flag that Miles adds to slime's and Megatron-LM's, if it is not a flag of this project."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.compat.miles.defaults import FULLY_ASYNC
from miles_async.config.translation import Flag, Idle, Only, Refused, Rule, converts, sets

_FSDP = Refused("the learner runs Megatron-core, not FSDP: remove it")
_DISTILLATION = Refused("on-policy distillation is not supported: remove it")
_SESSIONS = Idle("has no effect: the endpoint for agents keeps the tokens of each session")
_EVALUATION = Idle("has no effect: the engines evaluate beside training samples, which have priority")
_MODEL = Idle("describes a part of the model, which hf_checkpoint defines")
_TEST = Idle("belongs to Miles' own tests")
_REPLAY = Refused("indexer replay is not supported: remove it")
_ROUTER = Idle("has no effect: the run starts sglang-router")
_ENGINES = Refused("the run starts its own engines: remove it")
_DASHBOARD = Idle("has no effect: each run has a live page")
_TRANSPORT = "samples travel through Ray's object store"
_ONE_STEP = converts("learner.num_steps_per_rollout", {True: 1})
_EQUAL_STEPS = Idle("has no effect: optimizer steps have equal sizes, so no sample is left over")
_RESTARTS = Idle("has no effect: engines that fail are always restarted, and a learner with save and save_interval")
_OFFLOADED = Idle("has no effect: what leaves a GPU waits in main memory, not in files")
_MEMORY = Idle("has no effect: it saves memory of Miles' learner, and changes no result")
_VERIFIED = Idle("has no effect: engines' weights are always compared with the learner's")
_PRECISION = Idle("has no effect: weights are not quantised")
_EXPERTS_KERNEL = Idle("has no effect: SGLang computes adapters of experts in this way by default")
_ATTENTION_KERNEL = Idle("has no effect: Megatron-Bridge chooses the kernel of sparse attention")
_CRITIC_DEVICES = Idle("has no effect: the critic is trained on the GPUs of the policy")
_ONE_ADAPTER = Idle("has no effect without multi_lora_n_adapters")
_MLFLOW = Idle("has no effect without use_mlflow")
_EVENTS = Refused("trace a run and read its events instead: remove it")
_CHECKS = Idle("belongs to Miles' tests of its learner")
_DUMPER = Refused("tensors of engines and learner are not dumped: remove it")
_PATCHES = Refused("code of engines and learner is not patched: remove it")
_INJECTED = Idle("has no effect without ci_inject_rollout_data_path")

_SWITCHES: Mapping[str, Rule] = {
    "fully_async": converts("rollout.rollout_function_path", {True: FULLY_ASYNC}),
    "use_prometheus": Idle("has no effect: metrics are always exported"),
    "gradient_checkpointing": _FSDP,
    "lora_base_cpu_backup": Idle("has no effect: engines keep the weights of the base model"),
    "fsdp_cpu_offload": _FSDP,
    "use_miles_dashboard": _DASHBOARD,
    "dashboard_forward_prometheus": _DASHBOARD,
    "true_on_policy_mode": Refused("engines and learner use kernels of their own: remove it"),
    "recompute_logprobs_via_prefill": Refused("log-probabilities come from decoding: remove it"),
    "eval_drop_on_overflow": _EVALUATION,
    "use_indexer_replay": _REPLAY,
    "use_rollout_indexer_replay": _REPLAY,
    "use_miles_router": _ROUTER,
    # Engines and router.
    "rollout_external": _ENGINES,
    "no_sglang_lora_use_virtual_experts": _EXPERTS_KERNEL,
    "pin_rollout_manager_to_head": Idle(
        "has no effect: for agents on other machines, set sglang_router_ip to a router that they reach"
    ),
    # Batches and steps.
    "use_dynamic_global_batch_size": _ONE_STEP,
    "skip_actor_forward_only": _ONE_STEP,
    "allow_partial_train_step": _EQUAL_STEPS,
    "disable_rollout_trim_samples": _EQUAL_STEPS,
    "delay_split_train_data_by_dp": Idle(f"has no effect: {_TRANSPORT}"),
    "observe_training_entropy": Idle("has no effect: the entropy is always measured"),
    # Memory.
    "stream_optimizer_state_to_disk": Idle(
        "has no effect: optimizer_cpu_offload moves the state of the optimizer to main memory"
    ),
    "rematerialize_param_from_master_weight": _MEMORY,
    "low_memory_resume": _MEMORY,
    # Failures.
    "indep_dp": _RESTARTS,
    "mini_ft_controller_enable": _RESTARTS,
    # Adapters.
    "lora_sync_from_tensor": Idle("has no effect in Miles either"),
    "lora_train_only": Refused("engines generate with the adapter that is trained: remove it"),
    "multi_lora_disable_service_mode": _ONE_ADAPTER,
    "opd_topk_per_position": _DISTILLATION,
    # Logs, checks and tests.
    "use_mlflow": Refused("set use_tensorboard or use_wandb"),
    "check_weight_update_allow_quant_error": _PRECISION,
    "check_lora_weight_equal": Idle("has no effect: engines always compare the checksum of an adapter"),
    "save_local_weight_checksum": _CHECKS,
    "enable_event_analyzer": _CHECKS,
    "enable_witness": _CHECKS,
    "check_rematerialize_param_from_master_weight": _CHECKS,
    "debug_skip_weight_update": Refused("engines get the trained weights: set update_weights_interval"),
    "debug_disable_optimizer": Refused("set lr to 0, so that the optimizer changes no weight"),
    "debug_deterministic_collective": Refused("set deterministic_mode"),
    "dumper_enable": _DUMPER,
    **dict.fromkeys(
        (
            *("ci_disable_logprobs_checker", "ci_disable_weight_update_checker"),
            *("ci_save_model_hash", "ci_check_model_hash"),
        ),
        _TEST,
    ),
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
    # Engines and router.
    "prefill_num_servers": Refused("each engine computes both prefill and decoding: remove it"),
    **dict.fromkeys(
        ("miles_router_timeout", "miles_router_max_connections", "miles_router_health_check_failure_threshold"),
        _ROUTER,
    ),
    "sglang_remote_instance_weight_loader_ib_device": Idle(
        "has no effect: Mooncake chooses the network devices of p2p"
    ),
    "p2p_transfer_num_workers": Idle("has no effect: p2p writes to all engines at once"),
    "p2p_transfer_timeout": Idle("has no effect: update_weight_timeout_seconds limits the write of all weights"),
    "dsa_attention_backend": _ATTENTION_KERNEL,
    "miles_dsa_topk_backend": _ATTENTION_KERNEL,
    # Sessions of agents.
    "session_sample_picker_path": Refused(
        "all segments of a session are trained: set custom_generate_function_path to a function that returns some"
    ),
    "session_sample_postprocessor_path": Refused(
        "set custom_generate_function_path to a function that sets the loss masks and rewards of the segments"
    ),
    # Transport of samples.
    "object_store_backend": Only(("ray",), f"{_TRANSPORT}; set it to ray"),
    "mooncake_store_init_kwargs": Idle(f"has no effect: {_TRANSPORT}"),
    "mooncake_replica_num": Idle(f"has no effect: {_TRANSPORT}"),
    # The critic.
    "critic_num_nodes": _CRITIC_DEVICES,
    "critic_num_gpus_per_node": _CRITIC_DEVICES,
    "critic_lr_warmup_iters": sets("algorithm.critic_lr_warmup_steps"),
    "critic_save": Idle("has no effect: checkpoints of the critic are in those of the run"),
    # Memory.
    "offload_train_target": _OFFLOADED,
    "offload_train_disk_dir": _OFFLOADED,
    "offload_train_disk_chunk_mb": _OFFLOADED,
    "stream_optimizer_state_moment_dtype": Only(("fp32",), "set exp_avg_dtype and exp_avg_sq_dtype"),
    # Failures.
    "control_server_port": _RESTARTS,
    "mini_ft_controller_poll_interval": _RESTARTS,
    "mini_ft_controller_resume_delay": _RESTARTS,
    # Length of the run, checkpoints and evaluations.
    "debug_exit_after_rollout": Refused("set num_rollout, and lr_decay_steps to keep the course of the learning rate"),
    "save_trigger_sentinel": Refused("checkpoints are written at intervals: set save_interval"),
    "eval_overflow_policy": Only(
        ("skip",), "an evaluation that has not started when the next one is due is skipped; set it to skip"
    ),
    # Adapters.
    "multi_lora_n_adapters": Only((0,), "set adapters, which names the adapters of a run, and remove the flag"),
    **dict.fromkeys(
        (
            *("multi_lora_idle_poll_s", "multi_lora_http_server_path", "multi_lora_backend_path"),
            *("multi_lora_api_port", "multi_lora_max_adapter_global_batch_size"),
            *("multi_lora_max_coalesce_wait_s", "multi_lora_max_empty_wait_s"),
        ),
        _ONE_ADAPTER,
    ),
    "opd_teacher_key": _DISTILLATION,
    # Logs, checks and tests.
    **dict.fromkeys(
        ("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "mlflow_run_id"),
        _MLFLOW,
    ),
    **dict.fromkeys(
        (
            *("dashboard_flush_interval", "dashboard_gpu_sample_interval", "dashboard_sglang_scrape_interval"),
            *("dashboard_sglang_scrape_mode", "dashboard_sglang_metrics"),
        ),
        _DASHBOARD,
    ),
    "mfu_peak_tflops": Refused("mfu is relative to the known peak of each GPU: remove it"),
    "save_debug_trajectory_data": Refused("set save_debug_rollout_data"),
    "save_debug_event_data": _EVENTS,
    "check_weight_update_selector": _VERIFIED,
    "witness_buffer_size": _CHECKS,
    "env_report": Idle("belongs to Miles' launchers"),
    "dumper_dir": Idle("has no effect without dumper_enable"),
    "dumper_source_patcher_config_inference": _PATCHES,
    "dumper_source_patcher_config_train": _PATCHES,
    "ci_ft_test_actions": Refused("set inject_faults"),
    "ci_inject_rollout_data_path": Refused("set load_debug_rollout_data"),
    "ci_inject_rollout_data_start_rollout_id": _INJECTED,
    "ci_inject_rollout_data_min_match_ratio": _INJECTED,
}
_LISTS: Mapping[str, Rule] = {
    "target_modules": sets("learner.lora_target_modules"),
    "exclude_modules": sets("learner.lora_exclude_modules"),
    "offload_rollout_level": Idle(
        "has no effect: colocate lets learner and engines release their devices in turns, and nothing else does"
    ),
    "extra_high_precision_layers_hf": _PRECISION,
    "extra_high_precision_layers_megatron": _PRECISION,
    "ft_components": _RESTARTS,
    "opd_teacher_urls": _DISTILLATION,
    "multi_lora_adapter": Refused("set adapters, and the data sets of each adapter"),
    "check_weight_update_skip_list": _VERIFIED,
    "dumper_inference": _DUMPER,
    "dumper_fwd_only": _DUMPER,
    "dumper_fwd_bwd": _DUMPER,
}
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(rule, "nothing") for name, rule in _SWITCHES.items()},
    **{name: Flag(rule) for name, rule in _VALUES.items()},
    "use_session_server": Flag(Idle(_SESSIONS.why, (True, "v1", "v2")), "option"),
    **{name: Flag(rule, "values") for name, rule in _LISTS.items()},
}
"""All flags by name."""

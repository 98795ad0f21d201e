"""The rule of each key of ROLL's configuration files."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.config.translation import Combined, Idle, Only, Refused, Rule, Table, converts, sets

_PRECISIONS = {"bf16": "bf16", "fp32": "fp32"}
# Engines in fp16 would not hold all numbers of a learner in bf16.
_ENGINE_PRECISIONS = {"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"}
_DECAYS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
_AGGREGATIONS = {
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "token-mean": "token_mean",
    "seq-mean-token-sum-norm": "constant",
}
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_DYNAMIC_BATCHING = ("use_dynamic_batching", "max_tokens_per_microbatch", "sequence_length_round")
_MEGATRON_FIELDS = (
    *("moe_shared_expert_overlap", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("cross_entropy_loss_fusion", "pipeline_model_parallel_layout"),
)
"""Fields of Megatron-core's configuration, which have the same names in ROLL."""

_ATTENTION = Idle("has no effect: Transformer Engine chooses the kernel of attention; attention_backend sets it")
_MODEL_TYPE = Only((None, "trl"), "config.json of hf_checkpoint defines the type of the model")
_NO_GRADIENTS = Only((True, None), "engines and reference compute no gradients, set it to true")
_FSDP = Idle("belongs to FSDP")
_ULYSSES = Only((1, None), "set context_parallel_size in strategy_args.strategy_config")
_OF_ENVIRONMENTS = Idle("has no effect beside custom_envs, whose entries may refer to it")
_OF_REFERENCE = Idle("has no effect: the learner runs the reference in its own processes, batches and layout")
_UNREAD = Idle("has no effect in ROLL either, which does not read it")
_ALWAYS_PACKED = Idle("has no effect: samples are packed end to end, and micro-batches are balanced")
_OFF = Only((False, None), "samples have equal weights, set it to false")
_TOPR_WEIGHTS = ("topr_positive_weight", "topr_negative_weight")
_BOUNDS = dict.fromkeys(
    (
        *("tis_lower_bound", "tis_upper_bound", "cispo_epsilon_low", "cispo_epsilon_high", "cispo_use_unified_mask"),
        "kimi15_tau",
    ),
    Idle("has no effect in ROLL either, whose WorkerConfig has no such field: set eps_clip, eps_clip_high, kimi15_tau"),
)
"""Parameters of losses that ROLL's pages name, and its code does not read."""
_DISTILLATION = Refused("on-policy distillation is not supported: remove it")


def _below(prefix: str, rules: Mapping[str, Rule]) -> Table:
    return {f"{prefix}.{key}": rule for key, rule in rules.items()}


_LORA: Table = {
    **dict.fromkeys(("lora_target", "lora_rank", "lora_alpha", "lora_dropout"), Combined()),
    "additional_target": Only((None,), "adapters are trained, and nothing beside them: remove it"),
    "autocast_adapter_dtype": Only((True,), "adapters are float32, set it to true"),
}
_TOP: Table = {
    # The run.
    "exp_name": sets("observability.experiment_name"),
    "output_dir": sets("observability.run_dir"),
    "base_dir": _UNREAD,
    "logging_dir": Idle("has no effect: logs are in the folder of the run, below run_dir"),
    "logging_steps": Only((1,), "every step is logged, set it to 1"),
    "track_with": Combined(),
    "tracker_kwargs": Combined(),
    "hydra": Idle("belongs to Hydra, which this project does not run"),
    "seed": sets("learner.seed", "data.rollout_seed"),
    "system_envs": Combined(),
    "num_nodes": Idle("has no effect: the numbers of devices follow from device_mapping"),
    "num_gpus_per_node": Combined(),
    "rpc_timeout": Idle("has no effect: processes that hang are found by their heartbeats"),
    "model_name": Idle("names a model that ROLL uploads; save_hf writes exports"),
    "model_download_type": Combined(),
    "rollout_dump_dir": sets("debug.dump_details"),
    "rollout_mock": Combined(),
    "profiler_timeline": sets("debug.use_pytorch_profiler"),
    "profiler_memory": Only((False,), "set use_pytorch_profiler"),
    "profiler_output_dir": sets("debug.profile_dir"),
    "checkpoint_config.type": Only(("file_system",), "checkpoints are written to a folder, set save"),
    "checkpoint_config.output_dir": sets("learner.save"),
    "checkpoint_config.async_upload": sets("learner.async_save"),
    "resume_from_checkpoint": Only((False, None), "set load to the folder of the earlier run's checkpoints"),
    "max_steps": Combined(),
    "save_steps": sets("learner.save_interval"),
    "max_ckpt_to_keep": Combined(),
    "eval_steps": Combined(),
    "offload_nccl": Idle("has no effect: colocate lets learner and engines release their devices in turns"),
    # Models.
    "pretrain": sets("model.hf_checkpoint"),
    "reward_pretrain": Combined(),
    "reward_model": Idle("starts no server: serve its model, and set rm_url for rm_type llm_judge"),
    "reward": Refused("set rm_url, or custom_rm_path to a function that asks a server with the reward model"),
    # Data, sizes and schedule.
    "rewards": Combined(),
    "validation": Combined(),
    "val_batch_size": Combined(),
    "rollout_batch_size": Combined(),
    "num_return_sequences_in_group": Combined(),
    "is_num_return_sequences_expand": Idle("has no effect: it changes requests to the engines, and no samples"),
    "prompt_length": sets("rollout.rollout_max_prompt_len"),
    "response_length": Combined(),
    "sequence_length": Combined(),
    "global_template": Combined(),
    "async_generation_ratio": Combined(),
    # Rewards and advantages.
    **dict.fromkeys(
        (
            *("adv_estimator", "norm_mean_type", "norm_std_type", "reward_clip", "whiten_advantages"),
            *("advantage_clip", "max_len_mask", "difficulty_mask", "difficulty_low_threshold"),
            *("difficulty_high_threshold", "gamma", "lambd", "value_clip", "dual_clip_loss", "pg_clip"),
            *("use_pg_clip_range", "pg_clip_low", "pg_clip_high", "use_kl_loss", "kl_loss_coef", "init_kl_coef"),
            *("add_token_level_kl", "kl_penalty"),
        ),
        Combined(),
    ),
    "critic_warmup": sets("algorithm.num_critic_only_steps"),
    "whiten_rewards": Only((False,), "set whiten_advantages"),
    "reward_norm": _UNREAD,
    "reward_shift": _UNREAD,
    "reward_scale": _UNREAD,
    "target_kl": Only((None,), "the coefficient of a KL penalty stays as it is, remove it"),
    "kl_horizon": Idle("has no effect without target_kl"),
    # The loss.
    "ppo_epochs": sets("learner.passes_per_rollout"),
    "loss_agg_mode": converts("algorithm.loss_aggregation", _AGGREGATIONS),
    "importance_sampling": Combined(),
    "pg_variant": _UNREAD,
    "positive_loss_coef": _UNREAD,
    "use_topr_neg_loss_coef": _UNREAD,
    **dict.fromkeys(_TOPR_WEIGHTS, _UNREAD),
    "rl_loss_coef": Combined(),
    **_BOUNDS,
    "entropy_loss_coef": sets("algorithm.entropy_coef"),
    "max_grad_norm": sets("learner.clip_grad"),
    "difficulty_loss_weight": _OFF,
    "length_loss_weight": _OFF,
    "error_max_len_clip": Only((False, None), "set rollout_sample_filter_path to a function that masks these samples"),
    "enable_old_logprobs_recompute": Idle("has no effect: log-probabilities are computed again before training"),
    "enable_reference": Idle("has no effect: use_kl_loss and add_token_level_kl keep a reference"),
    "train_infer_correction": Combined(),
    "is_pure_opd": Only((False,), "on-policy distillation is not supported: set it to false"),
    "use_opd": Only((False,), "on-policy distillation is not supported: set it to false"),
    "teacher": _DISTILLATION,
    "student_train": _DISTILLATION,
    "student_infer": _DISTILLATION,
    # Agents.
    "custom_envs": Combined(),
    "train_env_manager": Combined(),
    "val_env_manager": Combined(),
    "reward_normalization": Combined(),
    "batch_adjust_mode": Idle("has no effect: batches of any number of samples are divided among the ranks"),
    "ratio_type": Only(("token",), "set policy_objective to gspo for the ratio of a sequence"),
    "episode_reward_weight": Combined(),
    "step_reward_weight": Combined(),
    "step_reward_gamma": Combined(),
    **dict.fromkeys(
        ("render_save_dir", "env_monitor", "partial_gpu_mode", "skip_mock_system_prompt"),
        Idle("belongs to ROLL's processes of environments"),
    ),
    **dict.fromkeys(
        (
            *("env_manager_cls", "agent_runner_cls", "agent_config_common", "max_tokens_per_step"),
            *("max_actions_per_traj", "default_history_length", "parse_tool_call_parameter_to_dict"),
            *("all_response_pattern", "action_pattern", "think_action_pattern"),
            *("sokoban_format_penalty", "frozen_format_penalty", "custom_env"),
            *("gem_math", "gem_qa", "gem_games", "gem_rg", "gem_code"),
            *(
                f"{kind}agent_{template}"
                for kind in ("", "single_prompt_", "math_", "qa_", "game_", "rg_", "code_")
                for template in ("system_template", "template")
            ),
        ),
        _OF_ENVIRONMENTS,
    ),
}

_FSDP_KEYS = (
    *("fsdp_size", "efsdp_size", "ep_size", "offload_policy", "param_dtype", "reduce_dtype", "reshard_after_forward"),
    *("wrap_policy", "apply_expert_patch", "apply_tiled_mlp", "tiled_num_shards", "use_batched_model_update"),
    "moe_use_grouped_mm",
)
_MEGATRON: Table = {
    **{size: sets(f"learner.{size}") for size in PARALLEL_SIZES},
    **{
        name: sets(f"learner.{name}")
        for name in (
            *("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
            "moe_token_dispatcher_type",
        )
    },
    **{name: sets(f"learner.megatron_args.{name}") for name in _MEGATRON_FIELDS},
    "additional_configs.moe_permute_fusion": sets("learner.moe_permute_fusion"),
    "apply_rope_fusion": sets("learner.rope_fusion"),
    "bias_activation_fusion": sets("learner.bias_swiglu_fusion"),
    "bf16": converts("learner.precision", {True: "bf16", False: "fp32"}),
    "max_grad_norm": Idle("has no effect in ROLL either: max_grad_norm of the pipeline takes its place"),
    "moe_grouped_gemm": Idle("has no effect: Transformer Engine's layers always compute all experts in one product"),
    "moe_aux_loss_coeff": Only((0, 0.0), "no loss that balances the experts is added; set it to 0"),
    "distrib_optim_fully_reshardable": Idle("has no effect: checkpoints can always be resumed under another layout"),
    "recompute_granularity": Combined(),
    "recompute_modules": Combined(),
    "moe_layer_recompute": Combined(),
    **dict.fromkeys(_FSDP_KEYS, _FSDP),
}

_ACTOR_TRAIN: Table = {
    "system_envs": Combined(),
    **dict.fromkeys(("worker_cls", "pg_variant"), Combined()),
    **_BOUNDS,
    **dict.fromkeys(_TOPR_WEIGHTS, Combined()),
    "model_args.attn_implementation": _ATTENTION,
    "model_args.flash_attn": _ATTENTION,
    "model_args.disable_gradient_checkpointing": Combined(),
    "model_args.dtype": converts("learner.precision", _PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "model_args.freeze_module_prefix": Only(
        ("vision_model", None), "the learner trains the language model, and all of it: set it to vision_model"
    ),
    **_below("model_args", _LORA),
    "model_args.ulysses_size": _ULYSSES,
    "training_args.learning_rate": sets("learner.lr"),
    "training_args.weight_decay": sets("learner.weight_decay"),
    "training_args.adam_beta1": sets("learner.adam_beta1"),
    "training_args.adam_beta2": sets("learner.adam_beta2"),
    "training_args.per_device_train_batch_size": Combined(),
    "training_args.gradient_accumulation_steps": Combined(),
    "training_args.warmup_steps": sets("learner.lr_warmup_steps"),
    "training_args.warmup_ratio": Combined(),
    "training_args.lr_scheduler_type": converts("learner.lr_decay_style", _DECAYS),
    "training_args.num_train_epochs": Idle("has no effect in ROLL either: max_steps ends the run"),
    "data_args.template": Combined(),
    "data_args.file_name": Combined(),
    "data_args.messages": sets("data.input_key"),
    "data_args.dataset_dir": _UNREAD,
    "data_args.domain_interleave_probs": Combined(),
    "data_args.interleave_probs": _UNREAD,
    "data_args.preprocessing_num_workers": Idle("has no effect: rows are read when they are needed"),
    "strategy_args.strategy_name": Only(
        ("megatron_train",),
        "the learner runs Megatron-core: set it to megatron_train, and strategy_config to its sizes",
    ),
    **_below("strategy_args.strategy_config", _MEGATRON),
    "device_mapping": Combined(),
    "infer_batch_size": Idle("has no effect: passes without gradients use the micro-batches of training"),
    **{
        f"{name}_in_{phase}": sets(f"learner.{name}_in_{phase}")
        for name in _DYNAMIC_BATCHING
        for phase in ("train", "infer")
    },
    "use_remove_padding": _ALWAYS_PACKED,
    "use_sequence_packing": _ALWAYS_PACKED,
    "sequence_packing_args.algorithm": _ALWAYS_PACKED,
    "sequence_packing_args.min_num_micro_batches_train": _ALWAYS_PACKED,
    "sequence_packing_args.min_num_micro_batches_forward": _ALWAYS_PACKED,
    "sequence_packing_args.max_packed_sequence_length_train": Combined(),
    "sequence_packing_args.max_packed_sequence_length_forward": Idle(
        "has no effect: passes without gradients use the micro-batches of training"
    ),
    "offload_nccl": Idle("has no effect: colocate lets learner and engines release their devices in turns"),
}

_ACTOR_INFER: Table = {
    "system_envs": Combined(),
    "model_args.attn_implementation": _ATTENTION,
    "model_args.flash_attn": _ATTENTION,
    "model_args.disable_gradient_checkpointing": _NO_GRADIENTS,
    "model_args.dtype": converts("engine.sglang_server_args.dtype", _ENGINE_PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    **_below("model_args", _LORA),
    "generating_args.max_new_tokens": Combined(),
    "generating_args.top_p": sets("rollout.rollout_top_p"),
    "generating_args.top_k": sets("rollout.rollout_top_k"),
    "generating_args.temperature": sets("rollout.rollout_temperature"),
    "generating_args.stop_strings": sets("rollout.rollout_stop"),
    "generating_args.repetition_penalty": Only(
        (1, None), "engines sample from the probabilities of the model, set it to 1"
    ),
    "generating_args.include_stop_str_in_output": Only(
        (True,), "responses keep the string that ends them, set it to true"
    ),
    "generating_args.num_beams": Only((1,), "engines sample, set it to 1"),
    "generating_args.num_return_sequences": Combined(),
    "data_args.template": Combined(),
    "strategy_args.strategy_name": Only(("vllm", "sglang"), "the engines run SGLang, set it to sglang or vllm"),
    "strategy_args.strategy_config": Combined(),
    "device_mapping": Combined(),
    "num_gpus_per_worker": Combined(),
    "infer_batch_size": Idle("has no effect: the engines batch requests themselves; see sglang_server_concurrency"),
}
LOAD_FORMAT = Idle("has no effect: engines read the checkpoint, and then get the learner's weights")
_GRAPH_SIZES = sets("engine.sglang_server_args.cuda_graph_bs")
VLLM: Table = {
    "gpu_memory_utilization": sets("engine.sglang_server_args.mem_fraction_static"),
    "block_size": sets("engine.sglang_server_args.page_size"),
    "load_format": LOAD_FORMAT,
    "max_model_len": sets("engine.sglang_server_args.context_length"),
    "enforce_eager": sets("engine.sglang_server_args.disable_cuda_graph"),
    "enable_prefix_caching": converts("engine.sglang_server_args.disable_radix_cache", {True: False, False: True}),
    "tensor_parallel_size": sets("engine.rollout_num_gpus_per_engine"),
    "pipeline_parallel_size": sets("engine.sglang_server_args.pp_size"),
    "cuda_graph_sizes": _GRAPH_SIZES,
    "cudagraph_capture_sizes": _GRAPH_SIZES,
    "sleep_level": Idle("belongs to vLLM: colocate lets engines release their devices"),
    "optimization_level": Idle("belongs to vLLM's compiler"),
    "distributed_executor_backend": Idle("belongs to vLLM's processes"),
    "disable_log_stats": Idle("belongs to vLLM's logs"),
}
"""vLLM's arguments under the names of SGLang, which runs the engines here."""

_REFERENCE: Table = {
    "system_envs": Combined(),
    "model_args.attn_implementation": _ATTENTION,
    "model_args.flash_attn": _ATTENTION,
    "model_args.disable_gradient_checkpointing": _NO_GRADIENTS,
    "model_args.dtype": converts("learner.precision", _PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "model_args.freeze_module_prefix": _OF_REFERENCE,
    "model_args.ulysses_size": _OF_REFERENCE,
    **_below("model_args", dict.fromkeys(_LORA, _OF_REFERENCE)),
    "data_args": _OF_REFERENCE,
    "strategy_args": _OF_REFERENCE,
    "device_mapping": _OF_REFERENCE,
    "infer_batch_size": _OF_REFERENCE,
    **{f"{name}_in_infer": sets(f"learner.ref_{name}_in_infer") for name in _DYNAMIC_BATCHING},
    "use_remove_padding": _OF_REFERENCE,
    "use_sequence_packing": _OF_REFERENCE,
    "sequence_packing_args": _OF_REFERENCE,
    "offload_nccl": _OF_REFERENCE,
}

_OF_CRITIC = Idle("has no effect: the critic is trained with the batches, layout and devices of the learner")
_CRITIC: Table = {
    "model_args.attn_implementation": _ATTENTION,
    "model_args.flash_attn": _ATTENTION,
    "model_args.disable_gradient_checkpointing": _OF_CRITIC,
    "model_args.dtype": converts("learner.precision", _PRECISIONS),
    "model_args.model_type": _MODEL_TYPE,
    "model_args.lora_target": Only((None,), "a critic has no adapters, remove it"),
    "training_args.learning_rate": sets("algorithm.critic_lr"),
    "training_args.weight_decay": sets("learner.weight_decay"),
    "training_args.warmup_steps": sets("algorithm.critic_lr_warmup_steps"),
    "training_args.per_device_train_batch_size": _OF_CRITIC,
    "training_args.gradient_accumulation_steps": _OF_CRITIC,
    "training_args.num_train_epochs": _OF_CRITIC,
    "data_args": _OF_CRITIC,
    "strategy_args": _OF_CRITIC,
    "device_mapping": _OF_CRITIC,
    "infer_batch_size": _OF_CRITIC,
}

TABLE: Table = {
    **_TOP,
    **_below("actor_train", _ACTOR_TRAIN),
    **_below("actor_infer", _ACTOR_INFER),
    **_below("reference", _REFERENCE),
    **_below("critic", _CRITIC),
}

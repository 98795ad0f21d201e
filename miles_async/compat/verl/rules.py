"""The rule of each key of verl. `translation.py` names the functions that combine the keys with the rule `Combined`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_async.config.fields import SETTINGS
from miles_async.config.translation import Combined, Flag, Idle, Only, Refused, Rule, Table, converts, sets

SKIP_FIELDS = ("enable", "dump_dir", "steps", "action")
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
"""Sections of the penalty on long responses, the newest first."""

_FSDP = Refused("the learner runs Megatron-core: remove it, and set model_engine=megatron and keys of actor.megatron")
_MEGATRON = Only(("megatron",), "the learner runs Megatron-core: set it to megatron")
_LOW_PRECISION = Refused("learner and engines compute in bf16: remove it")
_MULTI_TURN = Idle("belongs to multi_turn.enable")
_MULTI_TURN_KEYS = (
    *("max_user_turns", "max_assistant_turns", "max_parallel_calls", "max_tool_response_length", "tool_config_path"),
    *("function_tool_path", "interaction_config_path", "tool_response_truncate_side", "format"),
    *("use_inference_chat_template", "tokenization_sanity_check_mode", "num_repeat_rollouts"),
)
_DRAFTS = Combined("sets SGLang's argument of this name if mtp.enable_rollout is true")
_LORA_RANK = Combined("sets lora_rank; 0 trains all weights")
_OF_LORA = {
    "alpha": Combined("sets lora_alpha"),
    "target_modules": Combined("sets lora_target_modules"),
    "exclude_modules": Combined("sets lora_exclude_modules"),
    "adapter_path": Combined("sets lora_load"),
}
_OTHER_LORA = Idle("belongs to lora.type vlm_lora")
_IMAGES = Refused("models are trained on text: remove it, and the images from the data")
_DROPOUT = Only((0, 0.0), "models are trained without dropout: set it to 0")
_NPU = Only(("cuda",), "the learner needs CUDA GPUs or CPUs: remove it")
_MEMORY = Idle("has no effect: the learner computes logits and entropies in chunks that fit the memory")
_PASSES = Idle("has no effect: all passes have the micro-batches of training, max_tokens_per_gpu")
_PACKED = Idle("has no effect: sequences are packed without padding")
_OFFLOAD = Idle("has no effect: learner and engines that share GPUs release them in turns, and nothing else does")
_RECOMPUTE = Idle("has no effect: set recompute_granularity to save memory of activations")
_EXPORT = Idle("has no effect: Megatron-Bridge or a plug-in converts the Hugging Face checkpoint")
_SAME_LAYOUT = Combined("must be the value of the actor, in whose layout the reference model runs", "compared")
_SAME_LENGTH = Combined("must be data.max_response_length, from which the penalty is counted", "compared")
_REWARD_FUNCTION = Refused("write a function fn(args, sample), which returns a number: set custom_rm_path")

_DATA: Table = {
    "train_files": Combined(
        "sets prompt_data, or datasets for several files, with input_key, label_key, metadata_key and rm_type "
        "data_source"
    ),
    "val_files": Combined("sets eval_datasets, unless test_freq and val_before_train turn evaluations off"),
    "prompt_key": sets("data.input_key"),
    "reward_fn_key": Only(("data_source",), "rows name their data set in data_source: set it to data_source"),
    "max_prompt_length": sets("rollout.rollout_max_prompt_len"),
    "max_response_length": sets("rollout.rollout_max_response_len"),
    "train_batch_size": Combined("sets rollout_batch_size, unless the run is fully asynchronous"),
    "gen_batch_size": Combined("sets over_sampling_batch_size, unless the run is fully asynchronous"),
    "val_batch_size": Idle("has no effect: the engines batch the prompts of an evaluation themselves"),
    "shuffle": sets("data.rollout_shuffle"),
    "seed": sets("data.rollout_seed"),
    "truncation": Idle("has no effect: prompts above rollout_max_prompt_len are skipped and counted, never cut"),
    "filter_overlong_prompts": Idle("has no effect: prompts above rollout_max_prompt_len are skipped and counted"),
    "filter_overlong_prompts_workers": Idle("has no effect: the length of a prompt is found when it is fed"),
    "return_raw_chat": Idle("has no effect: agents get messages, and engines get the rendered prompt"),
    "trust_remote_code": Idle("has no effect: code of a checkpoint is never run"),
    "image_key": _IMAGES,
    "video_key": _IMAGES,
    "image_patch_size": _IMAGES,
    "min_response_length": Refused("responses may end at any token: remove it"),
    "dataloader_num_workers": Idle("has no effect: rows are read when they are needed"),
}
_ACTOR: Table = {
    "strategy": _MEGATRON,
    "ppo_mini_batch_size": Combined(
        "sets global_batch_size to this number times rollout.n; in a fully asynchronous run also rollout_batch_size"
    ),
    "ppo_micro_batch_size": Refused("set ppo_micro_batch_size_per_gpu"),
    "ppo_micro_batch_size_per_gpu": Combined("sets micro_batch_size if use_dynamic_bsz is false"),
    "use_dynamic_bsz": Combined("sets use_dynamic_batch_size"),
    "ppo_max_token_len_per_gpu": Combined("sets max_tokens_per_gpu, unless use_dynamic_bsz is false"),
    "ppo_epochs": sets("learner.passes_per_rollout"),
    "shuffle": Idle("has no effect: a batch is divided into optimizer steps in the order in which groups finished"),
    "clip_ratio": Combined("has no effect: clip_ratio_low and clip_ratio_high count, 0.2 in verl unless they are set"),
    "clip_ratio_low": Combined("sets eps_clip"),
    "clip_ratio_high": Combined("sets eps_clip_high"),
    "clip_ratio_c": Combined("sets eps_clip_c with loss_mode vanilla"),
    "loss_agg_mode": Combined("sets loss_aggregation, unless loss_mode is gspo, geo_mean or sapo"),
    "loss_scale_factor": Combined(
        "must be data.max_response_length with loss_agg_mode seq-mean-token-sum-norm", "compared"
    ),
    "policy_loss.loss_mode": converts(
        "algorithm.policy_objective",
        {"vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "sapo": "sapo", "cispo": "cispo"},
    ),
    "use_kl_loss": sets("algorithm.use_kl_loss"),
    "kl_loss_coef": sets("algorithm.kl_loss_coef"),
    "kl_loss_type": Combined("sets kl_loss_type; with use_kl_in_reward only if use_kl_loss is true"),
    "entropy_coeff": sets("algorithm.entropy_coef"),
    "use_rollout_log_probs": sets("algorithm.use_rollout_logprobs"),
    "grad_clip": sets("learner.clip_grad"),
    "optim.lr": sets("learner.lr"),
    "optim.min_lr": sets("learner.min_lr"),
    "optim.weight_decay": sets("learner.weight_decay"),
    "optim.clip_grad": sets("learner.clip_grad"),
    "optim.betas": Combined("sets adam_beta1 and adam_beta2"),
    "optim.lr_warmup_steps": Combined("sets lr_warmup_steps to this number of batches; below 1 it has no effect"),
    "optim.lr_warmup_steps_ratio": sets("learner.lr_warmup_fraction"),
    "optim.lr_warmup_init": Only((0, 0.0), "the warm-up starts at 0: set it to 0"),
    "optim.lr_decay_steps": Combined(
        "sets lr_decay_steps to this number of batches, unless the learning rate is constant"
    ),
    "optim.lr_decay_style": converts(
        "learner.lr_decay_style",
        {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse_square_root": "inverse-square-root"},
    ),
    "optim.optimizer": Only(("adam", "AdamW"), "the learner uses AdamW: set it to adam"),
    "checkpoint.async_save": sets("learner.async_save"),
    "checkpoint.save_contents": Idle("has no effect: checkpoints are complete; set save_hf for exports"),
    "checkpoint.load_contents": Idle("has no effect: a run continues with all of its checkpoint"),
    "checkpoint.save_lora_only": Idle("has no effect: checkpoints of adapters hold no other weights"),
    "megatron.tensor_model_parallel_size": sets("learner.tensor_model_parallel_size"),
    "megatron.pipeline_model_parallel_size": sets("learner.pipeline_model_parallel_size"),
    "megatron.virtual_pipeline_model_parallel_size": sets("learner.virtual_pipeline_model_parallel_size"),
    "megatron.context_parallel_size": sets("learner.context_parallel_size"),
    "megatron.expert_model_parallel_size": sets("learner.expert_model_parallel_size"),
    "megatron.expert_tensor_parallel_size": sets("learner.expert_tensor_parallel_size"),
    "megatron.sequence_parallel": sets("learner.sequence_parallel"),
    "megatron.use_distributed_optimizer": sets("learner.use_distributed_optimizer"),
    "megatron.dtype": converts("learner.precision", {"bfloat16": "bf16"}),
    "megatron.seed": sets("learner.seed"),
    "use_torch_compile": Idle("has no effect: Megatron-core fuses its own kernels"),
    "ulysses_sequence_parallel_size": _FSDP,
    "entropy_from_logits_with_chunking": _MEMORY,
    "entropy_checkpointing": _MEMORY,
}
_OF_BOTH: Table = {
    "megatron.param_offload": _OFFLOAD,
    "megatron.grad_offload": _OFFLOAD,
    "megatron.optimizer_offload": _OFFLOAD,
    "megatron.use_mbridge": Only((True,), "weights come from the Hugging Face checkpoint: set it to true"),
    "megatron.vanilla_mbridge": _EXPORT,
    "megatron.use_dist_checkpointing": Idle("has no effect: the weights are those of hf_checkpoint"),
    "megatron.dist_checkpointing_path": Idle("has no effect: it is a conversion of hf_checkpoint"),
    "megatron.use_remove_padding": _PACKED,
    "megatron.use_megatron_fsdp": Only((False,), "the learner shards its optimizer only: set it to false"),
}
_REF: Table = {
    "strategy": _MEGATRON,
    "log_prob_micro_batch_size": _PASSES,
    "log_prob_micro_batch_size_per_gpu": _PASSES,
    "log_prob_max_token_len_per_gpu": _PASSES,
    "log_prob_use_dynamic_bsz": _PASSES,
    "use_torch_compile": _ACTOR["use_torch_compile"],
    "ulysses_sequence_parallel_size": _FSDP,
    "entropy_from_logits_with_chunking": _MEMORY,
    "entropy_checkpointing": _MEMORY,
    **{key: _SAME_LAYOUT for key in _ACTOR if key.startswith("megatron.") and key.endswith("_parallel_size")},
}
_SERVER = "engine.sglang_server_args"
_ROLLOUT: Table = {
    "name": Only(("sglang",), "the engines run SGLang: set it to sglang"),
    "mode": Idle("has no effect: requests are always asynchronous"),
    "n": sets("rollout.n_samples_per_prompt"),
    "temperature": sets("rollout.rollout_temperature"),
    "top_p": sets("rollout.rollout_top_p"),
    "top_k": sets("rollout.rollout_top_k"),
    "prompt_length": sets("rollout.rollout_max_prompt_len"),
    "response_length": sets("rollout.rollout_max_response_len"),
    "ignore_eos": Only((False,), "a response ends with the token that ends texts: set it to false"),
    "tensor_model_parallel_size": sets("engine.rollout_num_gpus_per_engine"),
    "data_parallel_size": Combined("sets SGLang's dp_size above 1"),
    "expert_parallel_size": Combined("sets SGLang's ep_size above 1"),
    "gpu_memory_utilization": sets(f"{_SERVER}.mem_fraction_static"),
    "dtype": converts(f"{_SERVER}.dtype", {"bfloat16": "bfloat16"}),
    "enforce_eager": sets(f"{_SERVER}.disable_cuda_graph"),
    "max_model_len": sets(f"{_SERVER}.context_length"),
    "max_num_seqs": sets(f"{_SERVER}.max_running_requests"),
    "enable_prefix_caching": converts(f"{_SERVER}.disable_radix_cache", {True: False, False: True}),
    "enable_chunked_prefill": Combined("sets SGLang's chunked_prefill_size to -1 if it is false"),
    "max_num_batched_tokens": Idle("has no effect: SGLang's chunked_prefill_size follows from the memory"),
    "load_format": Idle("has no effect: engines load the checkpoint, and each publish replaces its weights"),
    "free_cache_engine": _OFFLOAD,
    "enable_sleep_mode": _OFFLOAD,
    "layered_summon": Idle("has no effect: a publish sends weights in buckets of update_weight_buffer_size"),
    "calculate_log_probs": Idle("has no effect: the engines always return log-probabilities"),
    "disable_log_stats": Idle("has no effect: the metrics of the engines are always collected"),
    "agent.num_workers": Idle("has no effect: one event loop serves all requests"),
    "moe_tensor_parallel_size": Idle("belongs to TensorRT-LLM"),
    "single_turn_response_length": _MULTI_TURN,
    "multi_turn.enable": Combined("must be false if tools or an interaction are configured", "compared"),
    **{f"multi_turn.{name}": _MULTI_TURN for name in _MULTI_TURN_KEYS},
    "val_kwargs.n": Combined("sets n_samples of each entry of eval_datasets"),
    "val_kwargs.temperature": Combined("sets temperature of each entry of eval_datasets"),
    "val_kwargs.top_p": Combined("sets top_p of each entry of eval_datasets"),
    "val_kwargs.top_k": Combined("sets top_k of each entry of eval_datasets"),
    "val_kwargs.do_sample": Idle("has no effect: val_kwargs.temperature alone counts, as in verl's agent loop"),
    "checkpoint_engine.backend": converts(
        "weights.weight_transfer", {"naive": "auto", "nccl": "broadcast", "nixl": "p2p"}
    ),
    "checkpoint_engine.update_weights_bucket_megabytes": Combined("sets update_weight_buffer_size, in bytes"),
    "skip.enable": sets("rollout.skip_rollout"),
    **{f"log_prob_{name}": _PASSES for name in ("micro_batch_size", "micro_batch_size_per_gpu")},
    **{f"log_prob_{name}": _PASSES for name in ("max_token_len_per_gpu", "use_dynamic_bsz")},
}
_MODEL: Table = {
    "path": sets("model.hf_checkpoint"),
    "trust_remote_code": Idle("has no effect: code of a checkpoint is never run"),
    "use_remove_padding": _PACKED,
    "use_fused_kernels": _MEMORY,
    "enable_gradient_checkpointing": _RECOMPUTE,
    "enable_activation_offload": Refused("activations stay on the GPU: set recompute_granularity"),
    "use_shm": Idle("has no effect: each process reads the checkpoint where it is"),
    # verl has one set of keys for FSDP, and one for Megatron.
    "lora_rank": _LORA_RANK,
    "lora_alpha": _OF_LORA["alpha"],
    "target_modules": _OF_LORA["target_modules"],
    "exclude_modules": _OF_LORA["exclude_modules"],
    "lora_adapter_path": _OF_LORA["adapter_path"],
    "lora.rank": _LORA_RANK,
    **{f"lora.{name}": rule for name, rule in _OF_LORA.items()},
    "lora.dropout": Combined("sets lora_dropout"),
    "lora.type": Only(("lora", "canonical_lora"), "adapters are those of plain LoRA: set it to canonical_lora"),
    "lora.merge": Idle("has no effect: engines load the adapter itself; lora_merge is about exports"),
    "lora.dropout_position": Only(("pre",), "dropout comes before the adapter: set it to pre"),
    "lora.lora_A_init_method": Idle("has no effect: adapters start as those of PEFT"),
    "lora.lora_B_init_method": Only(("zero",), "adapters do not change the model at first: set it to zero"),
    "lora.dtype": Idle("has no effect: adapters are float32"),
    "lora.a2a_experimental": Idle("has no effect: ranks exchange only what is as wide as an adapter"),
    "lora.fully_sharded_loras": Idle("belongs to vLLM"),
    **{f"lora.freeze_{part}_model": _OTHER_LORA for part in ("vision", "language")},
    "lora.freeze_vision_projection": _OTHER_LORA,
    "mtp.enable": Combined("is needed by the other keys of mtp"),
    "mtp.enable_train": Combined("sets enable_mtp_training"),
    "mtp.enable_rollout": Combined("lets engines draft tokens, unless top_p or top_k need sampling masks"),
    "mtp.detach_encoder": Combined("must be true with mtp.enable_train: the loss of MTP heads changes only the heads"),
    "mtp.mtp_loss_scaling_factor": Combined("sets mtp_loss_scaling_factor"),
    **{f"mtp.speculative_{name}": _DRAFTS for name in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")},
    **{f"mtp.{name}": Idle("belongs to vLLM") for name in ("method", "num_speculative_tokens")},
    **{f"override_config.{name}": _DROPOUT for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")},
    **dict.fromkeys(
        ("override_config.max_position_embeddings", "override_config.model_config.max_position_embeddings"),
        Combined("sets SGLang's context_length, and allows engines more than config.json of the checkpoint has"),
    ),
}
_ALGORITHM: Table = {
    "adv_estimator": converts(
        "algorithm.advantage_estimator",
        {
            "grpo": "grpo",
            "gae": "ppo",
            "reinforce_plus_plus": "reinforce_plus_plus",
            "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        },
    ),
    "norm_adv_by_std_in_grpo": sets("algorithm.grpo_std_normalization"),
    "gamma": sets("algorithm.gamma"),
    "lam": sets("algorithm.lambd"),
    "use_kl_in_reward": Combined(
        "sets kl_coef: to 0 if it is false, otherwise to kl_ctrl.kl_coef; with adv_estimator grpo and "
        "reinforce_plus_plus_baseline also custom_advantage_function_path and rewards_normalization"
    ),
    "kl_penalty": Combined(
        "sets kl_loss_type with use_kl_in_reward, or custom_args.kl_penalty if rewards are compared afterwards"
    ),
    "kl_ctrl.kl_coef": Combined("sets kl_coef with use_kl_in_reward"),
    "kl_ctrl.type": Only(("fixed",), "kl_coef does not change: set it to fixed"),
    "filter_groups.enable": Combined("sets dynamic_sampling_filter_path, unless the run is fully asynchronous"),
    "filter_groups.metric": Combined(
        "sets dynamic_sampling_filter_path with enable, if it is acc, score, seq_reward or seq_final_reward"
    ),
    "filter_groups.max_num_gen_batches": Idle("has no effect: generation goes on until the batch is full"),
    "rollout_correction.rollout_is": Combined(
        "sets off_policy_correction to tis or sequence, unless bypass_mode is on"
    ),
    "rollout_correction.rollout_is_threshold": Combined(
        "sets tis_clip, or off_policy_correction icepop and icepop_band for two bounds"
    ),
    "rollout_correction.rollout_is_batch_normalize": Only((False,), "weights are not normalized: set it to false"),
    "rollout_correction.rollout_rs": Combined("sets rejection_level"),
    "rollout_correction.rollout_rs_threshold": Combined("sets rejection_band, with the inverse of its bounds"),
    "rollout_correction.rollout_rs_threshold_lower": Combined(
        "sets the lower bound of rejection_band with rollout_rs geometric"
    ),
    "rollout_correction.rollout_token_veto_threshold": sets("algorithm.rejection_veto"),
    "rollout_correction.bypass_mode": Combined("sets use_rollout_logprobs; a fully asynchronous run has it on"),
    "rollout_correction.loss_type": Only(("ppo_clip",), "policy_objective is the loss: set it to ppo_clip"),
}
_TRAINER: Table = {
    "experiment_name": sets("observability.experiment_name"),
    "project_name": sets("observability.project_name"),
    "total_training_steps": Combined("sets num_rollout, unless total_epochs ends the run earlier"),
    "total_epochs": Combined("sets num_epoch, where nothing else sets the length of the run"),
    "nnodes": Combined("sets actor_num_nodes, and colocate without rollout.nnodes"),
    "n_gpus_per_node": Combined("sets actor_num_gpus_per_node, and colocate without rollout.n_gpus_per_node"),
    "save_freq": Combined("sets save_interval; in a fully asynchronous run it counts publishes"),
    "test_freq": Combined("sets eval_interval; in a fully asynchronous run it counts publishes"),
    "val_before_train": Combined("turns evaluations off if it is false and test_freq is -1"),
    "val_only": Only((False,), "a run trains: set it to false"),
    "default_local_dir": Combined("sets save if save_freq is above 0"),
    "max_actor_ckpt_to_keep": Combined("sets save_keep if save_freq is above 0"),
    "max_critic_ckpt_to_keep": Idle("has no effect: policy and critic are saved together, see save_keep"),
    "resume_mode": Combined("sets resume, or load in a colocated run or with resume_path"),
    "resume_from_path": Combined("sets load with resume_mode resume_path"),
    "logger": Combined("sets use_wandb and use_tensorboard"),
    "log_val_generations": Idle("has no effect: the page of a run shows samples of each evaluation"),
    "balance_batch": sets("learner.balance_data"),
    "critic_warmup": Combined("sets num_critic_only_steps to one batch less: verl's steps count from 1"),
    "device": _NPU,
    "use_legacy_worker_impl": Idle("has no effect: verl chooses between its own workers with it"),
}
_OVERLONG_RULES: Table = {
    "enable": Combined("sets overlong_buffer_len and overlong_penalty if it is true"),
    "len": Combined("sets overlong_buffer_len if enable is true"),
    "penalty_factor": Combined("sets overlong_penalty if enable is true"),
    "log": Idle("has no effect: the reward of each sample is recorded"),
}
_OTHERS: Table = {
    "model_engine": _MEGATRON,
    "critic.strategy": _MEGATRON,
    "critic.enable": Only((False,), "set advantage_estimator to ppo for a critic, and remove this"),
    "critic.optim.lr": sets("algorithm.critic_lr"),
    "critic.optim.lr_warmup_steps": Combined(
        "sets critic_lr_warmup_steps to this number of batches; below 1 it has no effect"
    ),
    "critic.model.path": sets("algorithm.critic_load"),
    "critic.cliprange_value": sets("algorithm.value_clip"),
    "actor_rollout_ref.hybrid_engine": Combined(
        "sets colocate, unless rollout.nnodes or rollout.n_gpus_per_node gives the engines GPUs of their own"
    ),
    "actor_rollout_ref.nccl_timeout": Idle("has no effect: a rank that hangs is found by the run"),
    "ray_kwargs.ray_init.runtime_env.py_executable": Idle("has no effect: each process runs this Python"),
    "rollout.nnodes": Combined("sets rollout_num_gpus together with rollout.n_gpus_per_node"),
    "rollout.n_gpus_per_node": Combined("sets rollout_num_gpus together with rollout.nnodes"),
    "rollout.n": Idle("has no effect, as in verl: actor_rollout_ref.rollout.n counts"),
    "rollout.total_rollout_steps": Combined("sets num_rollout, in prompts"),
    "async_training.staleness_threshold": Combined(
        "sets queue_capacity to 1 + this share of the prompts between two publishes"
    ),
    "async_training.trigger_parameter_sync_step": Combined("sets update_weights_interval"),
    "async_training.require_batches": Combined("sets rollout_batch_size to this number times ppo_mini_batch_size"),
    "async_training.partial_rollout": converts("weights.pause_generation_mode", {True: "retract"}),
    "async_training.use_trainer_do_validate": Idle("has no effect: the engines evaluate beside training samples"),
    "async_training.concurrent_samples_per_replica": Idle("has no effect: set over_sampling_batch_size to a number"),
    "reward.reward_manager.name": Combined("sets rm_type data_source with data.train_files"),
    "reward_model.reward_manager": Combined("sets rm_type data_source with data.train_files"),
    "reward_model.enable": Only((False,), "set custom_rm_path to a function that asks the reward model"),
    "reward.custom_reward_function.path": _REWARD_FUNCTION,
    "reward.custom_reward_function.name": Idle("belongs to reward.custom_reward_function.path"),
    "custom_reward_function.path": _REWARD_FUNCTION,
    "custom_reward_function.name": Idle("belongs to custom_reward_function.path"),
    **{f"{section}.max_resp_len": _SAME_LENGTH for section in ("reward.reward_kwargs", "reward_model.reward_kwargs")},
    **{f"{section}.{name}": rule for section in OVERLONG for name, rule in _OVERLONG_RULES.items()},
}


def _below(prefix: str, rules: Mapping[str, Rule]) -> Table:
    return {f"{prefix}.{key}": rule for key, rule in rules.items()}


TABLE: Table = {
    # The settings have verl's names here, too.
    **{
        f"skip.{role}.{name}": sets(f"skip.{role}.{name}")
        for role in ("rollout", "async_rollout")
        for name in SKIP_FIELDS
    },
    **_below("data", _DATA),
    **_below("actor_rollout_ref.actor", {**_ACTOR, **_OF_BOTH}),
    **_below("actor_rollout_ref.ref", {**_OF_BOTH, **_REF}),
    **_below("actor_rollout_ref.rollout", _ROLLOUT),
    **_below("actor_rollout_ref.model", _MODEL),
    **_below("algorithm", _ALGORITHM),
    **_below("trainer", _TRAINER),
    **_OTHERS,
}
"""The rules of all keys but those below sections that pass on arguments of other libraries; see `rule_below`."""

_FIELDS: Mapping[str, Rule] = {
    "apply_rope_fusion": sets("learner.rope_fusion"),
    "bias_activation_fusion": sets("learner.bias_swiglu_fusion"),
    "num_layers_in_first_pipeline_stage": sets("learner.decoder_first_pipeline_num_layers"),
    "num_layers_in_last_pipeline_stage": sets("learner.decoder_last_pipeline_num_layers"),
    "use_flash_attn": converts("learner.attention_backend", {True: "flash"}),
    "optimizer_offload_fraction": Combined("sets optimizer_offload_fraction; 0 offloads nothing"),
    "moe_grouped_gemm": Idle("has no effect: Transformer Engine's layers always compute all experts in one product"),
    "moe_aux_loss_coeff": Idle("has no effect: as in verl, no loss that balances the experts is added"),
    "moe_router_load_balancing_type": Only(("none",), "no loss that balances the experts is added: set it to none"),
}
"""Fields of Megatron-core's configuration that have other names here, or another meaning."""
_VLLM = {
    "max_model_len": "set actor_rollout_ref.rollout.max_model_len instead",
    "enable_expert_parallel": "set actor_rollout_ref.rollout.expert_parallel_size instead",
    "compilation_config.cudagraph_capture_sizes": "set engine_kwargs.sglang.cuda_graph_bs instead",
}


def rule_below(key: str) -> Rule | None:
    """The rule of a key in a section that passes on arguments of Megatron-core, SGLang or a chat template, or whose
    library is not used here; None if the key is in no such section."""
    if "@" in key:
        return _FILES
    for section, rule in _SECTIONS.items():
        if key.startswith(section):
            return rule(key.removeprefix(section))
    return None


def _vllm(name: str) -> Rule:
    return Refused(f"the engines run SGLang: {_VLLM.get(name, 'remove it')}")


def _field(name: str) -> Rule:
    """The rule of a field of Megatron-core's configuration."""
    if name in _FIELDS:
        return _FIELDS[name]
    if name.startswith(("fp8", "fp4")):
        return _LOW_PRECISION
    setting = SETTINGS.get(name)
    is_ours = setting is not None and setting.path[0] == "learner"
    return sets(setting.dotted if setting is not None and is_ours else f"learner.megatron_args.{name}")


_FILES = Refused("files of Hydra are not read: remove it, and write the keys that the file sets")
_SECTIONS: Mapping[str, Callable[[str], Rule]] = {
    "hydra.": lambda name: _FILES,
    "data.apply_chat_template_kwargs.": lambda name: sets(f"data.apply_chat_template_kwargs.{name}"),
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": lambda name: sets(f"{_SERVER}.{name}"),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.": _vllm,
    "actor_rollout_ref.rollout.engine_kwargs.trtllm.": lambda name: Refused("the engines run SGLang: remove it"),
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.": lambda name: Idle("belongs to its backend"),
    "actor_rollout_ref.actor.megatron.override_transformer_config.": _field,
    "actor_rollout_ref.actor.optim.override_optimizer_config.": _field,
    "actor_rollout_ref.ref.megatron.override_transformer_config.": lambda name: _SAME_LAYOUT,
    **{
        f"actor_rollout_ref.{role}.{library}.": lambda name: _FSDP
        for role in ("actor", "ref")
        for library in ("fsdp_config", "veomni", "engine", "torchtitan")
    },
}
"""Sections whose keys other libraries define, and the rule of a key by its name there."""

FLAGS: Mapping[str, Flag] = {
    "config_path": Flag(Idle("has no effect: --config reads a file of verl, and --preset verl sets its defaults")),
    "config_name": Flag(
        Only(
            tuple(
                f"{name}_megatron_trainer{suffix}"
                for name in ("ppo", "fully_async_ppo", "one_step_off_ppo", "dapo")
                for suffix in ("", ".yaml")
            ),
            "the learner runs Megatron-core: set it to ppo_megatron_trainer",
        )
    ),
}
"""Hydra's flags, which verl's programs take beside overrides."""

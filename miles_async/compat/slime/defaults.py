"""slime's defaults, by the names of our settings.

They are those that its `parse_args` and Megatron's validation resolve (commit 624b824a, `slime/utils/arguments.py`).
Devices, layout and the transport of weights describe a machine and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    # Sizes and names. The user has to set those with None.
    "num_rollout": None,
    "rollout_batch_size": None,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": None,
    "input_key": "input",
    "label_key": None,
    # Loss.
    "advantage_estimator": "grpo",
    "grpo_std_normalization": True,
    "normalize_advantages": False,
    "loss_aggregation": "sequence_mean",
    "rewards_normalization": True,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "off_policy_correction": "none",
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "kl_coef": 0.0,
    "value_clip": 0.2,
    "gamma": 1.0,
    "lambd": 1.0,
    "num_critic_only_steps": 0,
    # Optimizer.
    "lr": 1e-6,
    "lr_decay_style": "linear",
    "lr_wsd_decay_style": "exponential",
    "lr_warmup_steps": 0,
    "min_lr": 0.0,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "clip_grad": 1.0,
    "seed": 1234,
    # The run ends at the first one.
    "max_nonfinite_batches": 1,
    # The dtype of the model, which has no name here.
    "moe_router_dtype": None,
    # Batches.
    "use_dynamic_batch_size": False,
    "micro_batch_size": 1,
    "max_tokens_per_gpu": None,
    "balance_data": False,
    # Generation.
    "rollout_shuffle": False,
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_skip_special_tokens": False,
    "apply_chat_template": False,
    "partial_rollout": False,
    "update_weights_interval": 1,
    "sglang_server_concurrency": 512,
    "sglang_router_policy": "cache_aware",
    "sglang_router_args": {"cache_threshold": 0.3, "balance_abs_threshold": 10, "balance_rel_threshold": 1.2},
    "sglang_router_request_timeout_secs": 14400.0,
    "engine_health_interval_seconds": 30.0,
    "engine_health_timeout_seconds": 30.0,
    # Evaluation and checkpoints.
    "eval_size": 0,
    "eval_interval": None,
    "save_interval": None,
    "save_keep": None,
    "async_save": False,
    "profile_step_start": 10,
    "profile_step_end": 12,
}
EQUIVALENTS: Mapping[str, Mapping[Any, Any]] = {
    # Without a box, the last number or formula of a response counts here. In slime and Miles, it is wrong.
    "rm_type": {"math": "boxed_math"},
}

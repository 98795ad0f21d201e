"""ROLL's defaults, by the names of our settings.

They are those of `PPOConfig` (`roll/configs/base_config.py`), `RLVRConfig`, `TrainingArguments` and
`GeneratingArguments` at commit 8eb27cc2. Devices and layout describe a machine and are left out, and so is
`per_device_train_batch_size`, which depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    # async_generation_ratio 0.
    "schedule": "synchronous",
    # max_steps, rollout_batch_size, prompt_length, num_return_sequences_in_group; response_length has to be set.
    "num_rollout": 500,
    "rollout_batch_size": 128,
    "rollout_max_prompt_len": 1024,
    "rollout_max_response_len": None,
    "n_samples_per_prompt": 1,
    # GeneratingArguments.
    "rollout_temperature": 0.95,
    "rollout_top_p": 0.7,
    "rollout_top_k": 50,
    # roll/pipeline/rlvr/rewards/math_rule_reward_worker.py decodes with special tokens.
    "rollout_skip_special_tokens": False,
    "rollout_seed": 42,
    # DynamicSamplingScheduler shuffles the rows at the start of each epoch.
    "rollout_shuffle": True,
    # adv_estimator gae, lambd, whiten_advantages, init_kl_coef without add_token_level_kl, critic_warmup.
    "advantage_estimator": "ppo",
    "normalize_advantages": False,
    "gamma": 1.0,
    "lambd": 0.95,
    "kl_coef": 0.0,
    "num_critic_only_steps": 0,
    # pg_clip, loss_agg_mode seq-mean-token-mean, entropy_loss_coef; actor_worker.py computes the KL loss with k3, which
    # compute_approx_kl limits to 10.
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "loss_aggregation": "sequence_mean",
    # agg_loss of roll/utils/functionals.py divides by the samples that a mask leaves.
    "count_removed_samples": False,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    # train_infer_correction has neither weights nor filters.
    "off_policy_correction": "none",
    # TrainingArguments, max_grad_norm.
    "lr": 5e-5,
    "lr_decay_style": "linear",
    "lr_warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "clip_grad": 1.0,
    "seed": 42,
    # ModelConfig of mcore_adapter, for models with 32 experts or more.
    "moe_router_dtype": "fp32",
    # WorkerConfig.
    "use_dynamic_batching_in_train": False,
    "use_dynamic_batching_in_infer": False,
    "sequence_length_round_in_train": 4,
    "sequence_length_round_in_infer": 4,
    # save_steps, max_ckpt_to_keep 0, eval_steps.
    "save_interval": 50,
    "save_keep": None,
    "eval_interval": 10,
    "eval_size": 0,
}

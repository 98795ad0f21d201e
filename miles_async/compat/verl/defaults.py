"""verl's defaults, by the names of our settings.

They are those of `verl/trainer/config/_generated_ppo_megatron_trainer.yaml` at commit 1dda039b. Devices and layout
describe a machine and are left out, and so are the limits of a micro-batch and `ppo_mini_batch_size`, which counts
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    # `trainer`: total_epochs, save_freq -1, test_freq -1, balance_batch, max_actor_ckpt_to_keep, critic_warmup.
    "num_epoch": 30,
    "save_interval": None,
    "eval_interval": None,
    "balance_data": True,
    "save_keep": None,
    "num_critic_only_steps": 0,
    # `data`.
    "rollout_batch_size": 1024,
    "rollout_max_prompt_len": 512,
    "rollout_max_response_len": 512,
    "rollout_shuffle": True,
    "input_key": "prompt",
    "label_key": "reward_model.ground_truth",
    "metadata_key": "extra_info",
    # verl/utils/dataset/rl_dataset.py renders each prompt.
    "apply_chat_template": True,
    "eval_size": 0,
    # `actor_rollout_ref.rollout`; the reward managers decode without special tokens.
    "n_samples_per_prompt": 1,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_seed": 42,
    "rollout_skip_special_tokens": True,
    # `algorithm`: adv_estimator gae, which whitens (core_algos.py: compute_gae_advantage_return), use_kl_in_reward off.
    "advantage_estimator": "ppo",
    "normalize_advantages": True,
    "grpo_std_normalization": True,
    "gamma": 1.0,
    "lambd": 1.0,
    "kl_coef": 0.0,
    # `algorithm.rollout_correction.rollout_is`, off.
    "off_policy_correction": "none",
    "tis_clip": 2.0,
    # `actor_rollout_ref.actor`.
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": 3.0,
    "loss_aggregation": "token_mean",
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_loss_type": "low_var_kl",
    "use_dynamic_batch_size": False,
    "async_save": False,
    "seed": 42,
    # `actor_rollout_ref.actor.optim`.
    "lr": 1e-6,
    "lr_decay_style": "constant",
    "lr_wsd_decay_style": "exponential",
    "lr_warmup_steps": 0,
    "min_lr": 0.0,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "clip_grad": 1.0,
    # `critic`.
    "critic_lr": 1e-5,
    "value_clip": 0.5,
}

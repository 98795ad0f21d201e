"""The optimizer, the loss, corrections of off-policy samples, KL penalties and the filter of groups of verl."""

from __future__ import annotations

from typing import Any

from miles_async.compat.verl.data import async_keys, is_async, optimizer_steps
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.translation import converts

_ACTOR = "actor_rollout_ref.actor"
_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
"""Metrics of verl by which groups are compared as by their rewards."""
_SUM_OVER_LONGEST = "seq-mean-token-sum-norm"
"""The mean of token losses with the sum over each response divided by the longest one."""
_MEANS = converts(
    "algorithm.loss_aggregation",
    {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        _SUM_OVER_LONGEST: "constant",
    },
)
_DIVERGENCES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_ESTIMATORS = converts("algorithm.kl_loss_type", _DIVERGENCES)
_COMPARED_AFTER_PENALTY = ("grpo", "reinforce_plus_plus_baseline")
"""Estimators of verl that compare the samples of a group after the KL penalty."""
_AFTER_PENALTY = "miles_async.compat.verl.advantages.after_penalty"
_ESTIMATORS_BEFORE_COMPARISON = converts("rollout.custom_args.kl_penalty", _DIVERGENCES)
_MEANS_OVER_SAMPLES = ("gspo", "geo_mean", "sapo")
"""Losses of verl that do not read loss_agg_mode (`verl/trainer/ppo/core_algos.py`)."""


def optimizer(keys: CombinedKeys) -> None:
    """verl keeps the learning rate for all optimizer steps of a batch, so its schedule counts batches."""
    batches = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches")
    for key, setting in (
        (f"{_ACTOR}.optim.lr_warmup_steps", "learner.lr_warmup_steps"),
        (f"{_ACTOR}.optim.lr_decay_steps", "learner.lr_decay_steps"),
        ("critic.optim.lr_warmup_steps", "algorithm.critic_lr_warmup_steps"),
    ):
        value = keys.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            keys.refuse(f"{key} {value!r} is not a whole number: write a number of batches")
        elif value is not None and value > 0:
            style = keys.values.get(f"{_ACTOR}.optim.lr_decay_style")
            if setting == "learner.lr_decay_steps" and style in ("constant", None):
                keys.note("has no effect: the learning rate stays constant, as verl's default is", key)
            else:
                keys.set(setting, value * optimizer_steps(keys), key, *(batches if optimizer_steps(keys) > 1 else ()))
        else:
            keys.note("has no effect: lr_warmup_steps_ratio applies, or no warm-up", key)
    warmup_key = "trainer.critic_warmup"
    if (first := keys.number(warmup_key)) is not None:
        # verl trains the policy from the step of this number on, and its first step is 1.
        keys.set("algorithm.num_critic_only_steps", max(0, first - 1), warmup_key)
    overrides = f"{_ACTOR}.optim.override_optimizer_config"
    part_key, offload_key = f"{overrides}.optimizer_offload_fraction", f"{overrides}.optimizer_cpu_offload"
    if keys.values.get(part_key) != 0:
        if part_key in keys.values:
            keys.set("learner.optimizer_offload_fraction", keys.values[part_key], part_key)
    elif keys.values.get(offload_key) is True:
        keys.refuse(f"{part_key} 0 offloads nothing, but {offload_key} is true: set it to false")
    else:
        keys.note("has no effect: 0 offloads nothing", part_key)
    betas_key = f"{_ACTOR}.optim.betas"
    match keys.values.get(betas_key):
        case None:
            pass
        case [int() | float() as beta1, int() | float() as beta2]:
            keys.set("learner.adam_beta1", beta1, betas_key)
            keys.set("learner.adam_beta2", beta2, betas_key)
        case other:
            keys.refuse(f"{betas_key} {other!r} is not a pair of numbers: write [0.9, 0.999]")


def objective(keys: CombinedKeys) -> None:
    """The loss of the policy: its clip range and its mean over tokens."""
    estimator = "algorithm.adv_estimator"
    if keys.values.get(estimator) == "gae":
        # verl has no key for it: compute_gae_advantage_return always whitens.
        keys.set("algorithm.normalize_advantages", True, estimator)
    both = f"{_ACTOR}.clip_ratio"
    keys.number(both)
    keys.note("has no effect: clip_ratio_low and clip_ratio_high count, 0.2 in verl unless they are set", both)
    for suffix, setting in (("low", "eps_clip"), ("high", "eps_clip_high")):
        if (key := f"{_ACTOR}.clip_ratio_{suffix}") in keys.values:
            keys.set(f"algorithm.{setting}", keys.values[key], key)
    mode_key, mean_key = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.loss_agg_mode"
    dual, mode = f"{_ACTOR}.clip_ratio_c", keys.values.get(mode_key, "vanilla")
    if mode in _MEANS_OVER_SAMPLES:
        keys.set("algorithm.loss_aggregation", "sequence_mean", mode_key)
        keys.note(f"has no effect in verl either: {mode} is always averaged by seq-mean-token-mean", mean_key)
    elif mean_key in keys.values:
        keys.translator.follow(_MEANS, mean_key, keys.values[mean_key])
    _scale(keys, mean_key, sums=keys.values.get(mean_key) == _SUM_OVER_LONGEST and mode not in _MEANS_OVER_SAMPLES)
    if mode == "vanilla" and dual in keys.values:
        keys.set("algorithm.eps_clip_c", keys.values[dual], dual)
    else:
        keys.note(f"has no effect with policy_loss.loss_mode {mode}", dual)


def _scale(keys: CombinedKeys, mean_key: str, *, sums: bool) -> None:
    """The number by which the sum over a response is divided."""
    key, longest_key = f"{_ACTOR}.loss_scale_factor", "data.max_response_length"
    if sums and key in keys.values and keys.values[key] != keys.values.get(longest_key):
        keys.refuse(
            f"{key} {keys.values[key]!r:.80} is not {longest_key}, by which {_SUM_OVER_LONGEST} divides the sum "
            "over a response: set both to the same value"
        )
    elif sums:
        keys.note(f"has no effect: {longest_key} is the same", key)
    else:
        keys.note(f"has no effect without {mean_key} {_SUM_OVER_LONGEST}", key)


def correction(keys: CombinedKeys) -> None:
    """How samples of other weights are corrected: by weights, by leaving tokens out, or by the ratio itself."""
    prefix = "algorithm.rollout_correction"
    level_key, threshold_key, bypass_key = (
        f"{prefix}.rollout_is",
        f"{prefix}.rollout_is_threshold",
        f"{prefix}.bypass_mode",
    )
    # verl's configuration for fully asynchronous runs turns this on.
    bypass = keys.values.get(bypass_key, is_async(keys))
    if bypass is True and f"{prefix}.rollout_rs" in keys.values:
        # Rejection needs the learner's own log-probabilities, so the ratio to the engines becomes a weight.
        keys.set("algorithm.off_policy_correction", "tis", bypass_key, f"{prefix}.rollout_rs")
        keys.note("has no effect beside rollout_rs: the ratio is a weight, off_policy_correction tis", bypass_key)
    elif bypass_key in keys.values or bypass is True:
        keys.set("algorithm.use_rollout_logprobs", bypass, *(keys.given(bypass_key) or async_keys(keys)))
    level, threshold = keys.values.get(level_key), keys.values.get(threshold_key, 2.0)
    corrections = {"token": "tis", "sequence": "sequence"}
    if bypass is True:
        keys.note("has no effect: the policy ratio itself is to the engines' log-probabilities", level_key)
        keys.note("has no effect: the policy ratio itself is to the engines' log-probabilities", threshold_key)
    elif level_key not in keys.values:
        keys.note(f"has no effect without {level_key}", threshold_key)
    elif level not in corrections:
        keys.refuse(f"{level_key} {level!r} has no counterpart: set it to token or sequence")
    elif (band := _band(threshold)) is not None and level == "token":
        keys.set("algorithm.off_policy_correction", "icepop", level_key, threshold_key)
        keys.set("algorithm.icepop_band", band, level_key, threshold_key)
    elif isinstance(threshold, int | float):
        keys.set("algorithm.off_policy_correction", corrections[str(level)], level_key)
        keys.set("algorithm.tis_clip", threshold, threshold_key, level_key)
    else:
        keys.refuse(f"{threshold_key} {threshold!r} has no counterpart: write a number")
    _rejection(keys, prefix)


def _rejection(keys: CombinedKeys, prefix: str) -> None:
    """Which tokens are left out. verl bounds the inverse ratio, except under the older name `geometric`."""
    key, threshold_key, low_key = (f"{prefix}.rollout_rs{end}" for end in ("", "_threshold", "_threshold_lower"))
    levels = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric", "geometric": "geometric"}
    level, threshold = keys.values.get(key), keys.values.get(threshold_key)
    if key not in keys.values:
        keys.note(f"has no effect without {key}", threshold_key, low_key)
    elif level not in levels:
        keys.refuse(f"{key} {level!r} has no counterpart: set it to {', '.join(levels)}, or set rejection_level")
    else:
        band = _band(threshold)
        if band is None and level == "geometric" and isinstance(threshold, int | float) and threshold > 0:
            band = [keys.values.get(low_key, 1 / threshold), threshold]
        elif band is not None:
            band = [1 / band[1], 1 / band[0]]
        if band is None:
            keys.refuse(f"{threshold_key} {threshold!r} is not a band: write two ratios, such as 0.5_2.0")
            return
        keys.set("algorithm.rejection_level", levels[str(level)], key)
        keys.set("algorithm.rejection_band", band, key, threshold_key, low_key)


def divergence(keys: CombinedKeys) -> None:
    """The KL penalty on rewards and the KL loss, which share an estimator here unless rewards are compared."""
    on_key, coef_key, kind_key = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    loss_key, loss_kind_key = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_type"
    estimator_key = "algorithm.adv_estimator"
    if keys.values.get(on_key) is not True:
        if on_key in keys.values:
            keys.set("algorithm.kl_coef", 0.0, on_key)
        keys.note(f"has no effect without {on_key}", coef_key, kind_key)
        if loss_kind_key in keys.values:
            keys.translator.follow(_ESTIMATORS, loss_kind_key, keys.values[loss_kind_key])
        return
    keys.set("algorithm.kl_coef", keys.values.get(coef_key, 0.001), on_key, coef_key)
    compares = keys.values.get(estimator_key) in _COMPARED_AFTER_PENALTY
    rule = _ESTIMATORS_BEFORE_COMPARISON if compares else _ESTIMATORS
    keys.translator.follow(rule, kind_key, keys.values.get(kind_key, "kl"))
    if compares:
        # The comparison waits for the learner, which knows the divergences.
        keys.set("algorithm.custom_advantage_function_path", _AFTER_PENALTY, on_key, estimator_key)
        keys.set("algorithm.rewards_normalization", False, on_key, estimator_key)
    if keys.values.get(loss_key) is True:
        keys.translator.follow(_ESTIMATORS, loss_kind_key, keys.values.get(loss_kind_key, "low_var_kl"))
    else:
        keys.note(f"has no effect without {loss_key}", loss_kind_key)


def group_filter(keys: CombinedKeys) -> None:
    """Groups without differences in their rewards are dropped. verl's fully asynchronous trainer keeps them."""
    enable_key, metric_key = (f"algorithm.filter_groups.{name}" for name in ("enable", "metric"))
    enable, metric = keys.switch(enable_key), keys.values.get(metric_key, _METRICS[0])
    if is_async(keys):
        why = "has no effect in verl's fully asynchronous runs either; set dynamic_sampling_filter_path to filter"
        keys.note(why, enable_key, metric_key)
        return
    if not enable:
        if enable_key in keys.values:
            keys.set("rollout.dynamic_sampling_filter_path", None, enable_key)
        keys.note("has no effect: no groups are filtered", metric_key)
        return
    path = "miles_async.filters.check_reward_nonzero_std"
    keys.set("rollout.dynamic_sampling_filter_path", path, enable_key, metric_key)
    if metric not in _METRICS:
        keys.refuse(
            f"{metric_key} {metric!r:.80} is not supported: groups are compared by their rewards: set it to acc, "
            f"or set {enable_key} to false and dynamic_sampling_filter_path to a function of your own"
        )


def _band(threshold: Any) -> list[float] | None:
    """The bounds of `low_high`; None for anything else."""
    try:
        low, high = map(float, str(threshold).split("_"))
    except ValueError:
        return None
    return [low, high] if 0 < low < high else None

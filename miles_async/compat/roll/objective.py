"""Advantages, masks, clipping and corrections of ROLL's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.roll.data import trains_agents
from miles_async.compat.roll.values import Values, note, number, section, switch
from miles_async.config.translation import Translator

_FUNCTIONS = "miles_async.compat.roll.advantages"
_PG_CLIP = 0.2
"""ROLL's default of pg_clip, pg_clip_low and pg_clip_high."""
_OWN_ADVANTAGES = ("norm_mean_type", "norm_std_type", "reward_clip", "whiten_advantages", "advantage_clip")
_WEIGHTS = {"token": "tis", "sequence": "sequence", "geometric": "geometric"}
_LEVELS = ("token", "sequence", "geometric")
_METHODS = ("identity", "mean", "mean_std", "asym_clip")


def advantages(translator: Translator, values: Values) -> None:
    """How rewards become advantages: as with one of the estimators, or by a function that does the same as ROLL."""
    estimator = values.get("adv_estimator")
    norms = _norms(translator, values)
    if estimator is None:
        if present := [key for key in _OWN_ADVANTAGES if key in values]:
            translator.problems.append(f"{', '.join(present)} need adv_estimator: set it to grpo, reinforce or gae")
        return
    if estimator not in ("grpo", "reinforce", "gae"):
        translator.problems.append(
            f"adv_estimator {estimator!r:.80} is no advantage_estimator here: set it to grpo or reinforce, which "
            "reward whole responses, or write a function for custom_advantage_function_path"
        )
        left = ("gamma", "lambd", "value_clip", "reward_pretrain", "reward_normalization")
        note(translator, values, "depends on adv_estimator", *_OWN_ADVANTAGES, *left)
        return
    key = "adv_estimator"
    chosen: dict[str, Any] = {
        **norms,
        "reward_clip": number(translator, values, "reward_clip") or None,
        "whiten_advantages": switch(translator, values, "whiten_advantages") or False,
        "advantage_clip": number(translator, values, "advantage_clip") or None,
    }
    if estimator == "gae":
        _critic(translator, values, chosen)
        return
    translator.set("algorithm.advantage_estimator", "grpo", key)
    note(translator, values, "has no effect without adv_estimator gae", "lambd", "value_clip", "reward_pretrain")
    note(translator, values, "has no effect at 1", "gamma")
    if values.get("gamma", 1) != 1:
        translator.problems.append(
            f"gamma {values['gamma']!r:.80} is not supported without adv_estimator gae: set it to 1"
        )
    plain = not (chosen["reward_clip"] or chosen["whiten_advantages"] or chosen["advantage_clip"])
    if plain and set(norms.values()) == {"group"}:
        note(translator, values, "is what advantage_estimator grpo does", *_OWN_ADVANTAGES, "reward_normalization")
    else:
        _own_function(translator, values, chosen, key)


def _norms(translator: Translator, values: Values) -> dict[str, str | None]:
    """The statistics by which rewards are shifted and scaled."""
    keys = ("norm_mean_type", "norm_std_type")
    if trains_agents(values):
        note(translator, values, "has no effect in ROLL's agentic pipeline, which reads reward_normalization", *keys)
        found = section(translator, values, "reward_normalization")
        grouping, method = found.get("grouping", "batch"), found.get("method", "identity")
        if grouping not in ("batch", "traj_group_id"):
            translator.problems.append(
                f"reward_normalization.grouping {grouping!r:.80} has no counterpart: set it to traj_group_id or batch"
            )
        if method not in _METHODS:
            translator.problems.append(
                f"reward_normalization.method {method!r:.80} has no counterpart: set it to mean_std, mean or identity"
            )
        over = "batch" if grouping == "batch" else "group"
        derived = {
            "norm_mean_type": None if method == "identity" else over,
            "norm_std_type": over if method in ("mean_std", "asym_clip") else None,
        }
        norms = {name: found.get(name) or derived[name] for name in keys}
    elif values.get("adv_estimator") == "grpo":
        note(translator, values, "has no effect in ROLL either: grpo sets it to group", *keys)
        norms = dict.fromkeys(keys, "group")
    else:
        norms = {name: values.get(name) for name in keys}
    for name, kind in norms.items():
        if kind not in (None, "group", "batch"):
            translator.problems.append(f"{name} {kind!r:.80} has no counterpart: set it to group, batch or null")
    return norms


def _own_function(translator: Translator, values: Values, chosen: Mapping[str, Any], key: str) -> None:
    translator.set("rollout.custom_reward_post_process_path", f"{_FUNCTIONS}.advantages", key)
    for name, value in chosen.items():
        source = "reward_normalization" if name.startswith("norm_") and "reward_normalization" in values else name
        translator.set(f"rollout.custom_args.{name}", value, source if source in values else key)


def _critic(translator: Translator, values: Values, chosen: Mapping[str, Any]) -> None:
    """Advantages of a critic (GAE)."""
    key = "adv_estimator"
    translator.set("algorithm.advantage_estimator", "ppo", key)
    if "reward_pretrain" in values and values["reward_pretrain"] != values.get("pretrain"):
        translator.set("algorithm.critic_load", values["reward_pretrain"], "reward_pretrain")
    else:
        note(translator, values, "has no effect: the critic starts from pretrain", "reward_pretrain")
    source = "whiten_advantages"
    translator.set("algorithm.normalize_advantages", chosen[source], source if source in values else key)
    for name in ("gamma", "lambd"):
        if (value := number(translator, values, name)) is not None:
            translator.set(f"algorithm.{name}", value, name)
    # Without a clip in ROLL, the critic's values may move as far as they want.
    clip = number(translator, values, "value_clip") or 1e6
    translator.set("algorithm.value_clip", clip, "value_clip" if "value_clip" in values else key)
    if chosen["advantage_clip"]:
        translator.problems.append(
            "advantage_clip has no counterpart with adv_estimator gae: set it to null, or write a function for "
            "custom_advantage_function_path"
        )
    else:
        note(translator, values, "has no effect: it is null", "advantage_clip")
    if chosen["reward_clip"] or any(chosen[name] for name in ("norm_mean_type", "norm_std_type")):
        _own_function(translator, values, {**chosen, "whiten_advantages": False, "advantage_clip": None}, key)
    else:
        note(translator, values, "has no effect: it is null", "reward_clip", "norm_mean_type", "norm_std_type")


def masks(translator: Translator, values: Values) -> None:
    """Samples that are not trained."""
    thresholds = ("difficulty_low_threshold", "difficulty_high_threshold")
    too_long, difficult = (switch(translator, values, name) or False for name in ("max_len_mask", "difficulty_mask"))
    if difficult:
        translator.set("rollout.rollout_sample_filter_path", f"{_FUNCTIONS}.mask", "difficulty_mask")
        translator.set("rollout.custom_args.difficulty_mask", True, "difficulty_mask")
        source = "max_len_mask" if "max_len_mask" in values else "difficulty_mask"
        translator.set("rollout.custom_args.max_len_mask", too_long, source)
        for name, default in zip(thresholds, (0.0, 1.0), strict=True):
            limit = number(translator, values, name)
            source = name if name in values else "difficulty_mask"
            translator.set(f"rollout.custom_args.{name}", default if limit is None else limit, source)
        return
    note(translator, values, "has no effect: it is false", "difficulty_mask")
    note(translator, values, "has no effect without difficulty_mask", *thresholds)
    if too_long:
        translator.set("rollout.rollout_sample_filter_path", "miles_async.filters.mask_truncated", "max_len_mask")
    else:
        note(translator, values, "has no effect: it is false", "max_len_mask")


def clipping(translator: Translator, values: Values) -> None:
    """How far a batch may move the policy."""
    ranges = ("pg_clip_low", "pg_clip_high")
    common = number(translator, values, "pg_clip")
    if switch(translator, values, "use_pg_clip_range"):
        for name, setting in zip(ranges, ("eps_clip", "eps_clip_high"), strict=True):
            limit = number(translator, values, name)
            source = name if name in values else "use_pg_clip_range"
            translator.set(f"algorithm.{setting}", _PG_CLIP if limit is None else limit, source)
        if not switch(translator, values, "dual_clip_loss"):
            note(translator, values, "has no effect with use_pg_clip_range", "pg_clip")
    else:
        note(translator, values, "has no effect without use_pg_clip_range", *ranges)
        note(translator, values, "has no effect: it is false", "use_pg_clip_range")
        if common is not None:
            translator.set("algorithm.eps_clip", common, "pg_clip")
        elif values.get("importance_sampling") == "seq":
            # The default here would be that of the paper.
            translator.set("algorithm.eps_clip", _PG_CLIP, "importance_sampling")
    if switch(translator, values, "dual_clip_loss"):
        key = "dual_clip_loss pg_clip" if common is not None else "dual_clip_loss"
        translator.set("algorithm.eps_clip_c", 1 + 2 * (_PG_CLIP if common is None else common), key)
    else:
        note(translator, values, "has no effect: it is false", "dual_clip_loss")


def divergence(translator: Translator, values: Values) -> None:
    """The KL loss, and the KL penalty on the reward of each token."""
    used = switch(translator, values, "use_kl_loss")
    if used is not None:
        translator.set("algorithm.use_kl_loss", used, "use_kl_loss")
    if used:
        translator.set("algorithm.kl_loss_type", "k3", "use_kl_loss")
        translator.set(
            "algorithm.kl_loss_coef", number(translator, values, "kl_loss_coef") or 0.0, "use_kl_loss kl_loss_coef"
        )
    else:
        note(translator, values, "has no effect without use_kl_loss", "kl_loss_coef")
    of_penalty = ("init_kl_coef", "kl_penalty")
    if not switch(translator, values, "add_token_level_kl"):
        note(translator, values, "has no effect: it is false", "add_token_level_kl")
        note(translator, values, "has no effect without add_token_level_kl", *of_penalty)
    elif values.get("adv_estimator") != "gae" or used or values.get("kl_penalty", "kl") != "kl":
        translator.problems.append(
            "add_token_level_kl has a counterpart only with adv_estimator gae, kl_penalty kl and without use_kl_loss: "
            "set it to false, and use_kl_loss to true"
        )
    else:
        coefficient = number(translator, values, "init_kl_coef")
        key = " ".join(name for name in ("add_token_level_kl", *of_penalty) if name in values)
        translator.set("algorithm.kl_coef", 0.2 if coefficient is None else coefficient, key)
        translator.set("algorithm.kl_loss_type", "k1", key)


def correction(translator: Translator, values: Values) -> None:
    """Weights and filters of tokens by the ratio of the learner's probabilities to the engines'."""
    key = "train_infer_correction"
    found = section(translator, values, key)
    if not found:
        return
    weight, filters = found.get("is_weight") or {}, found.get("filters") or []
    if not isinstance(weight, Mapping) or not isinstance(filters, list):
        translator.problems.append(f"{key} is wrong: write is_weight as a section, and filters as a list of sections")
        return
    if weight.get("enabled"):
        kind, bound = weight.get("weight_type", "token"), weight.get("upper_bound", 1.2)
        name = next((ours for theirs, ours in _WEIGHTS.items() if theirs == kind), None)
        if name is not None and bound is not None:
            translator.set("algorithm.off_policy_correction", name, key)
            translator.set("algorithm.tis_clip", bound, key)
        else:
            translator.problems.append(
                f"{key}.is_weight has no counterpart: set weight_type to token, sequence or geometric, and upper_bound"
            )
    else:
        translator.set("algorithm.off_policy_correction", "none", key)
    enabled = [one for one in filters if isinstance(one, Mapping) and one.get("enabled")]
    match enabled:
        case []:
            pass
        case [one] if (
            one.get("agg_type", "token") in _LEVELS and one.get("ratio_enabled") and not one.get("diff_enabled")
        ):
            translator.set("algorithm.rejection_level", one.get("agg_type", "token"), key)
            band = [one.get("ratio_low", 0.8), one.get("ratio_high", 1.2)]
            translator.set("algorithm.rejection_band", band, key)
        case _:
            translator.problems.append(
                f"{key}.filters has a counterpart only as one filter with ratio_enabled, without diff_enabled, and "
                "with agg_type token, sequence or geometric"
            )

"""Advantages, masks, clipping and corrections of ROLL's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.adapters.environments.server import Roll
from miles_async.compat.roll.data import trains_agents, trains_steps
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.translation import converts

_FUNCTIONS = "miles_async.compat.roll.advantages"
_POSTPROCESS = "miles_async.compat.roll.tokens.postprocess"
_CORRECTION = "train_infer_correction"
_PG_CLIP = 0.2
"""ROLL's default of pg_clip, pg_clip_low and pg_clip_high."""
_OWN_ADVANTAGES = ("norm_mean_type", "norm_std_type", "reward_clip", "whiten_advantages", "advantage_clip")
_OF_STEPS = {"step_reward_gamma": 0.95, "step_reward_weight": 1.0, "episode_reward_weight": 1.0}
"""ROLL's defaults of the rewards of steps."""
_WEIGHTS = {"token": "tis", "sequence": "sequence", "geometric": "geometric"}
_LEVELS = ("token", "segment", "sequence", "geometric")
_BANDS = {"ratio": ("ratio", True, 0.8, 1.2), "difference": ("diff", False, -0.2, 0.2)}
"""What a filter of `train_infer_correction` compares: ROLL's name, and its defaults of enabled, low and high."""
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "vanilla": {"policy_objective": "reinforce"},
    "ppo": {"policy_objective": "ppo"},
    # ROLL's workers read no bounds of these, whatever its pages say, and have these defaults.
    "tis": {"policy_objective": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.0},
    "cispo": {"policy_objective": "cispo", "eps_clip": 0.1, "eps_clip_high": 0.1},
    "topr": {"policy_objective": "topr"},
    "kimi15": {"policy_objective": "kimi15", "kimi15_tau": 0.1},
}
"""The settings of `algorithm` that are the loss of each `pg_variant`. TIS clips the weight of a token to 0 and 1."""
_PG_WORKER = "actor_pg_worker"
"""A part of the path of ROLL's workers with several losses."""
_OF_PPO = ("importance_sampling", "dual_clip_loss", "pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high")
_METHODS = ("identity", "mean", "mean_std", "asym_clip")


def advantages(keys: CombinedKeys) -> None:
    """How rewards become advantages: as with one of the estimators, or by a function that does the same as ROLL."""
    estimator = keys.values.get("adv_estimator")
    norms = _norms(keys)
    if estimator is None:
        if present := [key for key in _OWN_ADVANTAGES if key in keys.values]:
            keys.refuse(f"{', '.join(present)} need adv_estimator: set it to grpo, reinforce or gae")
        return
    by_step = trains_steps(keys)
    if estimator not in ("grpo", "reinforce", "gae", *(("step_reinforce", "gigpo") if by_step else ())) or (
        estimator == "gae" and by_step
    ):
        advice = "step_reinforce, gigpo, grpo or reinforce" if by_step else "grpo or reinforce"
        if estimator in ("step_reinforce", "gigpo"):
            advice += f", or set env_manager_cls of custom_envs to one of {', '.join(Roll.BY_STEP)}"
        keys.refuse(
            f"adv_estimator {estimator!r:.80} is not an advantage_estimator here: set it to {advice}, or write a "
            "function for custom_advantage_function_path"
        )
        left = ("gamma", "lambd", "value_clip", "reward_pretrain", "reward_normalization")
        keys.note("depends on adv_estimator", *_OWN_ADVANTAGES, *left, *_OF_STEPS)
        return
    key = "adv_estimator"
    chosen: dict[str, Any] = {
        **norms,
        "reward_clip": keys.number("reward_clip") or None,
        "whiten_advantages": keys.switch("whiten_advantages") or False,
        "advantage_clip": keys.number("advantage_clip") or None,
    }
    if estimator == "gae":
        _critic(keys, chosen)
        return
    keys.set("algorithm.advantage_estimator", "grpo", key)
    keys.note("has no effect without adv_estimator gae", "lambd", "value_clip", "reward_pretrain")
    keys.note("has no effect at 1", "gamma")
    if keys.values.get("gamma", 1) != 1:
        keys.refuse(f"gamma {keys.values['gamma']!r:.80} is not supported without adv_estimator gae: set it to 1")
    if by_step:
        _rewards_of_steps(keys, chosen)
        return
    keys.note("has no effect without a class of steps in env_manager_cls", *_OF_STEPS)
    plain = not (chosen["reward_clip"] or chosen["whiten_advantages"] or chosen["advantage_clip"])
    if plain and set(norms.values()) == {"group"}:
        keys.note("is what advantage_estimator grpo does", *_OWN_ADVANTAGES, "reward_normalization")
    else:
        _own_function(keys, chosen, key)


def _norms(keys: CombinedKeys) -> dict[str, str | None]:
    """The statistics by which rewards are shifted and scaled."""
    names = ("norm_mean_type", "norm_std_type")
    if trains_agents(keys):
        keys.note("has no effect in ROLL's agentic pipeline, which reads reward_normalization", *names)
        found = keys.section("reward_normalization")
        grouping, method = found.get("grouping", "batch"), found.get("method", "identity")
        tags = keys.section("train_env_manager").get("tags")
        # All trajectories have the same tag, or each tag would need its own statistics.
        if grouping == "tags" and isinstance(tags, list) and len(tags) == 1:
            grouping = "batch"
        elif grouping not in ("batch", "traj_group_id"):
            keys.refuse(
                f"reward_normalization.grouping {grouping!r:.80} has no counterpart: set it to traj_group_id or batch"
            )
        if method not in _METHODS:
            keys.refuse(
                f"reward_normalization.method {method!r:.80} has no counterpart: set it to mean_std, mean or identity"
            )
        over = "batch" if grouping == "batch" else "group"
        derived = {
            "norm_mean_type": None if method == "identity" else over,
            "norm_std_type": over if method in ("mean_std", "asym_clip") else None,
        }
        norms = {name: over if found.get(name) == "group" else found.get(name) or derived[name] for name in names}
        if over == "group" and norms["norm_std_type"] == "batch" and keys.size("rollout.n_samples_per_prompt") == 1:
            keys.refuse(
                "reward_normalization.norm_std_type batch has no counterpart for groups of one trajectory, to which "
                "ROLL gives no advantage: set grouping to batch, or train_env_manager.group_size to 2 or more"
            )
    elif keys.values.get("adv_estimator") == "grpo":
        keys.note("has no effect in ROLL either: grpo sets it to group", *names)
        norms = dict.fromkeys(names, "group")
    else:
        norms = {name: keys.values.get(name) for name in names}
    for name, kind in norms.items():
        if kind not in (None, "group", "batch"):
            keys.refuse(f"{name} {kind!r:.80} has no counterpart: set it to group, batch or null")
    return norms


def _rewards_of_steps(keys: CombinedKeys, chosen: Mapping[str, Any]) -> None:
    """Advantages of samples that are steps."""
    key = "adv_estimator"
    estimator, method = keys.values[key], keys.section("reward_normalization").get("method")
    given = {name: keys.number(name) for name in _OF_STEPS}
    rewards: dict[str, Any] = {name: _OF_STEPS[name] if given[name] is None else given[name] for name in _OF_STEPS}
    if estimator != "gigpo":
        rewards |= {"step_reward_weight": None, "episode_reward_weight": None}
        keys.note("has no effect without adv_estimator gigpo", "step_reward_weight", "episode_reward_weight")
    if estimator in ("grpo", "reinforce"):
        # ROLL gives a step the reward of this step alone.
        rewards["step_reward_gamma"] = 0.0
        keys.note("has no effect without adv_estimator step_reinforce or gigpo", "step_reward_gamma")
    of_states = {
        "state_norm_mean_type": "group" if method in ("mean", "mean_std", "asym_clip") else None,
        "state_norm_std_type": "group" if method in ("mean_std", "asym_clip") else None,
    }
    _own_function(keys, {**chosen, **rewards, **of_states}, key, "step_advantages")


def _own_function(keys: CombinedKeys, chosen: Mapping[str, Any], key: str, function: str | None = None) -> None:
    function = function or ("agentic_advantages" if trains_agents(keys) else "advantages")
    keys.set("rollout.custom_reward_post_process_path", f"{_FUNCTIONS}.{function}", key)
    for name, value in chosen.items():
        normalizes = name.startswith(("norm_", "state_norm_")) and "reward_normalization" in keys.values
        source = "reward_normalization" if normalizes else name
        keys.set(f"rollout.custom_args.{name}", value, *keys.given(source, key)[:1])


def _critic(keys: CombinedKeys, chosen: Mapping[str, Any]) -> None:
    """Advantages of a critic (GAE)."""
    key = "adv_estimator"
    keys.set("algorithm.advantage_estimator", "ppo", key)
    if "reward_pretrain" in keys.values and keys.values["reward_pretrain"] != keys.values.get("pretrain"):
        keys.set("algorithm.critic_load", keys.values["reward_pretrain"], "reward_pretrain")
    else:
        keys.note("has no effect: the critic starts from pretrain", "reward_pretrain")
    keys.set("algorithm.normalize_advantages", chosen["whiten_advantages"], "whiten_advantages", key)
    for name in ("gamma", "lambd"):
        if (value := keys.number(name)) is not None:
            keys.set(f"algorithm.{name}", value, name)
    # Without a clip in ROLL, the critic's values may move as far as they want.
    clip = keys.number("value_clip") or 1e6
    keys.set("algorithm.value_clip", clip, "value_clip", key)
    if not chosen["advantage_clip"]:
        keys.note("has no effect: it is null", "advantage_clip")
    if chosen["reward_clip"] or any(chosen[name] for name in ("norm_mean_type", "norm_std_type")):
        _own_function(keys, {**chosen, "whiten_advantages": False, "advantage_clip": None}, key)
    else:
        keys.note("has no effect: it is null", "reward_clip", "norm_mean_type", "norm_std_type")


def masks(keys: CombinedKeys) -> None:
    """Samples that are not trained."""
    thresholds = ("difficulty_low_threshold", "difficulty_high_threshold")
    names = ("max_len_mask", "difficulty_mask")
    if trains_agents(keys):
        keys.note("has no effect in ROLL's agentic pipeline", *names, *thresholds)
        return
    too_long, difficult = (keys.switch(name) or False for name in names)
    if too_long or difficult:
        keys.set("algorithm.count_removed_samples", False, *keys.given(*names))
    if difficult:
        keys.set("rollout.rollout_sample_filter_path", f"{_FUNCTIONS}.mask", "difficulty_mask")
        keys.set("rollout.custom_args.difficulty_mask", True, "difficulty_mask")
        keys.set("rollout.custom_args.max_len_mask", too_long, *names)
        for name, default in zip(thresholds, (0.0, 1.0), strict=True):
            limit = keys.number(name)
            keys.set(f"rollout.custom_args.{name}", default if limit is None else limit, name, "difficulty_mask")
        return
    keys.note("has no effect: it is false", "difficulty_mask")
    keys.note("has no effect without difficulty_mask", *thresholds)
    if too_long:
        keys.set("rollout.rollout_sample_filter_path", "miles_async.filters.mask_truncated", "max_len_mask")
    else:
        keys.note("has no effect: it is false", "max_len_mask")


def loss(keys: CombinedKeys) -> None:
    """The loss of the policy, and how far a batch may move the policy."""
    worker, key = "actor_train.worker_cls", "actor_train.pg_variant"
    weights = [f"actor_train.topr_{kind}_weight" for kind in ("positive", "negative")]
    variant = keys.values.get(key)
    if _PG_WORKER not in str(keys.values.get(worker)):
        keys.note("has no effect: the learner computes the loss of policy_objective", worker)
        keys.note(f"has no effect in ROLL either, unless worker_cls is a class of {_PG_WORKER}", key, *weights)
        if trains_agents(keys):
            keys.note("has no effect in ROLL's agentic pipeline, which reads ratio_type", "importance_sampling")
        elif "importance_sampling" in keys.values:
            rule = converts("algorithm.policy_objective", {"token": "ppo", "seq": "gspo"})
            keys.translator.follow(rule, "importance_sampling", keys.values["importance_sampling"])
        _clipping(keys)
        return
    found = _VARIANTS.get(variant) if isinstance(variant, str) else None
    if found is None:
        keys.refuse(f"{key} {variant!r:.80} is not a loss of {worker}: set it to {', '.join(_VARIANTS)}")
        keys.note("depends on pg_variant", *weights, *_OF_PPO)
        return
    for setting, value in found.items():
        keys.set(f"algorithm.{setting}", value, worker, key)
    if "loss_agg_mode" not in keys.values:
        # ROLL's default, whatever the paper of the objective averages.
        keys.set("algorithm.loss_aggregation", "sequence_mean", worker, key)
    if variant == "topr":
        for name in keys.given(*weights):
            keys.set(f"algorithm.{name.rpartition('.')[2]}", keys.number(name), name)
    else:
        keys.note("has no effect without pg_variant topr", *weights)
    if variant == "ppo":
        keys.note("has no effect in ROLL either with this worker_cls", "importance_sampling")
        _clipping(keys)
    else:
        keys.note("has no effect without pg_variant ppo", *_OF_PPO)


def coefficients(keys: CombinedKeys) -> None:
    """Factors of parts of the loss."""
    factor = keys.number("rl_loss_coef")
    if factor == 1:
        keys.note("has no effect at 1", "rl_loss_coef")
    if factor == 0:
        keys.refuse(
            "rl_loss_coef 0 multiplies the whole loss of the policy, so that ROLL trains nothing: set it to 1, and for "
            "TOPR actor_train.pg_variant to topr and actor_train.worker_cls to "
            "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
        )
    elif factor not in (None, 1):
        keys.refuse(
            f"rl_loss_coef {factor:g} has no counterpart, because the loss has no factor: set it to 1, and "
            "learning_rate of training_args instead"
        )


def _clipping(keys: CombinedKeys) -> None:
    ranges = ("pg_clip_low", "pg_clip_high")
    common = keys.number("pg_clip")
    if keys.switch("use_pg_clip_range"):
        for name, setting in zip(ranges, ("eps_clip", "eps_clip_high"), strict=True):
            limit = keys.number(name)
            keys.set(f"algorithm.{setting}", _PG_CLIP if limit is None else limit, name, "use_pg_clip_range")
        if not keys.switch("dual_clip_loss"):
            keys.note("has no effect with use_pg_clip_range", "pg_clip")
    else:
        keys.note("has no effect without use_pg_clip_range", *ranges)
        keys.note("has no effect: it is false", "use_pg_clip_range")
        if common is not None:
            keys.set("algorithm.eps_clip", common, "pg_clip")
        elif keys.values.get("importance_sampling") == "seq" and not trains_agents(keys):
            # The default here would be that of the paper.
            keys.set("algorithm.eps_clip", _PG_CLIP, "importance_sampling")
    if keys.switch("dual_clip_loss"):
        key = "dual_clip_loss pg_clip" if common is not None else "dual_clip_loss"
        keys.set("algorithm.eps_clip_c", 1 + 2 * (_PG_CLIP if common is None else common), key)
    else:
        keys.note("has no effect: it is false", "dual_clip_loss")


def divergence(keys: CombinedKeys) -> None:
    """The KL loss, and the KL penalty on the reward of each token."""
    used = keys.switch("use_kl_loss")
    if used is not None:
        keys.set("algorithm.use_kl_loss", used, "use_kl_loss")
    if used:
        keys.set("algorithm.kl_loss_type", "low_var_kl", "use_kl_loss")
        keys.set("algorithm.kl_loss_coef", keys.number("kl_loss_coef") or 0.0, "use_kl_loss kl_loss_coef")
    else:
        keys.note("has no effect without use_kl_loss", "kl_loss_coef")
    of_penalty = ("init_kl_coef", "kl_penalty")
    if not keys.switch("add_token_level_kl"):
        keys.note("has no effect: it is false", "add_token_level_kl")
        keys.note("has no effect without add_token_level_kl", *of_penalty)
    elif keys.values.get("adv_estimator") != "gae" or used or keys.values.get("kl_penalty", "kl") != "kl":
        keys.refuse(
            "add_token_level_kl has a counterpart only with adv_estimator gae, kl_penalty kl and without use_kl_loss: "
            "set it to false, and use_kl_loss to true"
        )
    else:
        coefficient = keys.number("init_kl_coef")
        key = " ".join(name for name in ("add_token_level_kl", *of_penalty) if name in keys.values)
        keys.set("algorithm.kl_coef", 0.2 if coefficient is None else coefficient, key)
        keys.set("algorithm.kl_loss_type", "k1", key)


def correction(keys: CombinedKeys) -> None:
    """Weights of tokens by the ratio of the learner's probabilities to the engines'."""
    key = _CORRECTION
    found = keys.section(key)
    if not found:
        return
    weight = found.get("is_weight") or {}
    if not isinstance(weight, Mapping) or not isinstance(found.get("filters") or [], list):
        keys.refuse(f"{key} is wrong: write is_weight as a section, and filters as a list of sections")
        return
    if weight.get("enabled"):
        kind, bound = weight.get("weight_type", "token"), weight.get("upper_bound", 1.2)
        name = next((ours for theirs, ours in _WEIGHTS.items() if theirs == kind), None)
        if name is not None and bound is not None:
            keys.set("algorithm.off_policy_correction", name, key)
            keys.set("algorithm.tis_clip", bound, key)
        else:
            keys.refuse(
                f"{key}.is_weight has no counterpart: set weight_type to token, sequence or geometric, and upper_bound"
            )
    else:
        keys.set("algorithm.off_policy_correction", "none", key)


def tokens(keys: CombinedKeys) -> None:
    """What the learner changes of a batch before it trains it: the advantages of a critic are clipped, or tokens are
    left out by filters."""
    clip = keys.number("advantage_clip") if keys.values.get("adv_estimator") == "gae" else None
    filters = _filters(keys)
    key = " ".join(name for name, found in (("advantage_clip", clip), (_CORRECTION, filters)) if found)
    if key:
        keys.set("algorithm.rollout_data_postprocess_path", _POSTPROCESS, key)
        keys.set("rollout.custom_args.critic_advantage_clip", clip or None, key)
        keys.set("rollout.custom_args.train_infer_filters", filters, key)


def _filters(keys: CombinedKeys) -> list[Mapping[str, Any]]:
    """The filters of `train_infer_correction` that are enabled."""
    filters = keys.section(_CORRECTION).get("filters")
    listed = filters if isinstance(filters, list) else ()
    enabled = [one for one in listed if isinstance(one, Mapping) and one.get("enabled")]
    for one in enabled:
        if one.get("agg_type", "token") not in _LEVELS:
            keys.refuse(
                f"{_CORRECTION}.filters: agg_type {one['agg_type']!r:.80} is unknown: set it to {', '.join(_LEVELS)}"
            )
    return [{"level": one.get("agg_type", "token"), **_bands(keys, one)} for one in enabled]


def _bands(keys: CombinedKeys, one: Mapping[str, Any]) -> Mapping[str, list[float]]:
    """The limits of what a filter compares."""
    found = {}
    for ours, (theirs, default, low, high) in _BANDS.items():
        if one.get(f"{theirs}_enabled", default):
            band = [one.get(f"{theirs}_low", low), one.get(f"{theirs}_high", high)]
            if not all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in band):
                keys.refuse(f"{_CORRECTION}.filters: {theirs}_low and {theirs}_high are not numbers: write numbers")
            found[ours] = band
    return found

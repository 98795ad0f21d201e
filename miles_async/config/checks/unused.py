"""Notes on settings that have no effect, because another setting is not what they need.

Only a value that differs from the default is noted: a file that lists all settings says nothing about intentions. The
settings of the warm start, of the tiny model and of generated problems are left out: users turn these off by a flag
beside a file that sets them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from miles_async.config.fields import SETTINGS, Setting
from miles_async.config.generation import evaluates, generates_by_user, rollout_mode, serves_agents
from miles_async.config.losses import calls_tis_function, estimator_of, loss_aggregation, objective_name, objective_of
from miles_async.config.schema import RunConfig
from miles_async.losses.objectives.objective import OBJECTIVES
from miles_async.rewards.plugin import BOXED, REWARDS
from miles_async.section import Section


@dataclass(frozen=True, slots=True)
class Needs:
    """What settings need to have an effect."""

    settings: str
    """Their names, with spaces between them."""
    used: Callable[[RunConfig], bool]
    """Whether they have an effect."""
    condition: str
    """What that is, in words."""
    rows_choose: bool = False
    """Whether a row of `prompt_data` can choose it by naming another `rm_type` in its metadata."""


def _own_rewards(config: RunConfig) -> bool:
    """Whether code of the user or a server may return rewards of any form."""
    return config.rollout.custom_rm_path is not None or config.data.environment is not None or generates_by_user(config)


def _no_worker(config: RunConfig) -> bool:
    """Whether no worker of the rollout function takes the place of the pipeline's producer."""
    return not rollout_mode(config).keeps_groups


def _of_plugins() -> Iterator[Needs]:
    """The settings of plug-ins, which need the setting that selects one of the plug-ins with these settings."""
    for setting in SETTINGS.values():
        owners: dict[type[Section], list[str]] = {}
        for name, plugin in () if setting.plugins is None else setting.plugins.usable().items():
            if plugin.Settings is not None:
                owners.setdefault(plugin.Settings, []).append(name)
        for section, names in owners.items():
            used = partial(_selects, setting, names)
            rows_choose = setting.plugins is REWARDS
            yield Needs(" ".join(section.model_fields), used, _either(setting.name, names), rows_choose)


def _selects(setting: Setting, names: Sequence[str], config: RunConfig) -> bool:
    """Whether a setting names one of these plug-ins."""
    if setting.plugins is REWARDS:
        return _may_be(names, config)
    selected = objective_name(config.algorithm) if setting.plugins is OBJECTIVES else setting.value(config)
    return selected in names


def _may_be(rewards: Sequence[str], config: RunConfig) -> bool:
    """Whether the run may compute one of the rewards, apart from rows that choose it."""
    chosen = (config.rollout.rm_type or "").removeprefix(BOXED)
    return chosen in rewards or _own_rewards(config) or bool(config.rollout.eval_datasets or config.data.datasets)


def _either(setting: str, names: Iterable[str]) -> str:
    *others, last = names
    return f"{setting} {', '.join(others)} or {last}" if others else f"{setting} {last}"


_NO_WORKER = "a rollout function without a worker, because the worker generates the groups"
_DICTIONARIES = [name for name, reward in REWARDS.usable().items() if reward.may_be_dictionary]

NEEDS = (
    Needs(
        "gamma",
        lambda c: estimator_of(c.algorithm).discounts,
        "advantage_estimator ppo or reinforce_plus_plus",
    ),
    Needs(
        "lambd normalize_advantages critic_env_vars",
        lambda c: estimator_of(c.algorithm).trains_critic,
        "advantage_estimator ppo",
    ),
    Needs(
        "eps_clip eps_clip_high",
        lambda c: objective_of(c.algorithm).clip is not None,
        _either("policy_objective", (name for name, plugin in OBJECTIVES.usable().items() if plugin.clip is not None)),
    ),
    *_of_plugins(),
    Needs(
        "rewards_normalization",
        lambda c: estimator_of(c.algorithm).compares_samples,
        "an advantage_estimator that compares the samples of a group",
    ),
    Needs(
        "count_removed_samples",
        lambda c: loss_aggregation(c.algorithm) != "token_mean",
        "loss_aggregation sequence_mean, sequence_sum or constant",
    ),
    Needs("rejection_band", lambda c: c.algorithm.rejection_level is not None, "rejection_level"),
    Needs(
        "rejection_level rejection_veto",
        lambda c: not calls_tis_function(c.algorithm),
        "custom_tis_function_path unset, because the function weights all tokens",
    ),
    Needs(
        "off_policy_correction",
        lambda c: c.algorithm.off_policy_correction == "none" or not c.algorithm.use_rollout_logprobs,
        "use_rollout_logprobs turned off, because all weights are 1 otherwise",
    ),
    Needs(
        "custom_tis_function_path",
        lambda c: calls_tis_function(c.algorithm),
        "off_policy_correction other than none, or get_mismatch_metrics",
    ),
    Needs("opsm_delta", lambda c: c.algorithm.use_opsm, "use_opsm"),
    Needs(
        "rejection_level rejection_veto get_mismatch_metrics",
        lambda c: not c.algorithm.use_rollout_logprobs,
        "use_rollout_logprobs turned off, because the learner otherwise computes no log-probabilities before the step",
    ),
    Needs("overlong_penalty", lambda c: c.algorithm.overlong_buffer_len is not None, "overlong_buffer_len"),
    Needs("kl_loss_coef", lambda c: c.algorithm.use_kl_loss, "use_kl_loss"),
    Needs("kl_loss_type ref_load ref_env_vars", lambda c: c.keeps_reference, "use_kl_loss or kl_coef"),
    Needs(
        "min_lr",
        lambda c: c.learner.lr_decay_style != "constant",
        "lr_decay_style linear, cosine, inverse-square-root or WSD",
    ),
    Needs(
        "lr_decay_steps",
        lambda c: c.learner.lr_decay_style in ("linear", "cosine", "WSD"),
        "lr_decay_style linear, cosine or WSD",
    ),
    Needs("lr_wsd_decay_steps lr_wsd_decay_style", lambda c: c.learner.lr_decay_style == "WSD", "lr_decay_style WSD"),
    Needs(
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
        lambda c: c.learner.optimizer_cpu_offload,
        "optimizer_cpu_offload",
    ),
    Needs("mtp_loss_scaling_factor", lambda c: c.learner.enable_mtp_training, "enable_mtp_training"),
    Needs("lora_newest_each_turn", lambda c: c.learner.lora_rank > 0, "lora_rank"),
    Needs(
        "lora_alpha lora_dropout lora_target_modules lora_exclude_modules lora_type lora_load lora_merge "
        "experts_shared_outer_loras",
        lambda c: c.learner.lora_rank > 0,
        "lora_rank",
    ),
    Needs("lora_merge", lambda c: c.learner.save_hf is not None, "save_hf"),
    Needs("micro_batch_size", lambda c: not c.learner.use_dynamic_batch_size, "use_dynamic_batch_size turned off"),
    Needs(
        "max_tokens_per_microbatch_in_train sequence_length_round_in_train",
        lambda c: c.learner.use_dynamic_batching_in_train,
        "use_dynamic_batching_in_train",
    ),
    Needs("async_save save_keep", lambda c: c.learner.save is not None, "save"),
    Needs("checkpoint_checksums", lambda c: c.learner.save is not None or c.learner.load is not None, "save or load"),
    Needs("save_interval", lambda c: c.learner.save is not None or c.learner.save_hf is not None, "save or save_hf"),
    Needs("head_deadline_action", lambda c: c.rollout.head_deadline_seconds is not None, "head_deadline_seconds"),
    Needs("group_rm", _own_rewards, "custom_rm_path, because built-in rewards score one sample at a time"),
    Needs(
        "reward_key",
        partial(_may_be, _DICTIONARIES),
        f"rewards that are dictionaries: custom_rm_path, or {_either('rm_type', _DICTIONARIES)}",
        rows_choose=True,
    ),
    Needs(
        "eval_interval custom_eval_rollout_log_function_path",
        evaluates,
        "eval_size above 0, eval_datasets or eval_function_path",
    ),
    Needs(
        "generate_timeout_seconds",
        lambda c: serves_agents(c) or evaluates(c) or bool(c.rollout.rollout_sample_hook_path),
        "custom_generate_function_path, rollout_sample_hook_path, external generators or evaluations",
    ),
    Needs(
        "agent_port tool_call_parser reasoning_parser",
        serves_agents,
        "custom_generate_function_path or external generators",
    ),
    Needs(
        "tool_max_turns tool_search_corpus",
        generates_by_user,
        "custom_generate_function_path",
    ),
    Needs(
        "profile_step_start profile_step_end profile_dir",
        lambda c: c.debug.use_pytorch_profiler,
        "use_pytorch_profiler",
    ),
    Needs("trace_max_bytes", lambda c: c.observability.trace, "trace"),
    Needs(
        "wandb_key wandb_host wandb_team wandb_mode wandb_project wandb_group",
        lambda c: c.observability.use_wandb,
        "use_wandb",
    ),
    Needs(
        "wandb_always_use_train_step",
        lambda c: c.observability.use_wandb or c.observability.use_tensorboard,
        "use_wandb or use_tensorboard",
    ),
    Needs("sglang_router_api_key", lambda c: c.engine.sglang_router_ip is not None, "sglang_router_ip"),
    Needs("fault_seed", lambda c: bool(c.faults.inject_faults), "inject_faults"),
    Needs(
        "policy_objective off_policy_correction entropy_coef custom_tis_function_path "
        "custom_pg_loss_reducer_function_path rejection_level rejection_veto use_opsm get_mismatch_metrics",
        lambda c: c.learner.loss_type == "policy_loss",
        "loss_type policy_loss",
    ),
    Needs(
        "overlong_buffer_len use_kl_loss kl_coef",
        lambda c: c.learner.loss_type != "sft_loss",
        "loss_type policy_loss or custom_loss",
    ),
    Needs("custom_loss_function_path", lambda c: c.learner.loss_type == "custom_loss", "loss_type custom_loss"),
    Needs(
        "custom_advantage_function_path custom_reward_post_process_path custom_megatron_before_log_prob_hook_path "
        "rollout_data_postprocess_path",
        lambda c: c.learner.loss_type != "sft_loss",
        "loss_type policy_loss or custom_loss",
    ),
    Needs(
        "custom_reward_post_process_path",
        lambda c: c.rollout.custom_convert_samples_to_train_data_path is None,
        "custom_convert_samples_to_train_data_path unset",
    ),
    Needs("environment_python", lambda c: c.data.environment is not None, "environment"),
    Needs(
        "windowed_fifo_ratio over_sampling_batch_size over_sampling_filter_path rollout_all_samples_process_path "
        "dynamic_sampling_filter_path head_deadline_seconds adaptive_concurrency skip_rollout_enable "
        "skip_async_rollout_enable",
        _no_worker,
        _NO_WORKER,
    ),
    Needs("dataset_sampling", lambda c: c.data.dataset_sampling != "difficulty" or _no_worker(c), _NO_WORKER),
    Needs("difficulty_band", lambda c: c.data.dataset_sampling == "difficulty", "dataset_sampling difficulty"),
)


def unused_settings(config: RunConfig) -> Iterator[str]:
    """One sentence for the settings that lack the same thing."""
    for needs in NEEDS:
        names = [name for name in needs.settings.split() if _is_changed(config, name)]
        if names and not needs.used(config):
            have, need = ("has", "it needs") if len(names) == 1 else ("have", "they need")
            rows = needs.rows_choose and bool(config.data.prompt_data or config.data.datasets)
            exception = ", except on rows whose metadata name another rm_type" if rows else ""
            yield f"{_listed(names)} {have} no effect{exception}: {need} {needs.condition}"


def has_effect(config: RunConfig, name: str) -> bool:
    """Whether no other setting of the run keeps a setting from having an effect."""
    return all(needs.used(config) for needs in NEEDS if name in needs.settings.split())


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _is_changed(config: RunConfig, name: str) -> bool:
    """Whether the run, or one of its data sets, sets another value than the default."""
    setting = SETTINGS[name]
    of_data_sets = (dataset.model_dump().get(name) for dataset in config.data.datasets.values())
    return bool(setting.value(config) != setting.default) or any(value is not None for value in of_data_sets)

"""Settings that would mean something else than they say are refused, and those without an effect are noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.batching.advantages import ScoredSample, weight_samples
from miles_async.config.checks import notes, problems, unused
from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig
from miles_async.config.table import table
from miles_async.losses.policy import PolicyLossSettings
from miles_async.rollout import fully_async
from miles_async.types import Sample
from tests.configuration import run_config

RUNNABLE: dict[str, Any] = {
    "reasoning_gym_task": "chain_sum",
    "rm_type": "exact",
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8,
    "rollout_skip_special_tokens": True,
}


def config(**settings: Any) -> RunConfig:
    return run_config(**RUNNABLE | settings)


def refusals(**settings: Any) -> list[str]:
    return problems(config(**settings), "train.py")


def noted(**settings: Any) -> list[str]:
    return notes(config(**settings), "train.py")


@pytest.mark.parametrize(
    "settings, low, high, aggregation",
    [
        ({}, 0.2, 0.2, "sequence_mean"),
        ({"advantage_estimator": "gspo"}, 3e-4, 4e-4, "sequence_mean"),
        ({"policy_objective": "gspo"}, 3e-4, 4e-4, "sequence_mean"),
        ({"advantage_estimator": "cispo"}, 1.0, 0.2, "token_mean"),
        ({"policy_objective": "gmpo"}, 0.4, 0.4, "sequence_mean"),
        ({"policy_objective": "gspo", "eps_clip": 1e-3}, 1e-3, 1e-3, "sequence_mean"),
        ({"policy_objective": "gspo", "eps_clip_high": 1e-3}, 3e-4, 1e-3, "sequence_mean"),
        ({"policy_objective": "gspo", "loss_aggregation": "constant"}, 3e-4, 4e-4, "constant"),
        ({"loss_aggregation": "sequence_sum"}, 0.2, 0.2, "sequence_sum"),
        ({"eps_clip": 0.1}, 0.1, 0.1, "sequence_mean"),
        ({"eps_clip_high": 0.28}, 0.2, 0.28, "sequence_mean"),
    ],
)
def test_the_clip_range_and_the_mean_are_those_of_the_paper_unless_they_are_set(
    settings: dict[str, Any], low: float, high: float, aggregation: str
) -> None:
    """GSPO: arXiv 2507.18071, section 5.1. CISPO: 2506.13585, section 3.1. GMPO: 2507.20673, section 4."""
    algorithm = config(**settings).algorithm
    loss = PolicyLossSettings.from_algorithm(algorithm)
    assert (loss.eps_clip, loss.eps_clip_high) == (low, high)
    samples = [Sample(tokens=[0] * (n + 1), response_length=n, rollout_log_probs=[0.0] * n) for n in (1, 3)]
    scored = [ScoredSample(sample, 0, number, 1.0) for number, sample in enumerate(samples)]
    weights = {"token_mean": [1.0, 1.0], "sequence_mean": [2.0, 2 / 3], "constant": [0.25, 0.25]}
    weights |= {"sequence_sum": [2.0, 2.0]}
    assert [one.loss_weight for one in weight_samples(scored, algorithm, 8)] == weights[aggregation]


def test_the_table_at_start_up_names_the_objective_with_its_clip_range() -> None:
    [row] = [line for line in table(config(advantage_estimator="gspo"), "train.py").splitlines() if "clip" in line]
    assert row.split() == "objective gspo clip range -0.0003/+0.0004, sequence_mean of token losses".split()
    assert "objective" not in table(config(loss_type="sft_loss"), "train.py")


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"policy_objective": "gspo", "eps_clip": 0.2}, "eps_clip 0.2 is far from the 0.0003 that the paper of"),
        ({"policy_objective": "gspo", "eps_clip_high": 0.28}, "eps_clip_high 0.28 is far from the 0.0004 that"),
        ({"policy_objective": "gspo", "loss_aggregation": "token_mean"}, "which uses sequence_mean (arXiv 2507.18071"),
    ],
)
def test_a_value_that_is_far_from_the_paper_is_noted(settings: dict[str, Any], said: str) -> None:
    [note] = noted(**settings)
    assert said in note


def test_values_near_the_paper_are_not_noted() -> None:
    assert noted(policy_objective="gspo", eps_clip=2e-3, eps_clip_high=3e-3) == []
    assert noted(policy_objective="cispo", eps_clip=1.0, eps_clip_high=5.0) == []
    assert noted(eps_clip=0.01, eps_clip_high=0.9, loss_aggregation="constant") == []
    assert noted(policy_objective="dppo", off_policy_correction="none", loss_aggregation="constant") == []


PPO = {"advantage_estimator": "ppo"}


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 9, "lr_warmup_steps": 10},
            "lr_decay_steps 9 ends the decay within the lr_warmup_steps 10",
        ),
        ({"eps_clip": 5}, "eps_clip 5 sets no lower bound, because 1 - eps_clip is negative"),
        ({"lr": 1e-6, "min_lr": 1e-5, "lr_decay_style": "linear"}, "min_lr 1e-05 is above lr 1e-06, so the learning"),
        ({**PPO, "lr": 1e-5, "min_lr": 1e-6, "critic_lr": 1e-7, "lr_decay_style": "WSD"}, "is above critic_lr 1e-07"),
        ({**PPO, "num_critic_only_steps": 10, "num_rollout": 10}, "none of num_rollout 10 to train the policy: set it"),
        ({"rollout_temperature": 0}, "rollout_temperature 0 makes the 8 samples of a prompt equal"),
        ({"rollout_stop": ["END", ""]}, "rollout_stop has an empty text, with which every response ends"),
        ({"rollout_stop_token_ids": [3, -5]}, "rollout_stop_token_ids has -5, not a token of the model"),
        (
            {"save_hf": "out-{rollout_id}-{step}"},
            "has the placeholder {step}, but only {rollout_id} is replaced",
        ),
        (
            {"save_hf": "out-{rollout_id:04d}"},
            "has the placeholder {rollout_id:04d}, but only {rollout_id} is replaced",
        ),
        (
            {"save": "out-{rollout_id}"},
            "save out-{rollout_id} has the placeholder {rollout_id}, but nothing is replaced",
        ),
        ({"save_debug_rollout_data": "a-{rollout_id}-{step}"}, "save_debug_rollout_data a-{rollout_id}-{step} has the"),
        ({"load_debug_rollout_data": "{rollout}.pt"}, "load_debug_rollout_data {rollout}.pt has the placeholder"),
        ({"save_debug_rollout_data": "a.st"}, "every batch saved to save_debug_rollout_data a.st would overwrite"),
        ({"prompt_template": "Question:"}, "prompt_template 'Question:' has no placeholder: add {question}"),
        (
            {"use_pytorch_profiler": True, "profile_step_start": 15},
            "profile_step_end 12 is not after profile_step_start 15, so nothing is profiled: set profile_step_end to",
        ),
    ],
)
def test_a_setting_that_would_mean_something_else_is_refused(settings: dict[str, Any], said: str) -> None:
    [sentence] = refusals(**settings)
    assert said in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {"eps_clip": 1},
        {"eps_clip": 5, "policy_objective": "gmpo"},
        {"lr": 1e-6, "min_lr": 1e-6, "lr_decay_style": "linear"},
        {**PPO, "num_critic_only_steps": 9, "num_rollout": 10},
        {"rollout_temperature": 0, "debug_rollout_only": True},
        {"rollout_temperature": 0, "custom_generate_function_path": "my.generate"},
        {"rollout_temperature": 0, "rollout_function_path": "my.rollout"},
        {**PPO, "rollout_temperature": 0, "n_samples_per_prompt": 1},
        {"save_debug_rollout_data": "a.st", "num_rollout": 1},
        {"profile_step_start": 5},
        {"use_pytorch_profiler": True, "profile_step_start": 5, "profile_step_end": 6},
    ],
)
def test_the_neighbours_of_these_settings_are_accepted(settings: dict[str, Any]) -> None:
    assert refusals(**settings) == []


def test_stop_tokens_are_ids_of_the_checkpoint(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 100, **shape}))
    checkpoint = {"hf_checkpoint": str(tmp_path)}
    assert refusals(**checkpoint, rollout_stop_token_ids=[0, 99]) == []
    assert refusals(**checkpoint, rollout_stop_token_ids=[100]) == [
        "rollout_stop_token_ids has 100, not a token of the model: set ids from 0 to 99"
    ]


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"rollout_temperature": 0, "custom_generate_function_path": "my.f"},
            "rollout_temperature 0 makes sampling greedy",
        ),
        ({**PPO, "rollout_temperature": 0, "n_samples_per_prompt": 1}, "rollout_temperature 0 makes sampling greedy"),
        ({"lr_warmup_steps": 11, "num_rollout": 10}, "never reaches its peak, because lr_warmup_steps is 11"),
        ({"load_debug_rollout_data": "a.pt"}, "every rollout trains on the same batch, a.pt: add {rollout_id}"),
        (
            {"use_pytorch_profiler": True, "profile_step_start": 10, "profile_step_end": 11, "num_rollout": 10},
            "profiles nothing, because profile_step_start 10 is not below num_rollout 10",
        ),
        (
            {"apply_chat_template_kwargs": {"enable_thinking": "no"}},
            "apply_chat_template_kwargs sets enable_thinking to the text 'no': for a switch, write true or false",
        ),
        ({"group_rm": True}, "group_rm has no effect: it needs custom_rm_path"),
        ({"reward_key": "acc"}, "reward_key has no effect: it needs rewards that are dictionaries"),
        ({"use_kl_loss": True}, "does not train on it, because kl_loss_coef is 0: set kl_loss_coef"),
        ({"rollout_skip_special_tokens": False}, "responses end with a special token: set rollout_skip_special_tokens"),
        ({"overlong_penalty": 0.5}, "overlong_penalty has no effect: it needs overlong_buffer_len"),
        (
            {"min_lr": 1e-7, "lr_decay_style": "constant"},
            "min_lr has no effect: it needs lr_decay_style linear, cosine",
        ),
        ({"gamma": 0.9}, "gamma has no effect: it needs advantage_estimator ppo or reinforce_plus_plus"),
        ({"lambd": 0.9}, "lambd has no effect: it needs advantage_estimator ppo"),
        ({"loss_type": "sft_loss", "entropy_coef": 0.1}, "entropy_coef has no effect: it needs loss_type policy_loss"),
    ],
)
def test_a_setting_without_an_effect_is_noted(settings: dict[str, Any], said: str) -> None:
    [note] = noted(**settings)
    assert said in note


@pytest.mark.parametrize(
    "settings",
    [
        {"rm_type": "dapo"},
        {"rm_type": None, "custom_rm_path": "my.rm", "group_rm": True, "reward_key": "acc"},
        {"overlong_buffer_len": 4, "overlong_penalty": 0.5},
        {**PPO, "gamma": 0.9, "lambd": 0.9},
        {"lr_decay_style": "cosine", "min_lr": 1e-7},
        {"kl_loss_coef": 0.0, "wandb_mode": "online"},
        {"kl_loss_coef": 0.1, "use_kl_loss": True},
        {"rollout_function_path": "my.rollout", "tool_max_turns": 3, "reward_key": "acc", "rm_url": "http://x"},
        {"eval_datasets": {"aime": {"path": "aime.jsonl", "rm_type": "dapo"}}, "reward_key": "acc"},
    ],
)
def test_a_setting_with_an_effect_or_its_default_is_not_noted(settings: dict[str, Any]) -> None:
    assert noted(**settings) == []


@pytest.mark.parametrize("setting", [{"reward_key": "acc"}, {"rm_url": "http://x"}])
def test_rows_that_choose_their_reward_are_excepted_from_the_note(tmp_path: Path, setting: dict[str, Any]) -> None:
    """A row may name `dapo` or `remote_rm` in its metadata, and the run's `reward_key` and `rm_url` then apply."""
    data = {"reasoning_gym_task": None, "prompt_data": str(tmp_path / "rows.jsonl")}
    [note] = noted(**data, **setting)
    assert "has no effect, except on rows whose metadata name another rm_type: it needs" in note


IN_RANGE = {"dataset_sampling": "difficulty", "eps_clip_c": 3.0, "rejection_veto": 0.5, "off_policy_correction": "tis"}


def another_value(name: str) -> Any:
    setting = SETTINGS[name]
    if name in IN_RANGE:
        return IN_RANGE[name]
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    if dict in setting.kinds:
        return {"a": "b"}
    if bool in setting.kinds:
        return not setting.default
    if list in setting.kinds:
        return ["other"] if setting.element is str else [0.1, 9.0]
    if str in setting.kinds:
        return "other"
    return (
        1
        if setting.default is None
        else setting.default / 2 or 0.125
        if float in setting.kinds
        else setting.default + 16
    )


SUPERVISED = {"loss_type": "sft_loss"}
WHERE_UNUSED: dict[str, dict[str, Any]] = {
    "grpo_std_normalization": {"advantage_estimator": "reinforce_plus_plus"},
    "eps_clip eps_clip_high": {"policy_objective": "sapo"},
    "eps_clip_c": {"policy_objective": "sapo"},
    "count_removed_samples": {"loss_aggregation": "token_mean"},
    "rewards_normalization": {"advantage_estimator": "reinforce_plus_plus"},
    "rejection_level rejection_veto": {
        "custom_tis_function_path": "losses_of_users.truncated",
        "off_policy_correction": "tis",
    },
    "custom_tis_function_path": {"off_policy_correction": "none"},
    "rejection_level rejection_veto get_mismatch_metrics": {"use_rollout_logprobs": True},
    "off_policy_correction": {"use_rollout_logprobs": True},
    "tis_clip tis_clip_low": {"off_policy_correction": "none"},
    "prompt_template reasoning_gym_settings": {"reasoning_gym_task": None},
    "min_lr": {"lr_decay_style": "constant"},
    "lr_decay_steps": {"lr_decay_style": "constant"},
    "micro_batch_size": {},
    "generate_timeout_seconds": {"eval_size": 0},
    "custom_reward_post_process_path": {"custom_convert_samples_to_train_data_path": "my.conversion"},
}


@fully_async(keeps_groups=True)
def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    return []


WORKER = {"rollout_function_path": f"{__name__}.rollout"}


@pytest.mark.parametrize("needs", unused.NEEDS, ids=lambda needs: needs.settings.split()[0])
def test_each_setting_of_the_table_is_noted_where_it_is_not_used(needs: unused.Needs) -> None:
    supervised = "policy_loss" in needs.condition
    worker = "without a worker" in needs.condition
    base = SUPERVISED if supervised else WORKER if worker else WHERE_UNUSED.get(needs.settings, {})
    for name in needs.settings.split():
        run = config(**base | {name: another_value(name)})
        assert any(note.startswith(f"{name} has no effect") for note in unused.unused_settings(run)), name

"""The parts of ROLL's objective that several keys determine together."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.config.translation import Outcome, translate

OWN = "rollout.custom_reward_post_process_path"


def outcome(**keys: Any) -> Outcome:
    return translate({"actor_train": {}, **keys}, "ROLL")


def settings(**keys: Any) -> dict[str, Any]:
    found = outcome(**keys)
    assert found.problems == []
    return {name: one.value for name, one in found.translation.items()}


def algorithm(**keys: Any) -> dict[str, Any]:
    return {
        name.removeprefix("algorithm."): value
        for name, value in settings(**keys).items()
        if name.startswith("algorithm.")
    }


def test_grpo_needs_no_function_without_clipping_and_whitening() -> None:
    assert settings(adv_estimator="grpo", whiten_advantages=False, reward_clip=None) == {
        "algorithm.advantage_estimator": "grpo"
    }


@pytest.mark.parametrize("keys", [{"whiten_advantages": True}, {"reward_clip": 5}, {"advantage_clip": 1.0}])
def test_grpo_with_clipping_or_whitening_normalizes_groups_in_a_function(keys: dict[str, Any]) -> None:
    found = settings(adv_estimator="grpo", **keys)
    assert found[OWN] == "miles_async.compat.roll.advantages.advantages"
    assert found["rollout.custom_args.norm_mean_type"] == found["rollout.custom_args.norm_std_type"] == "group"
    [(name, value)] = keys.items()
    assert found[f"rollout.custom_args.{name}"] == value


def test_reinforce_uses_rewards_as_the_file_normalizes_them() -> None:
    found = settings(adv_estimator="reinforce", norm_mean_type="batch")
    assert found["rollout.custom_args.norm_mean_type"] == "batch"
    assert found["rollout.custom_args.norm_std_type"] is None


MAZE = dict.fromkeys(("env_type", "max_steps", "max_tokens_per_step", "agent_system_template", "agent_template"), 1)
AGENTS = {"custom_envs": {"Maze": MAZE}, "train_env_manager": {"tags": ["Maze"]}}


@pytest.mark.parametrize(
    "method, grouping, mean, std",
    [
        ("mean_std", "traj_group_id", "group", "group"),
        ("mean", "batch", "batch", None),
        ("mean", "tags", "batch", None),
        ("identity", "batch", None, None),
    ],
)
def test_agents_normalize_rewards_by_their_own_section(
    method: str, grouping: str, mean: str | None, std: str | None
) -> None:
    normalization = {"method": method, "grouping": grouping}
    found = settings(adv_estimator="reinforce", whiten_advantages=True, reward_normalization=normalization, **AGENTS)
    kinds = [found[f"rollout.custom_args.norm_{part}_type"] for part in ("mean", "std")]
    assert kinds == [mean, std]


def test_a_critic_estimates_advantages_with_gae() -> None:
    keys = {"gamma": 1, "lambd": 0.95, "whiten_advantages": True, "pretrain": "a", "reward_pretrain": "b"}
    assert algorithm(adv_estimator="gae", **keys) == {
        "advantage_estimator": "ppo",
        "critic_load": "b",
        "normalize_advantages": True,
        "gamma": 1,
        "lambd": 0.95,
        "value_clip": 1e6,
    }


def test_dual_clip_bounds_ratios_at_one_and_twice_the_clip_range() -> None:
    assert algorithm(dual_clip_loss=True, pg_clip=0.3) == {"eps_clip": 0.3, "eps_clip_c": 1.6}
    assert algorithm(dual_clip_loss=True) == {"eps_clip_c": 1.4}


def test_a_clip_range_has_two_limits() -> None:
    found = algorithm(use_pg_clip_range=True, pg_clip=0.1, pg_clip_high=0.28)
    assert found == {"eps_clip": 0.2, "eps_clip_high": 0.28}


def test_the_ratio_of_a_sequence_has_rolls_clip_range() -> None:
    assert algorithm(importance_sampling="seq") == {"policy_objective": "gspo", "eps_clip": 0.2}


def test_the_kl_loss_has_rolls_estimator() -> None:
    found = algorithm(use_kl_loss=True, kl_loss_coef=0.01, init_kl_coef=0.2)
    assert found == {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.01}


def test_a_kl_penalty_needs_a_critic() -> None:
    assert algorithm(adv_estimator="gae", add_token_level_kl=True, init_kl_coef=0.1)["kl_coef"] == 0.1
    [sentence] = outcome(adv_estimator="grpo", add_token_level_kl=True).problems
    assert sentence.startswith("add_token_level_kl has a counterpart only with adv_estimator gae")


def test_weights_and_filters_of_tokens_are_a_correction() -> None:
    weight = {"enabled": True, "weight_type": "token", "upper_bound": 1.5}
    band = {"enabled": True, "agg_type": "geometric", "ratio_enabled": True, "ratio_low": 0.9, "ratio_high": 1.1}
    assert algorithm(train_infer_correction={"is_weight": weight, "filters": [band, {"enabled": False}]}) == {
        "off_policy_correction": "tis",
        "tis_clip": 1.5,
        "rejection_level": "geometric",
        "rejection_band": [0.9, 1.1],
    }


@pytest.mark.parametrize(
    "keys",
    [
        {"adv_estimator": "gigpo"},
        {"advantage_clip": 1.0},
        {"adv_estimator": "reinforce", "gamma": 0.9},
        {"adv_estimator": "gae", "advantage_clip": 1.0},
        {"adv_estimator": "reinforce", "norm_mean_type": "running"},
        {"adv_estimator": "reinforce", "reward_clip": -1},
        {"train_infer_correction": {"filters": [{"enabled": True, "diff_enabled": True}]}},
        {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "segment"}}},
        {"track_with": "swanlab"},
        {"track_with": ["wandb"]},
        {"rollout_mock": {"enable": True, "mode": "replay"}},
        {"max_steps": -1},
        {"rewards": {"a": {}}, "actor_train": {"data_args": {"file_name": ["x"], "domain_interleave_probs": {"b": 1}}}},
    ],
)
def test_what_has_no_counterpart_is_refused(keys: dict[str, Any]) -> None:
    problems = outcome(**keys).problems
    assert problems
    for sentence in problems:
        assert any(word in sentence for word in ("set ", "write", "remove", "has a counterpart only")), sentence


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_run_reports_to_the_tracker_of_the_file(tracker: str) -> None:
    found = settings(track_with=tracker, tracker_kwargs={"project": "roll", "name": "mine", "log_dir": "/logs"})
    of_wandb = {"observability.wandb_project": "roll"} if tracker == "wandb" else {}
    assert found == {f"observability.use_{tracker}": True, **of_wandb}


@pytest.mark.parametrize("mode, setting", [("dump", "save"), ("mock", "load")])
def test_recordings_are_debug_data(mode: str, setting: str) -> None:
    found = settings(rollout_mock={"enable": True, "mode": mode, "dump_dir": "/dumps"})
    assert found == {f"debug.{setting}_debug_rollout_data": "/dumps/{rollout_id}.safetensors"}
    assert settings(rollout_mock={"enable": False, "mode": mode}) == {}


def test_one_batch_ahead_is_a_bound_on_staleness() -> None:
    found = settings(async_generation_ratio=1.5)
    assert (found["rollout.schedule"], found["rollout.max_weight_staleness"]) == ("fully_async", 2)
    assert settings(async_generation_ratio=0) == {"rollout.schedule": "synchronous"}


def test_a_validation_set_is_evaluated_with_its_own_sampling() -> None:
    sampling = {"temperature": 0.6, "top_p": 0.6, "top_k": 50, "num_return_sequences": 4}
    validation = {"data_args": {"file_name": ["data/aime.jsonl"]}, "generating_args": sampling}
    found = settings(validation=validation, eval_steps=20)
    assert found["rollout.eval_interval"] == 20
    assert found["rollout.eval_datasets"] == {
        "aime": {
            "path": "data/aime.jsonl",
            "label_key": "ground_truth",
            "n_samples": 4,
            "temperature": 0.6,
            "top_p": 0.6,
            "top_k": 50,
        }
    }

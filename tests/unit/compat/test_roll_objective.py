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


def test_a_group_of_one_trajectory_is_not_divided_by_the_deviation_of_the_batch() -> None:
    def found(grouping: str, size: int) -> list[str]:
        normalization = {"grouping": grouping, "method": "mean", "norm_std_type": "batch"}
        manager = {"tags": ["Maze"], "group_size": size}
        keys = {**AGENTS, "train_env_manager": manager, "reward_normalization": normalization}
        return outcome(adv_estimator="reinforce", **keys).problems

    [problem] = found("traj_group_id", 1)
    assert problem.startswith("reward_normalization.norm_std_type batch has no counterpart for groups of one")
    assert found("traj_group_id", 2) == found("batch", 1) == []


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
    assert found == {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.01}


def test_a_kl_penalty_needs_a_critic() -> None:
    assert algorithm(adv_estimator="gae", add_token_level_kl=True, init_kl_coef=0.1)["kl_coef"] == 0.1
    [sentence] = outcome(adv_estimator="grpo", add_token_level_kl=True).problems
    assert sentence.startswith("add_token_level_kl has a counterpart only with adv_estimator gae")


TOKENS = "miles_async.compat.roll.tokens.postprocess"


def test_weights_of_tokens_are_a_correction_and_filters_a_function() -> None:
    weight = {"enabled": True, "weight_type": "token", "upper_bound": 1.5}
    band = {"enabled": True, "agg_type": "geometric", "ratio_low": 0.9, "ratio_high": 1.1}
    both = {"enabled": True, "agg_type": "segment", "diff_enabled": True, "diff_low": -0.1}
    difference = {"enabled": True, "ratio_enabled": False, "diff_enabled": True}
    filters = [band, {"enabled": False}, both, difference]
    found = settings(train_infer_correction={"is_weight": weight, "filters": filters})
    assert found == {
        "algorithm.off_policy_correction": "tis",
        "algorithm.tis_clip": 1.5,
        "algorithm.rollout_data_postprocess_path": TOKENS,
        "rollout.custom_args.critic_advantage_clip": None,
        "rollout.custom_args.train_infer_filters": [
            {"level": "geometric", "ratio": [0.9, 1.1]},
            {"level": "segment", "ratio": [0.8, 1.2], "difference": [-0.1, 0.2]},
            {"level": "token", "difference": [-0.2, 0.2]},
        ],
    }


def test_the_advantages_of_a_critic_are_clipped_after_they_are_normalized() -> None:
    found = settings(adv_estimator="gae", whiten_advantages=True, advantage_clip=2.0, reward_clip=10)
    assert found["algorithm.normalize_advantages"] is True
    assert found["algorithm.rollout_data_postprocess_path"] == TOKENS
    assert found["rollout.custom_args.critic_advantage_clip"] == 2.0
    # This one clips the rewards of samples.
    assert found["rollout.custom_args.advantage_clip"] is None
    assert "algorithm.rollout_data_postprocess_path" not in settings(adv_estimator="grpo", advantage_clip=2.0)


PG_WORKERS = (
    "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
    "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
)


@pytest.mark.parametrize("worker", PG_WORKERS)
@pytest.mark.parametrize(
    "variant, expected",
    [
        ("vanilla", {"policy_objective": "reinforce"}),
        ("ppo", {"policy_objective": "ppo", "eps_clip": 0.3, "eps_clip_c": 1.6}),
        ("tis", {"policy_objective": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.0}),
        ("cispo", {"policy_objective": "cispo", "eps_clip": 0.1, "eps_clip_high": 0.1}),
        ("topr", {"policy_objective": "topr", "topr_negative_weight": 0.5}),
        ("kimi15", {"policy_objective": "kimi15", "kimi15_tau": 0.1}),
    ],
)
def test_a_variant_of_the_policy_gradient_is_an_objective(worker: str, variant: str, expected: dict[str, Any]) -> None:
    role = {"worker_cls": worker, "pg_variant": variant, "topr_negative_weight": 0.5}
    found = outcome(actor_train=role, pg_clip=0.3, dual_clip_loss=True, importance_sampling="seq")
    assert found.problems == []
    values = {name.removeprefix("algorithm."): one.value for name, one in found.translation.items()}
    assert values == {"loss_aggregation": "sequence_mean", **expected}
    idle = {"importance_sampling"}
    idle |= set() if variant == "ppo" else {"pg_clip", "dual_clip_loss"}
    idle |= set() if variant == "topr" else {"actor_train.topr_negative_weight"}
    assert found.idle.keys() == idle


def test_a_variant_is_averaged_as_the_file_says() -> None:
    role = {"worker_cls": PG_WORKERS[0], "pg_variant": "cispo"}
    assert algorithm(actor_train=role, loss_agg_mode="seq-mean-token-sum")["loss_aggregation"] == "sequence_sum"


def test_a_variant_has_no_effect_without_a_worker_that_reads_it() -> None:
    found = outcome(actor_train={"pg_variant": "topr", "worker_cls": "roll.pipeline.rlvr.actor_worker.ActorWorker"})
    assert (found.problems, found.translation) == ([], {})
    assert found.idle["actor_train.pg_variant"].endswith("unless worker_cls is a class of actor_pg_worker")


def test_a_loss_without_the_policy_gradient_is_refused_with_what_topr_is_called_now() -> None:
    found = outcome(rl_loss_coef=0.0, use_topr_neg_loss_coef="x_2")
    [problem] = found.problems
    assert "ROLL trains nothing: set it to 1, and for TOPR actor_train.pg_variant to topr" in problem
    assert problem.endswith("roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker")
    assert "use_topr_neg_loss_coef" in found.idle
    assert outcome(rl_loss_coef=1.0, use_topr_neg_loss_coef=0.5).problems == []


@pytest.mark.parametrize(
    "keys",
    [
        {"adv_estimator": "gigpo"},
        {"advantage_clip": 1.0},
        {"adv_estimator": "reinforce", "gamma": 0.9},
        {"adv_estimator": "reinforce", "norm_mean_type": "running"},
        {"adv_estimator": "reinforce", "reward_clip": -1},
        {"train_infer_correction": {"filters": [{"enabled": True, "diff_enabled": True, "diff_low": "low"}]}},
        {"train_infer_correction": {"filters": [{"enabled": True, "agg_type": "sentence"}]}},
        {"actor_train": {"worker_cls": PG_WORKERS[0], "pg_variant": "grpo"}},
        {"actor_train": {"worker_cls": PG_WORKERS[1]}},
        {"rl_loss_coef": 0.5},
        {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "segment"}}},
        {"track_with": "ml_tracker"},
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


@pytest.mark.parametrize("tracker", ["stdout", "swanlab", "trackio"])
def test_a_run_without_the_tracker_of_the_file_says_where_its_metrics_are(tracker: str) -> None:
    found = outcome(track_with=tracker)
    assert (found.problems, found.translation) == ([], {})
    assert "in the files of the run" in found.idle["track_with"]


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
    # What it does not set has ROLL's defaults, and not the values of the training.
    del validation["generating_args"]
    found = settings(validation=validation, eval_steps=20, actor_infer={"generating_args": {"temperature": 1.0}})
    evaluated = found["rollout.eval_datasets"]["aime"]
    assert [evaluated[name] for name in ("temperature", "top_p", "top_k")] == [0.95, 0.7, 50]


STOPS = {"stop_strings": ["</code>"]}


def test_an_evaluation_ends_its_responses_at_the_strings_of_the_training() -> None:
    def found(sampling: dict[str, Any], of_training: dict[str, Any]) -> list[str]:
        validation = {"data_args": {"file_name": ["data/aime.jsonl"]}, "generating_args": sampling}
        return outcome(validation=validation, eval_steps=20, actor_infer={"generating_args": of_training}).problems

    assert found(STOPS, STOPS) == found({}, {}) == found({"stop_strings": None}, {"stop_strings": None}) == []
    [other] = found(STOPS, {})
    assert other.startswith("validation.generating_args.stop_strings ['</code>'] are not the [] at which the responses")
    [missing] = found({}, STOPS)
    assert missing.startswith("validation.generating_args.stop_strings [] are not the ['</code>'] at which")


def test_a_repetition_penalty_is_refused() -> None:
    validation = {"data_args": {"file_name": ["data/aime.jsonl"]}, "generating_args": {"repetition_penalty": 1.1}}
    [problem] = outcome(validation=validation).problems
    assert problem.startswith("validation.generating_args.repetition_penalty 1.1 has no counterpart")
    validation["generating_args"] = {"repetition_penalty": 1.0}
    assert outcome(validation=validation, actor_infer={"generating_args": {"repetition_penalty": 1.0}}).problems == []
    assert len(outcome(actor_infer={"generating_args": {"repetition_penalty": 1.1}}).problems) == 1


def test_the_ratio_of_a_sequence_belongs_to_the_pipeline_rlvr() -> None:
    assert algorithm(importance_sampling="seq")["policy_objective"] == "gspo"
    found = outcome(**AGENTS, importance_sampling="seq")
    assert "algorithm.policy_objective" not in found.translation
    assert found.idle["importance_sampling"] == "has no effect in ROLL's agentic pipeline, which reads ratio_type"


def test_agents_are_trained_whatever_samples_other_pipelines_leave_out() -> None:
    found = outcome(**AGENTS, max_len_mask=True, difficulty_mask=True)
    assert "rollout.rollout_sample_filter_path" not in found.translation
    assert found.idle["max_len_mask"] == found.idle["difficulty_mask"] == "has no effect in ROLL's agentic pipeline"


def test_gradients_are_clipped_as_the_pipeline_says_and_not_as_the_strategy_says() -> None:
    strategy = {"strategy_args": {"strategy_config": {"max_grad_norm": 0.5}}}
    assert settings(max_grad_norm=2.0, actor_train=strategy) == {"learner.clip_grad": 2.0}
    assert "learner.clip_grad" not in settings(actor_train=strategy)


def test_prompts_are_rendered_with_the_template_of_the_tokenizer_as_rolls_templates_call_it() -> None:
    def rendered(template: str | None, **others: Any) -> dict[str, Any]:
        return settings(actor_train={"data_args": {"template": template}}, **others)

    assert rendered("qwen2_5") == rendered("native") == {"data.apply_chat_template": True}
    thinking = {"data.apply_chat_template": True, "data.apply_chat_template_kwargs": {"enable_thinking": True}}
    assert rendered("qwen3") == rendered("native", global_template="qwen3") == thinking
    assert rendered(None) == {}


def test_a_template_that_changes_the_messages_is_refused() -> None:
    [said] = outcome(global_template="longCOT_qwen2.5", actor_train={"data_args": {"template": "native"}}).problems
    assert said.startswith("global_template 'longCOT_qwen2.5' has no counterpart: set it to native")

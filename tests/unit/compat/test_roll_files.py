"""ROLL's recorded configuration files start with `--check-config` as they are, but for paths, or say why not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.environments.process import environment_start
from miles_async.adapters.environments.server import Roll
from miles_async.batching.advantages import score_samples
from miles_async.compat.roll.table import TABLE
from miles_async.config import model_source
from miles_async.config.cli import parse_or_exit
from miles_async.config.flags import parse_flags
from miles_async.config.load import checked_config, load_config
from miles_async.config.schema import RunConfig
from miles_async.config.translation import translate
from miles_async.rollout.contract import flat_args
from miles_async.types import Group, Sample
from tests.launch_scripts.replay import recorded_results
from tests.launch_scripts.roll_files import REASONS, RollFile, kinds, roll_files
from tests.sim.world import Trace
from workers.functions import BatchPreparation, reward_post_process

ALL = roll_files()
RESULTS = recorded_results("roll")
ASYNC = "qwen2.5-7B-rlvr_megatron-rlvr_config_async"
FROZEN_LAKE = "qwen2.5-0.5B-agentic-agent_val_frozen_lake_async"


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with Megatron-Bridge."""
    monkeypatch.setattr(model_source, "_bridge_complaint", lambda: None)


def named(name: str) -> RollFile:
    return next(file for file in ALL if file.name == name)


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_a_file_is_accepted_or_refused_for_the_recorded_reasons(file: RollFile, tmp_path: Path) -> None:
    assert file.reasons(tmp_path) == RESULTS[file.name]


def test_the_results_are_those_of_the_recorded_files() -> None:
    assert RESULTS.keys() == {file.name for file in ALL}
    assert {reason for reasons in RESULTS.values() for reason in reasons} == REASONS.keys()


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_no_key_of_a_file_is_ignored_silently(file: RollFile, tmp_path: Path) -> None:
    """Each key sets a setting, is compared with what a run does, is refused, or is named as without effect."""
    content = file.content(tmp_path)
    found = kinds(translate(content, "ROLL"), content)
    assert [key for key, kind in found.items() if kind == "ignored"] == []


@pytest.mark.parametrize("flags", [[], ["--preset", "roll"]], ids=["alone", "with ROLL's defaults"])
def test_rolls_asynchronous_example_passes_the_check(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = named(ASYNC).written(tmp_path)
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*flags, "--config", str(path), "--check-config"], "train_async.py")
    out, err = capsys.readouterr()
    assert exited.value.code == 0, err
    assert "rollout.max_weight_staleness = 1  (from async_generation_ratio)" in out
    assert "algorithm.eps_clip_c = 1.4  (from dual_clip_loss)" in out
    assert "actor_infer.model_args.dtype is fp16, but the engines compute in bf16, as the learner does" in out


def test_rolls_asynchronous_example_has_its_algorithm(tmp_path: Path) -> None:
    path = named(ASYNC).written(tmp_path)
    config = load_config(["--preset", "roll", "--config", str(path)], entry="train_async.py")
    rollout, algorithm, learner = config.rollout, config.algorithm, config.learner
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, learner.global_batch_size) == (64, 8, 64 * 8)
    assert (rollout.rollout_max_prompt_len, rollout.rollout_max_response_len) == (2048, 8192)
    assert rollout.rm_type == "roll_math"
    assert config.data.rollout_shuffle  # in each epoch, as in ROLL
    assert (config.data.input_key, config.data.label_key) == ("messages", "ground_truth")
    assert rollout.custom_reward_post_process_path == "miles_async.compat.roll.advantages.advantages"
    assert rollout.rollout_sample_filter_path == "miles_async.compat.roll.advantages.mask"
    assert rollout.custom_args == {
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": 10,
        "whiten_advantages": True,
        "advantage_clip": 2.0,
        "max_len_mask": True,
        "difficulty_mask": True,
        "difficulty_low_threshold": 0.1,
        "difficulty_high_threshold": 0.95,
    }
    assert (algorithm.loss_aggregation, algorithm.off_policy_correction) == ("sequence_mean", "none")
    assert algorithm.count_removed_samples is False
    assert (learner.lr, learner.lr_decay_style, learner.lr_warmup_steps) == (1e-6, "linear", 1)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_group_has_as_many_samples_as_the_file_says(samples: int, tmp_path: Path) -> None:
    edits = {"num_return_sequences_in_group": samples, "actor_train.device_mapping": f"list(range(0,{2 * samples}))"}
    path = named(ASYNC).written(tmp_path, edits)
    config = load_config(["--config", str(path)], entry="train_async.py")
    assert config.rollout.n_samples_per_prompt == samples


def test_a_batch_has_the_advantages_of_rolls_pipeline(tmp_path: Path) -> None:
    """Raw rewards, whitened over the tokens of groups that are neither too easy nor too hard, and clipped at 2."""
    path = named(ASYNC).written(tmp_path, {"num_return_sequences_in_group": 2, "rollout_batch_size": 4})
    config, _ = checked_config(parse_flags(["--config", str(path)]), entry="train_async.py")
    args = flat_args(config)
    rewards = [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    groups = [
        Group(
            Sample(index=2 * number + i, reward=reward, tokens=[1, 2], rollout_log_probs=[-1.0], response_length=1)
            for i, reward in enumerate(pair)
        )
        for number, pair in enumerate(rewards)
    ]
    asyncio.run(BatchPreparation(config, args, Trace())(0, groups))
    assert [group[0].remove_sample for group in groups] == [False, True, False, True]
    scored = score_samples(groups, config.algorithm, 8192, reward_post_process(config, args))
    trained = [one.advantage for one in scored if not one.sample.remove_sample]
    assert trained == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2, rel=1e-4)  # the variance of a sample of 4 tokens


def test_a_flag_comes_after_a_file_of_roll(tmp_path: Path) -> None:
    path = named(ASYNC).written(tmp_path)
    config = load_config(["--config", str(path), "--lr", "1e-5"], entry="train_async.py")
    assert config.learner.lr == 1e-5


def test_rolls_runs_are_synchronous_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    path = named("qwen3-next-80BA3B-rlvr_megatron-rlvr_config").written(tmp_path)
    config = load_config(["--preset", "roll", "--config", str(path)], entry="train_async.py")
    assert config.rollout.schedule == "synchronous"


def test_domains_become_data_sets_with_their_shares(tmp_path: Path) -> None:
    file = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus")
    content = file.content(tmp_path)
    content["rewards"] = {name: content["rewards"]["math_rule"] | {"tag_included": [name]} for name in ("RLVR", "b")}
    data = content["actor_train"]["data_args"]
    data["domain_interleave_probs"] = {"RLVR": 0.3, "b": 0.7}
    data["file_name"] = [path for path in data["file_name"] if "llm_judge" in path or "math" in path]
    for rows in ("math_deepmath_deal", "math_benchmarks"):
        (tmp_path / "data" / f"{rows}.jsonl").write_text('{"tag": "b"}\n')
    outcome = translate(content, "ROLL")
    assert outcome.problems == []
    datasets = {key: one.value for key, one in outcome.translation.items() if key.startswith("data.datasets.")}
    assert datasets == {
        "data.datasets.RLVR.prompt_data": str(tmp_path / "data" / "llm_judge_Multi-subject-RLVR_deal_new.jsonl"),
        "data.datasets.RLVR.weight": 0.3,
        "data.datasets.RLVR.rm_type": "roll_math",
        "data.datasets.RLVR.label_key": "ground_truth",
        "data.datasets.b.prompt_data": str(tmp_path / "data" / "math_deepmath_deal.jsonl"),
        "data.datasets.b.weight": 0.7,
        "data.datasets.b.rm_type": "roll_math",
        "data.datasets.b.label_key": "ground_truth",
    }


def test_rows_have_a_prompt_unless_the_file_names_their_messages(tmp_path: Path) -> None:
    content = named(ASYNC).content(tmp_path)
    assert translate(content, "ROLL").translation["data.input_key"].value == "messages"
    del content["actor_train"]["data_args"]["messages"]
    assert translate(content, "ROLL").translation["data.input_key"].value == "prompt"


def test_code_is_scored_by_the_tests_of_its_rows(tmp_path: Path) -> None:
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    outcome = translate(content, "ROLL")
    settings = {key.rpartition(".")[2]: one.value for key, one in outcome.translation.items() if "code_sandbox" in key}
    assert (settings["rm_type"], settings["label_key"]) == ("code", "test_cases")


def test_a_file_with_a_judge_needs_its_address_and_nothing_else(tmp_path: Path) -> None:
    file = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus_llm_as_judge_server")
    assert file.refusals(tmp_path) == []
    path = file.written(tmp_path)
    [refusal] = checked_config(parse_flags(["--config", str(path)]), entry=file.entry)[1]
    assert refusal == (
        "rm_type llm_judge needs a judge: serve its model with SGLang, and set rm_url to "
        "http://host:port/v1/chat/completions of the server"
    )
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    said = translate(content, "ROLL").idle["virtuoussy/Qwen2.5-7B-Instruct-RLVR of rewards.llm_judge"]
    assert said == "is not started: serve it with SGLang, and set rm_url to its chat completions"


def test_filters_of_segments_and_topr_are_those_of_the_file(tmp_path: Path) -> None:
    config, refused = agentic(tmp_path, {}, "qwen2.5-0.5B-agentic-agent_val_frozen_lake-pg_var_is_correct")
    assert refused == []
    algorithm, args = config.algorithm, flat_args(config)
    assert (algorithm.policy_objective, args.loss_aggregation) == ("topr", "sequence_mean")
    assert algorithm.rollout_data_postprocess_path == "miles_async.compat.roll.tokens.postprocess"
    bands = {"ratio": [0.8, 1.05], "difference": [-0.1, 0.1]}
    assert args.train_infer_filters == [{"level": "segment", **bands}]
    assert args.critic_advantage_clip is None


def test_environments_without_training_are_not_evaluated(tmp_path: Path) -> None:
    config, refused = agentic(tmp_path, {}, "agentic_demo-agent_rollout_rock_swe")
    assert refused == []
    assert config.debug.debug_rollout_only
    assert config.rollout.eval_datasets == {}


def test_a_choice_is_scored_softly_or_refused(tmp_path: Path) -> None:
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    outcome = translate(content, "ROLL")
    assert outcome.translation["data.datasets.crossthinkqa.rm_type"].value == "roll_choice"
    assert outcome.translation["data.datasets.ifeval.rm_type"].value == "roll_ifeval"
    content["rewards"]["crossthinkqa"] |= {"reward_type": "strict", "response_length_penalty_coef": 0.1}
    said = " ".join(translate(content, "ROLL").problems)
    assert "rewards.crossthinkqa.reward_type 'strict' has no counterpart: set it to soft" in said
    assert "rewards.crossthinkqa.response_length_penalty_coef 0.1 has no counterpart: set it to 0" in said


def test_a_filter_of_groups_is_refused(tmp_path: Path) -> None:
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    content["rewards"]["math_rule"]["query_filter_config"] = {"type": "no_filter"}
    assert translate(content, "ROLL").problems == []
    content["rewards"]["math_rule"]["query_filter_config"] = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    [said] = translate(content, "ROLL").problems
    assert said.startswith("rewards.math_rule.query_filter_config 'std_filter' has no counterpart: remove it, and set")


def test_a_file_with_rows_of_two_domains_is_refused(tmp_path: Path) -> None:
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    mixed = tmp_path / "data" / "code_KodCode_data.jsonl"
    mixed.write_text('{"tag": "KodCode"}\n{"tag": "ifeval"}\n')
    said = f"{mixed} has rows of code_sandbox, ifeval: write one file for each domain"
    assert any(said in sentence for sentence in translate(content, "ROLL").problems)


def test_an_evaluation_has_the_reward_of_the_domain_of_its_rows(tmp_path: Path) -> None:
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    [benchmark] = content["validation"]["data_args"]["file_name"]
    programs, mixed = (tmp_path / f"{name}.jsonl" for name in ("programs", "mixed"))
    programs.write_text('{"tag": "KodCode"}\n')
    mixed.write_text('{"tag": "KodCode"}\n{"tag": "ifeval"}\n')
    content["validation"]["data_args"]["file_name"] = [benchmark, str(programs)]
    evaluated = translate(content, "ROLL").translation["rollout.eval_datasets"].value
    found = {name: (one["rm_type"], one["label_key"]) for name, one in evaluated.items()}
    assert found == {Path(benchmark).stem: ("roll_math", "ground_truth"), "programs": ("code", "test_cases")}
    content["validation"]["data_args"]["file_name"] = [str(mixed)]
    [said] = translate(content, "ROLL").problems
    assert said.endswith("mixed.jsonl has rows of code_sandbox, ifeval: write one file for each domain")


def test_the_response_length_of_an_evaluation_is_said_to_have_no_effect(tmp_path: Path) -> None:
    """ROLL replaces it by that of the training."""
    content = named("qwen2.5-7B-rlvr_megatron-rlvr_config_8gpus").content(tmp_path)
    content["validation"]["generating_args"]["max_new_tokens"] = 7
    idle = translate(content, "ROLL").idle
    assert idle["validation.generating_args.max_new_tokens"].startswith("has no effect in ROLL either")
    del content["validation"]["generating_args"]["max_new_tokens"]
    assert not any("validation" in key for key in translate(content, "ROLL").idle)


def test_trajectories_of_a_group_are_the_samples_of_a_prompt(tmp_path: Path) -> None:
    content = named("qwen2.5-0.5B-agentic-agent_val_frozen_lake_async").content(tmp_path)
    outcome = translate(content, "ROLL")
    settings = {key: one.value for key, one in outcome.translation.items()}
    assert (settings["rollout.rollout_batch_size"], settings["rollout.n_samples_per_prompt"]) == (128, 8)
    assert settings["rollout.rollout_max_response_len"] == 8192 - 1024
    assert settings["rollout.custom_args.norm_std_type"] == "group"
    assert outcome.problems == []


def agentic(tmp_path: Path, edits: Mapping[str, Any], name: str = FROZEN_LAKE) -> tuple[RunConfig, Sequence[str]]:
    """The configuration of a file whose values at dotted keys are changed, and what is refused."""
    file = named(name)
    return checked_config(parse_flags(["--config", str(file.written(tmp_path, edits))]), entry=file.entry)


def test_environments_of_roll_are_those_of_the_run(tmp_path: Path) -> None:
    config, refused = agentic(tmp_path, {})
    assert refused == []
    assert config.data.environment == "roll:roll.pipeline.agentic.env"
    assert config.data.environment_settings["max_new_tokens"] == 128
    tag = config.data.environment_settings["tags"]["FrozenLake"]
    assert (tag["env_type"], tag["max_steps"], tag["max_tokens_per_step"]) == ("frozen_lake", 10, 64)
    assert tag["env_config"]["format_penalty"] == -0.01
    assert "{actions_left} actions left" in tag["agent_template"]
    assert config.rollout.custom_generate_function_path == "miles_async.rollout.environment.generate"
    # The tasks of the evaluation are not trained.
    assert config.data.prompt_data == "environment:FrozenLake@[256:]"
    evaluated = config.rollout.eval_datasets
    assert list(evaluated) == ["SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake"]
    assert (evaluated["FrozenLake"].path, evaluated["FrozenLake"].size) == ("environment:FrozenLake", 256)


async def test_the_settings_of_an_environment_can_be_used_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = agentic(tmp_path, {})
    made: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=lambda env_type, **of_env: made.update(of_env)))
    env = Roll("gem", json.loads(environment_start(config.data))["settings"])
    tasks = await env.tasks(2, "SokobanDifferentGridVocab")
    assert [task["task"]["seed"] for task in tasks] == [0, 1]
    assert (made["dim_room"], made["grid_lookup"][0]) == ([6, 6], "W")


def test_several_tags_are_data_sets_with_the_shares_of_their_groups(tmp_path: Path) -> None:
    manager = {"tags": ["FrozenLake", "SimpleSokoban"], "num_groups_partition": [96, 32], "group_size": 8}
    config, refused = agentic(tmp_path, {"train_env_manager": manager, "eval_steps": 0})
    assert refused == []
    weights = {name: (one.prompt_data, one.weight) for name, one in config.data.datasets.items()}
    assert weights == {
        "FrozenLake": ("environment:FrozenLake", 96),
        "SimpleSokoban": ("environment:SimpleSokoban", 32),
    }
    assert config.rollout.custom_reward_post_process_path == "miles_async.compat.roll.advantages.agentic_advantages"


def test_sampling_may_be_that_of_the_environment_managers(tmp_path: Path) -> None:
    config, _ = agentic(tmp_path, {}, "qwen2.5-0.5B-agentic-agent_val_frozen_lake")
    rollout = config.rollout
    assert (rollout.rollout_temperature, rollout.rollout_top_p, rollout.rollout_top_k) == (0.99, 0.99, 100)
    assert rollout.eval_datasets["FrozenLake"].temperature == 0.2
    assert config.data.environment_settings["max_new_tokens"] == 128


@pytest.mark.parametrize(
    "edits, message",
    [
        ({"custom_envs": {}}, "custom_envs.FrozenLake is missing, or is not a section"),
        ({"train_env_manager.tags": []}, "train_env_manager.tags [] is not a list of different tags"),
        ({"train_env_manager.tags": ["FrozenLake"] * 2}, "is not a list of different tags"),
        (
            {"train_env_manager.group_filter_cls": "mine.Filter"},
            "train_env_manager.group_filter_cls has no counterpart",
        ),
        ({"val_env_manager.group_size": 0}, "val_env_manager.group_size 0 is not a number of 1 or more"),
        ({"max_actions_per_traj": "ten"}, "custom_envs.FrozenLake.max_steps 'ten' is not a number of 1 or more"),
        ({"train_env_manager.num_groups_partition": [1, 2]}, "needs a number of groups for each of tags"),
        (
            {"custom_envs.FrozenLake": {"env_type": "frozen_lake"}},
            "custom_envs.FrozenLake has no max_steps, max_tokens_per_step, agent_system_template, agent_template",
        ),
        (
            {"env_manager_cls": "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"},
            "custom_envs.FrozenLake.env_manager_cls 'VLTrajEnvManager' has no counterpart: set it to one of",
        ),
        (
            {"adv_estimator": "gigpo"},
            "adv_estimator 'gigpo' is not an advantage_estimator here: set it to grpo or reinforce, or set",
        ),
        (
            {"adv_estimator": "gae", "env_manager_cls": "roll.StepEnvManager"},
            "adv_estimator 'gae' is not an advantage_estimator here: set it to step_reinforce, gigpo, grpo or "
            "reinforce",
        ),
        (
            {
                "custom_envs.SimpleSokoban": {"env_manager_cls": "roll.StepEnvManager"},
                "train_env_manager.tags": ["FrozenLake", "SimpleSokoban"],
            },
            "steps are samples of some tags and not of others",
        ),
    ],
)
def test_environments_that_cannot_be_run_are_refused(edits: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused = agentic(tmp_path, edits)[1]
    assert any(message in sentence for sentence in refused), refused


def test_steps_of_a_trajectory_are_samples_with_the_advantages_of_gigpo(tmp_path: Path) -> None:
    config, refused = agentic(tmp_path, {}, "qwen2.5-0.5B-agentic-agent_val_frozen_lake_gigpo")
    assert refused == []
    tag = config.data.environment_settings["tags"]["FrozenLake"]
    assert (tag["env_manager_cls"], tag["history_length"]) == ("StepEnvManager", 5)
    # An answer of 64 tokens, and with its prompt 1024.
    assert (config.rollout.rollout_max_prompt_len, config.rollout.rollout_max_response_len) == (960, 64)
    # 16 samples per device * 8 steps of accumulation * 8 devices.
    assert (config.learner.segments_are_samples, config.learner.global_batch_size) == (True, 1024)
    assert config.learner.lr_decay_steps == 10240
    assert config.rollout.custom_reward_post_process_path == "miles_async.compat.roll.advantages.step_advantages"
    assert config.rollout.custom_args == {
        "norm_mean_type": "group",
        "norm_std_type": None,
        "reward_clip": None,
        "whiten_advantages": False,
        "advantage_clip": 20,
        "step_reward_gamma": 0.95,
        "step_reward_weight": 1.0,
        "episode_reward_weight": 1.0,
        "state_norm_mean_type": "group",
        "state_norm_std_type": None,
    }


@pytest.mark.parametrize("estimator, gamma", [("step_reinforce", 1.0), ("reinforce", 0.0)])
def test_without_gigpo_a_step_has_its_discounted_return_or_its_own_reward(
    estimator: str, gamma: float, tmp_path: Path
) -> None:
    edits = {"adv_estimator": estimator}
    config, refused = agentic(tmp_path, edits, "qwen3_agentic_gem-gem_game_guess_the_number")
    assert refused == []
    assert config.learner.passes_per_rollout == 2
    args = config.rollout.custom_args
    assert (args["step_reward_gamma"], args["episode_reward_weight"]) == (gamma, None)
    assert (args["norm_mean_type"], args["norm_std_type"]) == ("batch", "batch")


def test_statistics_of_groups_are_those_of_the_batch_if_the_batch_is_the_group(tmp_path: Path) -> None:
    norms = {"grouping": "batch", "norm_mean_type": "group", "norm_std_type": "group"}
    config, _ = agentic(tmp_path, {"reward_normalization": norms})
    assert {config.rollout.custom_args[name] for name in ("norm_mean_type", "norm_std_type")} == {"batch"}


def test_all_problems_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    problems = " ".join(named("qwen2.5-7B-rlvr_megatron-rlvr_fsdp2_sp2").refusals(tmp_path))
    for part in ("fsdp2_train", "ulysses_size"):
        assert part in problems


@pytest.mark.parametrize("name", [ASYNC, "qwen2.5-7B-rlvr_megatron-rlvr_config", FROZEN_LAKE])
def test_a_value_of_another_type_is_a_problem_and_no_crash(name: str, tmp_path: Path) -> None:
    content = named(name).content(tmp_path)
    values: list[Any] = [True, 10**400, "x", [[]], {"enabled": True, "weight_type": []}]
    agents = ("custom_envs.FrozenLake", *(f"train_env_manager.{name}" for name in ("tags", "num_groups_partition")))
    correction = (f"train_infer_correction.{name}" for name in ("is_weight", "filters"))
    below = (*agents, *correction, "rewards.math_rule.tag_included")
    for key in (*TABLE, *below):
        for value in values:
            changed = json.loads(json.dumps(content))
            *parents, last = key.split(".")
            section = changed
            for parent in parents:
                section = section.setdefault(parent, {}) if isinstance(section, dict) else {}
            section[last] = value
            translate(changed, "ROLL")


def test_a_layout_of_roll_has_virtual_stages(tmp_path: Path) -> None:
    """As in Megatron-core, the number of virtual stages follows from the parts of the layout."""
    path = named("qwen3.5-397A17-rlvr_megatron-rlvr_megatron_80GB").written(tmp_path)
    config = load_config(["--config", str(path)], entry="train.py")
    assert config.learner.virtual_pipeline_model_parallel_size == 2
    assert config.learner.megatron_args["pipeline_model_parallel_layout"] == "E|(tt|)*30,L"


def test_responses_end_at_the_context_of_the_engines_as_with_vllm(tmp_path: Path) -> None:
    longer, fitting = (
        named(f"qwen2.5-7B-rlvr_megatron-rlvr_config{suffix}").content(tmp_path) for suffix in ("_amd_async", "")
    )
    server = "engine.sglang_server_args"
    translated = translate(longer, "ROLL").translation
    assert (translated[f"{server}.context_length"].value, translated[f"{server}.allow_auto_truncate"].value) == (
        8000,
        True,
    )
    assert translated["rollout.rollout_max_response_len"].value == 8192
    assert f"{server}.allow_auto_truncate" not in translate(fitting, "ROLL").translation
    longer["actor_infer"]["strategy_args"] = {"strategy_name": "sglang", "strategy_config": {"context_length": 8000}}
    assert f"{server}.allow_auto_truncate" not in translate(longer, "ROLL").translation

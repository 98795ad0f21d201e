"""Keys of verl that mean something only together, and overrides as Hydra takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.verl.translation import translate
from miles_async.config.flags import parse_flags

MINI, N = "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n"
GPUS = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}
ASYNC = {MINI: 32, N: 4, "async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": 2}


def settings(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the keys set here, by the last part of a setting's name."""
    outcome = translate(content)
    assert outcome.problems == []
    return {name.rpartition(".")[2]: entry.value for name, entry in outcome.translation.items()}


def problems(content: Mapping[str, Any]) -> list[str]:
    return translate(content).problems


def of_command_line(*words: str) -> Mapping[str, Any]:
    parsed = parse_flags(words)
    assert parsed.problems == []
    return {".".join(one.path): one.value for one in parsed.assignments}


def test_a_mini_batch_of_prompts_is_an_optimizer_step_of_their_samples() -> None:
    found = settings({"data.train_batch_size": 64, MINI: 16, N: 8})
    assert (found["rollout_batch_size"], found["global_batch_size"]) == (64, 128)


def test_a_mini_batch_without_samples_per_prompt_is_refused() -> None:
    assert problems({MINI: 16}) == [f"{MINI} counts prompts: set {N}, the samples per prompt, too"]


def test_a_warm_up_in_batches_is_one_in_optimizer_steps() -> None:
    steps = {"actor_rollout_ref.actor.optim.lr_warmup_steps": 10}
    assert settings({"data.train_batch_size": 64, MINI: 16, N: 8, **steps})["lr_warmup_steps"] == 40
    critic = {"critic.optim.lr_warmup_steps": 10}
    assert settings({"data.train_batch_size": 64, MINI: 16, N: 8, **critic})["critic_lr_warmup_steps"] == 40
    assert "critic_lr_warmup_steps" not in settings({"critic.optim.lr_warmup_steps": -1})


def test_a_fully_asynchronous_run_counts_publishes_and_prompts() -> None:
    found = settings({**ASYNC, "async_training.staleness_threshold": 0.5, "rollout.total_rollout_steps": 6400})
    assert found["rollout_batch_size"] == 64
    assert found["num_rollout"] == 100
    assert found["update_weights_interval"] == 4
    assert found["queue_capacity"] == 64 * 4 * 1.5
    assert found["rollout_function_path"].endswith("generate_rollout_fully_async")
    assert found["use_rollout_logprobs"] is True
    assert settings({**ASYNC, "trainer.save_freq": 5, "trainer.test_freq": 10})["save_interval"] == 20
    assert settings({**ASYNC, "trainer.save_freq": 5, "trainer.test_freq": 10})["eval_interval"] == 40


def test_engines_share_the_gpus_of_the_learner_unless_they_have_their_own() -> None:
    assert settings(GPUS)["colocate"] is True
    own = settings({**GPUS, "rollout.nnodes": 3, "rollout.n_gpus_per_node": 4})
    assert (own["actor_num_nodes"], own["actor_num_gpus_per_node"], own["rollout_num_gpus"]) == (2, 8, 12)
    assert "colocate" not in own


def test_rows_have_the_keys_of_verl_unless_the_prompt_has_another() -> None:
    rows = {"data.train_files": "train.parquet"}
    keys = ("input_key", "label_key", "metadata_key")
    assert [settings(rows)[key] for key in keys] == ["prompt", "reward_model.ground_truth", "extra_info"]
    assert settings({**rows, "data.prompt_key": "question"})["input_key"] == "question"


def test_evaluations_are_greedy_unless_that_is_set() -> None:
    files = {"data.val_files": ["/data/aime.parquet"], "trainer.test_freq": 5}
    greedy = settings(files)["eval_datasets"]["aime"]
    assert (greedy["temperature"], greedy["n_samples"], greedy["label_key"]) == (0.0, 1, "reward_model.ground_truth")
    sampled = {"actor_rollout_ref.rollout.val_kwargs.temperature": 0.7, "actor_rollout_ref.rollout.val_kwargs.n": 4}
    drawn = settings({**files, **sampled})["eval_datasets"]["aime"]
    assert (drawn["temperature"], drawn["n_samples"]) == (0.7, 4)


def test_nothing_is_evaluated_if_verl_evaluates_nothing() -> None:
    off = {"data.val_files": "x.parquet", "trainer.test_freq": -1, "trainer.val_before_train": False}
    outcome = translate(off)
    assert outcome.translation == {}
    assert outcome.idle.keys() == off.keys()


def test_files_of_the_same_name_are_told_apart_and_weigh_as_many_as_they_have_rows(tmp_path: Path) -> None:
    for name, rows in (("gsm8k", 3), ("math", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("{}\n" * rows)
    files = [f"{tmp_path}/gsm8k/train.jsonl", f"{tmp_path}/math/train.jsonl"]
    found = settings({"data.train_files": files, "data.train_batch_size": 2, "trainer.total_epochs": 10})
    assert {name: entry["weight"] for name, entry in found["datasets"].items()} == {"gsm8k_train": 3, "math_train": 1}
    assert found["num_rollout"] == 20
    # A pass of 4 rows fills one batch of 3.
    assert (
        settings({"data.train_files": files, "data.train_batch_size": 3, "trainer.total_epochs": 10})["num_rollout"]
        == 10
    )


def test_a_run_ends_after_its_steps_or_its_epochs_whichever_comes_first(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 7)
    keys = {"data.train_files": f"{tmp_path}/rows.jsonl", "data.train_batch_size": 2, "trainer.total_epochs": 2}
    assert settings({**keys, "trainer.total_training_steps": 5})["num_rollout"] == 5
    assert settings({**keys, "trainer.total_training_steps": 7})["num_rollout"] == 6
    outcome = translate({**keys, "trainer.total_training_steps": 7})
    assert outcome.idle["trainer.total_training_steps"] == "has no effect: trainer.total_epochs ends the run earlier"


def test_nothing_is_saved_without_a_frequency() -> None:
    outcome = translate({"trainer.default_local_dir": "out", "trainer.save_freq": -1, "trainer.resume_mode": "auto"})
    assert outcome.translation == {}
    assert len(outcome.idle) == 3


def test_a_run_resumes_from_its_folder_as_in_verl() -> None:
    saved = {"trainer.default_local_dir": "out", "trainer.save_freq": 5}
    assert settings(saved)["resume"] == "auto"
    assert settings({**saved, **GPUS})["load"] == "out"
    assert "resume" not in settings({**saved, "trainer.resume_mode": "disable"})


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"rollout_is": "token"}, {"off_policy_correction": "tis", "tis_clip": 2.0}),
        ({"rollout_is": "sequence", "rollout_is_threshold": 5}, {"off_policy_correction": "sequence", "tis_clip": 5}),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_4"},
            {"off_policy_correction": "icepop", "icepop_band": [0.5, 4]},
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4"},
            {"rejection_level": "geometric", "rejection_band": [0.25, 2.0]},
        ),
        ({"bypass_mode": True, "rollout_is": "token"}, {"use_rollout_logprobs": True}),
    ],
)
def test_corrections_have_the_names_and_bounds_of_this_project(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings({f"algorithm.rollout_correction.{key}": value for key, value in keys.items()}) == expected


def test_a_reference_model_of_another_layout_is_refused() -> None:
    key = "megatron.tensor_model_parallel_size"
    actor, reference = f"actor_rollout_ref.actor.{key}", f"actor_rollout_ref.ref.{key}"
    assert problems({actor: 2, reference: 2}) == []
    assert problems({actor: 2, reference: 4}) == [f"{reference} 4 differs from {actor} 2: set both to the same value"]


def test_arguments_of_other_libraries_are_passed_on() -> None:
    words = ["+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton"]
    words += ["+actor_rollout_ref.actor.megatron.override_transformer_config.persist_layer_norm=True"]
    assert of_command_line(*words) == {
        "engine.sglang_server_args.attention_backend": "triton",
        "learner.megatron_args.persist_layer_norm": True,
    }


def test_overrides_are_read_as_hydra_reads_them() -> None:
    words = ("trainer.balance_batch=True", "+trainer.critic_warmup=1", "++trainer.critic_warmup=3")
    assert of_command_line(*words) == {"learner.balance_data": True, "algorithm.num_critic_only_steps": 2}


@pytest.mark.parametrize("first, alone", [(0, 0), (1, 0), (20, 19)])
def test_the_policy_is_trained_from_the_step_of_critic_warmup_on_as_verl_counts_from_1(first: int, alone: int) -> None:
    assert settings({"trainer.critic_warmup": first}) == {"num_critic_only_steps": alone}


def test_a_tilde_removes_what_was_set_before() -> None:
    assert of_command_line("trainer.critic_warmup=1", "~trainer.critic_warmup") == {}
    parsed = parse_flags(["~trainer.critic_warmup"])
    assert parsed.idle == {"~trainer.critic_warmup": "has no effect: nothing before it sets this key"}


@pytest.mark.parametrize("word", ["~algorithm.gamma", "~algorithm.lam", "~algorithm.foo"])
def test_a_tilde_before_a_key_of_verl_without_a_value_has_no_effect(word: str) -> None:
    parsed = parse_flags([word])
    assert parsed.problems == []
    assert parsed.idle == {word: "has no effect: nothing before it sets this key"}


def test_a_key_that_is_also_a_setting_may_be_added_and_removed() -> None:
    assert of_command_line("++algorithm.gamma=0.9") == {"algorithm.gamma": 0.9}
    assert of_command_line("algorithm.gamma=0.9", "~algorithm.gamma") == {}


@pytest.mark.parametrize(
    "word, said",
    [
        ("algorithm.foo=1", "algorithm.foo is not a key of verl that can be translated: remove it"),
        ("algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo is not a key of verl that can be translated: remove it"),
        (
            "data.max_prompt_lenght=9",
            "is not a key of verl that can be translated; did you mean data.max_prompt_length?",
        ),
        ("optim.foo=1e-6", "optim.foo is not a key of verl that can be translated: remove it"),
        (
            "rollout.rollout_batch_sise=3",
            "unknown setting rollout.rollout_batch_sise; did you mean rollout.rollout_bat",
        ),
        (
            "data.rollout_batch_size=3",
            "unknown setting data.rollout_batch_size; write it as rollout.rollout_batch_size",
        ),
        ("learner.foo=3", "unknown setting learner.foo"),
        ("algorithm=3", "algorithm is a section: write algorithm.setting=value"),
    ],
)
def test_an_unknown_key_beside_keys_of_verl_is_one_of_verl_unless_a_setting_is_nearer(word: str, said: str) -> None:
    for words in ([word, "trainer.nnodes=1"], ["trainer.nnodes=1", word]):
        [problem] = parse_flags(words).problems
        assert said in problem


def test_settings_below_a_dict_are_no_keys_of_verl() -> None:
    words = ["trainer.balance_batch=True", "engine.sglang_server_args.foo=1", "skip.reward.enable=True"]
    assert parse_flags(words).problems == []


LOSS, MEAN = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.loss_agg_mode"


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "sapo"])
def test_losses_of_sequences_are_averaged_over_samples_whatever_verl_is_told(loss: str) -> None:
    assert settings({LOSS: loss})["loss_aggregation"] == "sequence_mean"
    outcome = translate({LOSS: loss, MEAN: "token-mean"})
    assert outcome.translation["algorithm.loss_aggregation"].value == "sequence_mean"
    assert outcome.idle[MEAN] == f"has no effect in verl either: {loss} is always averaged by seq-mean-token-mean"


@pytest.mark.parametrize("loss", ["vanilla", "cispo"])
def test_losses_of_tokens_are_averaged_as_loss_agg_mode_says(loss: str) -> None:
    assert settings({LOSS: loss, MEAN: "seq-mean-token-sum"})["loss_aggregation"] == "sequence_sum"


CLIP = "actor_rollout_ref.actor.clip_ratio"


def test_the_sum_over_a_response_is_divided_by_its_longest_length_only() -> None:
    mean, factor = "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.loss_scale_factor"
    keys = {"data.max_response_length": 512, mean: "seq-mean-token-sum-norm"}
    assert settings({**keys, factor: 512})["loss_aggregation"] == "constant"
    assert problems({**keys, factor: 1024}) == [
        f"{factor} 1024 is not data.max_response_length, by which seq-mean-token-sum-norm divides the sum over a "
        "response: set both to the same value"
    ]
    assert translate({**keys, mean: "token-mean", factor: 1024}).idle.keys() == {factor}


def test_advantages_of_a_critic_are_normalized_as_verl_always_does() -> None:
    assert settings({"algorithm.adv_estimator": "gae"}) == {"advantage_estimator": "ppo", "normalize_advantages": True}
    assert settings({"algorithm.adv_estimator": "grpo"}) == {"advantage_estimator": "grpo"}


PENALTY = "algorithm.use_kl_in_reward"


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_a_kl_penalty_on_rewards_is_that_of_verl_for_estimators_that_compare_no_samples(estimator: str) -> None:
    keys = {"algorithm.adv_estimator": estimator, PENALTY: True, "actor_rollout_ref.actor.kl_loss_type": "k3"}
    found = settings({**keys, "algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_penalty": "mse"})
    assert (found["kl_coef"], found["kl_loss_type"]) == (0.01, "k2")
    assert (settings(keys)["kl_coef"], settings(keys)["kl_loss_type"]) == (0.001, "k1")


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline"])
def test_rewards_are_compared_after_a_kl_penalty_on_them(estimator: str) -> None:
    function = "custom_advantage_function_path"
    found = settings({"algorithm.adv_estimator": estimator, PENALTY: True})
    assert found[function] == "miles_async.compat.verl.advantages.after_penalty"
    assert (found["rewards_normalization"], found["kl_coef"], found["kl_penalty"]) == (False, 0.001, "k1")
    both = settings({"algorithm.adv_estimator": estimator, PENALTY: True, "actor_rollout_ref.actor.use_kl_loss": True})
    assert (both["kl_penalty"], both["kl_loss_type"]) == ("k1", "low_var_kl")
    assert function not in settings({"algorithm.adv_estimator": estimator, PENALTY: False})
    assert function not in settings({"algorithm.adv_estimator": "reinforce_plus_plus", PENALTY: True})


def test_the_kl_loss_and_the_kl_penalty_on_rewards_share_an_estimator() -> None:
    both = {PENALTY: True, "actor_rollout_ref.actor.use_kl_loss": True}
    [problem] = problems(both)  # verl's defaults are kl and low_var_kl
    assert "contradict each other, because both set algorithm.kl_loss_type" in problem
    assert settings({**both, "algorithm.kl_penalty": "low_var_kl"})["kl_loss_type"] == "low_var_kl"


def test_the_clip_ratio_of_both_sides_has_no_effect_as_in_verl() -> None:
    parsed = parse_flags([f"{CLIP}=0.1", f"{CLIP}_low=0.3"])
    assert [*parsed.idle] == [CLIP]
    found = settings({f"{CLIP}": 0.1, f"{CLIP}_low": 0.3})
    assert (found["eps_clip"], "eps_clip_high" in found) == (0.3, False)


def test_an_evaluation_samples_with_its_temperature_whatever_do_sample_says() -> None:
    sampling = "actor_rollout_ref.rollout.val_kwargs"
    values = {"data.val_files": "math.parquet", f"{sampling}.do_sample": False, f"{sampling}.temperature": 0.7}
    [dataset] = settings(values)["eval_datasets"].values()
    assert dataset["temperature"] == 0.7


@pytest.mark.parametrize("word", ["~rollout.num_rollout", "+rollout.num_rollout=3"])
def test_settings_of_this_project_are_neither_added_nor_removed(word: str) -> None:
    [problem] = parse_flags([word]).problems
    assert problem == f"unexpected argument {word!r}: write --flag value, or section.setting=value"


def test_the_order_of_overrides_does_not_matter() -> None:
    words = [f"{N}=8", "data.train_batch_size=64", f"{MINI}=16"]
    assert of_command_line(*words) == of_command_line(*reversed(words))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    sentences = parse_flags(
        [
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.actor.fsdp_config.param_offload=True",
            "trainer.nnode=1",
            "trainer.logger=[console,swanlab]",
        ]
    ).problems
    assert sentences == [
        "actor_rollout_ref.rollout.name 'vllm' is not supported: the engines run SGLang: set it to sglang",
        "actor_rollout_ref.actor.fsdp_config.param_offload has no counterpart: the learner runs Megatron-core: remove "
        "it, and set model_engine=megatron and keys of actor.megatron",
        "trainer.nnode is not a key of verl that can be translated; did you mean trainer.nnodes?",
        "trainer.logger 'swanlab' has no counterpart: use console, wandb or tensorboard",
    ]


ADAPTER = "actor_rollout_ref.model"


def adapter(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in settings(content).items() if name.startswith("lora_")}


def test_an_adapter_has_the_keys_of_fsdp_or_those_of_megatron_each_with_their_default() -> None:
    assert adapter({f"{ADAPTER}.lora_rank": 8}) == {"lora_rank": 8, "lora_alpha": 16}
    assert adapter({f"{ADAPTER}.lora.rank": 8}) == {"lora_rank": 8, "lora_alpha": 32}
    layers = {f"{ADAPTER}.target_modules": ["q_proj", "v_proj"], f"{ADAPTER}.exclude_modules": ["v_proj"]}
    found = adapter({f"{ADAPTER}.lora_rank": 64, f"{ADAPTER}.lora_alpha": 32, **layers})
    assert found == {
        "lora_rank": 64,
        "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_exclude_modules": ["v_proj"],
    }
    found = adapter(
        {
            f"{ADAPTER}.lora.rank": 32,
            f"{ADAPTER}.lora.alpha": 64,
            f"{ADAPTER}.lora.dropout": 0.1,
            f"{ADAPTER}.lora.target_modules": ["linear_qkv"],
            f"{ADAPTER}.lora_rank": 8,
        }
    )
    assert found == {"lora_rank": 32, "lora_alpha": 64, "lora_dropout": 0.1, "lora_target_modules": ["linear_qkv"]}


def test_at_rank_0_no_adapter_is_trained() -> None:
    content = {f"{ADAPTER}.lora_rank": 0, f"{ADAPTER}.lora_alpha": 16, f"{ADAPTER}.lora.alpha": 32}
    assert adapter(content) == {}
    assert set(translate(content).idle.values()) == {"has no effect: no adapter is trained"}


def test_an_adapter_to_start_from_needs_its_rank() -> None:
    path, rank = f"{ADAPTER}.lora_adapter_path", f"{ADAPTER}.lora_rank"
    assert adapter({path: "adapter", rank: 8})["lora_load"] == "adapter"
    assert problems({path: "adapter"}) == [f"{path} needs {rank}: set it to the rank of that adapter"]


def test_other_adapters_than_those_of_lora_are_refused() -> None:
    kind = f"{ADAPTER}.lora.type"
    assert adapter({f"{ADAPTER}.lora.rank": 8, kind: "canonical_lora"})["lora_rank"] == 8
    assert problems({f"{ADAPTER}.lora.rank": 8, kind: "dora"}) == [
        f"{kind} 'dora' is not supported: adapters are those of plain LoRA: set it to canonical_lora"
    ]


FILTER = "algorithm.filter_groups"


def test_groups_are_filtered_by_their_rewards_unless_verl_does_not_filter_them() -> None:
    name = "dynamic_sampling_filter_path"
    on = {f"{FILTER}.enable": True}
    assert settings({**on, f"{FILTER}.metric": "acc"})[name] == "miles_async.filters.check_reward_nonzero_std"
    assert settings({f"{FILTER}.enable": False, f"{FILTER}.metric": "response_filter"})[name] is None
    assert problems({**on, f"{FILTER}.metric": "response_filter"}) == [
        f"{FILTER}.metric 'response_filter' is not supported: groups are compared by their rewards: set it to acc, or "
        f"set {FILTER}.enable to false and dynamic_sampling_filter_path to a function of your own"
    ]
    asynchronous = {**ASYNC, **on, f"{FILTER}.metric": "response_filter"}
    assert name not in settings(asynchronous)
    assert "fully asynchronous runs" in translate(asynchronous).idle[f"{FILTER}.metric"]


def test_keys_of_agents_have_no_effect_without_agents() -> None:
    section = "actor_rollout_ref.rollout.multi_turn"
    content = {f"{section}.enable": False, f"{section}.format": "hermes", f"{section}.tool_config_path": "tools.yaml"}
    assert settings(content) == {}
    assert translate(content).idle[f"{section}.format"] == "belongs to multi_turn.enable"
    assert "also for rows whose agent_name asks for tools" in translate(content).idle[f"{section}.enable"]

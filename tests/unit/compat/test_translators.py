"""Configuration files of ROLL and verl: each key sets one of our settings, or is refused with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_async.compat.roll import table as roll
from miles_async.compat.verl import rules as verl
from miles_async.config.cli import parse_or_exit
from miles_async.config.fields import BY_PATH, SETTINGS
from miles_async.config.flags import parse_flags
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.config.translation import Only, Refused, Sets, project_of, translate
from miles_async.errors import UserError
from tests.configuration import build, read_yaml, run_config

DYNAMIC_BATCHING = """
actor_train:
  # Flash Attention is recommended when using both Dynamic Batching and Context Parallel
  system_envs: {NVTE_FLASH_ATTN: '1', NVTE_FUSED_ATTN: '0', NVTE_UNFUSED_ATTN: '0'}
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 64
    warmup_steps: 10
    lr_scheduler_type: cosine
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      use_distributed_optimizer: true
  device_mapping: list(range(0,8))
  infer_batch_size: 2
  use_dynamic_batching_in_train: true
  max_tokens_per_microbatch_in_train: 8192
  sequence_length_round_in_train: 128
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: 16384
  sequence_length_round_in_infer: 128
actor_infer:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  generating_args:
    max_new_tokens: 128 # single-turn response length
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: 1
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.8, block_size: 16, load_format: auto}
  device_mapping: list(range(0,8))
reference:
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: megatron_infer, strategy_config: ~}
  device_mapping: list(range(0,8))
  infer_batch_size: 2
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: 16384
  sequence_length_round_in_infer: 128
"""
"""The configuration of ROLL's guide to dynamic batching."""

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def runnable(tmp_path: Path) -> list[str]:
    """Flags for what ROLL's guide leaves out: model, prompts, reward and the size of a batch."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    flags = f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/rows.jsonl --rm-type dapo --rollout-batch-size 128"
    return flags.split()


def example(edit: Edit = lambda content: None) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(DYNAMIC_BATCHING)
    edit(content)
    return content


def settings_of(content: dict[str, Any]) -> dict[str, Any]:
    """Our settings for the content of a file, by dotted path."""
    project = project_of(content)
    assert project is not None
    outcome = translate(content, project)
    assert outcome.problems == []
    return {setting: translated.value for setting, translated in outcome.translation.items()}


def refusals(content: dict[str, Any]) -> list[str]:
    project = project_of(content)
    assert project is not None
    return translate(content, project).problems


def refusal(edit: Edit) -> str:
    [sentence] = refusals(example(edit))
    return sentence


def test_every_key_of_rolls_example_has_its_meaning() -> None:
    assert settings_of(example()) == {
        "learner.train_env_vars": {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
        "learner.recompute_granularity": "full",
        "learner.recompute_method": "uniform",
        "learner.recompute_num_layers": 1,
        "learner.precision": "bf16",
        "learner.lr": 1e-6,
        "learner.weight_decay": 0,
        "learner.global_batch_size": 2 * 64 * 8,
        "learner.lr_warmup_steps": 10,
        "learner.lr_decay_style": "cosine",
        "data.apply_chat_template": True,
        "learner.tensor_model_parallel_size": 1,
        "learner.pipeline_model_parallel_size": 1,
        "learner.expert_model_parallel_size": 1,
        "learner.use_distributed_optimizer": True,
        "learner.actor_num_nodes": 1,
        "learner.actor_num_gpus_per_node": 8,
        "learner.use_dynamic_batching_in_train": True,
        "learner.max_tokens_per_microbatch_in_train": 8192,
        "learner.sequence_length_round_in_train": 128,
        "learner.use_dynamic_batching_in_infer": True,
        "learner.max_tokens_per_microbatch_in_infer": 16384,
        "learner.sequence_length_round_in_infer": 128,
        "engine.sglang_server_args.dtype": "bfloat16",
        "rollout.rollout_max_response_len": 128,
        "rollout.n_samples_per_prompt": 1,
        "rollout.rollout_top_p": 0.99,
        "rollout.rollout_top_k": 100,
        "rollout.rollout_temperature": 0.99,
        "engine.sglang_server_args.mem_fraction_static": 0.8,
        "engine.sglang_server_args.page_size": 16,
        "engine.rollout_num_gpus": 8,
        "cluster.colocate": True,
        "learner.ref_use_dynamic_batching_in_infer": True,
        "learner.ref_max_tokens_per_microbatch_in_infer": 16384,
        "learner.ref_sequence_length_round_in_infer": 128,
    }


def test_rolls_example_passes_the_check_which_names_the_project_and_each_key(
    tmp_path: Path, runnable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(DYNAMIC_BATCHING.replace("system_envs: {", "system_envs: {HF_TOKEN: hunter2, "))
    flags = [*runnable, "--n-samples-per-prompt", "8"]
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--config", str(file), *flags, "--check-config"], entry="train.py")
    out, err = capsys.readouterr()
    assert exited.value.code == 0, err
    assert f"{file} has the keys of ROLL, which mean:\n" in out
    assert "  learner.lr = 1e-06  (from actor_train.training_args.learning_rate)\n" in out
    assert "'HF_TOKEN': '<redacted>'" in out
    assert "hunter2" not in out
    assert "samples: 128 groups of 8, trained in 1 optimizer step(s) of 1024" in out


def test_an_invalid_value_is_reported_with_the_key_of_the_file(tmp_path: Path, runnable: list[str]) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(DYNAMIC_BATCHING.replace("learning_rate: 1.0e-6", "learning_rate: -1"))
    with pytest.raises(UserError, match=r"roll.yaml: actor_train.training_args.learning_rate: input should be greater"):
        load_config(["--config", str(file), *runnable], entry="train.py")


def test_a_flag_overrides_a_file_of_roll(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(DYNAMIC_BATCHING)
    config = build([*read_yaml(file), *parse_flags(["--no-colocate", "--sglang-page-size", "1"]).assignments])
    assert config.cluster.colocate is False
    assert config.engine.sglang_server_args["page_size"] == 1
    assert config.engine.sglang_server_args["mem_fraction_static"] == 0.8


def test_devices_of_their_own_separate_learner_and_engines() -> None:
    def separate(content: dict[str, Any]) -> None:
        content["num_gpus_per_node"] = 8
        content["actor_train"]["device_mapping"] = content["reference"]["device_mapping"] = "list(range(0,16))"
        content["actor_infer"]["device_mapping"] = "list(range(16,20)) + [22, 23]"

    settings = settings_of(example(separate))
    assert (settings["learner.actor_num_nodes"], settings["learner.actor_num_gpus_per_node"]) == (2, 8)
    assert (settings["engine.rollout_num_gpus"], settings["cluster.colocate"]) == (6, False)
    assert settings["learner.global_batch_size"] == 2 * 64 * 16


def test_without_dynamic_batching_samples_limit_a_micro_batch() -> None:
    def fixed(content: dict[str, Any]) -> None:
        for role in ("actor_train", "reference"):
            content[role]["use_dynamic_batching_in_infer"] = False
        content["actor_train"]["use_dynamic_batching_in_train"] = False

    settings = settings_of(example(fixed))
    assert (settings["learner.micro_batch_size"], settings["learner.use_dynamic_batch_size"]) == (2, False)


def test_the_settings_of_all_roles_and_of_the_whole_run_are_translated() -> None:
    content = yaml.safe_load(
        """
        exp_name: qwen
        seed: 42
        system_envs: {USE_MODELSCOPE: '1'}
        pretrain: /models/Qwen2.5-7B
        max_steps: 500
        save_steps: 100
        checkpoint_config: {type: file_system, output_dir: "/checkpoints/${exp_name}"}
        resume_from_checkpoint: false
        rollout_batch_size: 64
        num_return_sequences_in_group: 8
        prompt_length: 2048
        response_length: 4096
        adv_estimator: grpo
        ppo_epochs: 1
        actor_train: {system_envs: {NVTE_FLASH_ATTN: '1'}, data_args: {file_name: [math.jsonl], messages: messages}}
        actor_infer:
          generating_args:
            max_new_tokens: ${response_length}
            num_return_sequences: ${num_return_sequences_in_group}
          strategy_args: {strategy_name: sglang, strategy_config: {mem_fraction_static: 0.7}}
        """
    )
    assert settings_of(content) == {
        "observability.experiment_name": "qwen",
        "learner.seed": 42,
        "learner.passes_per_rollout": 1,
        "data.rollout_seed": 42,
        "learner.train_env_vars": {"USE_MODELSCOPE": "1", "NVTE_FLASH_ATTN": "1"},
        "engine.engine_env_vars": {"USE_MODELSCOPE": "1"},
        "model.hf_checkpoint": "/models/Qwen2.5-7B",
        "rollout.num_rollout": 500,
        "learner.save": "/checkpoints/qwen",
        "learner.save_interval": 100,
        "rollout.rollout_batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "rollout.rollout_max_prompt_len": 2048,
        "rollout.rollout_max_response_len": 4096,
        "algorithm.advantage_estimator": "grpo",
        "data.prompt_data": "math.jsonl",
        "data.rollout_shuffle": True,
        "data.input_key": "messages",
        "engine.sglang_server_args.mem_fraction_static": 0.7,
    }


@pytest.mark.parametrize(
    "edit, said",
    [
        (
            lambda roll: roll["actor_train"].update(infer_batchsize=2),
            "actor_train.infer_batchsize is not a key of ROLL that can be translated; did you mean "
            "actor_train.infer_batch_size?",
        ),
        (lambda roll: roll.update(dpo_train={}), "dpo_train is not a key of ROLL that can be translated: remove it"),
        (
            lambda roll: roll.update(rollout={"rm_type": "math"}),
            "rollout.rm_type is not a key of ROLL, as the other keys of this file are: put settings of miles_async "
            "into another file, and pass both with --config",
        ),
        (
            lambda roll: roll["reference"]["model_args"].update(dtype="fp32"),
            "actor_train.model_args.dtype 'bf16' and reference.model_args.dtype 'fp32' contradict each other, because "
            "both set learner.precision: set them to the same value",
        ),
        (
            lambda roll: roll["actor_train"]["model_args"].update(dtype="fp16"),
            "actor_train.model_args.dtype 'fp16' has no counterpart: set it to bf16 or fp32, or set learner.precision",
        ),
        (
            lambda roll: roll["actor_train"]["strategy_args"].update(strategy_name="deepspeed_train"),
            "actor_train.strategy_args.strategy_name 'deepspeed_train' is not supported: the learner runs "
            "Megatron-core: set it to megatron_train, and strategy_config to its sizes",
        ),
        (
            lambda roll: (
                roll["actor_train"]["strategy_args"]["strategy_config"].update(recompute_granularity="full")
                or roll["actor_train"]["model_args"].update(disable_gradient_checkpointing=True)
            ),
            "actor_train.model_args.disable_gradient_checkpointing true and "
            "actor_train.strategy_args.strategy_config.recompute_granularity 'full' contradict each other: remove one "
            "of them",
        ),
        (
            lambda roll: roll["actor_infer"].update(device_mapping="__import__('os').getpid()"),
            "actor_infer.device_mapping \"__import__('os').getpid()\" is not a list of devices: write it as "
            "list(range(0,8))",
        ),
        (
            lambda roll: roll["actor_train"]["training_args"].update(per_device_train_batch_size="two"),
            "actor_train.training_args.per_device_train_batch_size 'two' is not a number of 1 or more: write a whole "
            "number",
        ),
        (
            lambda roll: roll["actor_infer"]["generating_args"].update(max_new_tokens="${response_length}"),
            "actor_infer.generating_args.max_new_tokens refers to ${response_length}, which this file does not set: "
            "write the value",
        ),
        (
            lambda roll: roll["actor_infer"]["strategy_args"]["strategy_config"].update(swap_space=4),
            "actor_infer.strategy_args.strategy_config.swap_space has no counterpart: set SGLang's argument in "
            "sglang_server_args",
        ),
        (
            lambda roll: roll["actor_train"].update(data_args={"file_name": {"math": "a.jsonl"}}),
            "actor_train.data_args.file_name is not a list of files: write it as [file.jsonl]",
        ),
        (
            lambda roll: roll["actor_train"].update(system_envs="NVTE_FLASH_ATTN=1"),
            "actor_train.system_envs is a section, but its value is 'NVTE_FLASH_ATTN=1': put settings below it",
        ),
    ],
)
def test_a_key_of_roll_without_a_counterpart_is_refused_with_one_sentence(edit: Edit, said: str) -> None:
    assert refusal(edit) == said


@pytest.mark.parametrize(
    "content, pipeline",
    [
        ({"student_pretrain": "a", "teacher_pretrain": "b", "student": {}, "seed": 1}, "distillation"),
        ({"student_train": {}, "student_infer": {}}, "on-policy distillation"),
        ({"sft_train": {}, "query_key": "a"}, "supervised fine-tuning"),
        ({"actor_train": {}, "chosen_key": "a", "beta": 0.1}, "preference optimization"),
    ],
)
def test_a_file_of_another_pipeline_of_roll_is_refused_with_one_sentence(content: Any, pipeline: str) -> None:
    assert project_of(content) == "ROLL"
    [problem] = translate(content, "ROLL").problems
    assert f" belongs to ROLL's pipeline of {pipeline}: only files of its pipelines rlvr and agentic can be" in problem


def test_all_refused_keys_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text("rewards: {math_rule: {world_size: 8}}\nactor_train: {infer_batchsize: 1}")
    with pytest.raises(UserError) as refused:
        read_yaml(file)
    sentences = str(refused.value).splitlines()
    assert [sentence.split()[:2] for sentence in sentences] == [
        [f"{file}:", "actor_train.infer_batchsize"],
        [f"{file}:", "rewards.math_rule.worker_cls"],
    ]


def test_verls_file_for_recorded_rollouts_is_translated() -> None:
    content = yaml.safe_load(
        """
        trainer: {experiment_name: replay, project_name: math}
        data: {train_batch_size: 64, gen_batch_size: 96, max_prompt_length: 512, max_response_length: 1024}
        actor_rollout_ref: {rollout: {n: 8}}
        skip:
          rollout: {enable: true, dump_dir: /path/to/rollout_dump, steps: [1, 2, 3, 10], action: cache}
          async_rollout: {enable: false, dump_dir: /path/to/rollout_dump, steps: [1], action: repeat}
        """
    )
    assert project_of(content) == "verl"
    assert settings_of(content) == {
        "observability.experiment_name": "replay",
        "observability.project_name": "math",
        "rollout.rollout_batch_size": 64,
        "rollout.over_sampling_batch_size": 96,
        "rollout.rollout_max_prompt_len": 512,
        "rollout.rollout_max_response_len": 1024,
        "rollout.n_samples_per_prompt": 8,
        "skip.rollout.enable": True,
        "skip.rollout.dump_dir": "/path/to/rollout_dump",
        "skip.rollout.steps": [1, 2, 3, 10],
        "skip.rollout.action": "cache",
        "skip.async_rollout.enable": False,
        "skip.async_rollout.dump_dir": "/path/to/rollout_dump",
        "skip.async_rollout.steps": [1],
        "skip.async_rollout.action": "repeat",
    }


def test_a_skip_module_of_a_user_keeps_its_field_in_a_file_of_verl() -> None:
    content = {"trainer": {"experiment_name": "a"}, "skip": {"reward": {"enable": True, "steps": [1]}}}
    assert settings_of(content) == {
        "observability.experiment_name": "a",
        "skip.roles.reward.enable": True,
        "skip.roles.reward.steps": [1],
    }


def overridden(*words: str) -> RunConfig:
    return run_config(*words)


@pytest.mark.parametrize("role", ["rollout", "async_rollout"])
def test_verls_overrides_set_the_same_on_the_command_line(role: str) -> None:
    first_128 = "[" + ",".join(map(str, range(1, 129))) + "]"
    config = overridden(
        f"skip.{role}.enable=True", f"skip.{role}.dump_dir=/path/to/rollout_dump", f"skip.{role}.steps={first_128}",
        f"skip.{role}.action=cache", "trainer.experiment_name=replay", "data.train_batch_size=64",
    )  # fmt: skip
    skip = {"rollout": config.skip.rollout, "async_rollout": config.skip.async_rollout}[role]
    assert (skip.enable, skip.dump_dir, skip.action) == (True, "/path/to/rollout_dump", "cache")
    assert skip.steps == list(range(1, 129))
    assert config.observability.experiment_name == "replay"
    assert config.rollout.rollout_batch_size == 64


def test_an_override_of_verl_after_a_list_is_no_value_of_the_list() -> None:
    config = overridden("--rollout-stop", "END", "STOP", "trainer.experiment_name=replay")
    assert config.rollout.rollout_stop == ["END", "STOP"]
    assert config.observability.experiment_name == "replay"


def test_verls_older_switch_is_ignored_with_a_warning_beside_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="has no effect beside skip.rollout"):
        config = overridden("actor_rollout_ref.rollout.skip.enable=True", "skip.rollout.enable=True")
    assert config.rollout.model_dump()["skip_rollout"] is False


@pytest.mark.parametrize(
    "word, said",
    [
        ("data.min_response_length=5", "data.min_response_length has no counterpart: responses may end at any token"),
        ("trainer.experiment_nam=x", "did you mean trainer.experiment_name?"),
        ("+trainer.experiment_nam=x", "did you mean trainer.experiment_name?"),
        ("critic.foo=1", "critic.foo is not a key of verl that can be translated: remove it"),
        ("skip.rollout.enabled=True", "did you mean skip.rollout.enable?"),
        ("+algorithm.foo=1", "algorithm.foo is not a key of verl that can be translated: remove it"),
        ("+data.foo=1", "data.foo is not a key of verl that can be translated: remove it"),
        ("data.max_prompt_lenght=9", "did you mean data.max_prompt_length?"),
    ],
)
def test_an_override_of_verl_without_a_counterpart_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        overridden(word)
    assert said in str(refused.value)


def test_an_unknown_key_in_a_file_of_verl_is_refused() -> None:
    content = {"trainer": {"experiment_name": "a", "swap": 3}, "skip": {"rollout": {"enabled": True}}}
    assert refusals(content) == [
        "trainer.swap is not a key of verl that can be translated: remove it",
        "skip.rollout.enabled is not a key of verl that can be translated; did you mean skip.rollout.enable?",
    ]


def test_a_file_with_our_own_sections_belongs_to_no_other_project() -> None:
    assert project_of({"skip": {"rollout": {"enable": True}}, "data": {"prompt_data": "x"}}) is None
    assert project_of({}) is None


@pytest.mark.parametrize("table", [roll.TABLE, roll.VLLM, verl.TABLE])
def test_every_rule_sets_settings_that_exist(table: dict[str, Any]) -> None:
    dicts = [setting.dotted for setting in SETTINGS.values() if dict in setting.kinds]
    for rule in table.values():
        for setting in rule.settings if isinstance(rule, Sets) else ():
            path = tuple(setting.split("."))
            assert path in BY_PATH or setting.rpartition(".")[0] in dicts, setting


def test_every_refusal_says_what_to_do_instead() -> None:
    for rule in [*roll.TABLE.values(), *verl.TABLE.values()]:
        if isinstance(rule, Only | Refused):
            assert any(word in rule.instead for word in ("set ", "remove", "write", "pass", "config.json")), rule

"""Flags of slime and of Megatron-LM on the command line."""

from __future__ import annotations

import ast
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.megatron.flags import flags as megatron_rules
from miles_async.compat.miles.flags import FLAGS as MILES
from miles_async.compat.slime.flags import FLAGS as SLIME
from miles_async.config import megatron
from miles_async.config.cli import parse_or_exit
from miles_async.config.fields import BY_PATH, SETTINGS
from miles_async.config.flags import Flags, parse_flags
from miles_async.config.guest_flags import aliased, meaning, shown
from miles_async.config.load import config_of_values
from miles_async.config.megatron import (
    OF_THE_TRAINING_LOOP,
    SET_BY_THE_RUN,
    megatron_fields,
    megatron_flags,
    table_version,
)
from miles_async.config.model_flags import COMPARED, differences, incomparable
from miles_async.config.translation import Flag, Sets
from miles_async.guests import GUESTS
from tests.configuration import run_config
from tests.unit.compat.slime_names import checkout

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
"""https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json"""


def parsed(line: str) -> Flags:
    flags = parse_flags(line.split())
    assert flags.problems == []
    return flags


def values(line: str) -> dict[str, Any]:
    """The settings of a command line, by dotted path."""
    return {".".join(one.path): one.value for one in parsed(line).assignments}


def problems(line: str) -> list[str]:
    return parse_flags(line.split()).problems


def checked(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and messages of `--check-config` with a checkpoint of Qwen3-4B."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    rest = f"--hf-checkpoint {tmp_path}/model --prompt-data {tmp_path}/rows.jsonl --rm-type math --check-config"
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--n-samples-per-prompt", "8", *line.split(), *rest.split()], "train.py")
    return int(exited.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("rules", [SLIME, MILES, megatron_rules()], ids=["slime", "Miles", "Megatron-LM"])
def test_every_flag_sets_a_setting_that_exists(rules: dict[str, Flag]) -> None:
    dicts = [path for path, setting in BY_PATH.items() if dict in setting.kinds]
    for name, flag in rules.items():
        for target in flag.rule.settings if isinstance(flag.rule, Sets) else ():
            path = tuple(target.split("."))
            assert path in BY_PATH or any(path[: len(known)] == known for known in dicts), (name, target)


@pytest.mark.parametrize("rules", [SLIME, MILES, megatron_rules()], ids=["slime", "Miles", "Megatron-LM"])
def test_every_flag_changes_the_run_or_is_refused_or_is_named_as_without_effect(
    rules: dict[str, Flag], tmp_path: Path
) -> None:
    silent = []
    for name, flag in rules.items():
        if name in SETTINGS:
            continue  # test_every_setting_changes_behaviour.py is about these
        found = {outcome([shown(name), *words]) for words in tries(name, flag, tmp_path)}
        if not found & {"changes the run", "without effect"} and found != {"refused"}:
            silent.append(shown(name))
    assert silent == []


def outcome(words: list[str]) -> str:
    """What a command line does: it is refused, has a flag that is named as without effect, changes a run, or nothing
    of that."""
    flags = parse_flags(words)
    if flags.problems or flags.idle:
        return "refused" if flags.problems else "without effect"
    # Some flags turn on what is on by default.
    for base in ([], ["learner.balance_data=false", "learner.main_grads_dtype=bf16"]):
        before = parse_flags(["--reasoning-gym-task", "chain_sum", *base]).assignments
        unset, _ = config_of_values(Flags(assignments=before))
        config, found = config_of_values(Flags(assignments=[*before, *flags.assignments]))
        if found or config != unset:
            return "refused" if found else "changes the run"
    return "silent"


def tries(name: str, flag: Flag, folder: Path) -> list[list[str]]:
    """Values of a flag, one of which is not what a run without the flag does."""
    if flag.takes == "nothing":
        return [[]]
    if name in ("custom_config_path", "eval_config"):
        (folder / "file.yaml").write_text("mine: 1\neval: {datasets: [{name: aime, path: a.jsonl}]}")
        return [[str(folder / "file.yaml")]]
    if isinstance(flag.rule, Sets) and flag.rule.values is not None:
        return [[str(value)] for value in flag.rule.values]
    return [["3"], ["0.25"], ["true"], ["disk"]]


def test_slime_has_no_flag_that_is_a_setting() -> None:
    assert SETTINGS.keys().isdisjoint(SLIME)


def test_flags_that_describe_the_checkpoint_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = """
        --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
        --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
        --qk-layernorm
    """
    code, said = checked(line, tmp_path, capsys)
    assert code == 0, said
    assert "--use-rotary-position-embeddings describes a part of the model" in said


@pytest.mark.parametrize(
    "flag, theirs",
    [
        ("--num-layers 35", "36"),
        ("--norm-epsilon 1e-5", "1e-06"),
        ("--rotary-base 10000", "1000000"),
        ("--untie-embeddings-and-output-weights", "False"),
        ("--add-qkv-bias", "False"),
        ("--squared-relu", "False"),
        ("--num-experts 8", "0"),
        ("--kv-lora-rank 512", "0"),
    ],
)
def test_a_flag_that_describes_another_model_is_refused_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, theirs: str
) -> None:
    code, said = checked(flag, tmp_path, capsys)
    assert code == 2
    name, _, given = flag[2:].replace("-", "_").partition(" ")
    given = given.replace("1e_5", "1e-05") or "True"
    assert f"{name} {given} differs from config.json of hf_checkpoint {tmp_path}/model, which has {theirs}" in said


MODELS: list[dict[str, Any]] = [
    QWEN3_4B,
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
]
"""Configurations of checkpoints, with the parts of a dense model, of latent and of linear attention, and of experts."""


@pytest.mark.parametrize("name", COMPARED)
def test_each_flag_that_describes_a_model_is_compared_with_one_that_has_the_part(name: str) -> None:
    having = [model for model in MODELS if COMPARED[name](model) is not None]
    assert having
    for model in having:
        theirs = COMPARED[name](model)
        # A number for layers with experts: every second one.
        other = 2 if isinstance(theirs, list) else not theirs if isinstance(theirs, bool) else f"not {theirs}"
        assert [found for found, *_ in differences({name: other}, model)] == [name]


def test_a_flag_about_which_the_checkpoint_says_nothing_is_named(tmp_path: Path, capsys: Any) -> None:
    code, said = checked("--moe-router-group-topk 4 --num-layers 36", tmp_path, capsys)
    assert code == 0, said
    assert (
        f"note: --moe-router-group-topk cannot be compared with config.json of hf_checkpoint {tmp_path}/model, which "
        "alone defines these parts of the model" in said
    )


def test_layers_with_experts_in_an_unknown_notation_are_not_said_to_be_equal() -> None:
    [_, model, _] = MODELS
    for unknown in ("[0]*one+[1]*three", 0):
        assert incomparable({"moe_layer_freq": unknown}, model) == ["moe_layer_freq"]
    assert incomparable({"moe_layer_freq": "[0]*1+[1]*3"}, model) == []
    assert [*differences({"moe_layer_freq": "[0]*1+[1]*3"}, model)] == []


def test_keys_of_a_checkpoint_may_be_null() -> None:
    [_, _, model] = MODELS
    empty = dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "n_shared_experts"))
    assert [*differences({"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": 8}, {**model, **empty})] == []


def test_a_router_that_scores_with_another_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(QWEN3_4B, "model_type", "qwen3_moe")
    monkeypatch.setitem(QWEN3_4B, "num_experts", 8)
    code, said = checked("--moe-router-score-function sigmoid --disable-bias-linear", tmp_path, capsys)
    assert code == 2
    assert "moe_router_score_function sigmoid differs from config.json" in said
    assert "bias" not in said


def test_swiglu_contradicts_a_model_with_gelu(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(QWEN3_4B, "hidden_act", "gelu")
    code, said = checked("--swiglu", tmp_path, capsys)
    assert code == 2
    assert "swiglu True differs from" in said


@pytest.mark.parametrize(
    "flags, note",
    [
        ("--num-epoch 1 --num-rollout 3000", "num_epoch 1 has no effect, because num_rollout is set"),
        (
            "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
            "custom_tis_function_path has no effect: it needs off_policy_correction other than none, or get_mismatch_",
        ),
        (
            "--use-rollout-logprobs --use-tis",
            "off_policy_correction has no effect: it needs use_rollout_logprobs turned off, because all weights are 1",
        ),
    ],
)
def test_a_flag_that_another_flag_makes_useless_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, note: str
) -> None:
    code, said = checked(flags, tmp_path, capsys)
    assert code == 0, said
    assert note in said


def test_canonical_lora_of_miles_is_plain_lora_here() -> None:
    config, found = config_of_values(parsed("--lora-rank 8 --lora-type canonical_lora --reasoning-gym-task chain_sum"))
    assert found == []
    assert config.learner.lora_type == "lora"


def test_the_tiny_model_has_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_or_exit("--num-layers 3 --rm-type math --reasoning-gym-task chain_sum --check-config".split(), "train.py")
    assert exited.value.code == 2
    assert "so no model can be compared with --num-layers: set it" in capsys.readouterr().err


def test_flags_of_megatrons_configuration_are_passed_on() -> None:
    assert values("--adam-eps 1e-15 --attention-softmax-in-fp32 --no-align-param-gather") == {
        "learner.megatron_args.adam_eps": 1e-15,
        "learner.megatron_args.attention_softmax_in_fp32": True,
        "learner.megatron_args.align_param_gather": False,
    }


def test_a_field_that_the_run_sets_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked("learner.megatron_args.bf16=true learner.megatron_args.adam_epss=1", tmp_path, capsys)
    assert code == 2
    assert "megatron_args.bf16 is set by the run itself: set precision" in said
    assert "has no such field; did you mean adam_eps?" in said


@pytest.mark.parametrize(
    "flags, advice",
    [
        ("--decoupled-lr 1e-5", "all weights have one learning rate: set lr and min_lr"),
        ("--decoupled-min-lr 1e-7", "all weights have one learning rate: set lr and min_lr"),
        ("--loss-scale 1024", "bf16 and fp32 need no scaled loss: remove it"),
        ("--qk-clip", "no weights are clipped after a step: remove it"),
        ("--qk-clip-threshold 50", "no weights are clipped after a step: remove it"),
        ("--moe-enable-routing-replay", "routing replay is not supported: remove it"),
        (
            "--cuda-graph-impl transformer_engine",
            "micro-batches differ in size, so no CUDA graphs are captured: remove it",
        ),
        ("--num-distributed-optimizer-instances 2", "the parallel sizes alone determine the process groups: remove it"),
        ("--cpu-offloading-num-layers 2", "set cpu_offloading and cpu_offloading_num_layers in megatron_args"),
    ],
)
def test_a_flag_that_needs_megatrons_training_loop_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, advice: str
) -> None:
    code, said = checked(flags, tmp_path, capsys)
    assert code == 2
    assert f"{flags.split()[0]} has no counterpart: {advice}" in said


def test_a_field_that_needs_megatrons_training_loop_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "learner.megatron_args.decoupled_lr=1e-5 learner.megatron_args.log_num_zeros_in_grad=true"
    code, said = checked(given, tmp_path, capsys)
    assert code == 2
    assert (
        "megatron_args.decoupled_lr has no counterpart: all weights have one learning rate: set lr and min_lr" in said
    )
    assert "megatron_args.log_num_zeros_in_grad has no counterpart: Megatron-LM's own logs are not written" in said


@pytest.mark.parametrize(
    "flag",
    [
        *("--initial-loss-scale 65536", "--log-num-zeros-in-grad", "--muon-momentum 0.9", "--flash-decode"),
        *("--disable-tp-comm-bulk-dgrad", "--cross-entropy-loss-fusion", "--first-last-layers-bf16"),
    ],
)
def test_a_flag_of_megatron_without_an_effect_here_is_noted_and_not_passed_on(flag: str) -> None:
    flags = parsed(flag)
    assert flag.split()[0] in flags.idle
    assert not any("megatron_args" in name for name in values(flag))


def test_keys_of_the_custom_configuration_set_what_flags_of_every_project_set(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("fully_async: true\nlr_decay_iters: 9\nuse_slime_logs: 3\nlog_passrate: true\n")
    found = values(f"--custom-config-path {path}")
    assert found.items() >= values("--fully-async").items()
    assert found["learner.lr_decay_steps"] == 9
    assert found["rollout.custom_args.use_slime_logs"] == 3
    assert f"--custom-config-path {path}: log_passrate" in parsed(f"--custom-config-path {path}").idle


def test_the_custom_configuration_takes_precedence_over_flags_as_in_slime(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("lr: 2e-6\nuse_tis: false\nfully_async: false\nlr_decay_iters: 9\n")
    key = f"--custom-config-path {path}"
    flags = parsed(f"--lr 1e-6 --use-tis --fully-async --lr-decay-steps 7 --weight-decay 0.1 {key}")
    config, found = config_of_values(flags)
    assert found == []
    assert (config.learner.lr, config.learner.lr_decay_steps, config.learner.weight_decay) == (2e-6, 9, 0.1)
    assert config.algorithm.off_policy_correction is None
    assert config.rollout.rollout_function_path == SETTINGS["rollout_function_path"].default
    assert flags.idle == {
        "--lr": f"has no effect, because {key}: lr sets learner.lr, too",
        "--lr-decay-steps": f"has no effect, because {key}: lr_decay_iters sets learner.lr_decay_steps, too",
        "--use-tis": f"has no effect, because {key}: use_tis turns it off",
        "--fully-async": f"has no effect, because {key}: fully_async turns it off",
    }


def test_the_custom_configuration_adds_attributes_to_those_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("use_slime_logs: 3\n")
    lengths = "--rollout-max-context-len 4096 --eval-max-context-len 16384"
    config, _ = config_of_values(parsed(f"{lengths} --custom-config-path {path}"))
    assert config.rollout.custom_args == {
        "rollout_max_context_len": 4096,
        "eval_max_context_len": 16384,
        "use_slime_logs": 3,
    }


def test_a_key_of_the_custom_configuration_that_only_a_flag_can_set_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("eval_top_p: 0.5\nuse_rollout_indexer_replay: true\nuse_routing_replay: false\n")
    assert problems(f"--custom-config-path {path}") == [
        f"--custom-config-path {path}: eval_top_p has no effect in this file: pass --eval-top-p instead",
        f"--custom-config-path {path}: use_rollout_indexer_replay has no counterpart: indexer replay is not "
        "supported: remove it",
    ]


def test_evaluation_flags_become_data_sets() -> None:
    line = """
        --eval-prompt-data aime /data/aime.jsonl gpqa /data/gpqa.jsonl --n-samples-per-eval-prompt 16
        --eval-max-response-len 16384 --eval-top-p 1
    """
    common = {"n_samples": 16, "max_response_len": 16384, "top_p": 1}
    assert values(line) == {
        "rollout.eval_datasets": {
            "aime": {"path": "/data/aime.jsonl", **common},
            "gpqa": {"path": "/data/gpqa.jsonl", **common},
        }
    }


def test_the_file_of_an_evaluation_is_read(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(
        "eval:\n  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.7}\n"
        "  datasets:\n  - {name: aime, path: a.jsonl, rm_type: math}\n  - {name: gpqa, path: b.jsonl, top_p: 0.9}\n"
    )
    assert values(f"--eval-config {tmp_path}/eval.yaml") == {
        "rollout.eval_datasets": {
            "aime": {"path": "a.jsonl", "n_samples": 4, "temperature": 0.7, "rm_type": "math"},
            "gpqa": {"path": "b.jsonl", "n_samples": 4, "temperature": 0.7, "top_p": 0.9},
        }
    }


def test_a_data_set_of_an_evaluation_may_have_its_own_keys(tmp_path: Path) -> None:
    keys = (
        "tool_key: functions, metadata_key: extra, apply_chat_template_kwargs: {enable_thinking: true}, "
        "metadata_overrides: {split: test}"
    )
    (tmp_path / "eval.yaml").write_text(f"eval: {{datasets: [{{name: a, path: a.jsonl, {keys}}}]}}")
    [dataset] = values(f"--eval-config {tmp_path}/eval.yaml")["rollout.eval_datasets"].values()
    assert (dataset["tool_key"], dataset["metadata_key"]) == ("functions", "extra")
    assert dataset["apply_chat_template_kwargs"] == {"enable_thinking": True}
    assert dataset["metadata_overrides"] == {"split": "test"}


@pytest.mark.parametrize("version", ["", "v1", "v2"])
def test_the_session_server_of_miles_may_have_a_version(version: str) -> None:
    said = parsed(f"--use-session-server {version} --num-rollout 3")
    assert said.idle == {
        "--use-session-server": "has no effect: the endpoint for agents keeps the tokens of each session"
    }
    assert {".".join(one.path): one.value for one in said.assignments} == {"rollout.num_rollout": 3}


def test_what_the_file_of_an_evaluation_has_beside_data_sets_is_said(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text("eval: {datasets: [{name: aime, path: a.jsonl}], delegate: [{url: http://there}]}")
    idle = parsed(f"--eval-config {path} --eval-prompt-data b b.jsonl").idle
    assert idle == {
        "--eval-prompt-data": "has no effect with --eval-config",
        "delegate of --eval-config": "has no effect: only the data sets of the file are evaluated",
    }
    for written, wanted in (("datasets: 5", "a list of sections"), ("defaults: 3", "a section")):
        path.write_text(f"eval: {{{written}}}")
        said = f"--eval-config {path}: {written.replace(':', ' is')}: write {wanted}"
        assert problems(f"--eval-config {path}") == [said]
    path.write_text("eval: {datasets: [aime]}")
    assert f"--eval-config {path}: each data set needs a section with name and path" in problems(
        f"--eval-config {path}"
    )


def test_a_folder_for_weights_has_no_effect() -> None:
    assert "--update-weight-disk-dir" in parsed("--update-weight-disk-dir /weights").idle


def test_a_data_set_without_a_path_is_refused() -> None:
    [sentence] = problems("--eval-prompt-data aime a.jsonl gpqa")
    assert sentence == "--eval-prompt-data needs a name and a path for each data set, such as aime aime.jsonl"


def test_flags_of_an_evaluation_have_no_effect_without_a_data_set() -> None:
    assert parsed("--eval-top-p 0.9").idle == {"--eval-top-p": "has no effect without --eval-prompt-data"}


@pytest.mark.parametrize(
    "line, setting, value",
    [
        ("--use-tis", "algorithm.off_policy_correction", "tis"),
        ("--disable-grpo-std-normalization", "algorithm.grpo_std_normalization", False),
        ("--calculate-per-token-loss", "algorithm.loss_aggregation", "token_mean"),
        ("--update-weight-transport disk", "weights.weight_transfer", "disk"),
        ("--update-weight-mode delta --update-weight-transport disk", "weights.weight_transfer", "disk_delta"),
        ("--rollout-health-check-interval 5", "engine.engine_health_interval_seconds", 5),
        ("--lr-warmup-iters 10", "learner.lr_warmup_steps", 10),
        ("--recompute-activations", "learner.recompute_granularity", "selective"),
        ("--bf16", "learner.precision", "bf16"),
    ],
)
def test_a_flag_of_slime_sets_what_it_means_there(line: str, setting: str, value: Any) -> None:
    assert values(line) == {setting: value}


def test_flags_without_effect_are_named_with_the_reason() -> None:
    idle = parsed("--use-mcore-models --num-gpus-per-node 8 --log-interval 1").idle
    assert idle == {
        "--use-mcore-models": "has no effect: all models are those of Megatron-core",
        "--num-gpus-per-node": "has no effect: Ray knows the GPUs of each node",
        "--log-interval": "belongs to Megatron-LM's own logs; this project has other metrics and traces",
    }


def test_all_problems_of_a_command_line_are_listed_at_once() -> None:
    found = problems("--swigluu --fp8-format e4m3 --optimizer sgd --use-opd --use-torch-fsdp2")
    assert found == [
        "unknown flag --swigluu; did you mean --swiglu?",
        "--fp8-format has no counterpart: the learner computes in bf16 or fp32: set precision",
        "--optimizer 'sgd' is not supported: the learner uses AdamW; set it to adam",
        "--use-torch-fsdp2 has no counterpart: the learner shards the optimizer only: set use_distributed_optimizer",
        "--use-opd has no counterpart: on-policy distillation is not supported: remove it",
    ]


def test_the_table_is_that_of_the_installed_megatron() -> None:
    assert table_version() == version("megatron-core")


def test_a_flag_of_another_version_of_megatron_is_refused_with_both_versions() -> None:
    [sentence] = problems("--freeze-all-layers")
    assert sentence == (
        f"--freeze-all-layers has no counterpart: Megatron-core 0.19.2 has it, but not {table_version()}: remove it"
    )


def test_fields_that_the_run_sets_are_fields_of_megatron() -> None:
    assert megatron_fields().keys() >= SET_BY_THE_RUN.keys()


def test_fields_of_the_training_loop_are_fields_of_some_version_of_megatron() -> None:
    tables = Path(megatron.__file__).parent.glob("*.json")
    assert {name for table in tables for name in json.loads(table.read_text())["fields"]} >= OF_THE_TRAINING_LOOP.keys()


def test_a_switch_of_megatron_takes_no_word() -> None:
    assert {flag.takes for flag in megatron_flags().values() if flag.value is not None} == {"nothing"}


def test_the_flags_of_another_project_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--help-slime"], "train.py")
    assert exited.value.code == 0
    explained = capsys.readouterr().out.splitlines()
    assert "  --use-tis sets algorithm.off_policy_correction to tis" in explained
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--help-nobody"], "train.py")
    assert exited.value.code == 2
    assert capsys.readouterr().err == (
        "train.py: --help-nobody names no project whose flags are known: use one of --help-megatron, --help-miles, "
        "--help-slime, --help-verl\n"
    )


@pytest.mark.parametrize("rules", [SLIME, MILES, megatron_rules()], ids=["slime", "Miles", "Megatron-LM"])
def test_every_flag_has_a_meaning_in_words(rules: dict[str, Flag]) -> None:
    for name, flag in rules.items():
        kind, text = meaning(name, flag)
        assert kind
        assert text.strip()


def test_the_buffer_of_miles_counts_finished_groups() -> None:
    config = run_config("--async-data-buffer-capacity-factor", "2.5", rollout_batch_size=8)
    assert config.rollout.queue_capacity == 8 + 20


def test_fully_async_of_miles_selects_the_rollout_function() -> None:
    path = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
    assert values("--fully-async") == {"rollout.rollout_function_path": path}


@pytest.mark.parametrize(
    "line, setting, value",
    [
        ("--use-dynamic-global-batch-size", "learner.num_steps_per_rollout", 1),
        ("--skip-actor-forward-only", "learner.num_steps_per_rollout", 1),
        ("--critic-lr-warmup-iters 5", "algorithm.critic_lr_warmup_steps", 5),
    ],
)
def test_a_flag_of_miles_sets_what_it_means_there(line: str, setting: str, value: Any) -> None:
    assert values(line) == {setting: value}


@pytest.mark.parametrize(
    "line",
    [
        "--session-sample-picker-path mine.pick",
        "--rollout-external",
        "--debug-exit-after-rollout 3",
        "--debug-skip-weight-update",
        "--debug-disable-optimizer",
        "--lora-train-only",
        "--ci-inject-rollout-data-path data/{rollout_id}.pt",
        "--use-mlflow",
    ],
)
def test_a_flag_of_miles_whose_run_would_train_or_report_something_else_is_refused(line: str) -> None:
    [sentence] = problems(line)
    assert sentence.startswith(f"{line.split()[0]} has no counterpart: ")


@pytest.mark.parametrize(
    "flag, kept, others",
    [
        ("--eval-overflow-policy", "skip", ["backpressure"]),
        ("--multi-lora-n-adapters", "0", ["2"]),
        ("--object-store-backend", "ray", ["mooncake"]),
        ("--stream-optimizer-state-moment-dtype", "fp32", ["bf16", "fp8e4m3"]),
    ],
)
def test_a_flag_of_miles_may_have_the_value_of_what_a_run_does(flag: str, kept: str, others: list[str]) -> None:
    assert problems(f"{flag} {kept}") == []
    for other in others:
        [sentence] = problems(f"{flag} {other}")
        assert "is not supported: " in sentence


def test_flags_of_miles_for_several_adapters_point_to_the_setting() -> None:
    [several] = problems("--multi-lora-n-adapters 2")
    assert several.endswith("is not supported: set adapters, which names the adapters of a run, and remove the flag")
    [one] = problems("--multi-lora-adapter math math.yaml")
    assert one.endswith("has no counterpart: set adapters, and the data sets of each adapter")


def test_a_flag_of_miles_that_needs_another_flag_has_no_effect_alone() -> None:
    lines = (
        "--mlflow-run-name a --multi-lora-api-port 8068 --dumper-dir /dumps --ci-inject-rollout-data-min-match-ratio 1"
    )
    assert all(why.startswith("has no effect without ") for why in parsed(lines).idle.values())
    assert len(parsed(lines).idle) == 4


def calls_that_add(module: Path) -> list[ast.Call]:
    """The calls in the source of a module that add flags to a parser of the standard library's argparse."""
    nodes = ast.walk(ast.parse(module.read_text()))
    return [node for node in nodes if isinstance(node, ast.Call) and adds_argument(node.func)]


def flags_added_in(call: ast.Call) -> list[str]:
    """The flags that a call adds."""
    texts = [word.value for word in call.args if isinstance(word, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.startswith("--")]


def adds_argument(function: ast.expr) -> bool:
    """Whether a call adds an argument: `reset_arg` of both projects does so if Megatron-LM has no such flag."""
    if isinstance(function, ast.Name):
        return function.id == "reset_arg"
    return isinstance(function, ast.Attribute) and function.attr == "add_argument"


@pytest.mark.parametrize(
    "project, modules, least",
    [("slime", ["utils/arguments.py"], 200), ("miles", ["utils/arguments.py", "dashboard/args.py"], 330)],
)
def test_every_flag_that_a_project_adds_is_known(project: str, modules: list[str], least: int) -> None:
    """SLIME_CHECKOUT and MILES_CHECKOUT name the checkouts, tried with commits 624b824a and 31f1ca96."""
    folder = checkout(project) / project
    calls = [call for module in modules for call in calls_that_add(folder / module)]
    flags = [flag for call in calls for flag in flags_added_in(call)]
    assert len(flags) >= least
    assert [sentence for sentence in problems(" ".join(flags)) if sentence.startswith("unknown")] == []


DEVICES_AND_NAMES = """
    actor_num_gpus_per_node rollout_num_gpus metrics_port agent_port wandb_mode project_name experiment_name
    rollout_function_path data_source_path disable_rollout_global_dataset megatron_to_hf_mode
    async_data_buffer_capacity_factor
""".split()
"""Settings whose defaults describe a machine, a run or a part of the program, not what is trained."""


@pytest.mark.parametrize("project", ["slime", "miles"])
def test_every_default_of_a_project_is_ours_or_that_of_its_preset(project: str) -> None:
    """SLIME_CHECKOUT and MILES_CHECKOUT name the checkouts, tried with commits 624b824a and 31f1ca96."""
    theirs_of = GUESTS.find(project).defaults()
    rules, others, compared = {**SLIME, **MILES}, [], 0
    for call in calls_that_add(checkout(project) / project / "utils" / "arguments.py"):
        for flag in flags_added_in(call):
            name = flag[2:].replace("-", "_")
            setting = SETTINGS.get(name) or (aliased(rules[name]) if name in rules else None)
            if setting is None or setting.name in DEVICES_AND_NAMES or {dict, list} & set(setting.kinds):
                continue
            known, theirs = default_in(call)
            compared += known
            if known and theirs not in (setting.default, theirs_of.get(setting.name, setting.default)):
                others.append((flag, theirs))
    assert compared > 80
    assert others == []


def default_in(call: ast.Call) -> tuple[bool, Any]:
    """Whether a call says the default of its flag in a literal, and this default."""
    words = {word.arg: word.value for word in call.keywords}
    if "default" not in words:
        return True, False if ast.unparse(words.get("action", ast.Constant(""))) == "'store_true'" else None
    try:
        return True, ast.literal_eval(words["default"])
    except ValueError:
        return False, None


@pytest.mark.parametrize(
    "line, setting",
    [
        ("--bf16 --precision fp32", "learner.precision"),
        ("--precision fp32 --bf16", "learner.precision"),
        ("--use-tis --off-policy-correction none", "algorithm.off_policy_correction"),
        ("--use-tis --off-policy-correction sequence", "algorithm.off_policy_correction"),
        ("--lr-warmup-iters 10 --lr-warmup-steps 3", "learner.lr_warmup_steps"),
        ("--lr-warmup-steps 3 --lr-warmup-iters 10", "learner.lr_warmup_steps"),
    ],
)
def test_a_flag_of_another_project_contradicts_another_value_of_the_same_setting(line: str, setting: str) -> None:
    [problem] = problems(line)
    assert all(word in problem for word in line.split() if word.startswith("--"))
    assert problem.endswith(f"contradict each other, because both set {setting}: remove one of them")


@pytest.mark.parametrize(
    "line",
    [
        "--bf16 --precision bf16",
        "--lr-warmup-iters 3 --lr-warmup-steps 3",
        "--lr-warmup-iters 10 --lr_warmup_iters 3",
        "--lr-warmup-iters 3 --lr-warmup-steps 10 --lr-warmup-steps 3",
        "--bf16 learner.precision=fp32",
    ],
)
def test_equal_values_repeated_flags_and_later_sources_do_not_contradict_a_flag(line: str) -> None:
    assert problems(line) == []


@pytest.mark.parametrize("flag", ["--swiglu=false", "--squared-relu=3"])
def test_a_switch_without_a_negation_is_not_said_to_have_one(flag: str) -> None:
    name, _, value = flag.partition("=")
    assert problems(flag) == [f"{name} does not take the value {value!r}: write {name} without a value, or remove it"]

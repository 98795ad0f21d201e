"""Defaults: those of other projects, those that a run derives, and what a run says about both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.config.cli import EXIT_INVALID, parse_or_exit
from miles_async.config.fields import SETTINGS, values_of
from miles_async.config.load import load_config
from miles_async.config.presets import names, preset, unlike
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.modes.shipped import Stream
from tests.configuration import KEY_FLAGS, run_config
from tests.plugin_packages import install_plugin

GENERATION = ("--n-samples-per-prompt", "2", "--rollout-max-response-len", "8")
JOB = ("--reasoning-gym-task", "chain_sum", "--rm-type", "math", *GENERATION)
SIZES = ("--rollout-batch-size", "4", "--max-tokens-per-gpu", "64")
STREAM = ("--rollout-function-path", Stream.function)
SLIME = {
    "loss_aggregation": "sequence_mean",
    "off_policy_correction": "none",
    "weight_decay": 0.01,
    "adam_beta2": 0.999,
    "lr_decay_style": "linear",
    "kl_loss_type": "k1",
    "eval_size": 0,
    "save_keep": None,
    "rollout_shuffle": False,
    "rollout_skip_special_tokens": False,
    "input_key": "input",
    "label_key": None,
    "max_nonfinite_batches": 1,
    "moe_router_dtype": None,
    "sglang_router_request_timeout_secs": 14400.0,
    "profile_step_start": 10,
    "profile_step_end": 12,
}
VERL = {
    "advantage_estimator": "ppo",
    "loss_aggregation": "token_mean",
    "critic_lr": 1e-5,
    "rollout_batch_size": 1024,
    "lr_decay_style": "constant",
    "input_key": "prompt",
    "label_key": "reward_model.ground_truth",
}
ROLL = {
    "rollout_top_k": 50,
    "lambd": 0.95,
    "lr": 5e-5,
    "rollout_batch_size": 128,
    "adam_beta2": 0.999,
    "moe_router_dtype": "fp32",
}


def resolved(*flags: str, entry: str = "train.py") -> RunConfig:
    return load_config([*JOB, *flags], entry=entry)


def said(capsys: pytest.CaptureFixture[str], *flags: str, entry: str = "train.py") -> tuple[str, list[str]]:
    """What `--check-config` prints, and the notes."""
    with pytest.raises(SystemExit) as ended:
        parse_or_exit([*JOB, *flags, "--check-config"], entry)
    assert ended.value.code == 0
    printed = capsys.readouterr()
    return printed.out, [line.partition("note: ")[2] for line in printed.err.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse_or_exit([*JOB, *flags], "train.py")
    assert ended.value.code == EXIT_INVALID
    return capsys.readouterr().err.splitlines()


def unlike_slime(notes: list[str]) -> str:
    [note] = [note for note in notes if note.startswith("unlike slime (its value in parentheses): ")]
    return note


def test_only_a_run_in_which_generation_and_training_overlap_is_corrected_by_default() -> None:
    assert resolved().algorithm.off_policy_correction == "none"
    assert resolved(entry="train_async.py").algorithm.off_policy_correction == "tis"
    assert resolved(*STREAM, entry="train_async.py").algorithm.off_policy_correction == "tis"
    assert resolved("--policy-objective", "dppo", entry="train_async.py").algorithm.off_policy_correction == "none"
    assert resolved("--off-policy-correction", "icepop").algorithm.off_policy_correction == "icepop"
    supervised = resolved("--loss-type", "sft_loss", "--rollout-function-path", "supervised", *data_file())
    assert supervised.algorithm.off_policy_correction is None


def data_file() -> tuple[str, ...]:
    rows = Path(__file__).parents[3] / "examples" / "lessons.jsonl"
    return ("--reasoning-gym-task", "null", "--prompt-data", str(rows), *KEY_FLAGS, "--rm-type", "null")


def test_no_correction_can_be_set_by_its_name() -> None:
    chosen = resolved("--off-policy-correction", "none", entry="train_async.py")
    assert chosen.algorithm.off_policy_correction == "none"


def test_what_nothing_sets_has_the_value_of_slime() -> None:
    config = resolved()
    assert values_of(config, SLIME.keys() - {"loss_aggregation"}) == {
        name: value for name, value in SLIME.items() if name != "loss_aggregation"
    }
    assert config.algorithm.kl_loss_coef == 0.0


@pytest.mark.parametrize("name", names())
def test_each_value_of_a_preset_is_valid(name: str) -> None:
    # num_epoch needs a file of prompts.
    values = {"num_rollout": 1, **preset(name)}
    assert values_of(run_config(**values), values) == values


@pytest.mark.parametrize("name, values", [("slime", SLIME), ("miles", SLIME), ("verl", VERL), ("roll", ROLL)])
def test_a_preset_sets_the_defaults_of_its_project(name: str, values: dict[str, Any]) -> None:
    config = resolved("--preset", name, "--num-rollout", "4", entry="train_async.py")
    assert values_of(config, values) == values


def test_a_file_and_a_flag_override_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("learner: {lr: 3.0e-5}\n")
    flags = ("--lambd", "0.9", "--config", str(file), "--preset", "ROLL", "learner.weight_decay=0.5")
    config = resolved(*flags)
    assert (config.learner.lr, config.algorithm.lambd, config.learner.weight_decay) == (3e-5, 0.9, 0.5)
    assert config.rollout.rollout_temperature == 0.95, "of the preset"


@pytest.mark.parametrize("name", ["slime", "miles", "verl", "roll"])
def test_each_of_these_projects_generates_one_sample_per_prompt_by_default(name: str) -> None:
    assert preset(name)["n_samples_per_prompt"] == SETTINGS["n_samples_per_prompt"].default == 1


@pytest.mark.parametrize("entry", ["train.py", "train_async.py"])
def test_grpo_without_the_number_of_samples_is_refused_with_what_to_set(
    capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_or_exit([*JOB, "--n-samples-per-prompt", "1", "--check-config"], entry)
    assert ended.value.code == EXIT_INVALID
    assert capsys.readouterr().err == (
        f"{entry}: n_samples_per_prompt 1 gives no training signal: advantage_estimator grpo compares the samples of a "
        "group; set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus or ppo\n"
    )


def test_a_preset_with_a_critic_does_not_keep_a_run_from_another_estimator() -> None:
    config = resolved("--preset", "verl", "--num-rollout", "4", "--advantage-estimator", "grpo")
    assert config.algorithm.advantage_estimator == "grpo"


def test_check_config_prints_what_the_preset_sets(capsys: pytest.CaptureFixture[str]) -> None:
    printed, notes = said(capsys, "--preset", "verl", "--num-rollout", "4")
    assert printed.startswith("--preset verl sets, unless a file or a flag does:\n  rollout.num_epoch = 30\n")
    assert "\n  algorithm.loss_aggregation = token_mean\n" in printed
    assert not [note for note in notes if "no effect" in note or "unlike" in note]


def test_two_presets_and_an_unknown_one_are_refused_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--preset", "slime", "--preset", "verl") == [
        "train.py: --preset slime and --preset verl exclude each other: choose one"
    ]
    assert refused(capsys, "--preset", "slme") == [
        "train.py: --preset slme is not a project whose defaults are known; did you mean slime?"
    ]
    assert refused(capsys, "--preset", "trl")[0].endswith("; choose one of miles, roll, slime, verl")
    assert refused(capsys, "--preset") == ["train.py: --preset needs the name of a project, such as slime"]


def test_a_run_names_the_defaults_that_differ_from_those_of_slime(capsys: pytest.CaptureFixture[str]) -> None:
    _, notes = said(capsys, *STREAM, "--rollout-batch-size", "4", "--lr", "1e-4", entry="train_async.py")
    said_once = unlike_slime(notes)
    assert "off_policy_correction tis (none)" in said_once
    assert "balance_data on (off)" in said_once
    assert "max_tokens_per_gpu 8192 (unset)" in said_once
    assert "engine_health_interval_seconds 1 (30)" in said_once
    for name in ("rollout_batch_size", "weight_decay", "async_save", "input_key", "max_nonfinite_batches", "eps_clip"):
        assert name not in said_once, f"{name} is set, equal, or has no effect here"


def test_a_run_names_a_reward_that_scores_other_answers_in_slime(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rm_type math (boxed_math)" in unlike_slime(said(capsys)[1])
    assert "rm_type" not in unlike_slime(said(capsys, "--rm-type", "boxed_math")[1])


@pytest.mark.parametrize("setting", ["data.datasets", "rollout.eval_datasets"])
def test_a_data_set_may_have_the_reward_that_scores_other_answers_in_slime(setting: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    path = "prompt_data" if setting == "data.datasets" else "path"
    for rm_type, is_named in (("math", True), ("f1", False)):
        sets = {"own": {path: str(rows), "rm_type": rm_type}}
        config = run_config("--rm-type", "boxed_math", **{setting.partition(".")[2]: sets})
        assert any("rm_type math (boxed_math)" in note for note in unlike(config, ())) is is_named


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_preset_names_only_the_values_with_another_meaning(capsys: pytest.CaptureFixture[str], name: str) -> None:
    notes = said(capsys, "--preset", name, "--num-rollout", "4", *SIZES)[1]
    assert [note for note in notes if "unlike" in note] == [
        f"unlike {name} (its value in parentheses): rm_type math (boxed_math)"
    ]


def test_a_default_that_matters_only_in_some_runs_is_named_only_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, notes = said(capsys, "--advantage-estimator", "gspo", "--save", "saved")
    assert "eps_clip 0.0003 (0.2)" in unlike_slime(notes)
    assert "async_save on (off)" in unlike_slime(notes)
    assert "off_policy_correction" not in unlike_slime(notes)


def test_a_run_that_keeps_its_model_nowhere_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def lost(*flags: str) -> list[str]:
        return [note for note in said(capsys, *flags)[1] if "will be lost" in note]

    assert lost() == [
        "the trained model will be lost when the run ends, because neither save nor save_hf is set: set save to a "
        "folder for checkpoints, or save_hf to a folder for the model in Hugging Face format"
    ]
    assert lost("--save", "checkpoints") == []
    assert lost("--save-hf", "models") == []
    assert lost("--debug-rollout-only") == []


def test_a_guest_of_a_user_adds_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = (
        "from miles_async.guests import Guest\n\n"
        "class Workshop(Guest):\n    def defaults(self):\n        return {'lr': 0.25, 'num_rollout': None}\n"
    )
    install_plugin(tmp_path, monkeypatch, GUESTS, "workshop", "workshop:Workshop", guest)
    assert resolved("--preset", "workshop").learner.lr == 0.25
    with pytest.raises(UserError, match="choose one of miles, roll, slime, verl, workshop"):
        resolved("--preset", "trl")


def test_defaults_of_settings_that_do_not_exist_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = (
        "from miles_async.guests import Guest\n\n"
        "class Garage(Guest):\n    def defaults(self):\n        return {'learning_rate': 0.25}\n"
    )
    install_plugin(tmp_path, monkeypatch, GUESTS, "garage", "garage:Garage", guest)
    with pytest.raises(UserError, match="garage:Garage has defaults of learning_rate: use only names of settings"):
        resolved()


def test_the_page_for_users_of_slime_lists_every_default_that_differs() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/from-slime.md").read_text()
    table = page.partition("## Defaults that differ")[2].partition("## Take all")[0]
    derived = {"loss_aggregation", "off_policy_correction"}
    for name, theirs in GUESTS.find("slime").defaults().items():
        setting = SETTINGS[name]
        if setting.default != theirs and dict not in setting.kinds and name not in derived:
            assert f"`{name}`" in table, name

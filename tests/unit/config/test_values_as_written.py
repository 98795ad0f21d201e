"""A value means what it says, however it is written: as a flag, as an override, or in a file of YAML 1.2."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_async.config.checks import problems
from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig
from miles_async.config.yaml_text import YAMLError, dump_yaml, parse_yaml
from miles_async.errors import UserError
from tests.configuration import build, read_yaml, run_config

A_NUMBER = "input should be a number"
AN_INTEGER = "input should be a valid integer"
LEADING_ZERO = "has a leading zero, which some programs read as octal: write 10"
FINITE = "input should be a finite number"

EVERYWHERE: list[tuple[str, str, Any]] = [
    ("rollout_batch_size", "true", (A_NUMBER,)),
    ("rollout_batch_size", "1:00", (AN_INTEGER,)),
    ("rollout_batch_size", "yes", (AN_INTEGER,)),
    ("num_rollout", "010", (LEADING_ZERO,)),
    ("num_rollout", "+010", (LEADING_ZERO,)),
    ("num_rollout", "08", 8),
    ("num_rollout", "0o10", 8),
    ("num_rollout", "0x10", 16),
    ("num_rollout", "0b11", (AN_INTEGER,)),
    ("num_rollout", "1_000", 1000),
    ("num_rollout", "1e3", 1000),
    ("num_rollout", "+5", 5),
    ("num_rollout", "5.0", 5),
    ("num_rollout", "5.5", (AN_INTEGER,)),
    ("num_rollout", "inf", (AN_INTEGER,)),
    ("num_rollout", "null", (AN_INTEGER,)),
    ("num_rollout", "2026-11-23", (AN_INTEGER,)),
    ("num_rollout", "!!binary aGk=", ("the tag tag:yaml.org,2002:binary is not supported",)),
    ("num_rollout", "!!int many", ("is not valid YAML", "not valid YAML")),
    ("lr", "yes", ("input should be a valid number",)),
    ("lr", "true", (A_NUMBER,)),
    ("lr", "1e-6", 1e-6),
    ("lr", ".5", 0.5),
    ("lr", "5.", 5.0),
    ("lr", ".5e-3", 5e-4),
    ("lr", ".inf", (FINITE,)),
    ("lr", "inf", (FINITE,)),
    ("lr", "nan", (FINITE,)),
    ("lr", "1e999", (FINITE,)),
    ("max_weight_staleness", "null", None),
    ("max_weight_staleness", "None", None),
    ("max_weight_staleness", "~", None),
    ("max_weight_staleness", "true", (A_NUMBER,)),
    ("run_name", "2026-11-23", "2026-11-23"),
    ("run_name", "yes", "yes"),
    ("run_name", "0823", "0823"),
    ("run_name", "None", None),
    ("rm_type", "null", None),
    ("engine_cpus", "[0, 0x10]", [0, 16]),
    ("engine_cpus", "[true]", (A_NUMBER,)),
    ("warm_start_accuracy", "[false, true]", (A_NUMBER,)),
    ("rollout_stop", "[yes, 1:00, 2026-11-23]", ["yes", "1:00", "2026-11-23"]),
]
"""Setting, text, and the value or the parts of possible sentences, for flags, overrides and files alike."""


def value(config: RunConfig, name: str) -> Any:
    return reduce(getattr, SETTINGS[name].path, config)


def in_a_file(folder: Path, name: str, text: str) -> RunConfig:
    file, (*sections, key) = folder / "run.yaml", SETTINGS[name].path
    file.write_text("".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(sections)) + f"  {key}: {text}\n")
    return build(read_yaml(file))


@pytest.mark.parametrize("name, text, expected", EVERYWHERE)
def test_a_value_is_read_alike_from_a_flag_an_override_and_a_file(
    tmp_path: Path, name: str, text: str, expected: Any
) -> None:
    sources: tuple[Callable[[], RunConfig], ...] = (
        lambda: run_config(SETTINGS[name].flag, text),
        lambda: run_config(f"{SETTINGS[name].dotted}={text}"),
        lambda: in_a_file(tmp_path, name, text),
    )
    for source in sources:
        if not isinstance(expected, tuple):
            assert value(source(), name) == expected
            continue
        with pytest.raises(UserError) as raised:
            source()
        assert any(part in str(raised.value) for part in expected), raised.value


@pytest.mark.parametrize("text", ["1e5", "123", "007", "1:00", "true", ".inf"])
def test_a_text_that_looks_like_a_number_stays_a_text_in_flags_and_needs_quotes_in_files(
    tmp_path: Path, text: str
) -> None:
    assert value(run_config("--cache-dir", text), "cache_dir") == text
    assert value(in_a_file(tmp_path, "cache_dir", f'"{text}"'), "cache_dir") == text
    if text != "1:00":
        with pytest.raises(UserError, match=r"input should be a (valid string in quotes|text), got|in quotes for the"):
            in_a_file(tmp_path, "cache_dir", text)


@pytest.mark.parametrize("text, on", [("yes", True), ("no", False), ("on", True), ("off", False), ("True", True)])
def test_a_switch_in_a_file_of_yaml_1_1_keeps_its_meaning(tmp_path: Path, text: str, on: bool) -> None:
    assert value(in_a_file(tmp_path, "trace", text), "trace") is on


def test_a_switch_of_sglang_is_not_passed_on_as_a_text() -> None:
    chosen = run_config("--sglang-enable-metrics", "yes", reasoning_gym_task="chain_sum", rm_type="reasoning_gym")
    assert "--sglang-enable-metrics yes is a text, not a switch: write true or false" in problems(chosen, "train.py")


def test_a_text_in_brackets_is_not_taken_for_a_list() -> None:
    with pytest.raises(UserError, match=r"--rollout-stop .* may be a text or a list: write "):
        run_config("--rollout-stop", "[/INST]")
    assert run_config("--rollout-stop", '["[/INST]"]').rollout.rollout_stop == ["[/INST]"]
    assert run_config("--rollout-stop", '["/INST"]').rollout.rollout_stop == ["/INST"]
    assert run_config("--rollout-stop", "[/INST]", "END").rollout.rollout_stop == ["[/INST]", "END"]
    assert run_config("--rollout-stop", "nullable").rollout.rollout_stop == ["nullable"]


def test_merge_keys_work_and_repeated_keys_do_not() -> None:
    assert parse_yaml("base: &base {a: 1, b: 2}\nrun: {<<: *base, b: 3}")["run"] == {"a": 1, "b": 3}
    with pytest.raises(YAMLError, match="duplicate key 'a'"):
        parse_yaml("{a: 1, 'a': 2}")


TEXTS = ["yes", "010", "1e3", ".5e3", "0o10", "1:00", "2026-11-23", "null", "", "<<", "=", "+1", "x: y", "NaN", ".nan"]


@pytest.mark.parametrize("content", [*TEXTS, "0823", 1e-7, 10, 0.5, True, None, float("inf")])
def test_written_values_are_read_back_by_readers_of_yaml_1_1_and_1_2(content: Any) -> None:
    written = dump_yaml({"key": content})
    assert parse_yaml(written) == yaml.safe_load(written) == {"key": content}


@pytest.mark.parametrize(
    "text, said",
    [
        ("rollout_batch_size: true", "rollout_batch_size True is not a number of 1 or more"),
        ("rollout_batch_size: 010", "010 in line 2 has a leading zero"),
        ("num_gpus_per_node: true", "num_gpus_per_node True is not a number of 1 or more"),
        ("rl_loss_coef: true", "rl_loss_coef True is not a number of 0 or more"),
        ("actor_infer: {generating_args: {top_p: yes}}", "top_p: input should be a valid number"),
    ],
)
def test_the_values_in_a_file_of_another_project_are_read_alike(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(f"actor_train: {{device_mapping: 'list(range(0,4))'}}\n{text}\n")
    with pytest.raises(UserError, match=re.escape(said)):
        build(read_yaml(file))


def test_names_and_stop_texts_in_a_file_of_another_project_stay_texts(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(
        "exp_name: 2026-11-23\nuse_kl_loss: yes\nactor_infer: {generating_args: {stop_strings: [no, 1:00]}}\n"
    )
    config = build(read_yaml(file))
    assert (config.observability.experiment_name, config.algorithm.use_kl_loss) == ("2026-11-23", True)
    assert config.rollout.rollout_stop == ["no", "1:00"]


ROLL_SWITCHES = """
actor_train:
  model_args: {disable_gradient_checkpointing: %s}
  training_args: {per_device_train_batch_size: 2}
  use_dynamic_batching_in_train: off
"""


@pytest.mark.parametrize("text, granularity", [("no", "full"), ("off", "full"), ("Yes", None), ("true", None)])
def test_a_switch_in_a_file_of_another_project_keeps_its_meaning_in_yaml_1_1(
    tmp_path: Path, text: str, granularity: str | None
) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(ROLL_SWITCHES % text)
    learner = build(read_yaml(file)).learner
    assert learner.recompute_granularity == granularity
    assert (learner.micro_batch_size, learner.use_dynamic_batch_size) == (2, False)


def test_a_switch_in_a_file_of_another_project_that_is_neither_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(ROLL_SWITCHES % "maybe")
    with pytest.raises(UserError, match="disable_gradient_checkpointing 'maybe' is neither true nor false: set it to"):
        build(read_yaml(file))

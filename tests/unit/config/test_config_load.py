from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import yaml
from pydantic import BaseModel

from miles_async.config.cli import parse_or_exit
from miles_async.config.fields import SETTINGS
from miles_async.config.load import load_config, write_config
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from tests.configuration import build, read_yaml, run_config

GENERATION = ["--n-samples-per-prompt", "8", "--rollout-max-response-len", "8"]
RUNNABLE = ["--reasoning-gym-task", "chain_sum", "--rm-type", "reasoning_gym", *GENERATION]


class ConfigFile(Protocol):
    """Writes a YAML file and returns its path."""

    def __call__(self, text: str, name: str = "run.yaml") -> str: ...


def load(*argv: str) -> RunConfig:
    return load_config([*RUNNABLE, *argv], entry="train_async.py")


def error_message(*argv: str) -> str:
    with pytest.raises(UserError) as raised:
        load(*argv)
    return str(raised.value)


@pytest.fixture
def config_file(tmp_path: Path) -> ConfigFile:
    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_later_file_a_flag_and_an_override_win_in_this_order(config_file: ConfigFile) -> None:
    first = config_file("rollout: {num_rollout: 1, rollout_batch_size: 1, n_samples_per_prompt: 2, max_attempts: 1}")
    second = config_file("rollout: {rollout_batch_size: 2, n_samples_per_prompt: 3, max_attempts: 2}", "second.yaml")
    rollout = load(
        "rollout.max_attempts=4",
        "--max-attempts", "3", "--n-samples-per-prompt", "4", "--config", first, "--config", second,
    ).rollout  # fmt: skip
    assert (rollout.num_rollout, rollout.rollout_batch_size) == (1, 2)
    assert (rollout.n_samples_per_prompt, rollout.max_attempts) == (4, 4)


@pytest.mark.parametrize(
    "argv", [["--num-rollout", "7"], ["--num_rollout", "7"], ["--num-rollout=7"], ["rollout.num_rollout=7"]]
)
def test_a_setting_can_be_written_in_four_ways(argv: list[str]) -> None:
    assert load(*argv).rollout.num_rollout == 7


def test_switches_can_be_turned_on_and_off() -> None:
    assert load("--normalize-advantages").algorithm.normalize_advantages is True
    assert load("--no-progress-bar", "--num-rollout", "3").observability.progress_bar is False
    assert load("--progress-bar=false").observability.progress_bar is False
    assert load("--progress-bar", "false").observability.progress_bar is False


def test_a_flag_whose_name_begins_with_no_is_not_a_negation() -> None:
    assert load("--no-progress-warn-seconds", "5").observability.no_progress_warn_seconds == 5


def test_lists_can_be_written_as_words_or_as_yaml() -> None:
    assert load("--engine-cpus", "0", "1", "--num-rollout", "3").engine.engine_cpus == [0, 1]
    assert load("--engine-cpus", "[0, 1]").engine.engine_cpus == [0, 1]
    assert load("--rollout-stop", "END", "007", "rollout.num_rollout=3").rollout.rollout_stop == ["END", "007"]
    assert load("--warm-start-accuracy", "0.1", "0.3").warm_start.warm_start_accuracy == (0.1, 0.3)
    assert load("--engine-cpus", "null").engine.engine_cpus is None


def test_strings_need_no_quotes() -> None:
    assert load("--prompt-template", "{expression}").data.prompt_template == "{expression}"
    assert load("--prompt-template", "rollout = {question}").data.prompt_template == "rollout = {question}"
    assert load("--cache-dir", "007").warm_start.cache_dir == "007"
    assert load("data.prompt_template=a: {question}").data.prompt_template == "a: {question}"


def test_null_unsets_what_a_file_set(config_file: ConfigFile) -> None:
    file = config_file("rollout: {max_weight_staleness: 3, over_sampling_batch_size: 64}")
    rollout = load("--config", file, "--max-weight-staleness", "null", "rollout.over_sampling_batch_size=null").rollout
    assert (rollout.max_weight_staleness, rollout.over_sampling_batch_size) == (None, None)


def test_numbers_with_an_exponent_are_numbers_everywhere(config_file: ConfigFile) -> None:
    file = config_file("learner: {lr: 1e-5}\nengine: {sglang_server_args: {watchdog_timeout: 1e3}}")
    config = load("--config", file, "--sglang-schedule-conservativeness", "2e-1")
    assert config.learner.lr == 1e-5
    assert config.engine.sglang_server_args == {"watchdog_timeout": 1e3, "schedule_conservativeness": 2e-1}


def test_other_sglang_flags_are_collected_for_the_server() -> None:
    arguments = load(
        "--sglang-mem-fraction-static", "0.8", "--sglang-disable-radix-cache",
        "--sglang-cuda-graph-bs-decode", "1", "2", "--sglang-server-concurrency", "9",
    ).engine  # fmt: skip
    assert arguments.sglang_server_concurrency == 9
    assert arguments.sglang_server_args == {
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": [1, 2],
    }


@pytest.mark.parametrize("flag", ["--sglang-router-balance-abs-threshold", "--router-balance-abs-threshold"])
def test_other_router_flags_are_collected_for_the_router(flag: str) -> None:
    engine = load(flag, "0", "--sglang-router-policy", "round_robin").engine
    assert engine.sglang_router_policy == "round_robin"
    assert engine.sglang_router_args == {"balance_abs_threshold": 0}


def test_an_override_can_set_one_key_of_a_dict(config_file: ConfigFile) -> None:
    file = config_file("data: {reasoning_gym_settings: {min_terms: 2, max_terms: 2}}")
    config = load("--config", file, "data.reasoning_gym_settings.max_terms=3")
    assert config.data.reasoning_gym_settings == {"min_terms": 2, "max_terms": 3}


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--rollout-batchsize", "3"], "unknown flag --rollout-batchsize; did you mean --rollout-batch-size?"),
        (["--sglang-server-concurency", "3"], "did you mean --sglang-server-concurrency?"),
        (["--sglang-router-polcy", "x"], "did you mean --sglang-router-policy?"),
        (["--zzzzzz"], "unknown flag --zzzzzz"),
        (["rollout.lr=1"], "unknown setting rollout.lr; write it as learner.lr="),
        (["rollout.batch_size=1"], "did you mean rollout.rollout_batch_size?"),
        (["run_my_model"], "unexpected argument 'run_my_model'"),
        (["--lr"], "--lr needs a value"),
        (["--no-progress-bar=1"], "--no-progress-bar does not take the value '1'"),
        (["--progress-bar=maybe"], "--progress-bar does not take the value 'maybe'"),
        (["--config"], "--config needs a YAML file"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--lr", "fast"], "--lr: input should be a valid number"),
        (["--num-rollout", "0"], "--num-rollout: input should be greater than or equal to 1, got 0"),
        (["--engine-health-timeout-seconds", "1"], "input should be greater than or equal to 2, got 1"),
        (["learner.lr=-1"], "learner.lr: input should be greater than or equal to 0, got -1"),
        (
            ["--weight-transfer", "pigeon"],
            "--weight-transfer: no weight transport is called 'pigeon': use one of auto, broadcast, disk, disk_delta, ",
        ),
        (["--reasoning-gym-settings", "{a"], "--reasoning-gym-settings: '{a' is not valid YAML"),
        (["--warm-start-accuracy", "0.2"], "--warm-start-accuracy[1]: a value is missing: add it, got [0.2]"),
    ],
)
def test_an_invalid_argument_is_reported_with_the_flag_and_the_nearest_name(argv: list[str], expected: str) -> None:
    assert expected in error_message(*argv)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("rollout: {batch_size: 3}", "run.yaml: unknown key rollout.batch_size"),
        ("rollout: {rollout_batchsize: 3}", "did you mean rollout_batch_size?"),
        ("rolout: {num_rollout: 3}", "unknown key rolout; did you mean rollout?"),
        ("learner: {rollout_batch_size: 3}", "write it as rollout.rollout_batch_size"),
        ("rollout_batch_size: 3", "write it as rollout.rollout_batch_size"),
        ("model: {tiny_model: {layers: 3}}", "unknown key model.tiny_model.layers; did you mean num_layers?"),
        ("eval: {datasets: []}", "unknown key eval; pass a file that begins with eval: as --eval-config"),
        ("rollout: 3", "run.yaml: rollout is a section, but its value is 3"),
        ("- 1", "expected sections"),
        ("rollout: {num_rollout: many}", "run.yaml: rollout.num_rollout: input should be a valid integer"),
        ("rollout: {num_rollout: 1, num_rollout: 2}", "duplicate key 'num_rollout'"),
        ("rollout: {", "run.yaml: not valid YAML"),
    ],
)
def test_an_invalid_file_is_reported_with_the_file_and_the_key(
    config_file: ConfigFile, text: str, expected: str
) -> None:
    assert expected in error_message("--config", config_file(text))


def test_all_invalid_values_are_reported_at_once(config_file: ConfigFile) -> None:
    message = error_message("--lr", "-1", "--config", config_file("rollout: {num_rollout: 0}"))
    assert "--lr:" in message
    assert "rollout.num_rollout:" in message


def test_an_empty_section_or_file_sets_nothing(config_file: ConfigFile) -> None:
    assert build(read_yaml(Path(config_file("rollout:\n")))) == run_config()
    assert build(read_yaml(Path(config_file("")))) == run_config()


def test_the_written_configuration_loads_as_an_equal_one(tmp_path: Path) -> None:
    config = load(
        "--rollout-stop", "END", "1", "--lr", "1e-7", "--engine-cpus", "0", "--sglang-chat-template", "x: y",
        "--prompt-template", "{question} é",
    )  # fmt: skip
    write_config(config, tmp_path / "config.yaml")
    assert load_config(["--config", str(tmp_path / "config.yaml")], entry="train_async.py") == config
    assert set(yaml.safe_load((tmp_path / "config.yaml").read_text())) == set(RunConfig.model_fields)


@pytest.mark.parametrize(
    "given", ["fully_async_rollout.generate_rollout_fully_async", "sglang_rollout.generate_rollout"]
)
def test_the_short_path_of_a_shipped_rollout_function_is_completed(given: str) -> None:
    assert load("--rollout-function-path", given).rollout.rollout_function_path == f"miles_async.rollout.{given}"


def test_a_user_module_shadows_a_shipped_rollout_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fully_async_rollout.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    mine = "fully_async_rollout.generate_rollout_fully_async"
    assert load("--rollout-function-path", mine).rollout.rollout_function_path == mine
    # To find the mode of the function, its module was imported, and it would shadow the shipped one in other tests.
    del sys.modules["fully_async_rollout"]


def test_every_setting_has_a_unique_name_and_a_help_text() -> None:
    fields = list(leaves(RunConfig))
    assert len(fields) == len(SETTINGS)
    assert [name for name, setting in SETTINGS.items() if not setting.help] == []


def leaves(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation)
        else:
            yield name


def test_a_ratio_selects_the_windowed_function_unless_another_one_is_set() -> None:
    windowed = "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
    greedy = "miles_async.rollout.sglang_rollout.generate_rollout"
    ratio = ("--windowed-fifo-ratio", "0.3")
    assert load(*ratio).rollout.rollout_function_path == windowed
    assert load(*ratio, "--rollout-function-path", greedy).rollout.rollout_function_path == greedy
    assert load().rollout.rollout_function_path == greedy


EXPERTS = ("--expert-model-parallel-size", "2", "--actor-num-gpus-per-node", "2")


def test_a_sentence_that_may_follow_from_another_problem_waits_until_that_is_corrected() -> None:
    """Without its wrong value, the batch has its default size, which 7 steps do not divide."""
    wrong = error_message("--rollout-batch-size", "many", "--num-steps-per-rollout", "7", *EXPERTS)
    batch, layout = wrong.splitlines()
    assert batch.startswith("--rollout-batch-size: input should be a valid integer")
    assert layout.startswith("expert_model_parallel_size and expert_tensor_parallel_size need a mixture-of-experts")


def test_help_is_shown_beside_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["--no-such-flag", "--help"], entry="train.py")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_file_of_settings_may_have_aliases_as_long_as_they_do_not_grow_without_end(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {reasoning_gym_settings: &s {a: [1, 2]}, apply_chat_template_kwargs: *s}\n")
    data = build(read_yaml(file)).data
    assert data.apply_chat_template_kwargs == data.reasoning_gym_settings == {"a": [1, 2]}


@pytest.mark.parametrize("size", [33, 43, 44, 900, 100_000])
def test_the_advised_size_of_over_sampling_is_the_largest_that_fits(size: int) -> None:
    flags = ["--schedule", "fully_async", "--max-weight-staleness", "1", "--windowed-fifo-ratio", "0.5"]
    flags += ["--reasoning-gym-task", "chain_sum", "--rm-type", "exact"]
    flags += ["--n-samples-per-prompt", "8", "--rollout-max-response-len", "64"]
    if size <= 43:
        assert load_config([*flags, "--over-sampling-batch-size", str(size)], entry="train_async.py")
        return
    with pytest.raises(UserError, match="set over_sampling_batch_size to 43 or less"):
        load_config([*flags, "--over-sampling-batch-size", str(size)], entry="train_async.py")

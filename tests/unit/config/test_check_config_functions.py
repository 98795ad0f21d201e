"""`--check-config` imports the functions that the settings name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_async import types
from miles_async.compat.slime.imports import install_slime_imports
from miles_async.config.cli import parse_or_exit
from miles_async.config.fields import SETTINGS
from miles_async.config.flags import parse_flags
from miles_async.config.user_functions import load_function
from miles_async.rollout import rm_hub

FUNCTIONS = sorted(name for name in SETTINGS if name.endswith("_path"))
JOB = ["--reasoning-gym-task", "chain_sum", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]


def check(setting: str, path: str) -> int:
    reward = ["--rm-type", "exact"] if setting != "custom_rm_path" else []
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*JOB, *reward, f"--{setting.replace('_', '-')}", path, "--check-config"], "train.py")
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_all_settings_that_name_functions_are_known() -> None:
    assert len(FUNCTIONS) == 27


@pytest.mark.parametrize("setting", FUNCTIONS)
@pytest.mark.parametrize("path", ["no_such_module.f", "json.no_such_function", "miles_async.filters.no_such_function"])
def test_a_function_that_cannot_be_imported_is_refused(
    setting: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(setting, path) == 2
    assert f"{setting} '{path}'" in capsys.readouterr().err


def test_the_reward_of_an_evaluation_data_set_that_cannot_be_imported_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check("eval_datasets", "{aime: {path: rows.jsonl, custom_rm_path: no_such_module.f}}") == 2
    assert "eval_datasets.aime.custom_rm_path 'no_such_module.f'" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["custom_rm_path", "dynamic_sampling_filter_path"])
def test_functions_of_a_data_set_that_cannot_be_imported_are_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("datasets", f"{{code: {{prompt_data: rows.jsonl, {setting}: no_such_module.f}}}}") == 2
    assert f"datasets.code.{setting} 'no_such_module.f'" in capsys.readouterr().err


def test_a_choice_of_data_sets_that_cannot_be_imported_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("dataset_sampling", "no_such_module.f") == 2
    assert "dataset_sampling 'no_such_module.f'" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["miles_async.filters.mask_truncated", "user_filters.mine"])
def test_a_function_that_exists_is_accepted(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "user_filters.py").write_text("def mine(args, groups): ...\n\nasync def later(args, groups): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check("rollout_sample_filter_path", path) == 0
    assert check("rollout_sample_filter_path", "user_filters.later") == 2
    assert "is async: write it with a plain def" in capsys.readouterr().err


@pytest.mark.parametrize("keyword, code", [("evaluation", 0), ("rollout_id", 2)])
def test_a_generate_function_may_require_the_keyword_that_the_run_adds(
    keyword: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"generates_{keyword}"
    (tmp_path / f"{module}.py").write_text(f"async def mine(args, sample, sampling_params, {keyword}): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check("custom_generate_function_path", f"{module}.mine") == code, capsys.readouterr().err


@pytest.fixture
def other_modules() -> Iterator[None]:
    """Removes the modules of slime and Miles for the test, and those of the test after it."""
    before = _modules_of_others()
    yield
    _modules_of_others()
    sys.modules.update(before)


def _modules_of_others() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in ("slime", "miles")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.usefixtures("other_modules")
def test_slime_imports_leaves_the_other_modules_of_a_checkout_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = tmp_path / "slime" / "rollout" / "rm_hub"
    rewards.mkdir(parents=True)
    (tmp_path / "slime" / "utils").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    (rewards / "__init__.py").write_text("raise ImportError('slime needs a package that is not installed')\n")
    (rewards / "even.py").write_text(
        "from .parts import half\n\ndef reward(args, text):\n    return len(text) == 2 * half(text)\n"
    )
    (rewards / "parts.py").write_text("def half(text):\n    return len(text) // 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    install_slime_imports()
    assert load_function("slime.rollout.rm_hub.even.reward", setting="custom_rm_path")(None, "ab")
    assert load_function("slime.rollout.rm_hub.async_rm", setting="custom_rm_path") is rm_hub.async_rm
    slime: Any = importlib.import_module("slime")
    assert slime.utils.types.Sample is types.Sample
    assert slime.rollout.rm_hub.even.reward(None, "abcd")


@pytest.mark.parametrize("project", ["slime", "miles"])
@pytest.mark.parametrize("flags, code", [((), 2), (("--slime-imports",), 0)])
@pytest.mark.usefixtures("other_modules")
def test_slime_imports_lets_a_module_import_the_names_of_slime_and_miles(
    project: str, flags: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"user_of_{project}_{code}"
    (tmp_path / f"{name}.py").write_text(
        f"from {project}.rollout.sglang_rollout import generate_and_rm_group\n"
        f"from {project}.utils.types import Sample\n"
        f"from {project}.rollout.rm_hub import async_rm, get_deepscaler_rule_based_reward, grade_answer_verl\n"
        f"from {project}.rollout.rm_hub.math_dapo_utils import compute_score\n"
        f"from {project}.rollout.rm_hub.math_utils import extract_answer\n\n"
        "def rollout(args, rollout_id, data_source, evaluation=False): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    function = [*JOB, "--rm-type", "exact", "--rollout-function-path", f"{name}.rollout"]
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*function, *flags, "--check-config"], "train.py")
    assert exited.value.code == code


def test_every_function_that_cannot_be_imported_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--buffer-filter-path", "no_such_module.f", "--rollout-sample-filter-path", "no_such_module.g"]
    with pytest.raises(SystemExit):
        parse_or_exit([*JOB, "--rm-type", "exact", *flags, "--check-config"], "train.py")
    first, second = capsys.readouterr().err.splitlines()
    assert "buffer_filter_path 'no_such_module.f'" in first
    assert "rollout_sample_filter_path 'no_such_module.g'" in second


def test_a_hook_of_samples_may_be_named_several_times() -> None:
    flag = "--rollout-sample-hook-path"
    parsed = parse_flags([flag, "mine.first", flag, "mine.second", "mine.third"])
    assert parsed.assignments[-1].value == ["mine.first", "mine.second", "mine.third"]


def test_a_function_of_the_started_program_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that was started as a file has a module `__main__` without a spec."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert check("rollout_function_path", "__main__.some_function") == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.endswith("__main__ is another program in each process of the run; put the function in a module")

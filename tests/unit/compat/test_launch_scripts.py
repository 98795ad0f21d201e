"""Launch scripts of slime and Miles pass `--check-config`, with the files that it reads, as they are but for paths, and
some with another number of GPUs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from miles_async.compat.megatron.flags import flags as megatron_rules
from miles_async.compat.miles.flags import FLAGS as MILES
from miles_async.compat.slime.flags import EVAL_FIELDS
from miles_async.compat.slime.flags import FLAGS as SLIME
from miles_async.config import model_source
from miles_async.config.cli import parse_or_exit
from miles_async.config.fields import SETTINGS, with_settings
from miles_async.config.flags import parse_flags
from miles_async.config.guest_flags import shown
from miles_async.config.schema import RunConfig
from miles_async.config.translation import Idle, Only
from miles_async.config.user_functions import FORMS, load_function
from miles_async.errors import collected
from miles_async.guests import GUESTS
from miles_async.rewards.functions import ifbench
from tests.launch_scripts.outcomes import GPUS, REASONS, edits
from tests.launch_scripts.replay import Script, reasons, recorded_results, refusals, scripts
from tests.unit.compat.slime_names import checkout, forget, names_of_slime
from workers.check_config import read_files

ALL = [*scripts("slime"), *scripts("miles")]
RESULTS = {project: recorded_results(project) for project in ("slime", "miles")}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment with Megatron-Bridge and IFBench, and without modules of slime and Miles afterwards."""
    monkeypatch.setattr(model_source, "_bridge_complaint", lambda: None)
    monkeypatch.setattr(ifbench, "lacking", lambda: None)
    before = set(sys.modules)
    yield
    forget(before)


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_a_script_passes_or_is_refused_for_the_recorded_reasons(script: Script, tmp_path: Path) -> None:
    found = reasons(refusals(script.command(tmp_path, edits(script)), script.entry), REASONS)
    assert found == RESULTS[script.project][script.name]


def test_the_results_are_those_of_the_recorded_scripts() -> None:
    assert {project: list(results) for project, results in RESULTS.items()} == {
        project: [script.name for script in scripts(project)] for project in RESULTS
    }
    named = {reason for results in RESULTS.values() for found in results.values() for reason in found}
    assert named == REASONS.keys()


@pytest.mark.parametrize(
    "name",
    [
        "run-qwen3-4B",
        "run-qwen3-30B-A3B",
        "run-qwen3-32B",
        "run-qwen3-4B-base-sft",
        "fully_async-run-qwen2.5-0.5B-fully_async",
        "fully_async-run-qwen3.5-9B-fully_async",
        "retool-retool_qwen3_4b_rl",
        "search-r1-run_qwen2.5_3B",
        "run-qwen3-235B-A22B",
        "run-deepseek-r1",
        "run-kimi-k2-Thinking",
        "run-minimax-m2",
        "run-glm4.7-355B-A32B",
        "run-qwen3-next-80B-A3B",
        "run-qwen3.5-27B",
        "run_qwen3_5_35b_a3b_mtp",
        "run_qwen3_6_35b_a3b_mtp",
        "coding_agent_rl-run_qwen36_35b_a3b_swe_8nodes",
        "run_deepseek",
        "run_glm45_355b_a32b_8node",
        "run_kimi_k2",
        "run_qwen3_235b_a22b",
        "run_qwen3_next_80b_a3b",
        "fully_async-run_qwen3_30b_a3b_fully_async-1",
        "fully_async-run_qwen3_30b_a3b_fully_async-2",
        "fully_async-run_qwen3_5_4b_fully_async_eval",
        "ppo-run_qwen3_4b_ppo",
        "nemo-gym-run",
        "openenv-run-openenv-tbench2",
        "retool_v2-run_retool_multi_turn",
        "swe-agent-harbor-docker-run",
        "eval_multi_task-multi_task",
        "lora-dev",
        "lora-run-qwen2.5-0.5B-megatron-lora",
        "lora-run-qwen2.5-3B-megatron-lora-disaggregated",
        "lora-run-qwen3-4B-megatron-lora",
        "lora-run-qwen3-4b-megatron-lora-result",
    ],
)
def test_a_script_starts_as_it_is(name: str) -> None:
    # Some examples of slime are in Miles, too.
    found = [results[name] for results in RESULTS.values() if name in results]
    assert found
    assert not any(found)
    assert name not in GPUS


@pytest.mark.parametrize(
    "name",
    [
        "run-qwen3-4B",
        "run-qwen3-4B-base-sft",
        "fully_async-run-qwen2.5-0.5B-fully_async",
        "fully_async-run-qwen3.5-9B-fully_async",
        "train_infer_mismatch_helper-run-qwen3-4b-mis",
        "fully_async-run_qwen3_30b_a3b_fully_async-1",
        "fully_async-run_qwen3_5_4b_fully_async_eval",
    ],
)
def test_the_functions_of_a_script_are_those_of_this_project(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = next(one for one in ALL if one.name == name)
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*script.command(tmp_path), "--check-config"], script.entry, read_files=read_files)
    assert exited.value.code == 0, capsys.readouterr().err


UNUSABLE = (
    # Packages that functions of the examples import, and that this project does not install.
    *("No module named 'tau_bench'", "No module named 'strands'", "No module named 'camel'"),
    *("No module named 'pylatexenc'", "No module named 'kimina_client'"),
    *("No module named 'omegaconf'", "import module 'AutoProcessor'"),
)
"""Parts of the sentences about functions that cannot be called here."""


@pytest.mark.parametrize("project", ["slime", "miles"])
def test_the_functions_that_scripts_name_can_be_called(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLIME_CHECKOUT and MILES_CHECKOUT name the checkouts. Scripts that a checkout does not have are left out."""
    folder = checkout(project)
    monkeypatch.syspath_prepend(str(folder))
    problems = set()
    tried = 0
    for script in scripts(project):
        beside = (folder / script.path).parent
        named = {(setting, path) for setting in FORMS for path in script.words(shown(setting))}
        if not named or not (folder / script.path).exists():
            continue
        with monkeypatch.context() as patch, names_of_slime():
            patch.syspath_prepend(str(beside))
            before = set(sys.modules)
            for setting, path in named:
                config = with_settings(RunConfig(), **{setting: path})
                for guest in GUESTS.usable().values():
                    config = guest.resolve(config)
                tried += 1
                # A setting whose value is unset stands for what a run does without the function.
                if (resolved := SETTINGS[setting].value(config)) is not None:
                    with collected(sentences := list[str]()):
                        load_function(resolved, setting=setting)
                    problems |= {one for one in sentences if not any(part in one for part in UNUSABLE)}
            for name in set(sys.modules) - before:
                if is_beside(sys.modules[name], folder):
                    del sys.modules[name]
    assert tried
    assert sorted(problems) == []


def is_beside(module: ModuleType, folder: Path) -> bool:
    """Whether a module is a file below `folder`. Other examples have modules of the same name."""
    spec = module.__spec__
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(folder)


def test_no_flag_of_a_script_is_ignored_silently(tmp_path: Path) -> None:
    """Each flag sets a setting, is compared with the checkpoint, is refused, or is named as without effect."""
    rules = {**megatron_rules(), **SLIME, **MILES}
    for script in ALL:
        folder = tmp_path / f"{script.repository.partition('/')[2]} {script.name}"
        folder.mkdir()
        parsed = parse_flags(script.command(folder))
        said = " ".join([*parsed.problems, *parsed.idle])
        sources = {one.source for one in parsed.assignments}
        for flag in {row[0] for row in script.arguments}:
            name = flag[2:].replace("-", "_")
            if name in SETTINGS or name.startswith(("sglang_", "router_")):
                assert flag in sources or flag in said, (script.name, flag)
            elif isinstance(rules[name].rule, Idle):
                assert flag in parsed.idle, (script.name, flag)
            elif not isinstance(rules[name].rule, Only):  # which allows the value that a run has anyway
                named = any(flag in source.split() for source in sources) or re.search(rf"{flag}\b", said)
                assert named or is_of_an_evaluation(name), (script.name, flag)


def is_of_an_evaluation(name: str) -> bool:
    """Whether the flag became a field of the data sets that `--eval-prompt-data` or `--eval-config` names."""
    return name in EVAL_FIELDS


def test_no_flag_belongs_to_two_projects() -> None:
    names = [*SLIME, *MILES, *megatron_rules()]
    assert sorted(shown(name) for name, count in Counter(names).items() if count > 1) == []

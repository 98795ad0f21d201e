"""Launch scripts of verl start with `--check-config` as they are, but for paths, GPU counts and the name of the engine.

Engines run SGLang here, so a script for vLLM needs `actor_rollout_ref.rollout.name=sglang`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.compat.verl.rules import FLAGS, TABLE, rule_below
from miles_async.config import model_source
from miles_async.config.cli import parse_or_exit
from miles_async.config.translation import Combined, Idle, Only, Refused, Sets
from tests.launch_scripts.outcomes import ENGINE, REASONS_OF_VERL, SGLANG, Result, edits
from tests.launch_scripts.replay import Script, reasons, recorded_results, refusals, scripts
from workers.check_config import read_files

ALL = {script.name: script for script in scripts("verl")}
FULLY_ASYNC = "fully_async_policy-grpo_30b_a3b_base_math_megatron_96_32"
SAME = [TABLE[f"actor_rollout_ref.rollout.{name}"] for name in ("prompt_length", "response_length", "max_model_len")]
"""Rules of keys that repeat what other keys set."""
RESULTS = recorded_results("verl")


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with Megatron-Bridge."""
    monkeypatch.setattr(model_source, "_bridge_complaint", lambda: None)


def runs_megatron(script: Script) -> bool:
    return any(".megatron." in row[0] for row in script.arguments)


@pytest.mark.parametrize("name", ALL)
def test_a_script_passes_or_is_refused_for_the_recorded_reasons(name: str, tmp_path: Path) -> None:
    script = ALL[name]
    found = reasons(refusals(script.command(tmp_path, edits(script)), script.entry), REASONS_OF_VERL)
    assert found == RESULTS[name]


def test_the_results_are_those_of_the_recorded_scripts() -> None:
    assert list(RESULTS) == list(ALL)
    assert {reason for found in RESULTS.values() for reason in found} == REASONS_OF_VERL.keys()


@pytest.mark.parametrize("name", ALL)
def test_only_scripts_on_megatron_start(name: str) -> None:
    assert runs_megatron(ALL[name]) or "FSDP" in RESULTS[name]


@pytest.mark.parametrize("name", ALL)
def test_no_key_of_a_script_is_ignored_silently(name: str, tmp_path: Path) -> None:
    """Each key sets a setting, is named as without effect or refused, or has the one value that is allowed."""
    for key in Result.of(ALL[name], tmp_path).compared:
        flag = FLAGS.get(key.removeprefix("--").replace("-", "_"))
        rule = TABLE.get(key) or rule_below(key) if flag is None else flag.rule
        # A second key for the same setting may only have the same value.
        assert isinstance(rule, Only) or (isinstance(rule, Sets) and rule in SAME), key


def test_the_fully_asynchronous_example_needs_only_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ALL[FULLY_ASYNC]
    [problem] = refusals(script.command(tmp_path), script.entry)
    assert problem == f"{ENGINE} 'vllm' is not supported: the engines run SGLang: set it to sglang"
    for preset in ([], ["--preset", "verl"]):
        words = [*preset, *script.command(tmp_path, SGLANG), "--check-config"]
        with pytest.raises(SystemExit) as exited:
            parse_or_exit(words, script.entry, read_files=read_files)
        assert exited.value.code == 0, capsys.readouterr().err


def test_every_refusal_of_a_key_below_a_section_says_what_to_do() -> None:
    for script in ALL.values():
        for key in {row[0].lstrip("+~") for row in script.arguments}:
            rule = TABLE.get(key) or rule_below(key)
            assert not isinstance(rule, Refused) or "set " in rule.instead or "remove it" in rule.instead, key
            assert not isinstance(rule, Idle | Combined) or rule != Combined(), key

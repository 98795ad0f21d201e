"""Settings that name functions of the loss, and plug-ins of the loss by path."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import problems
from miles_async.config.cli import parse_or_exit
from miles_async.config.losses import skips_zero_advantages
from miles_async.config.table import table
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from tests.configuration import run_config

GENERATION = ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]
JOB = ["--reasoning-gym-task", "chain_sum", "--rm-type", "exact", *GENERATION]
SOURCE = """
from miles_async.losses.objectives.objective import Objective
from miles_async.section import Section

def of_tokens(args, tokens): ...
def of_logits(args, batch, logits, sum_of_sample_mean): ...
def of_logits_only(logits): ...
def of_everything(*args): ...
async def later(args, tokens): ...
def truncated(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **others): ...
def by_position(args, loss): ...

class Plain(Objective):
    "Plain."

class WithSettings(Objective):
    class Settings(Section):
        width: float = 1.0
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_users.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "losses_of_users", raising=False)


def checked(*flags: str) -> int:
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*JOB, *flags, "--check-config"], "train.py")
    assert isinstance(exited.value.code, int)
    return exited.value.code


def custom(function: str) -> list[str]:
    return ["--loss-type", "custom_loss", "--custom-loss-function-path", f"losses_of_users.{function}"]


def said(**settings: Any) -> list[str]:
    usual = set(problems(run_config(), "train.py"))
    return [one for one in problems(run_config(**settings), "train.py") if one not in usual]


def test_only_a_loss_of_logits_costs_memory_and_the_table_says_how_much(tmp_path: Path) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "vocab_size": 321}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    of_tokens, of_logits = (
        table(
            run_config(
                hf_checkpoint=str(tmp_path),
                max_tokens_per_gpu=1000,
                loss_type="custom_loss",
                custom_loss_function_path=f"losses_of_users.{function}",
            ),
            "train.py",
        )
        for function in ("of_tokens", "of_logits")
    )
    assert "logits" not in of_tokens.partition("custom_loss")[2].replace("of_tokens", "")
    [row] = [line for line in of_logits.splitlines() if line.startswith("logits")]
    assert row.split()[1:3] == ["1,284,000", "bytes"]
    assert row.endswith("bytes on each rank for the logits of 1000 tokens, and as many for their gradient")


def test_the_functions_are_imported_when_the_configuration_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(*custom("of_logits")) == 0
    assert "losses_of_users.of_logits" in capsys.readouterr().out
    assert checked(*custom("of_nobody")) == 2
    assert "module losses_of_users has no function 'of_nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting, function",
    [
        ("custom_loss_function_path", "of_tokens"),
        ("custom_loss_function_path", "of_logits"),
        ("custom_loss_function_path", "of_everything"),
        ("custom_tis_function_path", "truncated"),
    ],
)
def test_functions_with_the_documented_parameters_are_accepted(setting: str, function: str) -> None:
    assert load_function(f"losses_of_users.{function}", setting=setting).__name__ == function


@pytest.mark.parametrize(
    "setting, function, sentence",
    [
        (
            "custom_loss_function_path",
            "of_logits_only",
            r"write fn\(args, tokens\) or fn\(args, batch, logits, sum_of_sample_mean\)$",
        ),
        ("custom_loss_function_path", "later", "is async: write it with a plain def"),
        (
            "custom_tis_function_path",
            "by_position",
            r"has the signature \(args, loss\) .*: write fn\(\*, args, pg_",
        ),
        (
            "custom_pg_loss_reducer_function_path",
            "of_tokens",
            r"write fn\(total_lengths, response_lengths, loss_",
        ),
    ],
)
def test_functions_with_other_parameters_are_refused(setting: str, function: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_function(f"losses_of_users.{function}", setting=setting)


def test_a_custom_loss_needs_its_function() -> None:
    assert said(loss_type="custom_loss") == [
        "loss_type custom_loss needs a function: set custom_loss_function_path to module.function"
    ]


def test_a_correction_by_path_counts_as_one() -> None:
    given = {"off_policy_correction": "none", "custom_tis_function_path": "losses_of_users.truncated"}
    assert said(policy_objective="dppo", **given) == []
    [sentence] = said(policy_objective="dppo", get_mismatch_metrics=True, **given)
    assert "so custom_tis_function_path would apply the correction twice: unset custom_tis_function_path" in sentence


def test_an_objective_is_named_by_its_path() -> None:
    assert said(policy_objective="losses_of_users.Plain") == []
    [missing] = said(policy_objective="losses_of_users.Missing")
    assert missing.startswith("losses_of_users.Missing, which a setting names, cannot be imported: AttributeError")
    [own] = said(policy_objective="losses_of_users.WithSettings")
    assert "has settings, which only a plug-in of an installed package adds to the flags" in own


@pytest.mark.parametrize(
    "settings",
    [
        {"custom_advantage_function_path": "losses_of_users.of_tokens"},
        {"custom_tis_function_path": "losses_of_users.truncated"},
        {"loss_type": "custom_loss", "custom_loss_function_path": "losses_of_users.of_tokens"},
        {"policy_objective": "losses_of_users.Plain"},
        {"enable_mtp_training": True},
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9},
    ],
)
def test_no_sample_is_left_out_of_a_loss_that_may_use_tokens_without_an_advantage(settings: dict[str, Any]) -> None:
    assert skips_zero_advantages(run_config())
    assert not skips_zero_advantages(run_config(**settings))

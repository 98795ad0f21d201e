"""Flags that functions of users add with `add_arguments`, as in Miles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.config.cli import parse_or_exit

MODULE = """
async def generate(args, sample, sampling_params):
    return sample

def add_arguments(parser):
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--judge")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--lr", type=float, default=7)

generate.add_arguments = add_arguments

class Plain:
    async def __call__(self, input): ...
"""
JOB = "--reasoning-gym-task chain_sum --rm-type exact --n-samples-per-prompt 2 --rollout-max-response-len 8"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_flags_of_its_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def custom_args(line: str, function: str = "generate") -> dict[str, Any]:
    path = f"--custom-generate-function-path with_flags_of_its_own.{function}"
    return parse_or_exit([*JOB.split(), *path.split(), *line.split()], "train.py").rollout.custom_args


@pytest.mark.parametrize(
    "line, values",
    [
        ("", {"turns": 4, "judge": None, "strict": False}),
        ("--turns 2 --judge http://judge --strict", {"turns": 2, "judge": "http://judge", "strict": True}),
        ("--turns=2", {"turns": 2, "judge": None, "strict": False}),
        ("rollout.custom_args.turns=3", {"turns": 3, "judge": None, "strict": False}),
    ],
)
def test_each_flag_that_a_function_adds_is_an_attribute_of_args(line: str, values: dict[str, Any]) -> None:
    assert custom_args(line) == values


@pytest.mark.parametrize(
    "line, turns",
    [("", 9), ("--turns 2", 2), ("--turns 4", 4), ("--turns 2 rollout.custom_args.turns=3", 3)],
    ids=["the file counts more than the default", "a flag more than the file", "also with the default", "a path most"],
)
def test_a_flag_counts_more_than_a_file_and_less_than_an_override(line: str, turns: int, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rollout: {custom_args: {turns: 9}}")
    assert custom_args(f"--config {tmp_path / 'run.yaml'} {line}")["turns"] == turns


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("--turnz 2", "unknown flag --turnz"),
        ("--turns two", "argument --turns: invalid int value: 'two'"),
    ],
)
def test_a_flag_that_is_wrong_is_refused_once(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        custom_args(line)
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("--turn") == 1


def test_flags_are_unknown_without_the_function_that_adds_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        custom_args("--turns 2", "Plain")
    assert "unknown flag --turns" in capsys.readouterr().err

"""Help, configuration checks and refusals appear within a second, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from miles_async.config.cli import parse_or_exit

ROOT = Path(__file__).parents[2]
MAIN_JOB = (
    "--config", str(ROOT / "configs" / "arithmetic-cpu.yaml"),
    "--rollout-function-path", "fully_async_rollout.generate_rollout_fully_async",
)  # fmt: skip
HELP, CHECK, REFUSED = ("--help",), ("--check-config", *MAIN_JOB), ("--lr", "-1")
HEAVY = "torch ray transformers sglang sglang_router megatron reasoning_gym aiohttp numpy".split()

REPORT = f"""
import runpy, sys, time
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(time.process_time(), *(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)
"""


@cache
def started(entry: str, argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REPORT, entry, *argv], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("argv", [HELP, CHECK, REFUSED], ids=["help", "check", "refusal"])
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_an_entry_script_answers_in_under_a_second_without_importing_torch_or_ray(
    entry: str, argv: tuple[str, ...]
) -> None:
    # CPU seconds of the process, so that other programs on the machine do not affect the result.
    seconds, *imported = started(entry, argv).stderr.splitlines()[-1].split()
    assert imported == []
    assert float(seconds) < 1.0


def test_a_refusal_is_one_sentence_per_problem_on_stderr_with_exit_code_2() -> None:
    wrong = (*MAIN_JOB, "--max-weight-staleness", "0", "--hf-checkpoint", "nowhere")
    done = subprocess.run([sys.executable, "train_async.py", *wrong], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "train_async.py: hf_checkpoint nowhere: no such folder; set it to the folder of a Hugging Face checkpoint",
        "train_async.py: max_weight_staleness 0 does not allow generation and training to overlap: use train.py, "
        "which alternates between the two, or set it to 1 or more",
    ]


def test_a_refusal_names_the_command_that_the_user_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--num-rollout", "0"], "train_async.py", "miles-async train")
    assert exited.value.code == 2
    assert capsys.readouterr().err.startswith("miles-async train: --num-rollout: input should be greater than")


def test_a_check_prints_the_derived_values() -> None:
    done = started("train_async.py", CHECK)
    assert done.returncode == 0
    assert "schedule    fully async" in done.stdout
    assert len(done.stderr.splitlines()) == 1, "only the line that the test itself prints"

"""Help, checks and refusals answer at once, and before anything heavy is imported."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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
def started(entry, argv):
    return subprocess.run([sys.executable, "-c", REPORT, entry, *argv], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("argv", [HELP, CHECK, REFUSED], ids=["help", "check", "refusal"])
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_it_answers_in_under_a_second_without_importing_torch_or_ray(entry, argv):
    # Seconds of its own: what is measured is the program, not whoever else uses the cores.
    seconds, *imported = started(entry, argv).stderr.splitlines()[-1].split()
    assert imported == []
    assert float(seconds) < 1.0


def test_a_refusal_is_one_sentence_per_problem_on_stderr_with_exit_code_2():
    wrong = (*MAIN_JOB, "--max-weight-staleness", "0", "--hf-checkpoint", "nowhere")
    done = subprocess.run([sys.executable, "train_async.py", *wrong], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "train_async.py: hf_checkpoint nowhere: no such folder; set it to a Hugging Face checkpoint on this machine",
        "train_async.py: max_weight_staleness 0 allows no overlap of generation and training: use train.py, which "
        "takes turns, or set it to 1 or more",
    ]


def test_a_check_prints_what_follows_from_the_settings():
    done = started("train_async.py", CHECK)
    assert done.returncode == 0
    assert "schedule    fully async" in done.stdout
    assert len(done.stderr.splitlines()) == 1, "only what this test itself reports"

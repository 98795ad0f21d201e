"""Help, checks and refusals answer at once, and before anything heavy is imported."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN_JOB = [
    "--config", str(ROOT / "configs" / "arithmetic-cpu.yaml"),
    "--rollout-function-path", "fully_async_rollout.generate_rollout_fully_async",
]  # fmt: skip
HEAVY = "torch ray transformers sglang sglang_router megatron reasoning_gym aiohttp numpy".split()

REPORT_IMPORTS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported:", *(set(sys.modules) & set({heavy!r})), file=sys.stderr)
"""


def start(entry, *argv):
    return subprocess.run([sys.executable, ROOT / entry, *argv], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("argv", [["--help"], ["--check-config", *MAIN_JOB]], ids=["help", "check"])
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_it_answers_in_under_a_second(entry, argv):
    def seconds():
        began = time.perf_counter()
        done = start(entry, *argv)
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - began

    # One of three will do: what is measured is the program, not whoever else uses the cores.
    assert any(seconds() < 1.0 for _ in range(3))


@pytest.mark.parametrize(
    "argv", [["--help"], ["--check-config", *MAIN_JOB], ["--lr", "-1"]], ids=["help", "check", "refusal"]
)
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_it_answers_without_importing_torch_or_ray(entry, argv):
    code = REPORT_IMPORTS.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code, entry, *argv], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "imported:", done.stderr


def test_a_refusal_is_one_sentence_per_problem_on_stderr_with_exit_code_2():
    done = start("train_async.py", *MAIN_JOB, "--max-weight-staleness", "0", "--hf-checkpoint", "nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "train_async.py: hf_checkpoint nowhere: no such folder; set it to a Hugging Face checkpoint on this machine",
        "train_async.py: max_weight_staleness 0 allows no overlap of generation and training: use train.py, which "
        "takes turns, or set it to 1 or more",
    ]


def test_a_check_prints_what_follows_from_the_settings():
    done = start("train_async.py", "--check-config", *MAIN_JOB)
    assert "schedule    fully async" in done.stdout
    assert done.stderr == ""

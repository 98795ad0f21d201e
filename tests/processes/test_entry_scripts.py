"""The entry scripts answer help, checks and refusals without heavy imports, and the launch script passes flags on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from miles_async.config.cli import parse_or_exit
from tests.configuration import KEY_FLAGS
from tests.wrong_inputs.builders import checkpoint

ROOT = Path(__file__).parents[2]
LAUNCH_SCRIPT = Path("configs", "qwen3-4b-8gpu.sh")
MAIN_JOB = (
    "--config", str(ROOT / "configs" / "arithmetic-cpu.yaml"),
    "--rollout-function-path", "fully_async_rollout.generate_rollout_fully_async",
)  # fmt: skip
HELP, CHECK, REFUSED = ("--help",), ("--check-config", *MAIN_JOB), ("--lr", "-1")
HEAVY = "torch ray transformers sglang sglang_router megatron reasoning_gym aiohttp numpy".split()

MODULES = 420
"""An answer takes about half a second if it imports so few modules besides plug-ins; it imports 417 of them today.
The file of a plug-in takes a third of a millisecond."""

REPORT = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    from miles_async.config.plugins import KINDS
    files = tuple(kind.group + "." for kind in KINDS)
    others = [name for name in sys.modules if not name.startswith(files)]
    print(len(others), *(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)
"""


@cache
def started(entry: str, argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REPORT, entry, *argv], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("argv", [HELP, CHECK, REFUSED], ids=["help", "check", "refusal"])
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_an_entry_script_answers_with_few_imports_and_without_torch_or_ray(entry: str, argv: tuple[str, ...]) -> None:
    modules, *imported = started(entry, argv).stderr.splitlines()[-1].split()
    assert imported == []
    assert int(modules) < MODULES


@pytest.mark.parametrize("chat", [False, True], ids=["text", "messages"])
def test_a_check_reads_data_and_templates_without_transformers(tmp_path: Path, chat: bool) -> None:
    checkpoint(tmp_path)
    prompt = [{"role": "user", "content": "one"}] if chat else "one"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "label": "1"}) + "\n")
    files = ("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "rows.jsonl"))
    job = ("--rm-type", "exact", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "64", "--check-config")
    done = started("train_async.py", (*files, *KEY_FLAGS, *job))
    assert "the longest prompt has" in done.stdout
    assert set(done.stderr.splitlines()[-1].split()[1:]) <= {"numpy", "aiohttp"}


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
    *notes, _ = done.stderr.splitlines()  # the test itself prints the last line
    assert [note.partition(":")[2][:20] for note in notes] == [" note: unlike slime ", " note: the trained m"]


def test_the_launch_script_checks_a_run_on_eight_gpus(tmp_path: Path) -> None:
    model, prompts, tree = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "tree"
    model.mkdir()
    (model / "config.json").write_text("{}")
    checkpoint(tmp_path)
    prompts.write_text("".join(f'{{"prompt": "1+{n}", "label": "{n + 1}"}}\n' for n in range(300)))
    # The script runs the .venv next to it, which may not exist in this checkout, so the test creates a stand-in.
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copytree(ROOT / "configs", tree / "configs")
    shutil.copy(ROOT / "train_async.py", tree)
    done = subprocess.run(
        [tree / LAUNCH_SCRIPT, model, prompts, "--num-rollout", "5", "--check-config"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert (rows["learner"], rows["engines"], rows["N"], rows["B"]) == ("4", "4", "64", "78")


def test_the_launch_script_prints_its_usage_without_arguments() -> None:
    done = subprocess.run([ROOT / LAUNCH_SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "CHECKPOINT_FOLDER PROMPTS.jsonl" in done.stderr

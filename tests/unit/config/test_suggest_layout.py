"""`--suggest-layout MODEL --gpus N`: settings with which a model trains on a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from miles_async.config.checks import problems
from miles_async.config.cli import EXIT_INVALID, parse_or_exit
from miles_async.config.memory import memory_plan
from tests.configuration import run_config
from tests.planned_models import MODELS, checkpoint

CLUSTERS = [(8, 80), (8, 141), (16, 80), (16, 141), (64, 80), (64, 141)]
ONE_NODE, TWO_NODES = CLUSTERS[:2], CLUSTERS[2:4]
TOO_SMALL = {
    "Qwen3-32B": ONE_NODE,
    "Llama-3.1-70B": ONE_NODE + TWO_NODES,
    "Mixtral-8x7B": [*ONE_NODE, (16, 80)],
    "Qwen3-30B-A3B": [(8, 80)],
    "Qwen3.5-35B-A3B": ONE_NODE,
    "Qwen3-235B-A22B": [*ONE_NODE, *TWO_NODES, (64, 80)],
    "gpt-oss-20b": [(8, 80)],
    "gpt-oss-120b": ONE_NODE + TWO_NODES,
    "Qwen3-Next-80B-A3B": ONE_NODE + TWO_NODES,
    "DeepSeek-V3": CLUSTERS,
}
"""Clusters on which a model does not fit: its state alone takes 10 bytes per weight, and 8 shared ones."""
JOB = ["--reasoning-gym-task", "chain_sum", "--rm-type", "reasoning_gym"]
SIZES = ["--n-samples-per-prompt", "8", "--rollout-max-prompt-len", "1024", "--rollout-max-response-len", "7168"]


def suggested(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """The flags that are printed."""
    with pytest.raises(SystemExit) as end:
        parse_or_exit(["--suggest-layout", *flags], "train_async.py")
    assert end.value.code == 0, capsys.readouterr().err
    commands, _, plan = capsys.readouterr().out.partition("\n\n")
    assert "at most on a learner rank" in plan
    return shlex.split(commands.replace("\\\n", " "))


@pytest.mark.parametrize("gpus, memory", CLUSTERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_suggested_layout_is_valid_and_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, gpus: int, memory: int
) -> None:
    arguments = [checkpoint(name, tmp_path), "--gpus", str(gpus), "--gpu-memory-gib", str(memory), *SIZES]
    if (gpus, memory) in TOO_SMALL.get(name, []):
        with pytest.raises(SystemExit) as end:
            parse_or_exit(["--suggest-layout", *arguments], "train_async.py")
        assert end.value.code == EXIT_INVALID
        assert "fits on" in capsys.readouterr().err
        return
    config = run_config(*suggested(capsys, *arguments), *SIZES, *JOB)
    plan = memory_plan(config)
    assert plan is not None
    assert plan.learner_fits
    assert plan.engine_fits
    assert config.learner.ranks + config.engine.rollout_num_gpus == gpus
    assert [one for one in problems(config, "train_async.py") if "hf_checkpoint" not in one] == []


def test_a_colocated_run_uses_all_gpus_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [checkpoint("Qwen3-4B", tmp_path), "--gpus", "8", "--gpu-memory-gib", "80", "--colocate"]
    config = run_config(*suggested(capsys, *flags))
    assert (config.cluster.colocate, config.learner.ranks, config.engine.rollout_num_gpus) == (True, 8, 8)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--gpus", "8"], "belong together"),
        (["--suggest-layout"], "needs the folder of a checkpoint"),
        (["--suggest-layout", "nothing", "--gpus", "8", "--gpu-memory-gib", "80"], "is not known"),
        (["--suggest-layout", "nothing", "--gpus", "none"], "is not a number of GPUs"),
        (["--suggest-layout", "nothing", "--gpus", "8", "--gpu-memory-gib", "0"], "greater than or equal to 1"),
    ],
)
def test_an_incomplete_question_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_or_exit(arguments, "train_async.py")
    assert end.value.code == EXIT_INVALID
    assert sentence in capsys.readouterr().err


def test_the_memory_of_the_gpus_must_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit(["--suggest-layout", checkpoint("Qwen3-4B", tmp_path), "--gpus", "8"], "train_async.py")
    assert "set gpu_memory_gib, such as 80 or 141" in capsys.readouterr().err

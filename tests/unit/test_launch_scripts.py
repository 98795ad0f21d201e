"""The recorded launch scripts of other projects, and the program that records them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launch_scripts.record import PROJECTS, Copy, Job, Project, Refused, family_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "launch_scripts").glob("*/*.json"))
CONTENTS: Mapping[Path, Mapping[str, Any]] = {file: json.loads(file.read_text()) for file in FILES}
PROJECT = Project("owner/name", "name", ["run.sh"], ["train.py"], "--hf-checkpoint", {})
SUBMIT = """
set -e
pkill -9 python
kill -9 $PPID
source /root/name/models/small.sh
export MASTER_ADDR=10.0.0.1
ray job submit --runtime-env-json='{"env_vars": {"NCCL_DEBUG": "INFO"}}' -- \\
    python3 train.py --hf-checkpoint /models/Qwen3-4B ${MODEL_ARGS[@]} \\
    --rollout-stop a b --lr=1e-6 --config files/run.yaml
"""


def can_isolate() -> bool:
    """Whether the kernel lets users create namespaces."""
    return shutil.which("unshare") is not None and not subprocess.run(["unshare", "--map-root-user", "true"]).returncode


isolated = pytest.mark.skipif(not can_isolate(), reason="the kernel lets users create no namespaces")


def recorded(script: str, tmp_path: Path, arguments: str = "") -> Job:
    """The job that a script starts in a checkout with the flags of a small model."""
    for name, text in {
        "run.sh": script,
        "models/small.sh": "MODEL_ARGS=(--swiglu)",
        "files/run.yaml": "a: 1e-6",
    }.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "copy").mkdir()
    copy = Copy.of(tmp_path / "checkout", tmp_path / "copy", PROJECT.environment)
    [job] = copy.jobs(Path("run.sh"), arguments.split(), PROJECT)
    return job


@isolated
def test_a_script_is_recorded_with_its_flags_variables_and_files(tmp_path: Path) -> None:
    job = recorded(SUBMIT, tmp_path)
    assert job.program == "train.py"
    assert job.arguments == [
        ["--hf-checkpoint", "/models/Qwen3-4B"],
        ["--swiglu"],
        ["--rollout-stop", "a", "b"],
        ["--lr", "1e-6"],
        ["--config", "files/run.yaml"],
    ]
    assert job.environment == {"MASTER_ADDR": "10.0.0.1", "NCCL_DEBUG": "INFO"}
    assert job.files == {"files/run.yaml": {"a": 1e-6}}
    assert job.checkpoint == "/models/Qwen3-4B"


@isolated
def test_arguments_of_a_script_may_begin_with_variables(tmp_path: Path) -> None:
    job = recorded("python train.py --data $DATA --mode $1", tmp_path, "DATA=/data fast")
    assert job.arguments == [["--data", "/data"], ["--mode", "fast"]]
    assert "DATA" not in job.environment, "it is not the script that sets it"


@isolated
def test_a_script_that_waits_for_all_gpus_of_a_cluster_gets_them(tmp_path: Path) -> None:
    count = "import ray; ray.init(); print(int(ray.cluster_resources().get('GPU', 0)))"
    job = recorded(f'until [ $(python3 -c "{count}") -ge 512 ]; do sleep 5; done\npython train.py --lr 1', tmp_path)
    assert job.arguments == [["--lr", "1"]]


@isolated
def test_an_override_is_recorded_as_its_key_and_its_value(tmp_path: Path) -> None:
    job = recorded("python train.py --config-name=small data.path=/data +trainer.logger='[a,b]'", tmp_path)
    assert job.arguments == [["--config-name", "small"], ["data.path", "/data"], ["+trainer.logger", "[a,b]"]]


@isolated
@pytest.mark.parametrize("command", ["reboot", "sh -c reboot"])
def test_a_script_that_calls_a_command_without_a_stand_in_is_refused(command: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no stand-in for reboot"):
        recorded(f"{command}\npython train.py", tmp_path)


@isolated
def test_a_script_that_starts_no_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="starts no training"):
        recorded("python convert.py", tmp_path)


@isolated
def test_a_script_changes_no_file_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_text("before")
    recorded(f"echo after > {file}\npython train.py", tmp_path)
    assert file.read_text() == "before"


@pytest.mark.parametrize(
    "checkpoint, family",
    [("Qwen2.5-7B", "Qwen2"), ("Qwen2.5-VL-7B", None), ("Qwen3-30B-A3B-FP8", "Qwen3-MoE"), ("qwen3-4b-sft", "Qwen3")],
)
def test_the_name_of_a_checkpoint_gives_its_family(checkpoint: str, family: str | None) -> None:
    assert family_of(checkpoint) == family


def test_each_launch_is_recorded_once() -> None:
    launches = Counter((file.parent.name, content["path"]) for file, content in CONTENTS.items())
    several = {path: len(lines) for project in PROJECTS.values() for path, lines in project.arguments.items()}
    for (project, path), count in launches.items():
        # A launcher may be started with several command lines, of which some train other models.
        assert count <= several.get(path, 1) or project == "verl", path


def test_a_script_is_either_recorded_or_left_out_for_a_reason() -> None:
    recorded = {content["path"] for content in CONTENTS.values()}
    assert not recorded & {path for project in PROJECTS.values() for path in project.left_out}


def test_each_recorded_file_says_where_it_comes_from() -> None:
    families = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["result"]
    repositories = {project.repository: project.folder for project in PROJECTS.values()}
    for file, content in CONTENTS.items():
        assert repositories[content["repository"]] == file.parent.name, file
        assert len(content["commit"]) == 40, file
        assert content["family"] in families, file
        assert content["arguments"], file

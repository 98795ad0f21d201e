"""Every command of the tutorial works, with fewer and smaller batches and fewer evaluated problems.

The first run trains the model of the tutorial. The other runs train a tiny model, which starts sooner.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHORT = "--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --eval-size 4"
TINY = "--hf-checkpoint null --apply-chat-template false --warm-start-max-steps 0"


def commands() -> list[str]:
    """The commands of the tutorial in their order. CI runs the first one, `make setup`, before all tests."""
    found = [text.strip() for language, text in BLOCKS if not language and re.match(r"make |\.venv/", text)]
    assert found[0] == "make setup"
    return found[1:]


def trains(command: str) -> bool:
    return command.startswith("make run") or "train.py" in command


def short_commands() -> Iterator[str]:
    """The commands, with runs that are shorter."""
    model = ""
    for command in commands():
        yield with_flags(command, f"{SHORT} {model}") if trains(command) else command
        if trains(command):
            model = TINY


def with_flags(command: str, flags: str) -> str:
    """A command that starts a run, with further flags."""
    if command.startswith("make run"):
        start, _, given = command.partition(' ARGS="')
        return f'{start} ARGS="{flags} {given or chr(34)}'
    return f"{command} {flags}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with everything of this one, but its own runs, and the reward function that the reader writes."""
    for entry in ROOT.iterdir():
        if entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    [function] = [text for language, text in BLOCKS if language == "python"]
    (tmp_path / "my_reward.py").write_text(function)
    return tmp_path


def test_the_commands_of_the_tutorial_work_in_their_order(clone: Path) -> None:
    # Python looks for modules beside the script, which is in another folder here because it is a link. `make test` with
    # ARGS would pass these on to the commands.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{clone}", "MAKEFLAGS": "", "ARGS": ""}

    def output(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    checked, *_ = [output(command) for command in short_commands()]
    # The first command has checked the settings of `make run`.
    for command in filter(trains, commands()):
        if not command.startswith("make run"):
            output(with_flags(command, "--check-config"))
    # The first lines that the tutorial shows are those of the command.
    for line in re.findall(r"^(?:schedule|N|W|P|staleness|B) {2,}.*", TEXT, re.MULTILINE)[:6]:
        assert line in checked
    runs = sorted((clone / "runs").glob("2*"))
    assert len(runs) == 3
    assert all((run / "summary.json").exists() and (run / "report.html").exists() for run in runs)

"""Every command of the FAQ works in the folder of a run, and every line that it quotes is one that the code writes."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import structlog

from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.storage.rollout_file import save_groups
from miles_async.events import CollapseRiskChanged, Event, RunEnded, Stalled, StepEnded, encode
from miles_async.observability.console.logging import configure_logging, log_file
from miles_async.observability.console.run_log import RunLog
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.summary import write_summary
from miles_async.observability.view import RunView
from miles_async.types import DropReason, Group, Sample
from tests.configuration import run_config
from tests.pages import ROOT, execute, link_project
from tests.unit.example_events import RUN

PAGE = (ROOT / "docs/how-to/faq.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [command for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for command in block.splitlines()]
OF_OTHERS = {"out of memory"}
"""What torch and SGLang write."""
STEP = StepEnded(
    time=110.0,
    rollout=0,
    seconds=1.0,
    tokens=100,
    finite=True,
    reward=0.0,
    response_length=5.0,
    metrics={"logprob_gap_mean": 0.001},
)
EVENTS: list[Event] = [
    RUN,
    STEP,
    CollapseRiskChanged(time=111.0, rollout=0, high=True, why="the effective sample size is 0.2", knob="lower --lr"),
    Stalled(time=141.0, seconds=30.0, queue=0, collected=5, wanted=64),
    RunEnded(time=142.0, reason="done"),
]
SAMPLE = Sample(
    index=0,
    prompt="1 + 1",
    label="2",
    tokens=[1, 2],
    response="3",
    response_length=1,
    rollout_log_probs=[-0.1],
    reward=0.0,
)
GROUP = Group([SAMPLE], feed_index="sample_0_0")


class NoEvents:
    def emit(self, event: Event) -> None: ...


@pytest.fixture
def project(tmp_path: Path, _logging_restored: None) -> Path:
    """A folder with the files of the project, a configuration, a saved batch, and the files of one run."""
    link_project(tmp_path)
    (tmp_path / "my.yaml").write_text((ROOT / "configs" / "arithmetic-cpu.yaml").read_text())
    for name in ("checkpoints", "saved"):
        (tmp_path / name).mkdir()
    save_groups(tmp_path / "saved" / "0.safetensors", 0, [GROUP])
    folder = RunFolder(tmp_path / "runs" / "latest")
    folder.logs.mkdir(parents=True)
    (folder.logs / "engine-0.log").write_text("CUDA out of memory\n")
    folder.events.write_bytes(b"".join(encode(event) + b"\n" for event in EVENTS))
    DeadLetterFile(folder.dead_letters, NoEvents()).dead_letter(GROUP, DropReason.NONFINITE, "not finite")
    configure_logging("console")
    view = RunView()
    lines = RunLog(view, run_config(), folder)
    with log_file(folder.logs / "driver.jsonl"):
        for event in EVENTS:
            view.apply(event)
            lines.observe(event)
    with log_file(folder.logs / "learner-0.jsonl"):
        structlog.get_logger("miles_async.losses").warning("a function returned a value that is not finite")
    write_summary(view, folder.path / "summary.json")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_faq_works(command: str, project: Path) -> None:
    done = execute(command, project, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_every_line_that_the_faq_quotes_is_one_that_the_code_writes() -> None:
    written = "\n".join(
        node.value
        for package in ("miles_async", "workers")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    quoted = [" ".join(line.split()) for line in prose.split("`")[1::2] if len(line.split()) > 2]
    parts = [part for line in quoted if line not in OF_OTHERS and "--" not in line for part in pieces(line)]
    assert len(parts) > 8
    assert [part for part in parts if part not in written] == []


def pieces(line: str) -> list[str]:
    """The parts of a line between the values in it: names of processes, numbers and what `…` stands for."""
    found = re.split(r"…|\b(?:engine|learner)-0\b|\d+", line.removeprefix("Warning: "))
    return [part.strip(" :;") for part in found if part.strip(" :;")]


def test_an_entry_of_the_faq_has_a_command_a_link_and_at_most_80_words() -> None:
    assert len(ENTRIES) == 10
    for title, text in ENTRIES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert 40 <= len(prose.split()) <= 80, title
        assert "```sh\n" in text, title
        assert "](" in text, title

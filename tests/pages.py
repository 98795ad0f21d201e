"""Executes pages of the documentation.

A block `console` has commands, which begin with `$ ` and go on after a backslash at the end of a line, and what they
print. The page may leave out lines of the output. A line that ends in `…` is the beginning of one. Another block whose
first line is `# NAME.py`, `# NAME.yaml` or the like is the file of this name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_RUNS = ("how-to/debug-rewards.md", "how-to/laptop.md")
"""Pages with commands that start engines."""
WITHOUT_RUNS = sorted(
    name
    for page in DOCS.rglob("*.md")
    if "```console\n" in page.read_text() and (name := str(page.relative_to(DOCS))) not in WITH_RUNS
)


class Command(NamedTuple):
    """A command of a page and the lines that the page shows of its output."""

    text: str
    shown: list[str]


def commands_of(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        matched = re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n", part)
        assert matched is not None
        yield Command(matched[1], [line for line in part[matched.end() :].splitlines() if line.strip(" …")])


def files_of(name: str) -> dict[str, str]:
    """The files that a page contains, by their names."""
    blocks = BLOCK.findall((DOCS / name).read_text())
    return {_file_name(text): text for language, text in blocks if language != "console" and _file_name(text)}


def execute_page(name: str, folder: Path, *, numbers_vary: bool = False, shared: Path = Path("/shared")) -> None:
    """Execute the page in `folder`, as if that were the project. `/shared` of the page is the folder `shared`.

    Each shown line must be in the output, in order; with `numbers_vary`, apart from its numbers and spaces.
    """
    link_project(folder)
    for language, text in BLOCK.findall((DOCS / name).read_text().replace("/shared/", f"{shared}/")):
        if language == "console":
            for command in commands_of(text):
                _find(command, _output(command.text, folder), numbers_vary)
        elif file := _file_name(text):
            (folder / file).write_text(text)


def link_project(folder: Path) -> None:
    """Fill `folder` with links to the files of the project, except its runs."""
    for entry in ROOT.iterdir():
        if entry.name != "runs":
            (folder / entry.name).symlink_to(entry)


def execute(command: str, folder: Path, *, stderr: int) -> subprocess.CompletedProcess[str]:
    """Execute a command in a folder of `link_project`. `stderr` is where `subprocess` puts the error stream."""
    # The packages are installed. Python looks for modules beside a script, which is a link here.
    command = re.sub(r"^make ", "make -o .venv/ready ", command)
    path = f"{folder}/.venv/bin:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}:{folder}", "MAKEFLAGS": "", "ARGS": ""}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


def _file_name(block: str) -> str:
    """The name in the first line of a block, or nothing."""
    found = re.match(r"# (\S+\.\w+)\n", block)
    return found[1] if found else ""


def _output(command: str, folder: Path) -> str:
    """What a command prints, on both streams. Raises AssertionError if it fails."""
    done = execute(command, folder, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout


def _find(command: Command, output: str, numbers_vary: bool) -> None:
    def comparable(line: str) -> str:
        return " ".join(re.sub(r"-?\d+(?:[.,]\d+)*", "0", line).split()) if numbers_vary else line.rstrip()

    lines = iter([comparable(line) for line in output.splitlines()])
    for shown in map(comparable, command.shown):
        beginning = shown.removesuffix("…")
        found = any(line.startswith(beginning) if shown.endswith("…") else line == shown for line in lines)
        assert found, f"{command.text}\ndoes not print, at this place:\n{shown}\n\nIt prints:\n{output}"

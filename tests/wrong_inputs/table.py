"""Reads the table of wrong inputs, and runs what `train_async.py --check-config` and the start of a run check."""

from __future__ import annotations

import base64
import os
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from miles_async.adapters.storage.gguf import with_converted_checkpoint
from miles_async.compat.tutorial import recipe
from miles_async.config.cli import EXIT_INVALID, parse_or_exit
from miles_async.config.fields import SECTIONS, SETTINGS
from miles_async.errors import UserError
from tests.wrong_inputs.builders import BUILDERS
from workers.check_config import read_files
from workers.preflight import preflight

TABLES = Path(__file__).parent
BASE = """\
data: {reasoning_gym_task: chain_sum, input_key: prompt, label_key: label, eval_size: 0}
rollout: {rm_type: reasoning_gym, n_samples_per_prompt: 8, rollout_max_response_len: 64}
"""
"""Settings of a run that nothing is wrong with."""
ENTRY = "train_async.py"
CPU_SECONDS = 120
"""Limit of a row that runs alone. Such a row takes about 5 seconds, most of them for imports."""
MEMORY_BYTES = 16 << 30
"""Limit of the address space of a row that runs alone. Libraries map some GiB that they never use."""
ADVICE = re.compile(
    r"\b(set|unset|write|remove|raise|lower|add|use|put|pass|save|copy|install|choose|start|return|define|check|split|"
    r"shorten|turn|give|keep|convert|change|name|should be|should have|should match|did you mean|expected|needs?|"
    r"no such file|no such folder|is missing|must|lists all|not valid YAML|such as|see|decorate)\b",
    re.IGNORECASE,
)
"""Words of a sentence that says what to do, or what was expected."""


@dataclass(frozen=True, slots=True)
class Row:
    """One wrong input."""

    kind: str
    """The name of the file, without its suffix."""
    name: str
    says: list[list[str]]
    """Fragments of each expected sentence."""
    arguments: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    make: str | None = None
    alone: bool = False
    recipe: str | None = None

    @property
    def id(self) -> str:
        """The name of the row in the test report."""
        return f"{self.kind}-{self.name.replace(' ', '_')}"

    def write_files(self, folder: Path) -> None:
        """Write the files of the row to a folder."""
        for name, content in {"base.yaml": BASE, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, dict):
                path.write_bytes(base64.b64decode(content["base64"]))
            else:
                path.write_text(content)
        if self.make is not None:
            BUILDERS[self.make](folder)

    def argv(self, folder: Path) -> list[str]:
        """The command line of the row, after the name of the program."""
        own = [str(argument).replace("{folder}", str(folder)) for argument in self.arguments]
        return ["--config", str(folder / "base.yaml"), *own]


def rows(kind: str | None = None) -> list[Row]:
    """The rows of one kind, or of all kinds."""
    return [
        Row(kind=file.stem, says=[[said] if isinstance(said, str) else said for said in row.pop("says")], **row)
        for file in sorted(TABLES.glob(f"{kind or '*'}.yaml"))
        for row in yaml.safe_load(file.read_text()) or []
    ]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the program ended."""

    code: int
    lines: list[str]
    """The lines on stderr."""


def run(row: Row, folder: Path) -> Ended:
    """Run a row in an empty folder, in this process or, if it says so, in another one with limits."""
    row.write_files(folder)
    if not row.alone:
        return _in_process(row, folder)
    command = [sys.executable, "-m", "tests.wrong_inputs.table", row.kind, row.name, str(folder)]
    ended = subprocess.run(
        command, cwd=TABLES.parents[1], capture_output=True, text=True, errors="replace", preexec_fn=_limit, check=False
    )
    return Ended(ended.returncode, ended.stderr.splitlines())


def check(row: Row, folder: Path) -> Ended:
    """Check the settings and the files of a row in an empty folder with `--check-config`, and start nothing."""
    row.write_files(folder)
    return _ended(folder, lambda: parse_or_exit([*row.argv(folder), "--check-config"], ENTRY, read_files=read_files))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _in_process(row: Row, folder: Path) -> Ended:
    recipe = row.recipe
    return _ended(folder, lambda: _start(row.argv(folder)) if recipe is None else _train(folder / recipe))


def _ended(folder: Path, program: Callable[[], object]) -> Ended:
    stderr = StringIO()
    code = 0
    with redirect_stdout(StringIO()), redirect_stderr(stderr), _at_home(folder):
        try:
            program()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return Ended(code, stderr.getvalue().splitlines())


def _start(argv: Sequence[str]) -> None:
    """What `train_async.py` does before the first process of a run starts, beginning with `--check-config`."""
    try:
        parse_or_exit([*argv, "--check-config"], entry=ENTRY)
    except SystemExit as ended:
        if ended.code != 0:
            raise
    config = parse_or_exit(argv, entry=ENTRY)
    try:
        preflight(with_converted_checkpoint(config))
    except UserError as error:
        for sentence in error.args:
            print(f"{ENTRY}: {' '.join(str(sentence).split())}", file=sys.stderr)
        sys.exit(EXIT_INVALID)


def _train(program: Path) -> None:
    """Run a program that uses `miles_async.compat.tutorial.recipe`. It must not come as far as starting a run."""
    with patch.object(recipe, "_run", side_effect=AssertionError("the recipe was accepted")):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except UserError as error:
            for sentence in str(error).splitlines():
                print(f"{ENTRY}: {sentence}", file=sys.stderr)
            sys.exit(EXIT_INVALID)


@contextmanager
def _at_home(folder: Path) -> Iterator[None]:
    """Run in a folder whose modules can be imported, and forget these modules afterwards."""
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in sys.modules.keys() - modules:
            if str(folder) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]


def complaints(row: Row, ended: Ended) -> list[str]:
    """What is wrong with the way in which a wrong input was refused."""
    prefix = f"{ENTRY}: "
    # A note is no refusal: it tells about a setting that has no effect.
    lines = [line for line in ended.lines if not line.startswith(f"{prefix}note: ")]
    found = []
    if ended.code != EXIT_INVALID:
        found.append(f"the exit code is {ended.code}")
    found += [f"not a sentence of the program: {line!r}" for line in lines if not line.startswith(prefix)]
    found += [f"no advice: {line!r}" for line in lines if not ADVICE.search(line)]
    found += [f"names neither a setting nor a file: {line!r}" for line in lines if not _names_something(row, line)]
    if len(lines) != len(row.says):
        found.append(f"{len(lines)} sentences instead of {len(row.says)}: {lines!r}")
    for line, fragments in zip(lines, row.says, strict=False):
        found += [f"{fragment!r} is not in {line!r}" for fragment in fragments if fragment not in line]
    return found


def _names_something(row: Row, line: str) -> bool:
    words = set(re.findall(r"[a-z]\w*", line.replace("-", "_")))
    files = [Path(name).name for name in row.files]
    arguments = [str(argument).partition("=")[0] for argument in row.arguments]
    program = "" if row.recipe is None else str(row.files[row.recipe])
    identifiers = re.findall(r"\w*[A-Z_]\w*", program)
    known = [*files, *filter(None, arguments), *identifiers, ".yaml", " --"]
    return bool(words & (SETTINGS.keys() | SECTIONS.keys())) or any(name in line for name in known)


def main() -> None:
    """Run the row of the kind and the name of the command line in the given folder, and exit as the program does."""
    kind, name, folder = sys.argv[1:]
    (row,) = (row for row in rows(kind) if row.name == name)
    ended = _in_process(row, Path(folder))
    for line in ended.lines:
        print(line, file=sys.stderr)
    sys.exit(ended.code)


if __name__ == "__main__":
    main()

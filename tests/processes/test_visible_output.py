"""Text of models, data, servers and files reaches terminals and log files without the characters that steer a terminal.

Each sink is a program that shows one hostile text. It runs on a pseudo-terminal, and the bytes that arrive there count.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\u202eevil\u2066\u061c\u200b\ufeff\xad\U000e0041\u3164\u2028\x85\x7f\x08\rfake"
    "z" + "\u0301" * 50
)
"""Titles, colours and moves of the cursor; bidirectional, invisible and stacked characters; a carriage return."""
KEPT = "owned"
"""Part of the hostile text that stays."""

PREAMBLE = f"""
import json, logging, os, sys, time
from pathlib import Path
HOSTILE = {HOSTILE!a}
FOLDER = Path(sys.argv[1])
"""
LOGGING = """
from miles_async.observability.console.logging import configure_logging
import structlog
configure_logging("console")
log = structlog.get_logger("miles_async.test")
"""
GROUP = """
from miles_async.types import Group, Sample, SampleStatus
sample = Sample(index=0, prompt=HOSTILE, response=HOSTILE, label=HOSTILE, tokens=[1], response_length=0,
                metadata={"note": HOSTILE}, status=SampleStatus.COMPLETED, reward=1.0)
group = Group([sample], feed_index=HOSTILE)
"""
SAVED = (
    GROUP
    + """
from miles_async.adapters.storage.rollout_file import save_groups
save_groups(FOLDER / "batch.safetensors", 0, [group])
from workers.inspect_rollout import main
"""
)
COMMAND = "from workers.main import main; sys.argv[1:] = {arguments}; sys.exit(main())"

SINKS = {
    "a log line": LOGGING + "log.warning(f'said {HOSTILE}', error=HOSTILE, note=HOSTILE)",
    "a log line of a library": LOGGING + "logging.getLogger('ray').error(HOSTILE)",
    "a log line with an exception": LOGGING
    + "try: raise ValueError(HOSTILE)\nexcept ValueError: log.exception('failed')",
    "a log line as JSON": LOGGING + "configure_logging('json'); log.warning(HOSTILE, error=HOSTILE)",
    "the tail of a log file": LOGGING
    + """
from miles_async.observability.console.log_tail import LogTail
(FOLDER / "rollout.log").write_bytes(f"ERROR {HOSTILE[:250]}".encode() + b"\\x9b31m\\n")
(FOLDER / "engine.jsonl").write_text(json.dumps({"level": "error", "event": HOSTILE, HOSTILE[:40]: HOSTILE}) + "\\n")
LogTail(FOLDER, 2**20).poll()
""",
    "a warning of the run": """
from miles_async.events import WarningRaised
from miles_async.observability.console.program_lines import PlainLines
PlainLines(sys.stdout).observe(WarningRaised(time=1.0, text=HOSTILE))
""",
    "the header, the status line and the progress bar": """
from msgspec import structs
from miles_async.config.schema import RunConfig
from miles_async.events import StartupChanged
from miles_async.observability.console.terminal import ProgressBar, Terminal
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView
from tests.unit import example_events
terminal = Terminal(RunView(), sys.stderr, RunConfig(), RunFolder(FOLDER / HOSTILE[:40]), "http://127.0.0.1:1/")
terminal.observe(structs.replace(example_events.RUN, model=HOSTILE))
terminal.observe(StartupChanged(time=1.0, part=HOSTILE, seconds=None))
terminal.observe(StartupChanged(time=1.0, part=HOSTILE, seconds=1.0))
terminal.close()
""",
    "a batch in a table": SAVED + "sys.exit(main([str(FOLDER / 'batch.safetensors')]))",
    "a sample in full": SAVED + "sys.exit(main([str(FOLDER / 'batch.safetensors'), '--sample', '0']))",
    "a missing batch": COMMAND.format(arguments="['inspect', f'/tmp/{HOSTILE}']"),
    "the groups of a run": """
from miles_async.events import GroupMoved, encode
move = GroupMoved(time=0.0, sequence=1, feed_index=HOSTILE, attempt=0, before=None, after="fed", reason=None, counts={})
(FOLDER / "events.jsonl").write_bytes(encode(move) + b"\\n")
"""
    + COMMAND.format(arguments="['groups', str(FOLDER)]"),
    "a report that cannot be written": COMMAND.format(arguments="['report', f'/tmp/{HOSTILE}']"),
    "an unknown argument": COMMAND.format(arguments="['report', '.', f'--{HOSTILE}']"),
    "the recordings": """
folder = FOLDER / HOSTILE[:30] / "GBS1_N1_in1_out1"
folder.mkdir(parents=True)
"""
    + COMMAND.format(arguments="['recordings', 'ls', '--dir', str(FOLDER)]"),
    "a refused setting": COMMAND.format(
        arguments="['train', '--hf-checkpoint', HOSTILE, '--advantage-estimator', HOSTILE]"
    ),
    "a missing data file": COMMAND.format(
        arguments=f"['train', '--config', {str(ROOT / 'configs' / 'arithmetic-cpu.yaml')!r}, '--check-config', "
        "'--rollout-function-path', 'miles_async.rollout.fully_async_rollout.generate_rollout_fully_async', "
        "'--reasoning-gym-task', 'null', '--rm-type', 'exact', '--prompt-data', HOSTILE]"
    ),
    "a traceback": """
from miles_async.config.cli import parse_or_exit
try: parse_or_exit(["--help"], entry="train_async.py")
except SystemExit: pass
raise RuntimeError(HOSTILE)
""",
    "a warning of Python": """
from miles_async.config.cli import parse_or_exit
try: parse_or_exit(["--help"], entry="train_async.py")
except SystemExit: pass
import warnings
warnings.warn(HOSTILE)
""",
    "the end of a run that fails": """
from workers import driver
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
def fails(config): raise FatalError(HOSTILE)
driver.with_environment_tasks = fails
sys.exit(driver.drive(RunConfig(), [], entry="train_async.py"))
""",
    "the output of a run that a recipe starts": """
from miles_async.compat.tutorial.recipe import _run
_run([sys.executable, "-c", f"print({HOSTILE!a})"])
""",
}


@pytest.mark.parametrize("name", SINKS)
def test_hostile_text_cannot_steer_the_terminal(name: str, tmp_path: Path) -> None:
    shown = on_a_terminal(PREAMBLE + SINKS[name], tmp_path)
    assert KEPT in shown
    assert steering(shown) == []


def on_a_terminal(program: str, folder: Path) -> str:
    """Return what a Python program writes to a pseudo-terminal."""
    controller, terminal = os.openpty()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables, cwd=folder):
        os.close(terminal)
        output = b""
        # Linux reports EIO once no process has the terminal open.
        while chunk := _read(controller):
            output += chunk
    os.close(controller)
    # The terminal itself adds carriage returns to newlines. What erases a status line is written by this project.
    return output.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def steering(text: str) -> list[str]:
    """Return the characters and stacks of marks in `text` that change how the text around them looks."""
    found = [
        ascii(character)
        for character in text
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]
    return found + re.findall("\u0301{9,}|\u3164", text)


def test_what_a_function_of_the_user_prints_is_visible_text_in_the_log_of_its_process(tmp_path: Path) -> None:
    program = """
from miles_async.observability.console.logging import configure_worker_logging
configure_worker_logging(FOLDER, "rollout", "run")
print(HOSTILE)
print(HOSTILE, file=sys.stderr)
logging.getLogger("miles_async").warning(HOSTILE)
"""
    on_a_terminal(PREAMBLE + program, tmp_path)
    for file in ("rollout.log", "rollout.jsonl"):
        written = (tmp_path / file).read_text()
        assert KEPT in written
        assert steering(written) == []


def test_the_log_of_a_server_is_visible_text_without_colours(tmp_path: Path) -> None:
    from io import FileIO

    from miles_async.observability.redacted_log import RedactedLog

    log = RedactedLog(FileIO(tmp_path / "router.log", "ab"))
    os.write(log.descriptor, HOSTILE.encode() + b"\x9b31m\n\x1b[2m12:00\x1b[0m INFO started\n")
    log.close_writer()
    log.finish(within=60.0)
    written = (tmp_path / "router.log").read_text()
    assert KEPT in written
    assert steering(written) == []
    assert r"\x9b31m" in written
    assert written.endswith("\n12:00 INFO started\n")


def test_dead_letters_and_events_have_escapes_which_readers_resolve(tmp_path: Path) -> None:
    from miles_async.adapters.storage.dead_letters import DeadLetterFile
    from miles_async.events import DeadLettered, Event, SampleDiscarded, WarningRaised, decode, encode
    from miles_async.types import DropReason, Group, Sample

    class Events:
        def emit(self, event: Event) -> None:
            assert isinstance(event, DeadLettered), event

    group = Group([Sample(index=0, prompt="p", response=HOSTILE, tokens=[1], response_length=1)], feed_index="a")
    DeadLetterFile(tmp_path / "letters.jsonl", Events()).dead_letter(group, DropReason.FAILED, HOSTILE)
    letter = (tmp_path / "letters.jsonl").read_text()
    event = encode(WarningRaised(time=1.0, text=HOSTILE)).decode()
    assert steering(letter) + steering(event) == []
    assert json.loads(letter)["error"] == HOSTILE
    assert decode(event) == WarningRaised(time=1.0, text=HOSTILE)
    half = SampleDiscarded(time=1.0, sequence=0, sample=0, reason="failed", tokens=0, error="\ud83d")
    found = decode(encode(half))
    assert isinstance(found, SampleDiscarded)
    assert found.error == "?"


def test_a_child_process_writes_visible_text_to_standard_error(tmp_path: Path) -> None:
    program = """
import subprocess
from miles_async.observability.redacted_log import child_stderr
child = [sys.executable, "-c", f"import os; os.write(2, {HOSTILE!a}.encode() + b'\\\\x9b31m a-secret-key')"]
with child_stderr(["a-secret-key"], finish_within=60.0) as output:
    subprocess.run(child, stderr=output)
"""
    shown = on_a_terminal(PREAMBLE + program, tmp_path)
    assert KEPT in shown
    assert steering(shown) == []
    assert "a-secret-key" not in shown


PROTECTED_BY = {
    "miles_async/config/cli.py": "protect_output",
    "miles_async/observability/page/report.py": "protect_output",
    "miles_async/observability/trace/groups.py": "protect_output",
    "miles_async/adapters/storage/recordings_command.py": "protect_output",
    "miles_async/skip/__main__.py": "the command that it calls",
    "workers/doctor.py": "protect_output",
    "workers/driver.py": "protect_output",
    "workers/inspect_rollout.py": "protect_output",
    "workers/main.py": "protect_output",
    "workers/memory_plan.py": "the parser of its arguments",
    "miles_async/observability/console/lines.py": "visible_text",
    "miles_async/compat/tutorial/recipe.py": "visible_text",
    "miles_async/observability/subscribers.py": "the driver, which creates them",
    "miles_async/adapters/storage/gguf.py": "its parent reads its output, and raises it as an error",
    "miles_async/adapters/system/sessions.py": "it prints nothing",
    "miles_async/adapters/environments/server.py": "its output is a pipe of JSON",
    "train.py": "parse_or_exit",
    "train_async.py": "parse_or_exit",
    "miles_async/adapters/sglang/answer_parser_process.py": "its output is a pipe of JSON",
    "miles_async/adapters/sglang/engine_process.py": "its output goes to a RedactedLog",
    "miles_async/adapters/sglang/router_process.py": "its output goes to a RedactedLog",
    "miles_async/rewards/grader.py": "its output is a pipe of JSON",
}
"""What makes the output of each file visible text: a name that the file uses, or a reason. A file that prints, draws a
progress bar or is a program belongs here."""


def test_every_file_that_prints_is_protected() -> None:
    files = [*ROOT.glob("miles_async/**/*.py"), *ROOT.glob("workers/**/*.py"), *ROOT.glob("train*.py")]
    printing = {str(file.relative_to(ROOT)): file.read_text() for file in files if prints(ast.parse(file.read_text()))}
    assert printing.keys() == PROTECTED_BY.keys()
    for file, protection in PROTECTED_BY.items():
        assert protection in printing[file] or " " in protection, file


def prints(module: ast.Module) -> bool:
    """Return whether a module is a program, prints, writes to a standard stream, or draws a progress bar of tqdm."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "pprint", "tqdm", "tqdm.write"):
            return True
        if isinstance(node, ast.Call) and re.match(r"sys\.(__)?std(out|err)(__)?\.write", ast.unparse(node.func)):
            return True
        if isinstance(node, ast.ClassDef) and "tqdm" in map(ast.unparse, node.bases):
            return True
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            return True
    return False

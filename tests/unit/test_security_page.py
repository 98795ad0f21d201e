"""Every test that SECURITY.md names exists, and its table of what is unpickled is complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PICKLE = {
    "miles_async/rewards/grader.py": "requests from its parent process",
    "miles_async/rewards/grader_pool.py": "requests to its child processes",
    "miles_async/compat/slime/saved_batches.py": "slime's files, which torch reads without running code",
    "miles_async/observability/snapshot.py": "what follows from the events of a run; only values and listed classes",
    "miles_async/adapters/weights/transports/ipc.py": "for engines, what SGLang expects: where they find weights",
    "miles_async/adapters/megatron/checkpoint/training_state.py": "the errors of Megatron's checkpoints",
}
"""Files that pickle or unpickle, and what."""
PICKLES = re.compile(r"pickle|cloudpickle|dill|marshal|shelve|torch\.load|\w+_object(_list)?|Serializer")
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)(?:::)?)?(test_\w+)?`")


def test_every_test_that_the_security_page_names_exists() -> None:
    page = Path("SECURITY.md").read_text()
    named = [(file, function) for file, function in NAMED.findall(page) if file or function]
    assert len(named) > 15
    functions = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    missing = [file for file, _ in named if file and not Path(file).is_file()]
    for file, function in named:
        text = Path(file).read_text() if file else functions
        if function and f"def {function}(" not in text:
            missing.append(function)
    assert missing == []


def test_only_the_files_in_this_table_use_pickle() -> None:
    files = [path for folder in ("miles_async", "workers") for path in Path(folder).rglob("*.py")]
    assert {str(path) for path in files if pickles(ast.parse(path.read_text()))} == PICKLE.keys()


def pickles(module: ast.Module) -> bool:
    """Return whether a module imports something that pickles, or calls it."""
    for node in ast.walk(module):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [ast.unparse(node.func), node.func.attr]
        if any(PICKLES.fullmatch(name) for name in names):
            return True
    return False

"""The import rules of pyproject.toml, [tool.importlinter], as the command `lint-imports` checks them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=tree, capture_output=True, text=True)


def test_the_import_rules_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


VIOLATIONS = {
    "Workers compose the library": ("miles_async/rollout/contract.py", "import workers.driver"),
    "The core does not know its guests": (
        "miles_async/filters.py",
        "def f():\n    from miles_async.rollout.rm_hub import async_rm",
    ),
    "imports point down only": ("miles_async/scheduling/queue.py", "import miles_async.pipeline.service"),
    "Projections of the view": (
        "miles_async/observability/metrics/recorder.py",
        "import miles_async.observability.page.document",
    ),
    "know Ray": ("miles_async/observability/trace/event_log.py", "import ray"),
    "knows Megatron": ("workers/driver.py", "from megatron import core"),
    "know SGLang": ("miles_async/rewards/functions/exact.py", "def f():\n    import sglang"),
    "knows Mooncake": ("workers/driver.py", "import mooncake.engine"),
    "load without torch": ("miles_async/config/fields.py", "import torch"),
    "Scheduling does no I/O": ("miles_async/scheduling/window.py", "import asyncio"),
}


def test_each_import_rule_catches_what_it_forbids(tmp_path: Path) -> None:
    for name in ("miles_async", "workers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in VIOLATIONS.values():
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{line}\n")
    verdicts = [line for line in lint(tmp_path).stdout.splitlines() if " BROKEN" in line or " KEPT" in line]
    assert [line for line in verdicts if " KEPT" in line] == []
    assert [rule for rule in VIOLATIONS if not any(rule in line for line in verdicts)] == []
    assert len(verdicts) == len(VIOLATIONS)

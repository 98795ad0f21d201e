"""Results of benchmarks: one file `benchmarks/results/NAME.json` each, with date, commit and machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def record(name: str, result: Any) -> None:
    """Write `results/NAME.json`, replacing the file of an earlier run.

    The file holds `date` (UTC), `commit`, `machine` and `result`. The commit ends in `-dirty` if tracked files other
    than results were changed.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**stamp(), "result": result}, indent=2) + "\n")
    print(f"wrote {path}")


def recorded(name: str) -> dict[str, Any]:
    """The `result` that an earlier run wrote, for a benchmark that runs in parts; empty if there is none."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text())["result"] if path.exists() else {}
    return known


def stamp() -> dict[str, Any]:
    """What every result carries: `date` (UTC), `commit` and `machine`."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": _commit(), "machine": _machine()}


def machine_load() -> float:
    """Mean number of processes that wanted a core during the last minute."""
    return round(os.getloadavg()[0], 2)


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    commit = _git("rev-parse", "--short=12", "HEAD")
    # A series changes its own results while it runs.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){RESULTS}")
    return f"{commit}{'-dirty' if changed else ''}" if commit else "unknown"


def _git(*arguments: str) -> str:
    root = RESULTS.parent.parent
    return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }

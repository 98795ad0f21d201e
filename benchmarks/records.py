"""What benchmarks find goes into `benchmarks/results/`, whatever folder they are called from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def record(name: str, found: Any) -> None:
    """Write `results/NAME.json` anew."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"wrote {path}")


def recorded(name: str) -> dict[str, Any]:
    """What the run before wrote; empty where there was none."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known

"""Trains on finite data to its end, undisturbed and with a driver that is killed five times. Compares the prompts.

    python -m benchmarks.chaos.finite_data

Prints how many prompts each run has trained, and how often. The exit code is 1 if they differ, or if a run has another
violation. The folders of the runs are in `runs/chaos/finite-data/`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.__main__ import FOLDERS
from benchmarks.chaos.cases import Strike
from benchmarks.chaos.judge import read_part, times_trained
from benchmarks.chaos.play import play

ROLLOUTS, BATCH = 24, 16
PROMPTS = ROLLOUTS * BATCH
KILLS = 5
EACH_START = Strike(part="driver", kind="kill", point=None, call=4, delay=0.2)


def main() -> int:
    folder = (FOLDERS / "finite-data").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'prompt': f'{row} + 1 =', 'label': row + 1})}\n" for row in range(PROMPTS)))
    kills = [replace(EACH_START, earlier_ends=ends) for ends in range(KILLS)]
    unbroken, broken = _trained(folder / "unbroken", rows, ()), _trained(folder / "broken", rows, kills)
    whole = Counter(f"sample_0_{row}" for row in range(PROMPTS))
    return 0 if unbroken == broken == whole else 1


def _trained(folder: Path, rows: Path, strikes: Sequence[Strike]) -> Counter[str]:
    """Play a run. Returns how often the weights at its end were trained on each prompt."""
    # With strict FIFO, the batches of the run are the data in its order. Otherwise, the last batch may contain prompts
    # of the next epoch.
    data = {"prompt-data": rows, "input-key": "prompt", "label-key": "label", "reasoning-gym-task": "null"}
    settings = data | {"windowed-fifo-ratio": 0}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    outcome = play(strikes, folder, rollouts=ROLLOUTS, further_flags=words)
    # A run that is resumed goes on in its own folder.
    trained = times_trained(read_part(folder / "runs" / "latest").events)
    times = Counter(trained.values())
    print(f"{folder.name}: {outcome.parts} parts, {len(trained)} prompts, trained {dict(times)} (times: prompts)")
    for sentence in outcome.violations:
        print(f"    VIOLATION {sentence}")
    return Counter() if outcome.violations else trained


if __name__ == "__main__":
    sys.exit(main())

"""`make study`: measures what staleness costs, with the main job under several schedules, corrections and seeds.

    python -m benchmarks.study [seeds] [repeats] [limits] [losses] [control] [stale] [waits] [keys] [--seeds N]
    [--processes N] [--page-only]

    seeds    in turns (train.py) and asynchronous with the shipped limit, the same seeds for both
    repeats  the same with one seed: nothing but the order in which answers arrive differs between these runs
    limits   staleness limits 1 to 16, each without a correction, with the default, and with the recommended correction
    losses   the other corrections and objectives at limits 2 and 8
    control  the shipped job with shuffled rewards, which must not learn
    stale    limits 1 to 16 with many groups in flight, so that samples are nearly as old as the limit allows, with the
             corrections and objectives above and with other learning rates
    waits    in turns and with staleness limits 1 to 16, the job whose tools wait (configs/slow-tools-cpu.yaml)
    keys     the same job with keys and values of older versions (--max-kv-staleness)

Without names all parts are run. Each run takes minutes and is stored in `benchmarks/results/study/`. A stored run with
the same settings is not repeated, so the study continues where it was interrupted. At the end, and with `--page-only`,
`docs/explanation/staleness.md` and its plots are written from all stored runs.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.records import RESULTS
from benchmarks.study.figures import draw
from benchmarks.study.page import IN_TURNS, LIMITS, by_name, page
from benchmarks.study.runs import LEAST_SHARE, MAIN, SEEDS, SLOW_TOOLS, Cell, Outcome, cells, stored, stored_or_run

DOCS = Path("docs/explanation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("seeds", "control", "repeats", "limits", "losses", "stale", "waits", "keys")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="part", help=", ".join(parts))
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds of the parts other than seeds and repeats (default: 3)"
    )
    parser.add_argument("--page-only", action="store_true", help="write the page from the stored runs")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default: 1); more spoil the times")
    options = parser.parse_args()
    todo = list(dict.fromkeys(cells(options.parts or parts, options.seeds)))
    too_fresh: set[tuple[str, str]] = set()

    def run_unless_too_fresh(cell: Cell) -> Outcome | None:
        if (cell.schedule, cell.variant) in too_fresh:
            return None
        outcome = stored_or_run(cell)
        if cell.is_too_fresh(outcome):
            too_fresh.add((cell.schedule, cell.variant))
            print(
                f"{cell.schedule}, {cell.variant}: the mean staleness of {outcome.staleness:.2f} is below "
                f"{LEAST_SHARE:.0%} of the limit, so no other seeds are run",
                flush=True,
            )
        return outcome

    with ThreadPoolExecutor(options.processes) as pool:
        outcomes = pool.map(stored if options.page_only else run_unless_too_fresh, todo)
        for number, (cell, outcome) in enumerate(zip(todo, outcomes, strict=True), start=1):
            if outcome is not None:
                print(
                    f"{number}/{len(todo)} {cell.path.stem}: {outcome.before:.3f} to {outcome.after:.3f} in "
                    f"{outcome.seconds:.0f} s, staleness {outcome.staleness:.2f}",
                    flush=True,
                )
    every = cells(parts, len(SEEDS))
    found = [(cell, outcome) for cell in dict.fromkeys(every) if (outcome := stored(cell)) is not None]
    runs = by_name((cell, outcome) for cell, outcome in found if cell.config == MAIN)
    waits = by_name((cell, outcome) for cell, outcome in found if cell.config == SLOW_TOOLS)
    if IN_TURNS not in runs:
        print("No page was written: it needs at least one stored run in turns.")
        return
    (DOCS / "staleness.md").write_text(page(runs, waits, _simulated()))
    draw(runs, DOCS)
    print(f"wrote {DOCS / 'staleness.md'}")


def _simulated() -> dict[str, float]:
    """See `page`. The runs have as many groups in flight as those of configs/slow-tools-cpu.yaml."""
    rows = json.loads((RESULTS / "sim-waiting.json").read_text())["result"]["rows"]
    names = {f"limit {limit}": f"limit {limit}, 32 in flight" for limit in LIMITS}
    return {schedule: rows["in turns"]["wall"] / rows[name]["wall"] for schedule, name in names.items()}


if __name__ == "__main__":
    main()

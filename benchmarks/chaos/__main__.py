"""`make chaos`: kills and stops processes of real runs at drawn times, and judges what becomes of the runs.

    python -m benchmarks.chaos [--runs 20] [--seed 0] [--kinds rollout_worker driver …] [--warm] [--adapter] [--only 7]

Each run takes about a minute and is appended to `benchmarks/results/chaos/cold-SEED.jsonl` with the commit, or to
`warm-SEED.jsonl` if the runs join one Ray (`--warm`). With `--adapter`, the runs train an adapter in place of all
weights, and the names of the files begin with `adapter-`. Runs in the file are not repeated, so an interrupted series
continues. A run that is played again (`--only`) counts with its last outcome. The folder of a run with violations is
kept in `runs/chaos/`. The exit code is 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.chaos.cases import KINDS, TARGETS, draw
from benchmarks.chaos.play import play
from benchmarks.chaos.warm_ray import WarmRay
from benchmarks.records import RESULTS, stamp

FOLDERS = Path("runs/chaos")
ADAPTER = ("--lora-rank", "8")


def main() -> int:
    options = _options()
    name = f"{'adapter-' * options.adapter}{'warm' if options.warm else 'cold'}-{options.seed}"
    series = RESULTS / "chaos" / f"{name}.jsonl"
    with WarmRay() if options.warm else nullcontext() as ray:
        _play_series(options, series, FOLDERS / name, ray)
    runs = list({run["number"]: run for run in _read(series)}.values())
    print(table(runs))
    return 1 if any(run["violations"] for run in runs) else 0


def _play_series(options: argparse.Namespace, series: Path, folders: Path, ray: WarmRay | None) -> None:
    for number in [options.only] if options.only is not None else range(options.runs):
        strikes = draw(options.seed, number, options.kinds, warm=options.warm)
        drawn = json.loads(json.dumps([asdict(strike) for strike in strikes]))
        if options.only is None and any(_is(run, number, drawn) for run in _read(series)):
            continue
        what = ", ".join(f"{each.kind} {each.part} at {each.point or 'batch'} {each.call}" for each in strikes)
        print(f"{number}: {what}", flush=True)
        folder = (folders / str(number)).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        outcome = play(strikes, folder, ray, further_flags=ADAPTER if options.adapter else ())
        series.parent.mkdir(parents=True, exist_ok=True)
        with series.open("a") as file:
            file.write(json.dumps({"number": number, **stamp(), **outcome.as_json()}) + "\n")
        for sentence in outcome.violations:
            print(f"    VIOLATION {sentence}", flush=True)
        if not outcome.violations:
            shutil.rmtree(folder)
        figures = [f"{each.detected or 0:.0f}/{each.recovered or 0:.0f} s" for each in outcome.strikes if each.time]
        ends = "".join(f"\n    {end}" for end in outcome.ends)
        print(f"    {outcome.seconds:.0f} s, {outcome.parts} parts, detected/recovered {figures}{ends}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").partition("\n")[0])
    once = sum(map(len, KINDS.values()))
    parser.add_argument(
        "--runs", type=int, default=once, help=f"length of the series (default: {once}, each kind once)"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the series (default: 0)")
    # Only root may mount the disk that is filled.
    targets = [target for target in TARGETS if target != "store_disk" or os.geteuid() == 0]
    parser.add_argument("--kinds", nargs="+", choices=TARGETS, default=targets, help="what is struck")
    parser.add_argument("--warm", action="store_true", help="start Ray once; the runs join it")
    parser.add_argument("--adapter", action="store_true", help="train an adapter in place of all weights")
    parser.add_argument("--only", type=int, help="play this run of the series again")
    return parser.parse_args()


def _read(series: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in series.read_text().splitlines()] if series.exists() else []


def _is(run: dict[str, Any], number: int, drawn: list[dict[str, Any]]) -> bool:
    return bool(run["number"] == number and [struck["strike"] for struck in run["strikes"]] == drawn)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Totals of a series, and the seconds of detection and recovery for each kind of strike."""
    missed = sum(struck["time"] is None for run in runs for struck in run["strikes"])
    lines = [
        f"{len(runs)} runs: {sum(bool(run['violations']) for run in runs)} with violations, "
        f"{sum(run['hangs'] for run in runs)} hangs, {sum(len(run['left']) for run in runs)} processes left, "
        f"{sum(run['parts'] > 1 for run in runs)} resumed, {missed} strikes never due",
        f"{'strike':28}{'count':>6}   {'detected: median, p95, max':30}{'recovered: median, p95, max':30}",
    ]
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        # After a jump of the clock, the times of events say nothing about durations.
        jumped = any(struck["strike"]["kind"] == "clock_jump" for struck in run["strikes"])
        for struck in run["strikes"]:
            if struck["time"] is not None:
                known = {**struck, "detected": None, "recovered": None} if jumped else struck
                kinds[f"{struck['strike']['kind']} {struck['strike']['part']}"].append(known)
    for kind, struck in sorted(kinds.items()):
        figures = [_seconds([each[name] for each in struck]) for name in ("detected", "recovered")]
        lines.append(f"{kind:28}{len(struck):>6}   {figures[0]:30}{figures[1]:30}")
    return "\n".join(lines)


def _seconds(values: Sequence[float | None]) -> str:
    """Median, 95th percentile and maximum of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    p95 = quantiles(known, n=20, method="inclusive")[-1] if len(known) > 1 else known[0]
    return ", ".join(f"{value:.1f} s" for value in (median(known), p95, max(known)))


if __name__ == "__main__":
    sys.exit(main())

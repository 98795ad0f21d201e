"""`make sim`: play the scenarios at full size in two processes; print tables, write JSON and figures.

    python -m tests.sim.run [scenario ...] [--quick] [--processes 2] [--figures docs/explanation]

Without names it plays all of them, after the over-sampling experiment and the model of a cluster. The exit code is 1 if
a claim does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import isinf
from pathlib import Path

from benchmarks.records import record
from tests.sim.bias import experiment
from tests.sim.cluster import CHECKS, KNOBS, SCALES, SENSITIVITIES, disagreements, simulate
from tests.sim.cluster_model import Cluster, Costs, Prediction, predict, workers_needed
from tests.sim.figures import draw_bias, draw_rows, draw_scale
from tests.sim.scenario import SCENARIOS, Row, Scenario, broken, combine, jobs, play

BIAS, BIAS_SEEDS = "bias", 200
CLUSTER = "cluster"


def main() -> int:
    options = _options()
    failed: list[str] = []
    if BIAS in options.scenarios:
        _run_bias(options.figures)
    with ProcessPoolExecutor(options.processes) as pool:
        if CLUSTER in options.scenarios:
            failed += _run_cluster(pool, options.figures, quick=options.quick)
        for name in (name for name in options.scenarios if name not in (BIAS, CLUSTER)):
            scenario = Scenario.load(SCENARIOS / f"{name}.yaml", quick=options.quick)
            failed += _run(scenario, pool, options.figures)
    for sentence in failed:
        print(f"BROKEN  {sentence}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    names = [BIAS, CLUSTER, *sorted(path.stem for path in SCENARIOS.glob("*.yaml"))]
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description="Play scenarios in virtual time.")
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="the size the tests use")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--figures", type=Path, help="folder for plots; none are drawn without it")
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(names):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    options.scenarios = options.scenarios or names
    if options.quick:
        options.figures = None  # the plots in docs/explanation/ show the full size
    return options


def _run(scenario: Scenario, pool: ProcessPoolExecutor, figures: Path | None) -> list[str]:
    """Print and write one scenario; returns the claims that do not hold."""
    started = time.monotonic()
    todo = list(jobs(scenario))
    parts: defaultdict[str, list[Row]] = defaultdict(list)
    outcomes = pool.map(play, [settings for _, settings, _ in todo], [seed for _, _, seed in todo])
    for (name, _, _), row in zip(todo, outcomes, strict=True):
        parts[name].append(row)
    rows = {name: combine(several) for name, several in parts.items()}
    took = time.monotonic() - started
    print(f"\n{scenario.title}\n({scenario.name}, {scenario.seeds} seed(s), {took:.1f} s of real time)")
    table = {name: {column: asdict(row)[column] for column in scenario.columns} for name, row in rows.items()}
    if scenario.baseline is not None:
        unit = rows[scenario.baseline].batch_seconds
        table = {name: {"speed-up": unit / rows[name].batch_seconds, **columns} for name, columns in table.items()}
    print_table(table)
    failed = broken(scenario.claims, rows)
    record(
        f"sim-{scenario.name}",
        {"real_seconds": took, "rows": {name: asdict(row) for name, row in rows.items()}, "broken": failed},
    )
    if figures is not None:
        draw_rows(scenario.name, rows, figures)
    return failed


def _run_bias(figures: Path | None) -> None:
    rows = experiment(BIAS_SEEDS)
    greedy = rows[0]
    print(f"\nWhich prompts over-sampling keeps: 128 of 256, {BIAS_SEEDS} seeds\n({BIAS})")
    print_table(
        {
            f"ratio {row.ratio:g}": {
                "hard kept": row.hard,
                "population": row.population,
                "fill time": row.fill / greedy.fill,
                "with a long tail": row.fill_long_tail / greedy.fill_long_tail,
            }
            for row in rows
        }
    )
    print("fill times are multiples of the greedy ones")
    record(f"sim-{BIAS}", {"rows": [asdict(row) for row in rows]})
    if figures is not None:
        draw_bias(rows, figures)


def _run_cluster(pool: ProcessPoolExecutor, figures: Path | None, *, quick: bool) -> list[str]:
    """Print and write where runs of 8 to 4,096 GPUs saturate; returns where simulator and formulas disagree."""
    costs = Costs.measured()
    tables: dict[str, dict[str, dict[str, float | str]]] = {}
    for title, clusters in (("scales", SCALES), ("one change", SENSITIVITIES), ("one change after the other", KNOBS)):
        tables[title] = {name: _columns(cluster, costs, predict(cluster, costs)) for name, cluster in clusters.items()}
        print(f"\nWhere a run saturates: {title}\n({CLUSTER})")
        print_table(tables[title])
    names = list(CHECKS)[: 1 if quick else None]
    played = pool.map(simulate, [CHECKS[name] for name in names], [costs] * len(names))
    pairs = {name: (predict(CHECKS[name], costs), run) for name, run in zip(names, played, strict=True)}
    compared: dict[str, dict[str, float | str]] = {}
    for name, (prediction, run) in pairs.items():
        compared[f"{name}: model"] = {
            "groups/s": prediction.groups_per_second,
            "rollout worker": prediction.utilisation["rollout worker"],
            "learner waits": prediction.learner_waits,
            "staleness": prediction.staleness,
            "loop lag, s": "saturated" if isinf(prediction.loop_lag) else prediction.loop_lag,
        }
        values = (run.groups_per_second, run.rollout_worker, run.learner_waits, run.staleness, run.loop_lag)
        compared[f"{name}: simulated"] = dict(zip(compared[f"{name}: model"], values, strict=True))
    print(f"\nThe model beside the simulator\n({CLUSTER})")
    print_table(compared)
    failed = disagreements(pairs)
    if not quick:
        record(f"sim-{CLUSTER}", {"costs": asdict(costs), **tables, "model and simulator": compared, "broken": failed})
    if figures is not None:
        draw_scale(costs, figures)
    return failed


def _columns(cluster: Cluster, costs: Costs, prediction: Prediction) -> dict[str, float | str]:
    parts = {name: round(share, 4) for name, share in prediction.utilisation.items() if name != "training loop"}
    return {
        "first": prediction.first,
        "groups/s": prediction.groups_per_second,
        "tokens/s": prediction.tokens_per_second,
        "of GPUs": prediction.of_gpus,
        "learner waits": prediction.learner_waits,
        "staleness": prediction.staleness,
        "pause, s": prediction.pause,
        "workers": workers_needed(cluster, costs),
        **parts,
    }


def print_table(rows: Mapping[str, Mapping[str, float | str]]) -> None:
    columns: Sequence[str] = list(next(iter(rows.values())))
    width = max(len(name) for name in rows)
    print(" " * width, *(f"{column:>16}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<{width}}", *(f"{_figure(row[column]):>16}" for column in columns))


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"


if __name__ == "__main__":
    sys.exit(main())

"""The plots of the study's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.study.page import IN_TURNS, LIMITS, SHIPPED, VARIANTS, Runs, compares_limits, difference
from benchmarks.study.runs import Outcome

mpl.rcParams["svg.hashsalt"] = "miles_async"  # the same figures give the same file
COLORS = {"in turns": "#444444", "none": "#c0504d", "default": "#1f4e79", "recommended": "#2e8b57"}


def draw(runs: Runs, folder: Path) -> None:
    """Write the plots that the page shows; a plot without runs is left out."""
    if SHIPPED in runs:
        _save("staleness-curves", _draw_curves, runs, folder)
    if compares_limits(runs):
        _save("staleness-limits", _draw_limits, runs, folder)
    if any(name[0].startswith("limit") for name in runs):
        _save("staleness-signals", _draw_signals, runs, folder)


def _save(name: str, draw_axes: Callable[[Figure, Runs], None], runs: Runs, folder: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    draw_axes(figure, runs)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _draw_curves(figure: Figure, runs: Runs) -> None:
    samples, time = figure.subplots(1, 2, sharey=True)
    for name, label, color in ((IN_TURNS, "in turns", "in turns"), (SHIPPED, "limit 2", "default")):
        curves = np.array([run.curve for run in runs[name].values()])  # [seeds, evaluations, 3]
        accuracy = curves[:, :, 2]
        for axes, across in ((samples, curves[0, :, 0]), (time, curves[:, :, 1].mean(0))):
            axes.plot(across, accuracy.mean(0), color=COLORS[color], label=f"{label}, {len(curves)} seeds")
            axes.fill_between(across, accuracy.min(0), accuracy.max(0), color=COLORS[color], alpha=0.2, linewidth=0)
    samples.set(xlabel="trained groups", ylabel="held-out accuracy", title="mean, lowest and highest seed")
    time.set(xlabel="seconds since the first batch", title="the same over time")
    samples.legend(frameon=False)


def _draw_limits(figure: Figure, runs: Runs) -> None:
    axes = figure.subplots()
    for shift, variant in enumerate(VARIANTS):
        found = [
            (position, difference(runs, name))
            for position, limit in enumerate(LIMITS)
            if (name := (f"limit {limit}", variant)) in runs
        ]
        axes.errorbar(
            [position + 0.12 * (shift - 1) for position, _ in found],
            [interval.mean for _, interval in found],
            [interval.half if interval.half < float("inf") else 0.0 for _, interval in found],
            fmt="o",
            capsize=3,
            color=COLORS[variant],
            label=variant,
        )
    axes.axhline(0, color=COLORS["in turns"], linewidth=1)
    axes.set_xticks(range(len(LIMITS)), [str(limit) for limit in LIMITS])
    axes.set(xlabel="--max-weight-staleness", ylabel="accuracy minus in turns", title="same seeds, 95 % interval")
    axes.legend(frameon=False)


def _draw_signals(figure: Figure, runs: Runs) -> None:
    ess, gap, norm = figure.subplots(1, 3)
    for variant in VARIANTS:
        found = [
            run
            for name, seeds in runs.items()
            if name[0] != "in turns" and name[1] == variant
            for run in seeds.values()
        ]
        if not found:
            continue
        _by_age(ess, found, "ess", variant)
        _by_age(gap, found, "logprob_gap_mean", variant)
        points = [point for run in found for point in run.points if "grad_norm" in point]
        norm.plot(
            [point["staleness"] for point in points],
            [point["grad_norm"] for point in points],
            ".",
            markersize=3,
            color=COLORS[variant],
            label=variant,
        )
    ess.set(xlabel="age, versions", title="ESS")
    gap.set(xlabel="age, versions", title="mean log-probability gap")
    norm.set(xlabel="mean age of the batch", title="gradient norm", yscale="log")
    ess.legend(frameon=False)


def _by_age(axes: Axes, runs: Sequence[Outcome], metric: str, variant: str) -> None:
    ages = sorted({age for run in runs for age in run.by_age})
    values = [fmean(found[metric] for run in runs for key, found in run.by_age.items() if key == age) for age in ages]
    axes.plot(ages, values, "o-", markersize=3, color=COLORS[variant], label=variant)

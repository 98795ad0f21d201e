"""The plots in `docs/explanation/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.sim.bias import Bias
from tests.sim.scenario import Row

mpl.rcParams["svg.hashsalt"] = "miles_async"  # the same figures give the same file
INK, PALE = "#1f4e79", "#9dc3e6"


def draw_bias(rows: Sequence[Bias], folder: Path) -> None:
    """Plots the fraction of hard prompts that are kept, and its cost, by ratio."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    hard, price = figure.subplots(1, 2)
    names = [f"{row.ratio:g}" for row in rows]
    hard.bar(names, [row.hard for row in rows], color=INK)
    hard.axhline(rows[0].population, color="black", linestyle="--", linewidth=1, label="all prompts")
    hard.set(title="hard prompts in the kept batch", xlabel="windowed_fifo_ratio", ylabel="share")
    hard.legend(frameon=False)
    price.bar(names, [row.fill / rows[0].fill for row in rows], color=PALE)
    price.set(title="time to fill the batch", xlabel="windowed_fifo_ratio", ylabel="multiple of greedy")
    _save(figure, folder, "bias")


def draw_rows(name: str, rows: Mapping[str, Row], folder: Path) -> None:
    if name in ("one-stuck-group", "filtered"):
        _draw_stall(name, rows, folder)
    elif name == "ladder":
        _draw_ladder(rows, folder)


def _draw_stall(name: str, rows: Mapping[str, Row], folder: Path) -> None:
    """Trainer stall and greatest age, by policy."""
    figure = Figure(figsize=(8, 0.7 + 0.32 * len(rows)), layout="constrained")
    stall, age = figure.subplots(1, 2, sharey=True)
    names = list(rows)[::-1]
    stall.barh(names, [100 * rows[row].stall_share for row in names], color=INK)
    stall.set(xlabel="time the trainer waits, %")
    age.barh(names, [rows[row].age for row in names], color=PALE)
    age.set(xlabel="oldest group trained, versions")
    _save(figure, folder, name)


def _draw_ladder(rows: Mapping[str, Row], folder: Path) -> None:
    """Wall time of each rung beside the two totals that bound it from below."""
    figure = Figure(figsize=(8, 0.7 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = list(rows)[::-1]
    axes.barh(names, [rows[row].wall for row in names], color=INK, label="wall time")
    ideal = [max(rows[row].rollout, rows[row].training) for row in names]
    axes.plot(ideal, range(len(names)), "|", color="orange", markersize=18, label="max(total rollout, total training)")
    axes.set(xlabel="seconds")
    axes.legend(frameon=False, loc="lower right")
    _save(figure, folder, "ladder")


def _save(figure: Figure, folder: Path, name: str) -> None:
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})

"""The plots in `docs/explanation/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.sim.bias import Bias
from tests.sim.cluster_model import Cluster, Costs, predict
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


def draw_scale(costs: Costs, folder: Path) -> None:
    """Plots utilisation by the number of GPUs, and throughput with several rollout workers."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    parts, throughput = figure.subplots(1, 2)
    gpus = [8 * 2**i for i in range(10)]
    predictions = [predict(Cluster(gpus=count), costs) for count in gpus]
    for part in ("engines", "learner", "batch distribution", "rollout worker", "publishing", "driver"):
        parts.plot(gpus, [prediction.utilisation[part] for prediction in predictions], marker=".", label=part)
    parts.axhline(1, color="black", linestyle="--", linewidth=1)
    parts.set(title="utilisation, 4B", xlabel="GPUs", xscale="log", yscale="log", ylim=(1e-3, 1.5))
    parts.legend(frameon=False, fontsize="small")
    for workers in (1, 2, 8, 32):
        shares = [predict(Cluster(gpus=count, workers=workers), costs).of_gpus for count in gpus]
        throughput.plot(gpus, shares, marker=".", label=f"{workers} rollout worker{'s' * (workers > 1)}")
    throughput.set(title="throughput, as a share of what the GPUs could do", xlabel="GPUs", xscale="log", ylim=(0, 1))
    throughput.legend(frameon=False, fontsize="small")
    for axes in (parts, throughput):
        axes.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
        axes.minorticks_off()
    _save(figure, folder, "scale")


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

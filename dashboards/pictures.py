"""Draws each dashboard from a run: what a Prometheus answers to the queries of its panels while the run trains.

    python -m dashboards.pictures runs/latest [--folder docs/how-to/dashboards] [--port 9090]

Writes one PNG file per dashboard. With `--port`, a Prometheus that runs at this port and has scraped the run answers,
such as that of `make monitoring`. Otherwise the events of the run are replayed. They have no metrics of SGLang, of the
router and of disks, so these panels show no data.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, PercentFormatter

from dashboards.content import ALL
from dashboards.panels import COLUMNS, Dashboard, Kind, Panel, Row
from dashboards.prometheus import Prometheus, load_recorded
from dashboards.recorded import span
from miles_async.errors import UserError
from miles_async.events import ClusterReady
from miles_async.observability.trace.event_log import read_events

FOLDER = Path("docs/how-to/dashboards")
RATE_INTERVAL = "20s"
"""What Grafana inserts for `$__rate_interval`: four times the scrape interval in prometheus.yml."""
POINTS = 200
"""Points of a curve."""
MAX_LEGENDS = 9
"""Entries of a legend. Grafana scrolls through more."""
LONG_LEGEND = 18
"""Characters of a legend of which only two fit beside each other."""
PANEL_INCHES, TITLE_INCHES = 2.4, 0.35
DOTS_PER_INCH = 80
SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True)
class Series:
    legend: str
    times: list[float]
    """Minutes since the beginning of the curves."""
    values: list[float]


class Answers:
    """The answers of a Prometheus about one run."""

    def __init__(self, prometheus: Prometheus, run: str, began: float, ended: float) -> None:
        """The curves go from `began` to `ended`, which are Unix times in seconds."""
        self._prometheus = prometheus
        self._run = run
        self.began = began
        self.ended = ended

    def series(self, panel: Panel) -> list[Series]:
        """The curves of a panel; of a panel with a name, those that exist at the end of the run."""
        return [one for legend, query in panel.queries.items() for one in self._asked(legend, query)]

    def latest(self, panel: Panel) -> list[str]:
        """The legends of the series that exist at the end of the run."""
        return [
            _legend(legend, answer["metric"])
            for legend, query in panel.queries.items()
            for answer in self._prometheus.query(self._filled(query), self.ended)
        ]

    def _asked(self, legend: str, query: str) -> Iterator[Series]:
        step = max((self.ended - self.began) / POINTS, 1.0)
        for answer in self._prometheus.query_range(self._filled(query), self.began, self.ended, step):
            times = [(float(time) - self.began) / SECONDS_PER_MINUTE for time, _ in answer["values"]]
            yield Series(_legend(legend, answer["metric"]), times, [float(value) for _, value in answer["values"]])

    def _filled(self, query: str) -> str:
        return query.replace("$run", self._run).replace("$__rate_interval", RATE_INTERVAL)


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), template).strip() or "Value"


def draw(dashboard: Dashboard, answers: Answers) -> Figure:
    """Draw all panels of a dashboard, in the rows that Grafana shows."""
    lines = [line for row in dashboard.rows for line in _lines(row)]
    heights = [PANEL_INCHES + TITLE_INCHES * bool(title) for title, _ in lines]
    figure = Figure(figsize=(13, TITLE_INCHES + sum(heights)))
    figure.set_layout_engine("constrained", w_pad=0.12)
    figure.suptitle(f"miles_async / {dashboard.title}", x=0.005, ha="left", fontweight="bold")
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, panels) in zip(parts, lines, strict=True):
        if title:
            part.suptitle(title, x=0.005, ha="left", fontsize="large", fontweight="bold")
        grid, column = part.add_gridspec(1, COLUMNS), 0
        for panel in panels:
            axes = part.add_subplot(grid[0, column : column + panel.width])
            axes.set_title(panel.title, loc="left", fontsize="medium")
            _DRAWN[panel.kind](axes, panel, answers)
            column += panel.width
    return figure


def _lines(row: Row) -> Iterator[tuple[str, list[Panel]]]:
    """The panels of a row that fit beside each other, with the title of the row above its first ones."""
    title, line = row.title, list[Panel]()
    for panel in row.panels:
        if sum(one.width for one in line) + panel.width > COLUMNS:
            yield title, line
            title, line = "", []
        line.append(panel)
    yield title, line


def _draw_lines(axes: Axes, panel: Panel, answers: Answers) -> None:
    series = [one for one in answers.series(panel) if not all(map(math.isnan, one.values))]
    for one in series:
        axes.plot(one.times, one.values, label=one.legend, linewidth=1.2)
    _finish(axes, panel, answers, series)


def _draw_stack(axes: Axes, panel: Panel, answers: Answers) -> None:
    series = answers.series(panel)
    if series:
        times = sorted({time for one in series for time in one.times})
        known = [dict(zip(one.times, one.values, strict=True)) for one in series]
        heights = [[_height(values.get(time, 0.0)) for time in times] for values in known]
        axes.stackplot(times, heights, labels=[one.legend for one in series], alpha=0.7)
    _finish(axes, panel, answers, series)


def _height(value: float) -> float:
    """Zero for NaN, which is a ratio without data."""
    return 0.0 if math.isnan(value) else value


def _draw_heatmap(axes: Axes, panel: Panel, answers: Answers) -> None:
    """The legends are the upper limits of buckets, and each bucket counts all lower ones too."""
    series = sorted(answers.series(panel), key=lambda one: float(one.legend))
    if series:
        counts = [one.values for one in series]
        single = [counts[0], *(_differences(*pair) for pair in itertools.pairwise(counts))]
        axes.pcolormesh(series[0].times, range(len(series)), single, cmap="Blues", shading="nearest")
        axes.set_yticks(range(len(series)), [f"≤ {one.legend}" for one in series], fontsize="x-small")
    _finish(axes, panel, answers, [])
    if not series:
        _no_data(axes)


def _differences(lower: Sequence[float], higher: Sequence[float]) -> list[float]:
    return [high - low for low, high in zip(lower, higher, strict=True)]


def _draw_name(axes: Axes, panel: Panel, answers: Answers) -> None:
    axes.axis("off")
    text = "\n".join(answers.latest(panel)) or "No data"
    axes.text(0.5, 0.5, text, fontsize="xx-large", ha="center", va="center", transform=axes.transAxes)


_DRAWN: dict[Kind, Callable[[Axes, Panel, Answers], None]] = {
    "lines": _draw_lines,
    "stack": _draw_stack,
    "heatmap": _draw_heatmap,
    "name": _draw_name,
}


def _finish(axes: Axes, panel: Panel, answers: Answers, series: Sequence[Series]) -> None:
    """Set limits, units and the legend, which are the same for all panels with curves."""
    axes.set_xlim(0, (answers.ended - answers.began) / SECONDS_PER_MINUTE)
    axes.tick_params(labelsize="x-small")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.spines[["top", "right"]].set_visible(False)
    if panel.kind == "heatmap":
        return
    axes.yaxis.set_major_formatter(_formatter(panel.unit))
    axes.grid(axis="y", linewidth=0.4)
    if not series:
        _no_data(axes)
        return
    # As in Grafana, axes begin at 0.
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top if any(value > 0 for one in series for value in one.values) else 1)
    handles, legends = axes.get_legend_handles_labels()
    columns = 3 if max(map(len, legends)) < LONG_LEGEND else 2
    shown = legends[:MAX_LEGENDS]
    if len(legends) > MAX_LEGENDS:
        shown[-1] += f" … {len(legends) - MAX_LEGENDS} more"
    axes.legend(
        handles[:MAX_LEGENDS], shown, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=columns, fontsize="x-small",
        frameon=False, borderaxespad=0, handlelength=1, columnspacing=1,
    )  # fmt: skip


def _no_data(axes: Axes) -> None:
    axes.text(0.5, 0.5, "No data", ha="center", va="center", color="grey", transform=axes.transAxes)
    axes.set_yticks([])


def _formatter(unit: str) -> Formatter:
    """The numbers at an axis, for one of Grafana's units."""
    match unit:
        case "percentunit":
            return PercentFormatter(1.0, decimals=0)
        case "s":
            return FuncFormatter(lambda seconds, _: _duration(seconds))
        case "bytes":
            return EngFormatter("B", sep=" ")
        case "Bps":
            return EngFormatter("B/s", sep=" ")
        case _:
            return FuncFormatter(lambda value, _: f"{value:g}" if abs(value) < 1000 else EngFormatter(sep="")(value))


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if abs(seconds) < 600 else f"{seconds / SECONDS_PER_MINUTE:g} min"


def write(run: Path, folder: Path, *, port: int | None = None) -> list[Path]:
    """Write a picture of each dashboard into `folder`, and return the paths."""
    if port is not None:
        # The server is not started here, only asked.
        return _write(Answers(Prometheus(run.parent, port=port), run.resolve().name, *training_span(run)), folder)
    with tempfile.TemporaryDirectory() as storage:
        load_recorded(run, Path(storage))
        with Prometheus(run, storage=Path(storage)) as prometheus:
            return _write(Answers(prometheus, run.resolve().name, *training_span(run)), folder)


def training_span(run: Path) -> tuple[float, float]:
    """When all processes of a run were ready, and when it ended, as Unix times in seconds."""
    began, ended = span(run)
    ready = (event.time for event in read_events(run / "events.jsonl") if isinstance(event, ClusterReady))
    return next(ready, began), ended


def _write(answers: Answers, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for dashboard in ALL:
        path = folder / f"{dashboard.name}.png"
        figure = draw(dashboard, answers)
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None}, pil_kwargs={"optimize": True})
        written.append(path)
    return written


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/latest")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where pictures are written (default: {FOLDER})")
    parser.add_argument(
        "--port", type=int, help="port of a Prometheus that has scraped the run (default: replay events)"
    )
    arguments = parser.parse_args(argv)
    try:
        written = write(arguments.run, arguments.folder, port=arguments.port)
    except (OSError, UserError) as error:
        raise SystemExit(f"pictures: {arguments.run} cannot be drawn: {error}") from error
    for path in written:
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])

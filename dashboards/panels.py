"""Dashboards as rows, panels and PromQL expressions, from which grafana-foundation-sdk builds Grafana's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

COLUMNS = 24
HEIGHT = 8
SOURCE = DataSourceRef(type_val="prometheus", uid="$source")

Kind = Literal["lines", "stack", "name", "heatmap"]
P = TypeVar("P", timeseries.Panel, stat.Panel, heatmap.Panel)


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    """What the panel shows, and what to do about it. Grafana shows the description as a tooltip."""
    unit: str
    """Grafana's identifier of the unit."""
    queries: dict[str, str]
    """PromQL expressions by legend."""
    kind: Kind = "lines"
    width: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    name: str
    """Name of its JSON file, and part of its address in Grafana."""
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def build(self) -> grafana.Dashboard:
        """Return the dashboard for Grafana, with variables for the Prometheus data source and the runs."""
        built = (
            grafana.Dashboard(f"miles_async / {self.title}")
            .uid(f"miles-async-{self.name}")
            .description(self.description)
            .tags(["miles_async"])
            .refresh("5s")
            .time("now-15m", "now")
            .timezone("browser")
            .with_variable(grafana.DatasourceVariable("source").label("Prometheus").type("prometheus"))
            .with_variable(_run_variable())
            .link(
                grafana.DashboardLink("miles_async")
                .type("dashboards")
                .tags(["miles_async"])
                .keep_time(True)
                .include_vars(True)
            )
        )
        for row in self.rows:
            built = built.with_row(grafana.Row(row.title))
            for panel in row.panels:
                built = built.with_panel(_BUILDERS[panel.kind](panel))
        return built


def _run_variable() -> grafana.QueryVariable:
    return (
        grafana.QueryVariable("run")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(miles_async_run_info, run)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _queries(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number))
        for number, (legend, expr) in enumerate(panel.queries.items())
    ]


def _filled(built: P, panel: Panel, queries: Iterable[prometheus.Dataquery]) -> P:
    """Return the panel for Grafana with everything that all kinds of panels have."""
    built = (
        built.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(HEIGHT)
    )
    for query in queries:
        built = built.with_target(query)
    return built


def _line_panel(panel: Panel) -> timeseries.Panel:
    return (
        _filled(timeseries.Panel(), panel, _queries(panel))
        .min(0)
        .fill_opacity(10)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )


def _stacked_panel(panel: Panel) -> timeseries.Panel:
    return _line_panel(panel).stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60).line_width(0)


def _name_panel(panel: Panel) -> stat.Panel:
    """Show the legends of the existing series in large letters, instead of their values."""
    queries = (query.instant() for query in _queries(panel))
    return _filled(stat.Panel(), panel, queries).text_mode(BigValueTextMode.NAME)


def _heatmap_panel(panel: Panel) -> heatmap.Panel:
    queries = (query.format(PromQueryFormat.HEATMAP) for query in _queries(panel))
    return _filled(heatmap.Panel(), panel, queries)


_BUILDERS = {"lines": _line_panel, "stack": _stacked_panel, "name": _name_panel, "heatmap": _heatmap_panel}

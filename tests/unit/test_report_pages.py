"""The reference has every metric, alert, event, summary key and log line, each with a meaning, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client import CollectorRegistry

from miles_async.config.fields import SETTINGS
from miles_async.events import Event
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.summary import summarize
from miles_async.observability.view import RunView
from tests.unit.test_docs import hook

ROOT = Path(__file__).parents[2]
PAGES = ["metrics", "alerts", "events", "summary", "log_lines"]


@pytest.fixture(scope="module")
def reports() -> ModuleType:
    return hook("reference/reports.py")


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the tables of a page, without their headlines."""
    lines = re.findall(r"^\| (?=`|\[)(.*) \|$", page, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def names(page: str) -> list[str]:
    return [re.findall(r"\w+", row[0])[0] for row in rows(page)]


def test_the_metrics_page_has_every_metric_that_a_run_registers(reports: ModuleType) -> None:
    registry = CollectorRegistry()
    MetricsRecorder(registry, RunView())
    suffixes = {"counter": "_total", "info": "_info"}
    registered = [metric.name + suffixes.get(metric.type, "") for metric in registry.collect()]
    assert len(registered) > 80
    page, learner = reports.metrics_page().split("## Metrics of the learner")
    assert sorted(names(page)) == sorted(registered)
    assert names(learner) == list(reports.learner_metrics())


def test_every_metric_that_the_learner_computes_is_listed_where_it_is_computed(reports: ModuleType) -> None:
    for path, function in reports.LEARNER_METRICS:
        module = ast.parse((ROOT / "miles_async" / path).read_text())
        functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
        helpers = [functions[name] for name in ("_off_policy_metrics",) if name in functions]
        computed = {name for node in (functions[function], *helpers) for name in keys(node)}
        listed = dict(reports.ITEM.findall(ast.get_docstring(functions[function]) or ""))
        assert listed.keys() == computed, function


def keys(function: ast.FunctionDef) -> set[str]:
    """The keys of the dictionaries that a function makes; of an f-string, its text."""
    made = [key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys]
    written = [
        target.slice
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    ]
    constants = ([part for part in ast.walk(key) if isinstance(part, ast.Constant)] for key in (*made, *written) if key)
    return {"".join(str(part.value) for part in parts).strip("_") for parts in constants if parts}


def test_every_metric_has_a_unit(reports: ModuleType) -> None:
    units = {reports.unit(name, text) for name, _, _, text in reports.prometheus_metrics()}
    assert units == {
        "0 or 1", "Unix time in seconds", "batches", "bytes", "changes", "engines", "epochs", "evaluations", "failures",
        "fraction", "groups", "labels", "letters", "publishes", "requests", "restarts", "reward", "rewards",
        "rows or groups", "samples", "seconds", "see below", "sessions", "stalls", "steps", "tokens", "version",
        "versions",
    }  # fmt: skip


def test_every_metric_in_an_alert_exists_and_is_shown_with_it(reports: ModuleType) -> None:
    used = reports.alerts_by_metric()
    assert used.keys() <= {name for name, *_ in reports.prometheus_metrics()}
    assert used["miles_async_queue_depth_groups"] == ["QueueEmpty", "QueueFull"]
    rules = yaml.safe_load((ROOT / "dashboards/rules/alerts.yml").read_text())["groups"][0]["rules"]
    unused = {rule["alert"] for rule in rules} - {alert for alerts in used.values() for alert in alerts}
    assert unused == {"RunUnreachable"}  # Prometheus itself knows that


def test_the_alerts_page_has_every_alert(reports: ModuleType) -> None:
    rules = (ROOT / "dashboards" / "rules" / "alerts.yml").read_text()
    assert names(reports.alerts_page()) == re.findall(r"- alert: (\w+)", rules)


def test_the_events_page_has_every_event_with_its_fields(reports: ModuleType) -> None:
    declared = {
        event.__name__: [name for name in event.__struct_fields__ if name != "time"] for event in Event.__subclasses__()
    }
    page = rows(reports.events_page())
    fields = {row[0]: re.findall(r"<br>Fields: ([^<]*)", row[1]) for row in page}
    shown = {re.findall(r"\w+", name)[0]: re.findall(r"\w+", "".join(texts)) for name, texts in fields.items()}
    assert shown == declared


def test_the_summary_page_has_every_key_of_the_summary(reports: ModuleType) -> None:
    assert sorted(names(reports.summary_page())) == sorted(summarize(RunView()))


def test_the_page_of_log_lines_has_every_text_that_a_logger_gets(reports: ModuleType) -> None:
    logged = r"""\b_?(?:log|details)\.(?:info|warning|error|exception)\(\s*f?"([^"{]+)"""
    sources = [path.read_text() for package in ("miles_async", "workers") for path in (ROOT / package).rglob("*.py")]
    begin = {text for source in sources for text in re.findall(logged, source)}
    assert len(begin) > 60
    lines = [line.text for line in reports.log_lines()]
    assert [text for text in begin if not any(line.startswith(text) for line in lines)] == []
    assert len(rows(reports.log_lines_page())) >= len(lines) - sum(line.startswith("<") for line in lines)


def test_a_log_line_about_an_event_names_it(reports: ModuleType) -> None:
    by_text = {line.text: line.event for line in reports.log_lines()}
    assert by_text["weight write failed"] == "WriteFailed"
    assert by_text["the run was drained"] == "RunDrained"
    assert by_text["engine was removed"] is None


def test_values_of_a_log_line_are_shown_by_their_names(reports: ModuleType) -> None:
    call = ast.parse(
        "log.warning(f'{event.engine} waits {now - then:.0f} s' if late else f'{len(self)}', step=1, **facts)"
    )
    [first, second] = reports._lines(call, "m", set(), None)
    assert (first.text, second.text) == ("<engine> waits <then> s", "<number>")
    assert first.facts == ("step", "…")


@pytest.mark.parametrize("name", PAGES)
def test_every_entry_has_a_meaning(reports: ModuleType, name: str) -> None:
    page = rows(getattr(reports, f"{name}_page")())
    column = {"metrics": 1, "alerts": 2, "events": 1, "summary": 1, "log_lines": 1}[name]
    assert page
    assert [row[0] for row in page if not row[column]] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_that_is_advised_exists(reports: ModuleType, name: str) -> None:
    known = {flag for setting in SETTINGS.values() for flag in (setting.flag, f"--no-{setting.flag[2:]}")}
    advised = set(re.findall(r"--[a-z][a-z0-9-]+[a-z0-9]", getattr(reports, f"{name}_page")()))
    assert advised
    assert advised - known == set()


@pytest.mark.parametrize("text, expected", [
    ("A number. Worry if it\n    rises: stop.", ("A number.", "If it rises: stop.")),
    ("A number.", ("A number.", "")),
])  # fmt: skip
def test_a_text_is_divided_into_its_meaning_and_the_advice(
    reports: ModuleType, text: str, expected: tuple[str, str]
) -> None:
    assert reports.meaning_and_worry(text) == expected

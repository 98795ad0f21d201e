"""The reference pages of what a run reports, generated from the declarations while MkDocs builds the site.

`reference/metrics.md` lists every metric of Prometheus and of the learner, `reference/alerts.md` every alert,
`reference/events.md` every event, `reference/summary.md` every key of `summary.json`, and `reference/log-lines.md`
every log line. The texts are those of the declarations. A sentence there that begins with `Worry` says when the value
is a sign of a problem, and what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client import CollectorRegistry

from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.metrics.view_metrics import view_metrics
from miles_async.observability.view import RunView

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards" / "rules"
LEARNER_METRICS = (
    ("losses/policy.py", "policy_metrics"),
    ("adapters/megatron/training/optimizer.py", "complete_gradients"),
    ("adapters/megatron/training/learner.py", "_packing_metrics"),
    ("adapters/megatron/training/inference.py", "head_loss"),
    ("adapters/megatron/training/performance.py", "performance_metrics"),
    ("adapters/ray/learner.py", "_merged"),
    ("losses/critic.py", "critic_metrics"),
    ("losses/mismatch.py", "mismatch"),
)
"""The functions that compute metrics of the learner. Their docstrings list the metrics."""
PREFIXES = {"mismatch": "mismatch_"}
"""What is put before the names that a function lists."""
UNITS = {
    "timestamp_seconds": "Unix time in seconds",
    "weight_version": "version",
    "ratio": "fraction",
    "up": "0 or 1",
    "metric": "see below",
    "info": "labels",
    "data": "rows or groups",
}
WIDE = "---\nhide: [toc]\n---\n\n"
"""Gives a page the place of its table of contents."""
LEVELS = ("info", "warning", "error", "exception")
ITEM = re.compile(r"^- `(\w+)`: (.+?)(?=^- |^\S|\Z)", re.MULTILINE | re.DOTALL)


class LogLine(NamedTuple):
    """A log line that the code writes."""

    level: str
    text: str
    """Values in it are shown as `<expression>`."""
    facts: tuple[str, ...]
    event: str | None
    """The event that the line reports; None if no event does."""
    module: str


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """MkDocs calls this function once it has collected the pages."""
    pages = {
        "metrics": metrics_page,
        "alerts": alerts_page,
        "events": events_page,
        "summary": summary_page,
        "log-lines": log_lines_page,
    }
    for name, page in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=f"{WIDE}{page()}"))
    return files


def metrics_page() -> str:
    """Every metric of Prometheus with its unit, meaning and alerts, and every metric of the learner."""
    lines = [
        "# Metrics",
        "",
        "The driver serves these metrics under `/metrics` ([Prometheus](../how-to/monitor.md#prometheus)). A name is",
        "shown with its labels. A histogram has the series `_bucket`, `_sum` and `_count`. The last column links the",
        "alerts that depend on the metric. If it is empty, the metric explains others, and no value of it is a sign of",
        "a problem by itself.",
        "",
        "| metric, kind, unit | meaning | when to worry, and what to do |",
        "|---|---|---|",
    ]
    alerts = alerts_by_metric()
    for name, kind, labels, text in prometheus_metrics():
        meaning, worry = meaning_and_worry(text)
        links = ", ".join(f"[{alert}](alerts.md)" for alert in alerts.get(name, ()))
        shown = f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"
        first = f"{shown}<br>{kind}, {unit(name, text)}"
        lines.append(_row(first, escaped(meaning), "; ".join(filter(None, (links, escaped(worry))))))
    lines += [
        "",
        "## Metrics of the learner",
        "",
        "Each trained batch reports these numbers: in the log line `step`, as `miles_async_step_metric{name}`, as",
        "curves of the live page, and as `train/NAME` in TensorBoard and Weights & Biases. Means over the optimizer",
        "steps of the batch; a name that ends in `_max` is the maximum. With a critic, its gradient norm and learning",
        "rate begin with `critic_`. A custom loss adds [its own](../how-to/write-a-loss.md).",
        "",
        "| metric | meaning | when to worry, and what to do |",
        "|---|---|---|",
    ]
    for name, text in learner_metrics().items():
        lines.append(_row(f"`{name}`", *map(escaped, meaning_and_worry(text))))
    return "\n".join(lines) + "\n"


def alerts_page() -> str:
    """Every alert with its condition and what to do, from the rules of Prometheus."""
    lines = [
        "# Alerts",
        "",
        "`dashboards/rules/alerts.yml` has the expressions ([Prometheus](../how-to/monitor.md#prometheus)).",
        "[Metrics](metrics.md) says what the metrics in them mean.",
        "",
        "| alert | severity | when | what to do |",
        "|---|---|---|---|",
    ]
    for rule in _rules("alerts"):
        when, advice = (escaped(rule["annotations"][name]) for name in ("description", "runbook"))
        lines.append(_row(f"`{rule['alert']}`", rule["labels"]["severity"], when, advice))
    return "\n".join(lines) + "\n"


def events_page() -> str:
    """Every event with its meaning, its fields and its log lines."""
    lines = [
        "# Events",
        "",
        "Each line of `events.jsonl` is one of these events, with its name as `type`. Every other output of a run is",
        "computed from them. The link of an event leads to the meaning and type of its fields. Fields with their",
        "default value are left out, and durations are in seconds.",
        "",
        "| event | meaning, fields and log lines | when to worry, and what to do |",
        "|---|---|---|",
    ]
    written = log_lines()
    for event in _classes("miles_async/events.py", "Event"):
        meaning, worry = meaning_and_worry(ast.get_docstring(event) or "")
        parts = {
            "Fields": [f"`{name}`" for name in _fields(event)],
            "Log lines": [f"`{line.text}`" for line in written if line.event == event.name],
        }
        further = "".join(f"<br>{title}: {', '.join(texts)}" for title, texts in parts.items() if texts)
        lines.append(_row(_link(event.name), escaped(meaning) + further, escaped(worry)))
    return "\n".join(lines) + "\n"


def summary_page() -> str:
    """Every key of `summary.json` with its meaning."""
    lines = [
        "# Summary",
        "",
        "A run writes `summary.json` when it ends, and prints the most important values. A value is `null` if the run",
        "did not come so far. Durations are in seconds unless the name says otherwise.",
        "",
        "| key | meaning | when to worry, and what to do |",
        "|---|---|---|",
    ]
    for group in _classes("miles_async/observability/summary.py", "TypedDict", "TrainingPhase"):
        lines += [_row(f"`{name}`", *map(escaped, meaning_and_worry(text))) for name, text in _fields(group).items()]
    return "\n".join(lines) + "\n"


def log_lines_page() -> str:
    """Every log line with its level, its facts and the module that writes it."""
    lines = [
        "# Log lines",
        "",
        "`logs/*.jsonl` has these lines as JSON: `event` is the text, and each fact is a key. The terminal shows a",
        "warning as `Warning: TEXT: …`. Words in angle brackets stand for values, and `…` for the values of the event",
        "that the line reports. Lines of level `info` need no action. A warning says what the run does about a",
        "problem: read its facts if it repeats. A line that reports an event has the meaning, and the advice, of",
        "[that event](events.md). Lines of level `stdout` are plain text. Lines that only repeat the sentence of an",
        "error are left out.",
        "",
        "| level | line and facts | reports | written by |",
        "|---|---|---|---|",
    ]
    for line in log_lines():
        facts = "<br>" + ", ".join(f"`{fact}`" for fact in line.facts) if line.facts else ""
        event = _link(line.event) if line.event else ""
        lines.append(_row(f"`{line.level}`", f"`{line.text}`{facts}", event, f"`{line.module}`"))
    return "\n".join(lines) + "\n"


def prometheus_metrics() -> Iterator[tuple[str, str, Sequence[str], str]]:
    """Name, kind, labels and text of every metric, by name."""
    view = RunView()
    of_events = MetricsRecorder(CollectorRegistry(), view).metrics.values()
    families = [(family, metric._labelnames) for metric in of_events for family in metric.describe()]
    families += [(family, family._labelnames) for family in view_metrics(view, 0.0)]
    for family, labels in sorted(families, key=lambda each: each[0].name):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield f"{family.name}{suffix}", family.type, labels, family.documentation


def alerts_by_metric() -> dict[str, list[str]]:
    """The names of the alerts that depend on each metric, also through a recording rule."""
    recorded = {rule["record"]: rule["expr"] for rule in _rules("recording")}
    found: dict[str, list[str]] = {}
    for rule in _rules("alerts"):
        text = rule["expr"] + " ".join(expr for name, expr in recorded.items() if name in rule["expr"])
        used = (re.sub("_(?:sum|count|bucket)$", "", name) for name in re.findall(r"miles_async_\w+", text))
        for name in dict.fromkeys(used):
            found.setdefault(name, []).append(rule["alert"])
    return found


def unit(name: str, text: str) -> str:
    """The unit of a metric, with which its name ends."""
    if text.startswith("1 "):
        return "0 or 1"
    name = name.removesuffix("_total")
    return next((value for suffix, value in UNITS.items() if name.endswith(f"_{suffix}")), name.rpartition("_")[2])


def learner_metrics() -> dict[str, str]:
    """The text of every metric of the learner, from the lists in the docstrings of `LEARNER_METRICS`."""
    found: dict[str, str] = {}
    for path, function in LEARNER_METRICS:
        [node] = [node for node in ast.walk(_tree(f"miles_async/{path}")) if _is_function(node, function)]
        assert isinstance(node, ast.FunctionDef)
        listed = ITEM.findall(ast.get_docstring(node) or "")
        found |= {PREFIXES.get(function, "") + name: text for name, text in listed}
    return found


def log_lines() -> list[LogLine]:
    """Every log line of the packages `miles_async` and `workers`, and the plain lines of stdout."""
    events = {event.name for event in _classes("miles_async/events.py", "Event")}
    paths = sorted(path for package in ("miles_async", "workers") for path in (ROOT / package).rglob("*.py"))
    found = (line for path in paths for line in _lines(_tree(path), str(path.relative_to(ROOT)), events, None))
    return list(dict.fromkeys(found))


def _lines(node: ast.AST, module: str, events: set[str], event: str | None) -> Iterator[LogLine]:
    """The log lines in a part of a module that handles `event`, if it handles one."""
    match node:
        case ast.match_case(pattern=ast.MatchClass(cls=ast.Name(id=name))) if name in events:
            event = name
        case ast.FunctionDef(args=ast.arguments(args=arguments)):
            named = [ast.unparse(one.annotation) for one in arguments if one.annotation is not None]
            event = next((name for name in named if name in events), event)
        case ast.Call(func=ast.Attribute(value=logger, attr=level), args=[text, *_]) if level in LEVELS and ast.unparse(
            logger
        ).rpartition(".")[2].lstrip("_") in ("log", "details"):
            facts = tuple(keyword.arg or "…" for keyword in node.keywords)
            yield from (LogLine(level, shown, facts, event, module) for shown in _texts(text))
        case ast.Call(func=ast.Attribute(value=caller, attr="warn" | "_warn"), args=[text]) if (
            ast.unparse(caller) != "warnings"
        ):
            yield from (LogLine("warning", shown, (), "WarningRaised", module) for shown in _texts(text))
        case ast.Call(func=ast.Attribute(attr="_print"), args=[text]) if module.endswith("program_lines.py"):
            yield from (LogLine("stdout", shown, (), event, module) for shown in _texts(text))
    for child in ast.iter_child_nodes(node):
        yield from _lines(child, module, events, event)


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can have. A variable has none: it holds the sentence of an error."""
    match node:
        case ast.IfExp():
            yield from _texts(node.body)
            yield from _texts(node.orelse)
        case ast.Constant():
            yield str(node.value)
        case ast.JoinedStr():
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"<{_shown(part)}>" for part in node.values
            )
        case _:
            pass


def _shown(node: ast.expr) -> str:
    """The last name in an expression, such as `engine` for `event.engine`, and `number` for `len(self)`."""
    names = re.findall(r"[A-Za-z]\w*", ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node))
    return next((name.lower() for name in reversed(names) if name not in ("len", "self")), "number")


def meaning_and_worry(text: str) -> tuple[str, str]:
    """The meaning in a text, and when to worry and what to do, each on one line."""
    meaning, _, worry = " ".join(cleandoc(text).split()).partition("Worry ")
    return meaning.strip(), worry[:1].upper() + worry[1:]


def escaped(text: str) -> str:
    """`text` for a Markdown table, where `|` ends a cell and `<` starts a tag. Code between backticks stays code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _link(event: str) -> str:
    return f"[{event}](python/events.md#miles_async.events.{event})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rules(name: str) -> list[dict[str, dict[str, str]]]:
    rules: list[dict[str, dict[str, str]]] = yaml.safe_load((RULES / f"{name}.yml").read_text())["groups"][0]["rules"]
    return rules


def _tree(path: str | Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _classes(path: str, *bases: str) -> Iterator[ast.ClassDef]:
    """The classes of a module whose first base class is one of `bases`."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.bases and ast.unparse(node.bases[0]) in bases:
            yield node


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """The fields of a class with their docstrings."""
    fields: dict[str, str] = {}
    name = ""
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                fields[name] = ""
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                fields[name] = text
    return fields

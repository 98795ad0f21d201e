"""`make report`: one HTML file that shows a whole run, or two of them over each other, and needs nothing but itself.

    python -m miles_async.observability.page.report runs/latest [--with OTHER_RUN] [--output FILE]

Events are read one after the other and folded into a fixed number of buckets, so that a day's report takes no more room
than a minute's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.config.yaml_text import parse_yaml
from miles_async.errors import UserError
from miles_async.events import Event
from miles_async.observability.diagnosis.verdict import KNOBS
from miles_async.observability.page.document import document
from miles_async.observability.page.view import View
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.summary import RunSummary
from miles_async.observability.trace.event_log import read_events


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run's files tell."""

    name: str
    config: dict[str, Any]
    """Every setting by its dotted name."""
    view: View
    summary: RunSummary
    until: float
    """Time of the last event."""

    @staticmethod
    def read(folder: RunFolder) -> RunData:
        """Raises UserError for a folder that holds no run, or events that cannot be read."""
        try:
            config = flat(parse_yaml((folder.path / "config.yaml").read_text()))
            events = read_events(folder.events)
            return RunData.of(folder.path.resolve().name, config, events)
        except OSError as error:
            raise UserError(f"{folder.path} is no run folder ({error.strerror}: {error.filename})") from error

    @staticmethod
    def of(name: str, config: dict[str, Any], events: Iterator[Event]) -> RunData:
        view = View(recent=False)
        summary = RunSummary()
        until = 0.0
        for event in events:
            view.observe(event)
            summary.observe(event)
            until = max(until, event.time)
        if not until:
            raise UserError(f"run {name} has told nothing yet: its events.jsonl is empty")
        return RunData(name, config, view, summary, until)

    def values(self) -> dict[str, Any]:
        """For the report's scripts."""
        return {
            "name": self.name,
            "config": self.config,
            "state": self.view.state("whole", self.until),
            "summary": self.summary.figures(),
            "phases": self.view.phases(self.until),
        }


def report(runs: Sequence[RunData]) -> bytes:
    """The HTML of the first run, with the second drawn over it where there is one."""
    return document("report.html", {"runs": [run.values() for run in runs], "knobs": KNOBS})


def write_report(folder: RunFolder, beside: RunFolder | None, output: Path | None) -> Path:
    """Write it into the run's own folder, or to `output`. Raises UserError with what cannot be read or written."""
    runs = [RunData.read(each) for each in (folder, beside) if each is not None]
    path = output or (folder.report if beside is None else folder.path / f"report-with-{runs[1].name}.html")
    write(runs, path)
    return path


def write(runs: Sequence[RunData], path: Path) -> None:
    """A reader finds the whole report or none. Raises UserError where it cannot be written."""
    partial = path.with_name(f".{path.name}")
    try:
        partial.write_bytes(report(runs))
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file with --output") from error


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="report", description="One HTML file about a run, or about two.")
    parser.add_argument("run", type=Path, help="run folder, such as runs/latest")
    parser.add_argument("--with", dest="beside", type=Path, help="another run folder, to compare with")
    parser.add_argument("--output", type=Path, help="file to write instead of report.html in the run folder")
    given = parser.parse_args(argv)
    try:
        beside = RunFolder(given.beside) if given.beside is not None else None
        print(write_report(RunFolder(given.run), beside, given.output))
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """The settings of nested sections by their dotted names; lists and empty mappings are values."""
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    settings: dict[str, Any] = {}
    for name, value in section.items():
        settings |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

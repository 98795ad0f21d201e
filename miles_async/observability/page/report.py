"""`make report`: one self-contained HTML file about a run, or about two runs drawn over each other.

    python -m miles_async.observability.page.report runs/latest [--with OTHER_RUN] [--output FILE]

Events are read one by one and summed up in a fixed number of buckets, so that the report of a day is no larger than the
report of a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.atomic_files import write_atomically
from miles_async.config.yaml_text import parse_yaml
from miles_async.errors import UserError
from miles_async.events import Event
from miles_async.observability.diagnosis.verdict import KNOBS
from miles_async.observability.output import protect_output
from miles_async.observability.page.document import document, page_state
from miles_async.observability.page.earlier import comparison, earlier_runs
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.snapshot import nothing_known, read_snapshot
from miles_async.observability.summary import summarize
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import RunView


@dataclass(frozen=True, slots=True)
class RunData:
    """What the report shows of a run."""

    folder: Path
    config: dict[str, Any]
    """All settings by their dotted names."""
    view: RunView

    @staticmethod
    def read(folder: RunFolder) -> RunData:
        """Read a run folder. Raises UserError if the folder holds no run or its events cannot be read."""
        try:
            config = flatten(parse_yaml((folder.path / "config.yaml").read_text()))
            known = read_snapshot(folder.snapshot) or nothing_known()
            later = read_events(folder.events, after=known.parts)
            return RunData.from_events(folder.path.resolve(), config, later, known.view)
        except OSError as error:
            raise UserError(
                f"{folder.path} is not a run folder ({error.strerror}: {error.filename}): "
                "name a folder such as runs/latest"
            ) from error

    @staticmethod
    def from_events(
        folder: Path, config: dict[str, Any], events: Iterator[Event], view: RunView | None = None
    ) -> RunData:
        """`view` has applied the earlier events. Raises UserError if there are no events."""
        view = view or RunView(recent=False)
        for event in events:
            view.apply(event)
        if not view.time:
            raise UserError(f"the events.jsonl of run {folder.name} is empty: wait until the run has started")
        return RunData(folder, config, view)

    def values(self) -> dict[str, Any]:
        """Return the data for the scripts of the report."""
        view = self.view
        earlier = comparison(earlier_runs(view.run, self.folder))
        with view.lock:
            return {
                "name": self.folder.name,
                "config": self.config,
                "state": page_state(view, "whole", view.time),
                "summary": summarize(view),
                "phases": view.charts.verdicts(view.until(view.time)),
                "samples": view.samples.newest(),
                "earlier": earlier,
            }


def report(runs: Sequence[RunData]) -> bytes:
    """Return the HTML of the report on the first run, with the second run, if there is one, drawn over it."""
    return document("report.html", {"runs": [run.values() for run in runs], "knobs": KNOBS})


def write_report(folder: RunFolder, other: RunFolder | None, output: Path | None) -> Path:
    """Write the report to `output`, or into the folder of the first run, and return its path.

    Raises UserError if a run cannot be read or the report cannot be written.
    """
    runs = [RunData.read(each) for each in (folder, other) if each is not None]
    path = output or (folder.report if other is None else folder.path / f"report-with-{runs[1].folder.name}.html")
    try:
        write_atomically(path, report(runs))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file with --output") from error
    return path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="report", description="Write an HTML report on one run, or on two runs.")
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/latest")
    parser.add_argument("--with", dest="other", type=Path, help="folder of a second run to compare with the first")
    parser.add_argument("--output", type=Path, help="file to write (default: report.html in the folder of the run)")
    protect_output()
    arguments = parser.parse_args(argv)
    try:
        other = RunFolder(arguments.other) if arguments.other is not None else None
        print(write_report(RunFolder(arguments.run), other, arguments.output))
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of nested sections by their dotted names. Lists and empty mappings count as values."""
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    settings: dict[str, Any] = {}
    for name, value in section.items():
        settings |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

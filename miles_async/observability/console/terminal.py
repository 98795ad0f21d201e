"""What people see of a run on stderr: a header, the start-up, one short line per batch, and a progress bar.

The metrics that are left out here are in the event log and in `logs/driver.jsonl`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from miles_async import events
from miles_async.config.redaction import redact_text
from miles_async.config.schema import RunConfig
from miles_async.observability.console.batch_table import BatchTable
from miles_async.observability.console.lines import Bar, write_line
from miles_async.observability.console.logging import fit_to_terminal
from miles_async.observability.console.quantities import duration
from miles_async.observability.diagnosis.verdict import SILENT_SECONDS, Finding
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView

NAME_WIDTH = 11
"""Characters of the column of names in the header, as in the summary at the end."""
LASTING_SECONDS = 30.0
"""A verdict is printed when it has lasted this long."""
PHASES = {"batch": "waiting for the first batch", "evaluate": "evaluating", "publish": "publishing the weights"}
"""What the run does before the first optimizer step, by the phase of the trainer."""


def is_interactive(config: RunConfig) -> bool:
    """Return whether people read all output of the run: both streams are terminals, and the format is for people."""
    return config.observability.log_format == "console" and sys.stdout.isatty() and sys.stderr.isatty()


class Terminal:
    """Prints a run in lines for people. On a terminal, a status line shows what the start-up waits for.

    Without a terminal, the lines are the same, and contain no control characters.
    """

    def __init__(self, view: RunView, stream: TextIO, config: RunConfig, folder: RunFolder, page_url: str) -> None:
        self._view = view
        self._stream = stream
        self._config = config
        self._folder = folder
        self._page_url = page_url
        self._status = StatusLine(stream, enabled=config.observability.progress_bar)
        self._starting: list[str] = []
        """Parts that are being started."""
        self._table: BatchTable
        self._lasting: events.VerdictChanged | None = None
        """The current verdict, if it was not printed before."""
        self._printed_verdicts: set[str] = set()
        self._finding: Finding | None = None
        """The verdict at the last tick."""
        self._stalled_for = 0.0
        """Seconds without progress that the last warning reported."""
        self._silent: set[str] = set()
        """Processes whose silence was printed."""

    def observe(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._table = BatchTable(event, self._view)
                self._print_header(event)
            case events.StartupChanged():
                self._startup_changed(event)
            case events.ClusterReady():
                self._status.show(PHASES["batch"])
            case events.TrainerPhaseChanged() if event.to in PHASES:
                self._status.show(PHASES[event.to])
            case events.StepStarted():
                self._status.close()
            case events.StepEnded():
                self._print(self._table.row(event))
            case events.Evaluated():
                when = "before training" if event.rollout < 0 else f"after batch {event.rollout + 1}"
                without = f", {event.missing} more without a score," if event.missing else ""
                low, high = event.interval
                details = f"{event.problems} samples of {event.name}{without} in {duration(event.seconds)}"
                text = f"{event.accuracy:.3f} {when} (95 %: {low:.3f} to {high:.3f}; {details})"
                self._print_entry("accuracy", text)
            case events.VerdictChanged():
                self._lasting = None if event.verdict in self._printed_verdicts else event
            case events.Stalled():
                self._explain_stall(event)
            case events.ProcessSilent():
                self._process_silent(event)
            case events.RunEnded():
                self.close()

    def tick(self, now: float, finding: Finding) -> None:
        """Update the status line, and print the verdict once it has lasted. `now` is in seconds since the epoch."""
        self._finding = finding
        self._status.tick(now - self._view.run.time if self._view.run is not None else 0.0)
        verdict = self._lasting
        if verdict is None or now - verdict.time < LASTING_SECONDS or finding.silent is not None:
            return
        if finding.verdict == verdict.verdict:
            self._lasting = None
            self._printed_verdicts.add(finding.verdict)
            self._print_entry("verdict", f"{finding.verdict}: {finding.why}; {self._view.advise(finding)}")

    def close(self) -> None:
        self._status.close()

    def _print_header(self, event: events.RunStarted) -> None:
        data = self._config.data
        task, file = data.reasoning_gym_task, data.prompt_data or ", ".join(data.datasets)
        limit = "no staleness limit" if event.staleness_limit is None else f"staleness at most {event.staleness_limit}"
        self._print_entry("model", event.model)
        self._print_entry("data", f"reasoning-gym {task}" if task else file or "from the rollout function")
        batch = f"{event.groups_per_rollout} groups of {event.samples_per_group}"
        self._print_entry("training", f"{event.rollouts} batches of {batch}, {event.entry}, {limit}")
        self._print_entry("run", _shortened(self._folder.path))
        self._print_entry("page", f"{self._page_url} (metrics at /metrics)")

    def _startup_changed(self, event: events.StartupChanged) -> None:
        if event.seconds is None:
            self._starting.append(event.part)
            if not self._status.enabled:
                self._print_entry(event.part, "starting")
        else:
            self._starting.remove(event.part)
            self._print_entry(event.part, f"ready after {duration(event.seconds)}")
        self._status.show(f"waiting for {', '.join(self._starting)}" if self._starting else "starting")

    def _explain_stall(self, event: events.Stalled) -> None:
        """Print the cause below the first warning of a stall. The warning itself is one of the `PlainLines`."""
        is_new, self._stalled_for = event.seconds <= self._stalled_for or not self._stalled_for, event.seconds
        if is_new and self._finding is not None:
            log = _shortened(self._folder.driver_log)
            self._print_entry("cause", f"{self._finding.why}; see the line `stall` in {log}")

    def _process_silent(self, event: events.ProcessSilent) -> None:
        if event.seconds >= SILENT_SECONDS and event.process not in self._silent:
            self._silent.add(event.process)
            self._print(f"Warning: {event.process} has not answered for {event.seconds:.0f}s")
        elif not event.seconds and event.process in self._silent:
            self._silent.remove(event.process)
            self._print(f"{event.process} answers again")

    def _print_entry(self, name: str, text: str) -> None:
        """Print a text with its name in front."""
        line = f"{name:<{NAME_WIDTH - 1}} {redact_text(text)}"
        self._print(fit_to_terminal(line, self._stream, indent=NAME_WIDTH))

    def _print(self, text: str) -> None:
        write_line(text, self._stream)


class StatusLine:
    """The last line of a terminal, which is updated in place until it is closed. Without a terminal it does nothing."""

    def __init__(self, stream: TextIO, *, enabled: bool) -> None:
        self.enabled = enabled and stream.isatty()
        """Whether the line is shown; False once it is closed."""
        self._stream = stream
        self._text = ""
        self._seconds = 0
        self._shown = ""
        self._line: Bar | None = None

    def show(self, text: str) -> None:
        self._text = text
        self._draw()

    def tick(self, seconds: float) -> None:
        """Update the seconds since the start of the run."""
        self._seconds = int(seconds)
        self._draw()

    def close(self) -> None:
        self.enabled = False
        if self._line is not None:
            self._line.close()
            self._line = None

    def _draw(self) -> None:
        text = f"{self._text} ({self._seconds} s)" if self._seconds > 0 else self._text
        if not self.enabled or not self._text or text == self._shown:
            return
        self._shown = text
        if self._line is None:
            self._line = Bar(bar_format="{desc}", file=self._stream, dynamic_ncols=True, leave=False)
        self._line.set_description_str(text)


class ProgressBar:
    """Shows the trained batches, the remaining time and the queue depth, from the first optimizer step on.

    Writes nothing if the stream is not a terminal or the bar is disabled.
    """

    FORMAT = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} batches, {elapsed} elapsed, {remaining} left{postfix}"

    def __init__(self, stream: TextIO, *, enabled: bool) -> None:
        self._stream = stream
        self._enabled = enabled and stream.isatty()
        self._batches = 0
        self._queue = ""
        self._bar: Bar | None = None

    def observe(self, event: events.Event) -> None:
        if not self._enabled:
            return
        match event:
            case events.RunStarted():
                self._batches = event.rollouts
            case events.StepStarted() if self._bar is None:
                # A resumed run starts in the middle; its remaining time follows from its own speed.
                self._bar = Bar(
                    total=self._batches,
                    initial=event.rollout,
                    bar_format=self.FORMAT,
                    file=self._stream,
                    dynamic_ncols=True,
                    postfix=self._queue,
                )
            case events.QueueChanged():
                self._show_queue(event.depth)
            case events.StepEnded() if self._bar is not None:
                self._bar.update(1)
            case events.RunEnded():
                self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_queue(self, depth: int) -> None:
        self._queue = f"queue {depth}"
        if self._bar is not None:
            # tqdm limits how often it redraws. Queue events arrive far more often than anyone could read them, so
            # drawing at each of them would only cost time.
            self._bar.set_postfix_str(self._queue, refresh=False)
            self._bar.update(0)


def _shortened(path: Path) -> str:
    """Return the path relative to the working directory, if it is inside it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

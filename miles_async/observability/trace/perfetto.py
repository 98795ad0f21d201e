"""`trace.json`: groups, requests, steps, publishes and pauses as Chrome trace events, for ui.perfetto.dev.

Google's "Trace Event Format" describes the file: an `X` entry is a slice with a duration, `C` is a counter and `M` is
metadata such as a name. Times are microseconds. A group is written when it ends, in the row of the slot it occupied.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miles_async import events
from miles_async.observability.state.groups import ENDED, Group
from miles_async.observability.trace.trace_file import TraceFile
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import GroupState

LEARNER, WEIGHTS, QUEUE, ADMISSION, EVALUATION, REQUESTS, GROUPS = range(1, 8)
_NAMES = {
    LEARNER: "learner",
    WEIGHTS: "weights and pauses",
    QUEUE: "queue",
    ADMISSION: "admission",
    EVALUATION: "evaluation",
    REQUESTS: "requests at the engines",
    GROUPS: "groups, by slot",
}
_PHASES = {
    GroupState.IN_FLIGHT: "in flight",
    GroupState.FINISHED: "held back by the window",
    GroupState.QUEUED: "queued",
    GroupState.LEASED: "in a batch",
    GroupState.TRAINED: "waiting for its version to go live",
}
_WAITING = {"batch": "waiting for a batch", "publish": "waiting for a publish"}
COUNTER_SECONDS = 0.1
"""Shortest time between two values of a counter."""


@dataclass(slots=True)
class _Rows:
    """Row numbers for groups, so that live groups do not overlap. The smallest free number is used first."""

    free: list[int] = field(default_factory=list)
    created: int = 0

    def take(self) -> tuple[int, bool]:
        """Return a row, and whether it is new."""
        if self.free:
            return heapq.heappop(self.free), False
        self.created += 1
        return self.created, True


@dataclass(slots=True)
class WrittenTrace:
    """What must be known of a trace to continue it."""

    end: int = 0
    """`TraceFile.end`."""
    began: float | None = None
    rows: _Rows = field(default_factory=_Rows)
    row_of: dict[int, int] = field(default_factory=dict)
    """The row of each live group, by sequence number."""
    request_ends: list[float] = field(default_factory=list)
    """When the last request in each row ended."""
    phase: events.TrainerPhaseChanged | None = None
    counted_at: float = 0.0


class PerfettoTrace:
    """Writes the trace of a run.

    Pass every event that the view has applied to `observe`, and call `close` at the end.
    """

    def __init__(
        self,
        view: RunView,
        path: Path,
        max_bytes: int,
        on_error: Callable[[Path, OSError], None],
        written: WrittenTrace | None = None,
    ) -> None:
        """Create the file at `path`, which grows to `max_bytes` at most. Raises OSError if it cannot be created.

        `written` describes the trace of another driver of the run, which is continued if the file is still there. If
        the file cannot be written later, `on_error` is called once, and the trace ends.
        """
        if written is None or not path.exists() or path.stat().st_size < written.end:
            written = WrittenTrace()
        self._written = written
        self._file = TraceFile(path, max_bytes, on_error=on_error, end=self._written.end)
        self._view = view

    @property
    def written(self) -> WrittenTrace:
        """The trace up to now."""
        self.flush()
        return replace(self._written, end=self._file.end)

    def observe(self, event: events.Event) -> None:
        match event:
            case events.RunStarted() if not self._written.began:
                self._written.began = event.time
                for process, name in _NAMES.items():
                    self._describe("process_name", process, name=name)
                    self._describe("process_sort_index", process, sort_index=process)
            case events.GroupMoved():
                self._moved(event)
            case events.RequestEnded():
                self._request(event)
            case events.QueueChanged() if abs(event.time - self._written.counted_at) >= COUNTER_SECONDS:
                self._written.counted_at = event.time
                counts = {"queued": event.depth, "held back by the window": event.blocked}
                entry = {"ph": "C", "name": "groups", "pid": QUEUE, "tid": 0, "ts": self._microseconds(event.time)}
                self._file.write({**entry, "args": counts}, detail=True)
            case events.TrainerPhaseChanged():
                self._finish_phase(event.time)
                self._written.phase = event
            case events.StepEnded():
                self._stepped(event)
            case events.PublishEnded():
                self._published(event)
            case events.AdmissionBlocked():
                self._slice(
                    ADMISSION, 0, f"blocked: {event.cause}", event.time - event.seconds, event.time, detail=True
                )
            case events.Evaluated():
                facts: dict[str, Any] = {
                    "accuracy": event.accuracy,
                    "missing": event.missing,
                    "rollout": event.rollout,
                    "versions": list(event.versions),
                }
                self._slice(EVALUATION, 0, event.name, event.time - event.seconds, event.time, **facts)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Write all open slices as ending at the last event, and close the file."""
        self._finish_phase(self._view.time)
        for group in self._view.groups.live.values():
            self._write_group(group, self._view.time, "unfinished at the end of the run")
        self._file.close()

    def _moved(self, event: events.GroupMoved) -> None:
        groups = self._view.groups
        if event.after not in ENDED:
            if event.sequence not in self._written.row_of:
                row, is_new = self._written.rows.take()
                self._written.row_of[event.sequence] = row
                if is_new:
                    self._describe("thread_name", GROUPS, row, name=f"slot {row}")
        elif groups.ended is not None:
            self._write_group(groups.ended, event.time, event.reason or event.after)

    def _write_group(self, group: Group, end: float, outcome: str) -> None:
        row = self._written.row_of.pop(group.sequence, None)
        if row is None:
            return
        heapq.heappush(self._written.rows.free, row)
        facts: dict[str, Any] = {"feed_index": group.feed_index, "attempt": group.attempt, "outcome": outcome}
        generated = group.generated
        if generated is not None:
            facts |= {"reward": generated.reward, "response_tokens": generated.response_tokens}
            facts |= {"oldest_version": generated.versions[0], "newest_version": generated.versions[1]}
        self._slice(GROUPS, row, f"group {group.sequence}", group.states[0][1], end, detail=True, **facts)
        ends = [*(time for _, time in group.states[1:]), end]
        for (state, start), phase_end in zip(group.states, ends, strict=True):
            if state in _PHASES:
                self._slice(GROUPS, row, _PHASES[GroupState(state)], start, phase_end, detail=True)
        if generated is not None:
            self._slice(GROUPS, row, "generate", generated.started, generated.generated, detail=True)
            self._slice(GROUPS, row, "reward and filter", generated.generated, generated.time, detail=True)

    def _request(self, event: events.RequestEnded) -> None:
        # Slices in one row must not overlap, so a request goes to the first row whose last request has ended.
        free = (row for row, ended in enumerate(self._written.request_ends) if ended <= event.started)
        row = next(free, len(self._written.request_ends))
        if row == len(self._written.request_ends):
            self._written.request_ends.append(0.0)
            self._describe("thread_name", REQUESTS, row, name=f"request {row + 1}")
        self._written.request_ends[row] = event.time
        name = f"group {event.sequence}" if event.sequence is not None else "evaluation or chat turn"
        facts = {"samples": event.samples, "response_tokens": event.response_tokens}
        self._slice(REQUESTS, row, name, event.started, event.time, detail=True, **facts)

    def _finish_phase(self, now: float) -> None:
        if self._written.phase is not None:
            name = _WAITING.get(self._written.phase.to, self._written.phase.to)
            self._slice(LEARNER, 0, name, self._written.phase.time, now)
            self._written.phase = None

    def _stepped(self, event: events.StepEnded) -> None:
        facts: dict[str, Any] = {"tokens": event.tokens, "reward": event.reward, "finite": event.finite}
        if (step := self._view.last(events.StepStarted)) is not None:
            facts |= {"version": step.version, "staleness": step.staleness, "groups": step.groups}
        self._slice(LEARNER, 0, f"rollout {event.rollout}", event.started, event.time, **facts)

    def _published(self, event: events.PublishEnded) -> None:
        started = self._view.last(events.PublishStarted)
        if started is None or started.version != event.version:
            return
        start = started.time
        facts: dict[str, Any] = {
            "live": event.live,
            "bytes": event.bytes,
            "fenced": event.fenced,
            "staged_s": event.staged_seconds,
        }
        self._slice(WEIGHTS, 0, f"publish version {event.version}", start, event.time, **facts)
        paused = min(start + event.paused_seconds, event.time)
        self._slice(WEIGHTS, 0, "engines paused", start, paused, **dict[str, Any](event.pause))

    def _slice(
        self, process: int, row: int, name: str, start: float, end: float, *, detail: bool = False, **facts: Any
    ) -> None:
        begin = self._microseconds(start)
        # The end is rounded before the subtraction. Rounding the duration could make a slice end a microsecond after
        # the slice that encloses it.
        length = max(0, self._microseconds(end) - begin)
        entry = {"ph": "X", "name": name, "pid": process, "tid": row, "ts": begin, "dur": length}
        self._file.write({**entry, "args": facts} if facts else entry, detail=detail)

    def _describe(self, kind: str, process: int, row: int = 0, **facts: Any) -> None:
        """Write metadata of a process or of one of its rows."""
        self._file.write({"ph": "M", "name": kind, "pid": process, "tid": row, "args": facts})

    def _microseconds(self, time: float) -> int:
        return round(1e6 * (time - (self._written.began or time)))

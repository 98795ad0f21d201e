"""`trace.json`: groups, requests, steps, publishes and pauses as Chrome trace events, for ui.perfetto.dev.

A group is written when it ends, on the lane that stands for its slot. The format is described in Google's "Trace Event
Format": `X` is a slice with its duration, `C` a counter, `i` an instant, `M` a name; times are microseconds.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_async.events import (
    AdmissionBlocked,
    Evaluated,
    Event,
    GroupGenerated,
    GroupMoved,
    PublishEnded,
    PublishStarted,
    QueueChanged,
    RequestEnded,
    RunStarted,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.observability.trace.trace_file import TraceFile
from miles_async.scheduling.ledger import GroupState

TRAINER, WEIGHTS, QUEUE, ADMISSION, EVALUATION, REQUESTS, GROUPS = range(1, 8)
_NAMES = {
    TRAINER: "trainer",
    WEIGHTS: "weights and pauses",
    QUEUE: "queue",
    ADMISSION: "admission",
    EVALUATION: "evaluation",
    REQUESTS: "requests at the engines",
    GROUPS: "groups, by slot",
}
_PHASES = {
    GroupState.IN_FLIGHT: "under way",
    GroupState.FINISHED: "held by the window",
    GroupState.QUEUED: "queued",
    GroupState.LEASED: "in a batch",
    GroupState.TRAINED: "waits for its version to go live",
}
_DOING = {"batch": "waits for a batch", "publish": "waits for a publish"}
COUNTER_SECONDS = 0.1
"""Between two values of a counter at least."""


@dataclass(slots=True)
class _Life:
    """A group from its admission on."""

    lane: int
    feed_index: str
    attempt: int
    states: list[tuple[str, float]]
    generated: GroupGenerated | None = None


@dataclass(slots=True)
class _Lanes:
    """Numbers that are given out smallest first and come back."""

    free: list[int] = field(default_factory=list)
    made: int = 0

    def take(self) -> tuple[int, bool]:
        """A lane, and whether it is a new one."""
        if self.free:
            return heapq.heappop(self.free), False
        self.made += 1
        return self.made, True


class PerfettoTrace:
    """Feed every event to `observe`, the time to `tick`; `close` at the end."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError when the file cannot be made."""
        self._file = TraceFile(path, max_bytes)
        self._began: float | None = None
        self._lives: dict[int, _Life] = {}
        self._lanes = _Lanes()
        self._request_ends: list[float] = []
        """When the last request of each lane ended."""
        self._turned: TrainerPhaseChanged | None = None
        self._step: StepStarted | None = None
        self._publish: PublishStarted | None = None
        self._counted_at = 0.0
        self._last = 0.0

    def observe(self, event: Event) -> None:
        self._last = max(self._last, event.time)
        match event:
            case RunStarted():
                self._began = event.time
                for process, name in _NAMES.items():
                    self._name("process_name", process, 0, name)
                    self._write(
                        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
                    )
            case GroupMoved():
                self._moved(event)
            case GroupGenerated() if event.sequence in self._lives:
                self._lives[event.sequence].generated = event
            case RequestEnded():
                self._request(event)
            case QueueChanged() if event.time - self._counted_at >= COUNTER_SECONDS:
                self._counted_at = event.time
                figures = {"queued": event.depth, "held by the window": event.blocked}
                self._write(
                    {"ph": "C", "name": "groups", "pid": QUEUE, "tid": 0, "ts": self._at(event.time), "args": figures},
                    detail=True,
                )
            case TrainerPhaseChanged():
                self._finish_turn(event.time)
                self._turned = event
            case StepStarted():
                self._step = event
            case StepEnded():
                self._stepped(event)
            case PublishStarted():
                self._publish = event
            case PublishEnded():
                self._published(event)
            case AdmissionBlocked():
                self._slice(
                    ADMISSION, 0, f"blocked: {event.cause}", event.time - event.seconds, event.time, detail=True
                )
            case Evaluated():
                self._slice(EVALUATION, 0, event.name, event.time - event.seconds, event.time, accuracy=event.accuracy)
            case _:
                pass

    def tick(self, now: float) -> None:
        self._file.tick(now)

    def close(self) -> None:
        """Write what is still open as it stood at the last event."""
        self._finish_turn(self._last)
        for sequence in list(self._lives):
            self._write_group(sequence, self._last, "under way at the end")
        self._file.close()

    def _moved(self, event: GroupMoved) -> None:
        if event.before is None:
            lane, new = self._lanes.take()
            if new:
                self._name("thread_name", GROUPS, lane, f"slot {lane}")
            self._lives[event.sequence] = _Life(lane, event.feed_index, event.attempt, [(event.after, event.time)])
        elif event.after in (GroupState.PUBLISHED, GroupState.DROPPED):
            self._write_group(event.sequence, event.time, event.reason or event.after)
        elif event.sequence in self._lives:
            self._lives[event.sequence].states.append((event.after, event.time))

    def _write_group(self, sequence: int, end: float, outcome: str) -> None:
        life = self._lives.pop(sequence, None)
        if life is None:
            return
        heapq.heappush(self._lanes.free, life.lane)
        facts: dict[str, Any] = {"feed_index": life.feed_index, "attempt": life.attempt, "outcome": outcome}
        generated = life.generated
        if generated is not None:
            facts |= {"reward": generated.reward, "response_tokens": generated.response_tokens}
            facts |= {"oldest_version": generated.versions[0], "newest_version": generated.versions[1]}
        self._slice(GROUPS, life.lane, f"group {sequence}", life.states[0][1], end, detail=True, **facts)
        ends = [*(time for _, time in life.states[1:]), end]
        for (state, start), phase_end in zip(life.states, ends, strict=True):
            if state in _PHASES:
                self._slice(GROUPS, life.lane, _PHASES[GroupState(state)], start, phase_end, detail=True)
        if generated is not None:
            self._slice(GROUPS, life.lane, "generate", generated.started, generated.generated, detail=True)
            self._slice(GROUPS, life.lane, "reward and filter", generated.generated, generated.time, detail=True)

    def _request(self, event: RequestEnded) -> None:
        free = (lane for lane, ended in enumerate(self._request_ends) if ended <= event.started)
        lane = next(free, len(self._request_ends))
        if lane == len(self._request_ends):
            self._request_ends.append(0.0)
            self._name("thread_name", REQUESTS, lane, f"request {lane + 1}")
        self._request_ends[lane] = event.time
        name = f"group {event.sequence}" if event.sequence is not None else "evaluation or turn"
        facts = {"samples": event.samples, "response_tokens": event.response_tokens}
        self._slice(REQUESTS, lane, name, event.started, event.time, detail=True, **facts)

    def _finish_turn(self, now: float) -> None:
        if self._turned is not None:
            doing = self._turned.to
            self._slice(TRAINER, 0, _DOING.get(doing, doing), self._turned.time, now)
            self._turned = None

    def _stepped(self, event: StepEnded) -> None:
        facts: dict[str, Any] = {"tokens": event.tokens, "reward": event.reward, "finite": event.finite}
        if self._step is not None:
            facts |= {"version": self._step.version, "staleness": self._step.staleness, "groups": self._step.groups}
        self._slice(TRAINER, 0, f"rollout {event.rollout}", event.started, event.ended, **facts)

    def _published(self, event: PublishEnded) -> None:
        if self._publish is None:
            return
        start = self._publish.time
        facts: dict[str, Any] = {
            "live": event.live,
            "bytes": event.bytes,
            "fenced": event.fenced,
            "staged_s": event.staged_seconds,
        }
        self._slice(WEIGHTS, 0, f"publish version {event.version}", start, event.time, **facts)
        paused = min(start + event.paused_seconds, event.time)
        self._slice(WEIGHTS, 0, "engines paused", start, paused, **dict[str, Any](event.pause))
        self._publish = None

    def _slice(
        self, process: int, lane: int, name: str, start: float, end: float, *, detail: bool = False, **facts: Any
    ) -> None:
        begin = self._at(start)
        # Ends are rounded like beginnings, or a slice would stand a microsecond out of the one it lies in.
        length = max(0, self._at(end) - begin)
        entry = {"ph": "X", "name": name, "pid": process, "tid": lane, "ts": begin, "dur": length}
        self._write({**entry, "args": facts} if facts else entry, detail=detail)

    def _name(self, kind: str, process: int, lane: int, name: str) -> None:
        self._write({"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}})

    def _at(self, time: float) -> int:
        return round(1e6 * (time - (self._began or time)))

    def _write(self, entry: dict[str, Any], *, detail: bool = False) -> None:
        self._file.write(entry, detail=detail)

"""The trace for Perfetto: its content, its validity at every moment, and its limited size."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from miles_async.events import (
    Event,
    GroupGenerated,
    GroupMoved,
    PublishEnded,
    PublishStarted,
    RequestEnded,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.observability.trace.perfetto import GROUPS, LEARNER, REQUESTS, WEIGHTS, PerfettoTrace
from miles_async.observability.trace.trace_file import TraceFile
from miles_async.observability.view import RunView
from tests.unit.example_events import RUN

WAY = ("fed", "in_flight", "finished", "queued", "leased", "trained", "published")


def life(sequence: int, start: float, *, end: str = "published", reason: str | None = None) -> list[Event]:
    """A group that changes its state every second."""
    events: list[Event] = []
    transport = [*WAY[: WAY.index(end)], end] if end in WAY else ["fed", "in_flight", end]
    for position, state in enumerate(transport):
        before = transport[position - 1] if position else None
        events.append(
            GroupMoved(
                time=start + position,
                sequence=sequence,
                feed_index=f"sample_0_{sequence}",
                attempt=0,
                before=before,
                after=state,
                reason=reason if state == end else None,
                counts={},
            )
        )
    generated = GroupGenerated(
        time=start + 1.9,
        sequence=sequence,
        generation_seconds=0.7,
        reward_seconds=0.1,
        versions=(3, 4),
        response_tokens=20,
        reward=0.5,
        truncated=0,
    )
    return [*events[:2], generated, *events[2:]]


def fail(path: Path, error: OSError) -> None:
    raise AssertionError(f"{path}: {error}")


def traced(tmp_path: Path, *events: Event, max_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    view = RunView()
    trace = PerfettoTrace(view, tmp_path / "trace.json", max_bytes, fail)
    for event in (RUN, *events):
        view.apply(event)
        trace.observe(event)
    trace.close()
    return read(tmp_path)


def read(tmp_path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return entries


def slices(entries: list[dict[str, Any]], process: int) -> dict[str, tuple[int, int]]:
    """Begin and end in microseconds, by name."""
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in entries if e["ph"] == "X" and e["pid"] == process}


def test_a_group_is_a_slice_on_its_slot_with_its_phases_inside(tmp_path: Path) -> None:
    found = slices(traced(tmp_path, *life(7, 101.0)), GROUPS)
    assert found["group 7"] == (1_000_000, 7_000_000)
    assert found["generate"] == (2_100_000, 2_800_000)
    assert found["reward and filter"] == (2_800_000, 2_900_000)
    assert [found[name][0] for name in ("held back by the window", "queued", "in a batch")] == [
        3_000_000,
        4_000_000,
        5_000_000,
    ]
    assert found["waiting for its version to go live"] == (6_000_000, 7_000_000)


def test_the_slice_of_a_dropped_group_has_the_reason(tmp_path: Path) -> None:
    entries = traced(tmp_path, *life(7, 101.0, end="dropped", reason="filtered"))
    [group] = [entry for entry in entries if entry["name"] == "group 7"]
    assert group["args"]["outcome"] == "filtered"
    assert (group["args"]["reward"], group["args"]["oldest_version"]) == (0.5, 3)


def test_groups_take_the_smallest_free_slot(tmp_path: Path) -> None:
    together = sorted([*life(1, 110.0), *life(2, 110.5, end="queued")], key=lambda event: event.time)
    entries = traced(tmp_path, *life(0, 101.0), *together)
    lanes = {e["name"]: e["tid"] for e in entries if e["name"].startswith("group ")}
    assert lanes == {"group 0": 1, "group 1": 1, "group 2": 2}
    assert [e["args"]["outcome"] for e in entries if e["name"] == "group 2"] == ["unfinished at the end of the run"]


def test_slices_of_one_lane_are_nested_or_disjoint(tmp_path: Path) -> None:
    events = sorted((event for n in range(40) for event in life(n, 101.0 + 0.37 * n)), key=lambda event: event.time)
    requests = [
        RequestEnded(time=102.0 + n / 7, seconds=1.0 + n / 7 - n / 9, sequence=n, samples=4, response_tokens=9)
        for n in range(40)
    ]
    entries = traced(tmp_path, *sorted([*events, *requests], key=lambda event: event.time))
    for process in (GROUPS, REQUESTS):
        for lane in {e["tid"] for e in entries if e["ph"] == "X" and e["pid"] == process}:
            inside: list[int] = []
            own = [e for e in entries if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, lane)]
            for entry in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                while inside and inside[-1] <= entry["ts"]:
                    inside.pop()
                assert not inside or entry["ts"] + entry["dur"] <= inside[-1], entry
                inside.append(entry["ts"] + entry["dur"])


def test_steps_publishes_and_pauses_have_separate_lanes(tmp_path: Path) -> None:
    entries = traced(
        tmp_path,
        TrainerPhaseChanged(time=101.0, to="batch"),
        TrainerPhaseChanged(time=102.0, to="step"),
        StepStarted(time=102.0, rollout=5, version=5, staleness=[1, 2], groups=[3, 4]),
        StepEnded(
            time=103.0,
            rollout=5,
            seconds=0.9,
            tokens=64,
            finite=True,
            reward=0.5,
            response_length=3.0,
            metrics={},
        ),
        TrainerPhaseChanged(time=103.0, to="publish"),
        PublishStarted(time=103.5, version=6, queue=0),
        PublishEnded(
            time=104.0,
            version=6,
            live=True,
            staged_seconds=0.4,
            paused_seconds=0.3,
            stopping_seconds=0.0,
            write_seconds=0.2,
            resuming_seconds=0.0,
            bytes=99,
            queue=0,
            fenced=[],
        ),
    )
    trainer, weights = slices(entries, LEARNER), slices(entries, WEIGHTS)
    assert trainer["waiting for a batch"] == (1_000_000, 2_000_000)
    assert trainer["rollout 5"] == (2_100_000, 3_000_000)
    assert weights["publish version 6"] == (3_500_000, 4_000_000)
    assert weights["engines paused"] == (3_500_000, 3_800_000)


def test_the_file_is_valid_json_whenever_the_run_is_killed(tmp_path: Path) -> None:
    view = RunView()
    trace = PerfettoTrace(view, tmp_path / "trace.json", 1 << 20, fail)
    assert read(tmp_path) == []
    view.apply(RUN)
    trace.observe(RUN)
    for second in range(5):
        for event in life(second, 101.0 + second):
            view.apply(event)
            trace.observe(event)
        trace.flush()
        assert len([e for e in read(tmp_path) if e["name"].startswith("group ")]) == second + 1


def test_the_file_stays_within_its_size_and_steps_outlive_groups(tmp_path: Path) -> None:
    events: list[Event] = []
    for n in range(120):
        turns = [TrainerPhaseChanged(time=101.0 + n, to="step"), TrainerPhaseChanged(time=101.5 + n, to="batch")]
        events += [*turns, *(event for k in range(4) for event in life(4 * n + k, 101.0 + n))]
    entries = traced(tmp_path, *events, max_bytes=1 << 16)
    assert (tmp_path / "trace.json").stat().st_size <= 1 << 16
    last_group = max(e["ts"] for e in entries if e["ph"] == "X" and e["pid"] == GROUPS)
    last_step = max(e["ts"] for e in entries if e["name"] == "step")
    assert last_step > 2 * last_group
    assert last_step >= 119_000_000


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("repairable", [True, False])
def test_a_disk_that_fails_ends_the_trace_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, repairable: bool
) -> None:
    errors: list[tuple[Path, int | None]] = []
    file = TraceFile(tmp_path / "trace.json", 1 << 20, on_error=lambda path, error: errors.append((path, error.errno)))
    file.write({"name": "kept"}, detail=False)
    file.flush()
    write = os.pwrite

    def failing(descriptor: int, content: bytes, offset: int) -> int:
        if len(content) > 8 or not repairable:
            raise OSError(number, os.strerror(number))
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    for _ in range(3):
        file.write({"name": "lost"}, detail=False)
        file.flush()
    file.close()
    assert errors == [(tmp_path / "trace.json", number)]
    if repairable:
        assert [entry["name"] for entry in read(tmp_path)] == ["kept"]

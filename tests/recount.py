"""Computes what summary, page and report show of a run again, from the raw lines of its event log.

    python -m tests.recount RUN_FOLDER [...]

`Recount` shares no function with `miles_async/observability/`: it reads the JSON itself, has all events in memory, and
computes each number from the whole list, with intervals and sets instead of running sums. Which verdict held at a time
follows from two tables of rules, which are applied to what was known at that time (`docs/how-to/monitor.md`).

The numbers are compared with a view that reads the event log now, and with `summary.json` and `report.html` if the run
has written them. The command lists the numbers that differ, and its exit code is 1 if there are any. It also lists the
files that cannot be compared.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise
from math import floor, isclose, sqrt
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from miles_async.events import EventsMissing, encode_json
from miles_async.observability.diagnosis.verdict import MOSTLY_FILTERED, NEGLIGIBLE, WAITS
from miles_async.observability.page.status import status
from miles_async.observability.state.learner import MAX_HORIZON_SECONDS
from miles_async.observability.summary import summarize
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import FILTERED_GROUPS, RECENT_PULSES, RunView

Raw = dict[str, Any]
Interval = tuple[float, float]

REPORTS = ("TrainerPhaseChanged", "StepStarted", "PublishStarted", "PublishEnded", "Pulse")
"""Events by which a rollout worker shows that it serves the run."""
LONGEST_GAP = 60.0
"""Time between two reports above which the machine was suspended, or its clock was set."""
FIRST_REWARDS = 10
LISTED_REWARDS = 256
Z = 1.959964
ROUNDED = {"verdict_seconds": (1e-6, 1e-3), "rewards": (1e-3, 1e-6)}
"""Relative and absolute tolerance of the numbers that are written with fewer digits."""

HORIZON, HORIZON_BATCHES = 10.0, 3
"""The verdict judges the last seconds, or the last batches if these take longer."""
SILENT = 5.0
NOTABLE_WASTE = 0.2
BUSY_PROCESSORS = 0.9


def raw_events(folder: Path) -> list[Raw]:
    """Return the lines of an event log and of its earlier parts."""
    events: list[Raw] = []
    for part in [*sorted(folder.glob("events-*.jsonl*")), folder / "events.jsonl"]:
        text = gzip.decompress(part.read_bytes()) if part.suffix == ".gz" else part.read_bytes()
        events += [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    return events


def overlap(one: Iterable[Interval], other: Sequence[Interval]) -> float:
    """Return the length of what two sets of intervals have in common."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def tally(values: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in Counter(values).items() if count}


@dataclass
class Life:
    """The events of one rollout worker."""

    cause: str
    """What was replaced when it began: `driver`, `rollout_worker` or `learner`; empty for the first one."""
    first: int
    """Position of its first event in the log."""
    driver_started: float | None = None
    events: list[Raw] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Positions of the end of the run."""

    @cached_property
    def loop(self) -> list[float]:
        return [event["time"] for event in self.events if event["type"] == "TrainerPhaseChanged"]

    @cached_property
    def end(self) -> float:
        """The last report."""
        return max(event["time"] for event in self.events if event["type"] in (*REPORTS, "RunEnded"))


class Tokens(NamedTuple):
    """Response tokens that an event generated or wasted."""

    position: int
    """Position of the event in the log."""
    time: float
    generated: int
    wasted: int
    reason: str | None


class Span(NamedTuple):
    """The time between two reports of a rollout worker, in which the learner was in one phase."""

    report: int
    """Position in the log of the report that ends it."""
    begin: float
    end: float
    phase: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Moment:
    """What was known when a report arrived, from the events before it."""

    run: Recount
    span: Span
    """The time that the report ends."""

    @cached_property
    def pulse(self) -> Raw:
        """The last pulse; empty if there was none."""
        return self.run.before(self.span.report, "Pulse") or {}

    @cached_property
    def engines(self) -> Raw:
        """The last report on the engines; empty if there was none."""
        return self.run.before(self.span.report, "EngineBusy") or {}

    @property
    def blocked(self) -> str | None:
        """The limit that admission waits for."""
        limit: str | None = self.pulse.get("waits_for")
        return limit

    @property
    def publishing(self) -> bool:
        begun, ended = (self.run.position(self.span.report, kind) for kind in ("PublishStarted", "PublishEnded"))
        lost = bisect_left(self.run.restored, self.span.report)
        return begun > max(ended, self.run.restored[lost - 1] if lost else -1)

    @property
    def window_holds_back(self) -> bool:
        """Whether the groups behind the window would complete the batch, or occupy the slots that others need."""
        finished = self.run.finished_before(self.span.report)
        missing = self.pulse.get("wanted", 0) - self.pulse.get("collected", 0)
        return finished > 0 and (finished >= missing or self.blocked == "slots")

    @property
    def head_waits_for_reward(self) -> bool:
        at_engines = "oldest" in self.pulse and self.pulse["oldest"] <= self.pulse["head"]
        return self.pulse.get("head_state") == "in_flight" and "rewarding" in self.pulse and not at_engines

    @property
    def engines_have_room(self) -> bool:
        """Whether only the number of groups in flight keeps more requests from the engines."""
        return self.blocked == "in_flight" and not self.engines.get("in_line") and not self.synchronous

    @property
    def filtered(self) -> float:
        """The fraction of the last groups that filters dropped."""
        fates = self.run.filter_fates
        last = bisect_left(fates, self.span.report, key=itemgetter(0))
        recent = [dropped for _, dropped in fates[max(0, last - FILTERED_GROUPS) : last]]
        return fmean(recent) if recent else 0.0

    @property
    def wasted(self) -> float:
        """The avoidable waste among the tokens generated since the horizon, which begins with a full second."""
        since = floor(self.span.end - self.run.horizon(self.span.report))
        last = bisect_left(self.run.token_changes, self.span.report, key=itemgetter(0))
        first = bisect_left(self.run.newest_token_times, since, hi=last)
        # Tokens with a much later time were generated before the clock was set back.
        recent = [
            tokens
            for tokens in self.run.token_changes[first:last]
            if since <= tokens.time <= self.span.end + LONGEST_GAP
        ]
        wasted = sum(tokens.wasted for tokens in recent if tokens.reason != "filtered")
        return wasted / max(1, wasted, sum(tokens.generated for tokens in recent))

    @property
    def processors(self) -> float:
        positions = self.run.positions["Pulse"]
        last = bisect_left(positions, self.span.report)
        recent = positions[max(0, last - RECENT_PULSES) : last]
        return fmean(self.run.events[position].get("processors", 0.0) for position in recent) if recent else 0.0

    @property
    def silent(self) -> str | None:
        """The process that has not answered for the longest time, if that is long enough for a verdict."""
        started = self.run.position(self.span.report, "RunStarted")
        seconds = {}
        for process, positions in self.run.heartbeats.items():
            last = bisect_left(positions, self.span.report) - 1
            if last >= 0 and positions[last] > started:
                seconds[process] = self.run.events[positions[last]]["seconds"]
        longest = max(seconds, key=lambda name: seconds[name], default=None)
        return longest if longest is not None and seconds[longest] >= SILENT else None

    @property
    def synchronous(self) -> bool:
        return bool(self.run.of("RunStarted")[0]["entry"] == "train.py")


WAIT_RULES: Sequence[tuple[str, Callable[[Moment], bool]]] = (
    ("step", lambda at: at.span.phase == "step"),
    ("publish-bound", lambda at: at.span.phase == "publish"),
    ("save-bound", lambda at: at.span.phase == "save"),
    ("evaluation-bound", lambda at: at.span.phase == "evaluate"),
    # The learner waits for a batch.
    ("rollout-bound", lambda at: not at.pulse or not at.engines),
    ("publish-bound", lambda at: at.publishing),
    ("reward-bound", lambda at: at.window_holds_back and at.head_waits_for_reward),
    ("window-bound", lambda at: at.window_holds_back),
    ("reward-bound", lambda at: at.pulse.get("rewarding", 0) > at.pulse["generating"]),
    ("filter-bound", lambda at: at.filtered > MOSTLY_FILTERED),
    ("waste-bound", lambda at: at.wasted > NOTABLE_WASTE),
    ("staleness-bound", lambda at: at.blocked == "slots"),
    ("tool-bound", lambda at: 2 * at.engines["in_flight"] < at.pulse["generating"]),
    ("concurrency-bound", lambda at: at.engines_have_room),
    ("rollout-bound", lambda at: True),
)
"""What the learner does or waits for: the first rule that applies names it."""


@dataclass(frozen=True)
class Shares:
    """The fractions of the time up to the horizon."""

    by_wait: Mapping[str, float]
    """The names are those of `WAIT_RULES`."""
    held_back: float
    """The fraction in which admission waited for the learner."""

    @property
    def waits(self) -> dict[str, float]:
        return {name: share for name, share in self.by_wait.items() if name != "step"}

    @property
    def longest(self) -> str:
        """The longest wait. Simulated waits may be equally long: the first one of `WAITS` then counts."""
        return str(max(WAITS.values(), key=lambda name: round(self.waits[name], 9)))


VERDICT_RULES: Sequence[tuple[Callable[[Moment, Shares], bool], Callable[[Shares], str]]] = (
    (lambda at, of: (at.silent or "").startswith("learner"), lambda of: "trainer-bound"),
    (lambda at, of: at.silent is not None, lambda of: "rollout-bound"),
    (lambda at, of: at.synchronous and of.waits[of.longest] > of.by_wait["step"], lambda of: of.longest),
    (lambda at, of: at.synchronous, lambda of: "trainer-bound"),
    (lambda at, of: sum(of.waits.values()) > NEGLIGIBLE, lambda of: of.longest),
    (lambda at, of: of.held_back > NEGLIGIBLE, lambda of: "trainer-bound"),
    (lambda at, of: True, lambda of: "balanced"),
)
"""The first rule that applies gives the verdict."""
SLOWED_BY_PROCESSORS = ("rollout-bound", "concurrency-bound", "trainer-bound")
"""Verdicts that are `machine-bound` while almost all of the processors' time is used."""


def verdict_at(moment: Moment, shares: Shares) -> str:
    verdict = next(result(shares) for applies, result in VERDICT_RULES if applies(moment, shares))
    slowed = verdict in SLOWED_BY_PROCESSORS and moment.silent is None and moment.processors > BUSY_PROCESSORS
    return "machine-bound" if slowed else verdict


class Recount:
    """The numbers of one run."""

    def __init__(self, events: list[Raw]) -> None:
        self.events = events

    @cached_property
    def positions(self) -> Mapping[str, list[int]]:
        """The positions of the events of each type in the log."""
        positions = defaultdict(list)
        for position, event in enumerate(self.events):
            positions[event["type"]].append(position)
        return positions

    def of(self, *kinds: str) -> list[Raw]:
        return [
            self.events[position]
            for position in sorted(position for kind in kinds for position in self.positions[kind])
        ]

    def last(self, *kinds: str) -> Raw | None:
        return self.before(len(self.events), *kinds)

    def position(self, before: int, *kinds: str) -> int:
        """Return the last position of an event of these types before a position; -1 if there is none."""
        counts = ((positions, bisect_left(positions, before)) for positions in map(self.positions.__getitem__, kinds))
        return max((positions[count - 1] for positions, count in counts if count), default=-1)

    def before(self, position: int, *kinds: str) -> Raw | None:
        """Return the last event of these types before a position."""
        found = self.position(position, *kinds)
        return self.events[found] if found >= 0 else None

    @cached_property
    def lives(self) -> list[Life]:
        """The rollout workers of the run whose training loop has begun, in order."""
        return [life for life in self._every_life if life.loop]

    @cached_property
    def _every_life(self) -> list[Life]:
        lives, driver, reported, runs, begun = [Life("", 0)], None, False, False, True
        for position, event in enumerate(self.events):
            kind = event["type"]
            if kind == "RunStarted" and runs:
                driver = event["time"]
                continue
            if kind == "RunEnded" and driver is not None:
                continue  # the driver ended before its rollout worker reported anything
            runs = runs or kind == "RunStarted"
            by_driver = driver is not None and (
                _is_of_another_worker(event) or (kind in REPORTS and event["time"] >= driver)
            )
            if reported and begun and (_is_of_another_worker(event) or by_driver):
                lives.append(Life("rollout_worker", position))
                begun = False
            if by_driver and len(lives) > 1:
                lives[-1].cause, lives[-1].driver_started, driver = "driver", driver, None
            elif kind == "LearnerRestored" and lives[-1].cause == "rollout_worker" and not begun:
                lives[-1].cause = "learner"
            lives[-1].events.append(event)
            if kind == "RunEnded":
                lives[-1].ends.append(position)
            reported, begun = reported or kind in REPORTS, begun or kind == "TrainerPhaseChanged"
        return lives

    @cached_property
    def restored(self) -> list[int]:
        """Where in the log another rollout worker begins, or begins again because it was lost before its loop ran."""
        again = (position for position, event in enumerate(self.events) if _is_of_another_worker(event))
        return sorted({*(life.first for life in self._every_life), *again})

    @cached_property
    def served(self) -> list[Interval]:
        """When the training loop ran, by rollout worker."""
        return [(life.loop[0], life.end) for life in self.lives]

    @cached_property
    def interruptions(self) -> list[tuple[str, float, float]]:
        found = []
        for before, after in pairwise(self.lives):
            begin, end, driver = before.end, after.loop[0], after.driver_started
            if driver is None:
                found.append((after.cause, begin, end))
            else:
                found += [("no_driver", min(begin, driver), driver), ("driver_start", max(begin, driver), end)]
        return found

    # Training

    @cached_property
    def steps(self) -> list[tuple[Raw, Raw | None, bool]]:
        """Each step that ended: its end, its start, and whether it was kept."""
        found, oldest_later = [], float("inf")
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            if event["type"] == "StepEnded":
                found.append((index, event["rollout"] < oldest_later))
            elif event["type"] == "StepStarted":
                oldest_later = min(oldest_later, event["rollout"])
            elif event["type"] == "LearnerRestored":
                oldest_later = min(oldest_later, event["rollout"] + 1)
        starts = {}
        for index, event in enumerate(self.events):
            if event["type"] == "StepStarted":
                start = event
                starts[index] = start
        known = sorted(starts)
        return [
            (self.events[index], starts[max(each for each in known if each < index)] if known else None, kept)
            for index, kept in reversed(found)
        ]

    @cached_property
    def cut_off(self) -> list[tuple[Interval, bool]]:
        """Steps during which their rollout worker was lost, and whether the next one reports their end."""
        found = []
        for life, after in pairwise(self.lives):
            last = next((each for each in reversed(life.events) if each["type"] in ("StepStarted", "StepEnded")), None)
            if last is None or last["type"] == "StepEnded":
                continue
            first = next((each for each in after.events if each["type"] in ("StepStarted", "StepEnded")), None)
            ends = first is not None and first["type"] == "StepEnded" and first["rollout"] == last["rollout"]
            found.append(((last["time"], life.end), ends))
        return found

    @cached_property
    def unfinished(self) -> list[Interval]:
        return [interval for interval, ends in self.cut_off if not ends]

    @cached_property
    def training(self) -> Interval:
        return self.of("StepStarted")[0]["time"], self.steps[-1][0]["time"]

    def work(self) -> Raw:
        steps, (began, ended) = self.steps, self.training
        seconds, finite = ended - began, [step for step in steps if step[0]["finite"]]
        own = {
            id(end)
            for life in self.lives
            for start, end in pairwise(each for each in life.events if each["type"] in ("StepStarted", "StepEnded"))
            if (start["type"], end["type"]) == ("StepStarted", "StepEnded")
        }
        trained_in = [(max(began, end["time"] - end["seconds"]), end["time"]) for end, _, _ in steps if id(end) in own]
        lost = [interval for interval, _ in self.cut_off if interval[0] < ended]
        phase, served = [(began, ended)], [(began, ended)]
        away = sum(overlap(phase, [(begin, end)]) for _, begin, end in self.interruptions)
        present = overlap(phase, served) - away

        def groups(which: Iterable[tuple[Raw, Raw | None, bool]]) -> int:
            return sum(len(start["staleness"]) for _, start, _ in which if start is not None)

        def tokens(which: Iterable[tuple[Raw, Raw | None, bool]]) -> int:
            return sum(end["tokens"] for end, _, _ in which)

        kept = [step for step in finite if step[2]]
        undone = [step for step in finite if not step[2]]
        ages = Counter(age for _, start, _ in kept if start is not None for age in start["staleness"])
        counts = {
            "undone_batches": sum(not step[2] for step in steps),
            "undone_groups": groups(undone),
            "undone_tokens": tokens(undone),
            "lost_learner_seconds": sum(end["seconds"] for end, _, kept in steps if not kept)
            + sum(end - begin for begin, end in self.unfinished),
            "staleness_max": max(ages, default=None),
            "staleness_histogram": {str(age): ages[age] for age in sorted(ages)},
        }
        if present <= 0:
            return counts  # the clock was set back by more than the training phase, so there are no rates
        return counts | {
            "training_seconds": seconds,
            "groups_per_second": groups(kept) / seconds,
            "tokens_per_second": tokens(kept) / seconds,
            "groups_per_second_gross": groups(finite) / seconds,
            "tokens_per_second_gross": tokens(finite) / seconds,
            "learner_idle_share": max(0.0, 1 - overlap(phase, [*trained_in, *lost]) / present),
            "engine_idle_share": max(0.0, 1 - self.busy(*self.training) / present) if self.of("EngineBusy") else None,
        }

    def busy(self, begin: float, end: float) -> float:
        """Return the seconds of a span in which engines had requests. Each rollout worker counts from 0."""
        total = 0.0
        for number, life in enumerate(self.lives):
            reports = [(event["time"], event["busy"]) for event in life.events if event["type"] == "EngineBusy"]
            start = life.loop[0] if number else self.of("RunStarted")[0]["time"]
            early = [busy for time, busy in reports if time <= start]
            points = [(start, early[-1] if early else 0.0), *(report for report in reports if report[0] > start)]
            for (before, less), (after, more) in pairwise(points):
                share = overlap([(before, after)], [(begin, end)]) / max(after - before, 1e-9)
                total += share * (more - less if more >= less else more)
        return total

    def rewards(self) -> Raw:
        kept = [end["reward"] for end, _, kept in self.steps if kept]
        count = min(FIRST_REWARDS, max(1, len(kept) // 4))
        ends = {"reward_first": fmean(kept[:count]), "reward_last": fmean(kept[-count:]), "reward_batches": count}
        batches, width = max(end["rollout"] for end, _, _ in self.steps) + 1, 1
        while batches > LISTED_REWARDS * width:
            width *= 2
        by_value = defaultdict(list)
        for end, _, is_kept in self.steps:
            if is_kept:
                by_value[end["rollout"] // width].append(end["reward"])
        rewards = [fmean(by_value[number]) if by_value[number] else None for number in range(-(-batches // width))]
        return {**ends, "batches_per_reward": width, "rewards": rewards}

    # Tokens

    def tokens(self) -> Raw:
        moved, at_most = self.token_changes, 0
        wasted = Counter[str]()
        for tokens in moved:
            if tokens.reason is not None:
                wasted[tokens.reason] += tokens.wasted
        for event in self.of("GroupMoved"):
            if _was_lost_in_flight(event):
                at_most += max(0, self._longest_group - event.get("kept_tokens", 0))
        removed = {event["rollout"]: event.get("tokens", 0) for event in self.of("SamplesRemoved")}
        wasted["removed"] += sum(removed.values())
        wasted["leftover"] += self._unused_tokens()
        generated = max(sum(tokens.generated for tokens in moved), wasted.total())
        return {
            "generated_tokens": generated,
            "wasted_tokens": {reason: tokens for reason, tokens in sorted(wasted.items()) if tokens},
            "wasted_share": wasted.total() / max(generated, 1),
            "lost_tokens_at_most": at_most,
        }

    @property
    def _longest_group(self) -> int:
        """The most response tokens of a group."""
        started = self.of("RunStarted")[0]
        return int(started.get("longest_response", 0) * started["samples_per_group"])

    @cached_property
    def token_changes(self) -> list[Tokens]:
        """The tokens of each event, without the groups that are left over and the samples that filters removed."""
        found: list[Tokens] = []
        done_tokens, done_seconds, generating = 0, 0.0, 0.0
        entered: dict[int, float] = {}
        for position, event in enumerate(self.events):
            time = event["time"]
            match event["type"]:
                case "GroupGenerated":
                    found.append(Tokens(position, time, event["response_tokens"], 0, None))
                    done_tokens += event["response_tokens"]
                    done_seconds += event["generation_seconds"]
                case "Pulse" if event["generating"]:
                    generating = time
                case "SampleDiscarded":
                    found.append(Tokens(position, time, event["tokens"], event["tokens"], event["reason"]))
                case "GroupMoved" if event["after"] == "in_flight":
                    entered[event["sequence"]] = time
                case "GroupMoved" if event["after"] == "dropped":
                    reason, tokens = event["reason"], event.get("discarded_tokens", 0)
                    if _was_lost_in_flight(event) and event["sequence"] in entered and done_seconds:
                        seconds = max(0.0, min(generating, time) - entered[event["sequence"]])
                        estimate = min(self._longest_group, round(seconds * done_tokens / done_seconds))
                        tokens = max(tokens, estimate - event.get("kept_tokens", 0), 0)
                    is_new = event.get("before") in ("fed", "in_flight") and reason != "filtered"
                    found.append(Tokens(position, time, tokens if is_new else 0, 0, None))
                    fate, when = self._fate_of_abort(position) if reason == "aborted" else (reason, position)
                    found.append(Tokens(when, self.events[when]["time"], 0, tokens, fate))
        return sorted(found, key=lambda tokens: tokens.position)

    @cached_property
    def newest_token_times(self) -> list[float]:
        """The latest time up to each element of `token_changes`."""
        return list(accumulate((tokens.time for tokens in self.token_changes), max))

    def _fate_of_abort(self, position: int) -> tuple[str | None, int]:
        """Return whether aborted tokens were wasted or left over at the end of the run, and where that is decided."""
        for later in range(position, len(self.events)):
            if (kind := self.events[later]["type"]) in ("StepStarted", "RunEnded"):
                return "aborted" if kind == "StepStarted" else "leftover", later
        return None, position

    @cached_property
    def states(self) -> dict[int, str]:
        """The last state of each group."""
        return {event["sequence"]: event["after"] for event in self.of("GroupMoved")}

    def _unused_tokens(self) -> int:
        last = self.last("RunEnded", "RunStarted")
        if last is None or last["type"] != "RunEnded":
            return 0
        tokens = {event["sequence"]: event["response_tokens"] for event in self.of("GroupGenerated")}
        return sum(
            tokens.get(sequence, 0)
            for sequence, state in self.states.items()
            if state in ("in_flight", "finished", "queued", "leased")
        )

    # Verdicts

    @cached_property
    def _ends(self) -> list[int]:
        """Where the work of a rollout worker ends with the run."""
        return [position for life in self._every_life for position in life.ends]

    @cached_property
    def _reports(self) -> list[tuple[int, Interval | None]]:
        """The position of each report, and the time since the one before it; None if the clock was set meanwhile."""
        found: list[tuple[int, Interval | None]] = []
        newest = 0.0
        for position in sorted((*self._ends, *(position for kind in REPORTS for position in self.positions[kind]))):
            now = self.events[position]["time"]
            was_set = bool(found) and abs(now - newest) > LONGEST_GAP
            found.append((position, None if was_set else (newest, max(newest, now))))
            newest = now if was_set else max(newest, now)
        return found

    @cached_property
    def spans(self) -> list[Span]:
        """The time since the training loop of the first rollout worker began, without interruptions."""
        found = []
        for position, passed in self._reports:
            last = self.position(position, "TrainerPhaseChanged", "StepStarted")
            is_of_its_worker = last >= self.restored[bisect_right(self.restored, position) - 1]
            has_ended = bisect_left(self._ends, last) < bisect_left(self._ends, position)
            if passed is not None and passed[0] < passed[1] and is_of_its_worker and not has_ended:
                found.append(Span(position, *passed, self.events[last].get("to", "step")))
        return found

    @cached_property
    def _breaks(self) -> list[int]:
        """Where the horizon of the verdict begins again."""
        return sorted({*self.restored, *(position for position, passed in self._reports if passed is None)})

    def _part(self, position: int) -> int:
        """Return a number that is the same for all positions between two breaks."""
        return bisect_right(self._breaks, position)

    @cached_property
    def _horizons(self) -> list[float]:
        """The horizon after each step. The first step of a part has that of the step before it."""
        found = [HORIZON]
        for before, after in pairwise(self.positions["StepEnded"]):
            batches = HORIZON_BATCHES * (self.events[after]["time"] - self.events[before]["time"])
            known = self._part(before) == self._part(after)
            found.append(min(max(HORIZON, batches), MAX_HORIZON_SECONDS) if known else found[-1])
        return found

    def horizon(self, position: int) -> float:
        """Return how many seconds before a position the verdict judges."""
        return self._horizons[max(0, bisect_left(self.positions["StepEnded"], position) - 1)]

    @cached_property
    def heartbeats(self) -> Mapping[str, list[int]]:
        """The positions of the reports on each process that did not answer."""
        positions = defaultdict(list)
        for position in self.positions["ProcessSilent"]:
            positions[self.events[position]["process"]].append(position)
        return positions

    @cached_property
    def filter_fates(self) -> list[tuple[int, bool]]:
        """For each group that passed a filter or was dropped by it: the position, and whether it was dropped."""
        moved = ((position, self.events[position]) for position in self.positions["GroupMoved"])
        return [
            (position, event.get("reason") == "filtered")
            for position, event in moved
            if event["after"] == "finished" or event.get("reason") == "filtered"
        ]

    @cached_property
    def _finished(self) -> list[int]:
        """The number of finished groups after each change of a group."""
        moved = self.of("GroupMoved")
        return list(accumulate((e["after"] == "finished") - (e.get("before") == "finished") for e in moved))

    def finished_before(self, position: int) -> int:
        changes = bisect_left(self.positions["GroupMoved"], position)
        return self._finished[changes - 1] if changes else 0

    @cached_property
    def verdict_seconds(self) -> dict[str, float]:
        """The seconds of each verdict."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for _, spans in groupby(self.spans, key=lambda span: self._part(span.report)):
            for moment, shares in self._shares([Moment(self, span) for span in spans]):
                seconds[verdict_at(moment, shares)] += moment.span.seconds
        return dict(seconds)

    def _shares(self, moments: Sequence[Moment]) -> Iterator[tuple[Moment, Shares]]:
        """Yield each moment between two breaks, and the shares of the time up to it."""
        waits = [next(name for name, applies in WAIT_RULES if applies(moment)) for moment in moments]
        seconds = [moment.span.seconds for moment in moments]

        def sums(counts: Iterable[bool]) -> list[float]:
            return list(accumulate((s if c else 0.0 for s, c in zip(seconds, counts, strict=True)), initial=0.0))

        by_wait = {name: sums(wait == name for wait in waits) for name, _ in WAIT_RULES}
        held_back = sums(moment.blocked in ("slots", "queue") for moment in moments)
        ends = [moment.span.end for moment in moments]
        # A span that has left the horizon does not return when the horizon grows.
        begins = accumulate((moment.span.end - self.horizon(moment.span.report) for moment in moments), max)
        for number, (moment, begin) in enumerate(zip(moments, begins, strict=True), start=1):
            first = bisect_left(ends, begin)
            amounts = {name: amount[number] - amount[first] for name, amount in by_wait.items()}
            total = sum(amounts.values())
            shares = {name: amount / total for name, amount in amounts.items()}
            yield moment, Shares(shares, (held_back[number] - held_back[first]) / total)

    def verdicts(self) -> Raw:
        """Return what the summary has of the verdicts."""
        seconds = self.verdict_seconds
        longest = max(seconds, key=lambda name: seconds[name], default=None)
        return {
            "verdict": longest,
            "verdict_share": seconds[longest] / sum(seconds.values()) if longest is not None else None,
            "verdict_seconds": seconds,
        }

    # Everything else

    def summary(self) -> Raw:
        started, evaluated = self.of("RunStarted"), self.of("Evaluated")
        ready, published = self.of("ClusterReady"), [
            event for event in self.of("PublishEnded") if event["live"] and event["version"] > 0
        ]  # fmt: skip
        end = self.last("RunEnded", "RunStarted")
        assert end is not None
        ended = end["time"] if end["type"] == "RunEnded" else max(event["time"] for event in self.events)
        cold = [event for event in ready if not event["warm_start_cached"]] or ready
        dropped = tally(event["reason"] for event in self.of("GroupMoved") if event["after"] == "dropped")
        whole = [1e3 * (event["staged_seconds"] + event["paused_seconds"]) for event in published]
        paused = [1e3 * event["paused_seconds"] for event in published]
        interrupted = Counter[str]()
        for cause, begin, until in self.interruptions:
            interrupted[cause] += until - begin  # type: ignore[assignment]  # seconds
        newest = self.last("StepEnded", "LearnerRestored")
        collapse, unwritten = self.of("CollapseRiskChanged"), self.last("DeadLettersUnwritten")
        steps = self.of("StepEnded")
        causes = ["driver"] * (len(started) - 1)
        causes += [life.cause for life in self.lives if life.cause in ("rollout_worker", "learner")]
        return {
            "run": started[0]["run"],
            "entry": started[0]["entry"],
            "started": _timestamp(started[0]["time"]),
            "ended": _timestamp(ended),
            "wall_seconds": ended - started[0]["time"],
            "reason": end["reason"] if end["type"] == "RunEnded" else None,
            "warm_start_seconds": cold[0]["warm_start_seconds"] if cold else None,
            "weight_transfer": ready[-1]["weight_transfer"] if ready else None,
            "rollouts": newest["rollout"] - steps[0]["rollout"] + 1 if newest is not None and steps else 0,
            "restarts": tally(causes),
            "interrupted_seconds": dict(interrupted),
            "versions": max((event["version"] for event in published), default=0),
            "publish_ms_median": median(whole) if whole else None,
            "publish_ms_max": max(whole, default=None),
            "pause_ms_median": median(paused) if paused else None,
            "pause_ms_max": max(paused, default=None),
            "publish_bytes": sum(event["bytes"] for event in published),
            "dropped": dropped,
            "recycled": dropped.get("stale", 0),
            "left_out_samples": sum(event.get("missing", 0) for event in self.of("GroupGenerated")),
            "collapse_announced_after_rollout": collapse[0]["rollout"] if collapse else None,
            "unwritten_dead_letters": unwritten["letters"] if unwritten is not None else 0,
            **_accuracies(evaluated),
            **(self.work() | self.rewards() if steps else {}),
            **self.tokens(),
            **self.verdicts(),
        }

    def page(self) -> Raw:
        moved = self.of("GroupMoved")
        ends = [event.get("reason") or event["after"] for event in moved if event["after"] in ("dropped", "published")]
        outcomes = Counter(ends)
        outcomes["published"] -= sum(event.get("before") == "published" for event in moved)
        outcomes += Counter(f"filtered: {event['reason']}" for event in self.of("GroupFiltered"))
        # The queue is not known until the rollout worker of the last driver has reported it.
        queue = self.last("RunStarted", "QueueChanged", "Pulse", "BatchDrained")
        busy, phase, publish = self.last("EngineBusy"), self.last("TrainerPhaseChanged"), self.last("PublishEnded")
        newest = self.last("StepEnded", "LearnerRestored")
        return {
            "fed": sum(event.get("before") is None for event in moved),
            "outcomes": {name: count for name, count in outcomes.items() if count},
            "requests": busy["in_flight"] if busy is not None else 0,
            "queue.depth": queue.get("queue", queue.get("depth")) if queue is not None else None,
            "rollouts_done": newest["rollout"] + 1 if newest is not None and self.of("StepEnded") else 0,
            "trainer.does": phase["to"] if phase is not None else None,
            "publish.version": publish["version"] if publish is not None else None,
            "slots.counts": tally(state for state in self.states.values() if state not in ("dropped", "published")),
            "staleness": self.work()["staleness_histogram"] if self.of("StepEnded") else {},
        }

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the learner."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            seconds[span.phase] += span.seconds
        return dict(seconds)

    def totals(self) -> Raw:
        """The sums over time of what the report draws."""
        generated, dropped = self.of("GroupGenerated"), [e for e in self.of("GroupMoved") if e["after"] == "dropped"]
        away = sum(end - begin for _, begin, end in self.interruptions)
        return {
            "generated": len(generated),
            "response_tokens": sum(event["response_tokens"] for event in generated),
            "trained": sum(len(start["staleness"]) for end, start, _ in self.steps if end["finite"] and start),
            "trained_tokens": sum(end["tokens"] for end, _, _ in self.steps),
            "recycled": sum(event["reason"] == "stale" for event in dropped),
            "dropped": sum(event["reason"] != "stale" for event in dropped),
            **{f"trainer:{phase}": seconds for phase, seconds in self.phases.items()},
            **{f"verdict:{verdict}": seconds for verdict, seconds in self.verdict_seconds.items()},
            **({"trainer:interrupted": away, "verdict:interrupted": away} if away else {}),
        }


def _is_of_another_worker(event: Raw) -> bool:
    """Whether only a rollout worker that replaces a lost one emits this event."""
    return event["type"] in ("RunContinued", "LearnerRestored")


def _was_lost_in_flight(event: Raw) -> bool:
    return event.get("before") == "in_flight" and event.get("reason") in ("worker_lost", "engine_lost", "router_lost")


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _accuracies(evaluated: Sequence[Raw]) -> Raw:
    of_first = [event for event in evaluated if event["name"] == evaluated[0]["name"]]
    values: Raw = {}
    for when, events in (
        ("before", [event for event in of_first if event["rollout"] < 0]),
        ("after", [event for event in of_first if event["rollout"] >= 0]),
    ):
        last = events[-1] if events else None
        values[f"accuracy_{when}"] = last["accuracy"] if last else None
        values[f"accuracy_{when}_samples"] = last["problems"] if last else None
        values[f"accuracy_{when}_interval"] = _wilson(last["accuracy"], last["problems"]) if last else None
    scores = {}
    for event in evaluated:
        scores[f"eval/{event['name']}"] = event["reward"]
        scores[f"eval/{event['name']}-truncated_ratio"] = event["truncated"]
        scores[f"eval/{event['name']}-missing_samples"] = event.get("missing", 0)
    return {**values, "scores": scores}


def _wilson(share: float, samples: int) -> list[float]:
    """Return the two probabilities from which a share is 1.96 standard deviations away."""
    a, b, c = 1 + Z * Z / samples, -(2 * share + Z * Z / samples), share * share
    root = sqrt(max(0.0, b * b - 4 * a * c))
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]


class Comparison(NamedTuple):
    """The recount of a run, compared with what is shown."""

    differences: list[str]
    """Each number that is shown otherwise than it follows from the raw events."""
    left_out: list[str]
    """Each file that cannot be compared, and why."""


def compare(folder: Path) -> Comparison:
    view = RunView(recent=False)
    for event in read_events(folder / "events.jsonl"):
        view.apply(event)
    figures = view.charts.figures("whole", view.until(view.time))
    now: Raw = json.loads(
        encode_json({"summary": summarize(view), "state": {"now": status(view, view.time), "figures": figures}})
    )
    events = raw_events(folder)
    up_to = cache(lambda length: Recount(events[:length]))
    found = Comparison([*_differences("", up_to(len(events)), now)], [])
    for file, values in _written(folder):
        summary = values["summary"]
        ends = [
            position
            for position, event in enumerate(events, start=1)
            if event["type"] == "RunEnded" and _timestamp(event["time"]) == summary.get("ended")
        ]
        if view.last(EventsMissing) is not None:
            found.left_out.append(f"{file}: parts of the event log were deleted")
        elif summary.keys() != now["summary"].keys():
            found.left_out.append(f"{file}: another version wrote the file")
        elif not ends:
            found.left_out.append(f"{file}: the file was written before the run ended")
        else:
            found.differences.extend(_differences(f"{file} on disk, ", up_to(ends[-1]), values))
    return found


def _written(folder: Path) -> Iterator[tuple[str, Raw]]:
    """Yield each file that the run has written, and its numbers."""
    summary, report = folder / "summary.json", folder / "report.html"
    if summary.exists():
        yield summary.name, {"summary": json.loads(summary.read_bytes())}
    if report.exists():
        data = re.search(rb'<script type="application/json" id="state">(.*?)</script>', report.read_bytes(), re.DOTALL)
        assert data is not None, f"{report} has no data: write it again with `make report`"
        yield report.name, json.loads(data[1])["runs"][0]


def _differences(file: str, recount: Recount, shown: Raw) -> Iterator[str]:
    yield from _differing(f"{file}summary", recount.summary(), shown["summary"])
    if "state" not in shown:
        return
    yield from _differing(f"{file}page", recount.page(), _flat(shown["state"]["now"]))
    figures = shown["state"]["figures"]
    drawn = {
        name: sum(value or 0.0 for value in curve["mean"]) * figures["width"]
        for name, curve in figures["series"].items()
    }
    # A curve has four significant digits.
    yield from _differing(f"{file}curves", recount.totals(), drawn, tolerance=2e-3)


def _flat(values: Mapping[str, Any]) -> Raw:
    inner = {
        f"{name}.{key}": value
        for name in ("queue", "trainer", "slots", "publish")
        for key, value in (values[name] or {}).items()
    }
    return {**values, **inner}


def _differing(where: str, recounted: Raw, shown: Mapping[str, Any], tolerance: float = 1e-6) -> Iterator[str]:
    for name, value in recounted.items():
        relative, absolute = ROUNDED.get(name, (tolerance, tolerance))
        if not _equal(value, shown.get(name, 0 if value == 0 else None), relative, absolute):
            yield f"{where}: {name} is shown as {shown.get(name)}, and the events give {value}"


def _equal(one: Any, other: Any, relative: float, absolute: float) -> bool:
    match one, other:
        case int() | float(), int() | float():
            return isclose(one, other, rel_tol=relative, abs_tol=absolute)
        case dict(), dict():
            names = {name for name in {*one, *other} if one.get(name) or other.get(name)}
            return all(_equal(one.get(name, 0), other.get(name, 0), relative, absolute) for name in names)
        case list() | tuple(), list() | tuple():
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(_equal(a, b, relative, absolute) for a, b in pairs)
    return bool(one == other)


def main(folders: Sequence[str]) -> int:
    found = 0
    for folder in folders:
        differences, left_out = compare(Path(folder))
        lines = (*differences, *(f"not compared: {reason}" for reason in left_out))
        print(f"{folder}: {len(differences)} differences", *lines, sep="\n  ")
        found += len(differences)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

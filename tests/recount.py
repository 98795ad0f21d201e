"""Computes what summary, page and report show of a run again, from the raw lines of its event log.

    python -m tests.recount RUN_FOLDER [...]

`Recount` shares no code with `miles_async/observability/`: it reads the JSON itself, has all events in memory, and
computes each number from the whole list, with intervals and sets instead of running sums. The command lists the numbers
that differ, and its exit code is 1 if there are any.

Which verdict held at a time is a judgement and is not repeated here. It is checked that all verdicts together cover the
time of the learner, and that summary and report agree on the time of each of them.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isclose, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

from miles_async.observability.page.status import status
from miles_async.observability.summary import summarize
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import RunView

Raw = dict[str, Any]
Interval = tuple[float, float]

REPORTS = ("TrainerPhaseChanged", "StepStarted", "PublishStarted", "PublishEnded", "Pulse")
"""Events by which a rollout worker shows that it serves the run."""
LONGEST_GAP = 60.0
"""Time between two reports above which the machine was suspended, or its clock was set."""
FIRST_REWARDS = 10
Z = 1.959964


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
    driver_started: float | None = None
    events: list[Raw] = field(default_factory=list)

    @cached_property
    def loop(self) -> list[float]:
        return [event["time"] for event in self.events if event["type"] == "TrainerPhaseChanged"]

    @cached_property
    def end(self) -> float:
        """The last report."""
        return max(event["time"] for event in self.events if event["type"] in (*REPORTS, "RunEnded"))


class Recount:
    """The numbers of one run."""

    def __init__(self, events: list[Raw]) -> None:
        self.events = events

    def of(self, *kinds: str) -> list[Raw]:
        return [event for event in self.events if event["type"] in kinds]

    def last(self, *kinds: str) -> Raw | None:
        return next((event for event in reversed(self.events) if event["type"] in kinds), None)

    @cached_property
    def lives(self) -> list[Life]:
        """The rollout workers of the run whose training loop has begun, in order."""
        lives, driver, reported, runs, begun = [Life("")], None, False, False, True
        for event in self.events:
            kind = event["type"]
            if kind == "RunStarted" and runs:
                driver = event["time"]
                continue
            runs = runs or kind == "RunStarted"
            restored = kind in ("RunContinued", "LearnerRestored") or event.get("reason") == "worker_lost"
            by_driver = driver is not None and (restored or (kind in REPORTS and event["time"] >= driver))
            if reported and begun and (restored or by_driver):
                lives.append(Life("rollout_worker"))
                begun = False
            if by_driver and len(lives) > 1:
                lives[-1].cause, lives[-1].driver_started, driver = "driver", driver, None
            elif kind == "LearnerRestored" and lives[-1].cause == "rollout_worker" and not begun:
                lives[-1].cause = "learner"
            lives[-1].events.append(event)
            reported, begun = reported or kind in REPORTS, begun or kind == "TrainerPhaseChanged"
        return [life for life in lives if life.loop]

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
        return {
            "training_seconds": seconds,
            "groups_per_second": groups(kept) / seconds,
            "tokens_per_second": tokens(kept) / seconds,
            "groups_per_second_gross": groups(finite) / seconds,
            "tokens_per_second_gross": tokens(finite) / seconds,
            "undone_batches": sum(not step[2] for step in steps),
            "undone_groups": groups(undone),
            "undone_tokens": tokens(undone),
            "lost_learner_seconds": sum(end["seconds"] for end, _, kept in steps if not kept)
            + sum(end - begin for begin, end in self.unfinished),
            "learner_idle_share": max(0.0, 1 - overlap(phase, [*trained_in, *lost]) / present),
            "engine_idle_share": max(0.0, 1 - self.busy(*self.training) / present),
            "staleness_max": max(ages, default=None),
            "staleness_histogram": {str(age): ages[age] for age in sorted(ages)},
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
        by_batch = {end["rollout"]: end["reward"] for end, _, kept in self.steps if kept}
        if max(by_batch) >= 256:
            return ends
        return {**ends, "rewards": [by_batch.get(rollout) for rollout in range(max(by_batch) + 1)]}

    # Tokens

    def tokens(self) -> Raw:
        longest = self.of("RunStarted")[0].get("longest_response", 0) * self.of("RunStarted")[0]["samples_per_group"]
        wasted, generated, at_most = Counter[str](), 0, 0
        removed: dict[int, int] = {}
        done_tokens, done_seconds, generating = 0, 0.0, 0.0
        entered: dict[int, float] = {}
        for index, event in enumerate(self.events):
            match event["type"]:
                case "GroupGenerated":
                    generated += event["response_tokens"]
                    done_tokens += event["response_tokens"]
                    done_seconds += event["generation_seconds"]
                case "Pulse" if event["generating"]:
                    generating = event["time"]
                case "SampleDiscarded":
                    generated += event["tokens"]
                    wasted[event["reason"]] += event["tokens"]
                case "SamplesRemoved":
                    removed[event["rollout"]] = event.get("tokens", 0)
                case "GroupMoved" if event["after"] == "in_flight":
                    entered[event["sequence"]] = event["time"]
                case "GroupMoved" if event["after"] == "dropped":
                    before, reason, tokens = event.get("before"), event["reason"], event.get("discarded_tokens", 0)
                    if before == "in_flight" and reason in ("worker_lost", "engine_lost", "router_lost"):
                        carried = event.get("kept_tokens", 0)
                        at_most += max(0, longest - carried)
                        if event["sequence"] in entered and done_seconds:
                            seconds = max(0.0, min(generating, event["time"]) - entered[event["sequence"]])
                            estimate = min(longest, round(seconds * done_tokens / done_seconds)) - carried
                            tokens = max(tokens, estimate, 0)
                    if before in ("fed", "in_flight") and reason != "filtered":
                        generated += tokens
                    if reason == "aborted":
                        reason = self._fate_of_abort(index)
                    if reason is not None:
                        wasted[reason] += tokens
        wasted["removed"] += sum(removed.values())
        wasted["leftover"] += self._unused_tokens()
        generated = max(generated, wasted.total())
        return {
            "generated_tokens": generated,
            "wasted_tokens": {reason: tokens for reason, tokens in sorted(wasted.items()) if tokens},
            "wasted_share": wasted.total() / max(generated, 1),
            "lost_tokens_at_most": at_most,
        }

    def _fate_of_abort(self, index: int) -> str | None:
        """Return whether aborted tokens were wasted or left over at the end of the run; None if that is not known."""
        for later in range(index, len(self.events)):
            if (kind := self.events[later]["type"]) in ("StepStarted", "RunEnded"):
                return "aborted" if kind == "StepStarted" else "leftover"
        return None

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
        steps = self.of("StepEnded")
        causes = ["driver"] * (len(started) - 1)
        causes += [life.cause for life in self.lives if life.cause in ("rollout_worker", "learner")]
        return {
            "run": started[0]["run"],
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
            **_accuracies(evaluated),
            **(self.work() | self.rewards() if steps else {}),
            **self.tokens(),
        }

    def page(self) -> Raw:
        moved = self.of("GroupMoved")
        ends = [event.get("reason") or event["after"] for event in moved if event["after"] in ("dropped", "published")]
        outcomes = Counter(ends)
        outcomes["published"] -= sum(event.get("before") == "published" for event in moved)
        outcomes += Counter(f"filtered: {event['reason']}" for event in self.of("GroupFiltered"))
        queue = self.last("QueueChanged", "Pulse", "BatchDrained")
        busy, phase, publish = self.last("EngineBusy"), self.last("TrainerPhaseChanged"), self.last("PublishEnded")
        newest = self.last("StepEnded", "LearnerRestored")
        return {
            "fed": sum(event.get("before") is None for event in moved),
            "outcomes": {name: count for name, count in outcomes.items() if count},
            "requests": busy["in_flight"] if busy is not None else 0,
            "queue.depth": queue["queue" if queue["type"] == "Pulse" else "depth"] if queue is not None else None,
            "rollouts_done": newest["rollout"] + 1 if newest is not None and self.of("StepEnded") else 0,
            "trainer.does": phase["to"] if phase is not None else None,
            "publish.version": publish["version"] if publish is not None else None,
            "slots.counts": tally(state for state in self.states.values() if state not in ("dropped", "published")),
            "staleness": self.work()["staleness_histogram"] if self.of("StepEnded") else {},
        }

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the learner."""
        seconds = Counter[str]()
        for life in self.lives:
            phase, until = None, None
            for event in life.events:
                if event["type"] not in (*REPORTS, "RunEnded"):
                    continue
                now = event["time"]
                if phase is not None and until is not None and 0 < now - until <= LONGEST_GAP:
                    seconds[phase] += now - until
                until = now if until is None or abs(now - until) > LONGEST_GAP else max(until, now)
                if event["type"] in ("TrainerPhaseChanged", "StepStarted", "RunEnded"):
                    phase = {"StepStarted": "step", "RunEnded": None}.get(event["type"], event.get("to"))
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
            **({"trainer:interrupted": away, "verdict:interrupted": away} if away else {}),
        }


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


def differences(folder: Path) -> Iterator[str]:
    """Describe each number that summary, page and report show otherwise than it follows from the raw events."""
    view = RunView(recent=False)
    for event in read_events(folder / "events.jsonl"):
        view.apply(event)
    recount = Recount(raw_events(folder))
    shown = summarize(view)
    yield from _differences("summary.json", recount.summary(), shown)
    yield from _differences("page", recount.page(), _flat(status(view, view.time)))
    figures = view.charts.figures("whole", view.until(view.time))
    drawn = {
        name: sum(value or 0.0 for value in curve["mean"]) * figures["width"]
        for name, curve in figures["series"].items()
    }
    # A curve has four significant digits.
    yield from _differences("report", recount.totals(), drawn, tolerance=2e-3)
    verdicts = {f"verdict:{name}": seconds for name, seconds in shown["verdict_seconds"].items()}
    yield from _differences("report", verdicts, drawn, tolerance=2e-3)
    covered = {"verdict_seconds": sum(recount.phases.values())}
    yield from _differences("summary.json", covered, {"verdict_seconds": sum(verdicts.values())}, tolerance=1e-4)


def _flat(values: Mapping[str, Any]) -> Raw:
    inner = {
        f"{name}.{key}": value for name in ("queue", "trainer", "slots") for key, value in (values[name] or {}).items()
    }
    return {**values, **inner, "publish.version": values["publish"].version if values["publish"] else None}


def _differences(where: str, recounted: Raw, shown: Mapping[str, Any], tolerance: float = 1e-6) -> Iterator[str]:
    for name, value in recounted.items():
        if not _equal(value, shown.get(name, 0 if value == 0 else None), tolerance):
            yield f"{where}: {name} is shown as {shown.get(name)}, and the events give {value}"


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    match one, other:
        case int() | float(), int() | float():
            return isclose(one, other, rel_tol=max(tolerance, 1e-6), abs_tol=max(tolerance, 1e-3 * tolerance))
        case dict(), dict():
            names = {name for name in {*one, *other} if one.get(name) or other.get(name)}
            return all(_equal(one.get(name, 0), other.get(name, 0), tolerance) for name in names)
        case list() | tuple(), list() | tuple():
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(_equal(a, b, max(tolerance, 1e-3)) for a, b in pairs)
    return bool(one == other)


def main(folders: Sequence[str]) -> int:
    found = 0
    for folder in folders:
        listed = list(differences(Path(folder)))
        print(f"{folder}: {len(listed)} differences", *listed, sep="\n  ")
        found += len(listed)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

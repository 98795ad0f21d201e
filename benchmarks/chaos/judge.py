"""Judges a run and the runs that resumed it by their event logs and checkpoints alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import Part, Strike
from miles_async.events import (
    EngineChanged,
    Event,
    GroupGenerated,
    GroupMoved,
    LearnerRestored,
    ProcessSilent,
    RouterChanged,
    RunEnded,
    StartupChanged,
    StepEnded,
    StepStarted,
    WarningRaised,
)
from miles_async.observability.trace.event_log import read_events
from tests.audit import Audit
from workers.heartbeats import PROBE_SECONDS

STALENESS_LIMIT = 2
SAMPLES_PER_PROMPT = 4
GIVEN_UP = frozenset({"filtered", "prompt_too_long", "nonfinite"})
"""Drop reasons that end a prompt. Prompts that fail in every attempt are dead letters."""
_PROCESSES: dict[Part, str] = {
    "rollout_worker": "rollout",
    "learner": "learner",
    "engine_actor": "engine",
    "engine_server": "engine",
    "router_actor": "router",
    "router_server": "router",
}
"""What the names of processes in heartbeats begin with."""
_FEED_INDEX = re.compile(r"sample_(\d+)_(\d+)")


@dataclass(kw_only=True)
class RunPart:
    """The event log of one run folder: the run from its start, or from the checkpoint of another run, to its end."""

    events: Sequence[Event]
    dead_letters: set[str] = field(default_factory=set)
    """Feed indexes of the prompts that failed in every attempt."""


def read_part(folder: Path) -> RunPart:
    """Read the event log in the folder of a run. A log that ends within a line is read up to this line."""
    letters = folder / "dead_letters.jsonl"
    named = {found[0] for found in re.finditer(_FEED_INDEX, letters.read_text())} if letters.exists() else set()
    log = folder / "events.jsonl"
    return RunPart(events=list(read_events(log)) if log.exists() else [], dead_letters=named)


def violations(parts: Sequence[RunPart], progress: dict[str, Any] | None, rollouts: int) -> list[str]:
    """Return what is wrong with a lineage. `progress` is that of its last checkpoint (`read_progress`).

    The auditor checks each part. Over all parts, each batch is trained once, each prompt at most once, and each prompt
    that was fed is trained, owed by the last checkpoint, given up by name, or not taken yet at its position.
    """
    found = []
    for number, part in enumerate(parts):
        audit = Audit(STALENESS_LIMIT)
        for event in part.events:
            audit.observe(event)
        found += [f"part {number}: {sentence}" for sentence in audit.violations]
    trained: Counter[str] = Counter()
    batches: Counter[int] = Counter()
    fed: set[str] = set()
    named: set[str] = set()
    trained_in: dict[str, int] = {}
    for part in parts:
        rollout = -1
        for event in part.events:
            match event:
                case StepStarted() if rollout == -1 and part is not parts[0]:
                    # The checkpoint of another run; what that run did afterwards does not count.
                    last = event.rollout - 1
                    batches = Counter({number: times for number, times in batches.items() if number <= last})
                    trained = Counter({prompt: 1 for prompt, number in trained_in.items() if number <= last})
                case StepEnded():
                    rollout = event.rollout
                    batches[rollout] += 1
                case LearnerRestored(rollout=last):
                    batches = Counter({number: times for number, times in batches.items() if number <= last})
                case GroupMoved(before=None):
                    fed.add(event.feed_index)
                case GroupMoved(after="trained"):
                    trained[event.feed_index] += 1
                    trained_in[event.feed_index] = rollout
                case GroupMoved(before="trained" | "published", after="queued"):
                    trained[event.feed_index] -= 1
                    trained_in.pop(event.feed_index, None)
                case GroupMoved(after="dropped") if event.reason in GIVEN_UP:
                    named.add(event.feed_index)
                case _:
                    pass
        named |= part.dead_letters
    trained, batches = +trained, +batches
    if twice := sorted(prompt for prompt, times in trained.items() if times > 1):
        found.append(f"{len(twice)} prompts were trained twice in the lineage: {', '.join(twice[:5])}")
    if wrong := [rollout for rollout in range(rollouts) if batches[rollout] != 1]:
        found.append(f"batches {wrong[:10]} were trained {[batches[rollout] for rollout in wrong[:10]]} times")
    if progress is None:
        found.append("the lineage has no checkpoint at its end")
        return found
    owed = {group["feed_index"] for group in progress["owed"]}
    data = progress["data"]
    position = data["epoch_id"], data["sample_index"] // SAMPLES_PER_PROMPT
    unaccounted = fed - trained.keys() - owed - named
    if lost := sorted(prompt for prompt in unaccounted if _number(prompt) < position):
        found.append(f"{len(lost)} prompts were lost: {', '.join(lost[:5])}")
    return found


def times_trained(events: Iterable[Event]) -> Counter[str]:
    """How often the weights at the end of a run were trained on each prompt. A rollback takes training back."""
    times: Counter[str] = Counter()
    for event in events:
        match event:
            case GroupMoved(after="trained"):
                times[event.feed_index] += 1
            case GroupMoved(before="trained" | "published", after="queued"):
                times[event.feed_index] -= 1
            case _:
                pass
    return +times


def _number(prompt: str) -> tuple[int, int]:
    """The epoch of a prompt and its number."""
    match = _FEED_INDEX.fullmatch(prompt)
    assert match is not None, prompt
    return int(match[1]), int(match[2])


def detected(parts: Sequence[RunPart], strike: Strike, struck: float, ended: float | None) -> float | None:
    """Seconds from a strike until the run reported a loss, or ended with an error at `ended`; None if neither.

    On a loaded machine, another process may be silent at the same time, and that does not count.
    """
    process = _PROCESSES.get(strike.part, "")
    for event in chain.from_iterable(part.events for part in parts):
        after = event.time - struck
        match event:
            case ProcessSilent(seconds=silence):
                reports = 0 < silence < after + PROBE_SECONDS and event.process.startswith(process)
            case EngineChanged():
                reports = event.state != "routed"
            case _:
                reports = isinstance(event, WarningRaised | RouterChanged | RunEnded)
        if reports and after > 0:
            return after
    return None if ended is None else ended - struck


def start_seconds(parts: Sequence[RunPart]) -> dict[str, float]:
    """Seconds that each process needed at the first start, by name."""
    found: dict[str, float] = {}
    for event in chain.from_iterable(part.events for part in parts):
        if isinstance(event, StartupChanged) and event.seconds is not None:
            found.setdefault(event.part, event.seconds)
    return found


def recovered(parts: Sequence[RunPart], struck: float) -> float | None:
    """Seconds from a strike until a group was generated, and a batch trained, that both began after it."""
    generated = trained = None
    for part in parts:
        step = 0.0
        for event in part.events:
            match event:
                case StepStarted():
                    step = event.time
                case StepEnded() if step > struck and trained is None:
                    trained = event.time
                case GroupGenerated() if generated is None:
                    if event.time - event.generation_seconds - event.reward_seconds > struck:
                        generated = event.time
                case _:
                    pass
    return None if generated is None or trained is None else max(generated, trained) - struck

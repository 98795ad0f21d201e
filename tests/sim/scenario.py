"""A scenario: a YAML file that names settings, a world and variants of both, and claims what comes out.

base:      sections of the configuration, and `world`
variants:  by name, what each changes
quick:     what the tests change, so that they take seconds
claims:    {row: window, column: age, at_most: 4}, or at_most: 0.5 `of` another row
baseline:  the row with whose seconds per batch the printed speed-up compares
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, mode
from typing import Any
from zlib import crc32

import yaml

from miles_async.config.schema import RunConfig
from miles_async.events import AdmissionBlocked, BatchDrained, Event, PublishEnded, StepEnded, StepStarted, encode
from miles_async.observability.view import RunView
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group
from tests.sim.agents import AgentModel, AgentWorld
from tests.sim.alternative_windows import UNBOUNDED, PlainWindow
from tests.sim.engines import EngineModel
from tests.sim.latency import latency_of
from tests.sim.world import Trace, World

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one variant. Over several seeds they are means, and for violations the worst values."""

    wall: float
    """Seconds of the run, on the virtual clock."""
    batch_seconds: float
    """`wall` per batch trained."""
    stall: float
    """Seconds the trainer waited for groups, its first batch left out."""
    stall_share: float
    engines_idle: float
    """Fraction of the time in which no request is at the engines."""
    learner_does: str
    """What the learner spends most of its time with: `step`, or what it waits for (`diagnosis/verdict.py`)."""
    blocked_by: str
    """The limit that blocks admission for most of the time (`scheduling/admission.py`)."""
    rollout: float
    """Seconds that the engines would need with all permits in use all the time; 0 without a limit."""
    training: float
    over_ideal: float
    """Wall time over max(rollout, training), less 1."""
    bypasses: int
    age: int
    mean_age: float
    recycled: float
    """Groups recycled as stale, per group trained."""
    wasted: float
    """Fraction of the generated tokens that were not trained."""
    trained: int
    lost: int
    """Prompts that are neither trained nor filtered, dead_lettered, in the feed or under way at the end."""
    violations: int
    cpu: float
    """Seconds of CPU time that simulating and auditing took, per process."""


@dataclass(slots=True)
class Tally:
    """Folds the events, and keeps none."""

    waited: float = 0.0
    training: float = 0.0
    drains: int = 0
    ages: int = 0
    blocked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which admission was blocked, by the limit."""
    view: RunView = field(default_factory=lambda: RunView(recent=False))

    def emit(self, event: Event) -> None:
        self.view.apply(event)
        match event:
            case BatchDrained():
                self.waited += event.waited if self.drains else 0.0
                self.drains += 1
            case StepStarted():
                self.ages += sum(event.staleness)
            case StepEnded():
                self.training += event.seconds
            case AdmissionBlocked():
                self.blocked[event.cause] += event.seconds
            case _:
                pass


class Digest:
    """A hash of every event as it would stand in `events.jsonl`."""

    def __init__(self) -> None:
        self._hash = sha256()

    def emit(self, event: Event) -> None:
        self._hash.update(encode(event) + b"\n")

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    seeds: int
    variants: Mapping[str, Mapping[str, Any]]
    claims: list[dict[str, Any]]
    columns: list[str]
    baseline: str | None

    @staticmethod
    def load(path: Path, *, quick: bool = False) -> Scenario:
        text = yaml.safe_load(path.read_text())
        changes = text.get("quick", {}) if quick else {}
        return Scenario(
            name=path.stem,
            title=text["title"],
            seeds=1 if quick else text.get("seeds", 1),
            variants={name: merge(merge(text["base"], over or {}), changes) for name, over in text["variants"].items()},
            claims=text.get("claims", []),
            columns=text["columns"],
            baseline=text.get("baseline"),
        )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`, mapping by mapping; a mapping that names a `kind` replaces the one before it."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and "kind" not in value:
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def world_of(settings: Mapping[str, Any], seed: int, *sinks: Any) -> World:
    """A world with the settings of a variant. It keeps no events; `sinks` receive them."""
    world = dict(settings["world"])
    kept, window, slots = world.pop("kept", 1.0), world.pop("window", None), world.pop("slots", None)
    kind: type[World] = World
    if "agents" in world:
        agents = dict(world["agents"])
        if "tool_seconds" in agents:
            agents["tool_seconds"] = latency_of(agents["tool_seconds"])
        kind, world["agents"] = AgentWorld, AgentModel(**agents)
    else:
        world["latency"] = latency_of(world["latency"], world.pop("stuck", None))

    def keep(group: Group) -> bool:
        return crc32(f"{seed} {group.feed_index}".encode()) < kept * 2**32

    built = kind(
        config=RunConfig.model_validate({key: value for key, value in settings.items() if key != "world"}),
        schedule=Schedule(world.pop("schedule", "fully_async")),
        engines=EngineModel(**world.pop("engines", {})),
        keep=keep,
        seed=seed,
        sinks=sinks,
        trace=Trace(PublishEnded),
        keeps_batches=False,
        **world,
    )
    if window == "plain":
        built.keep = lambda group: True
        built.window = lambda size: PlainWindow(
            size, keep, lambda group: built.service.lifecycle.drop(group, DropReason.FILTERED)
        )
    if slots is not None:
        # Comparisons: the same slots whatever the policy, and no gate to hide what the policy lets through.
        built.bounds = replace(
            built.bounds,
            slots=slots,
            room=slots,
            window={"greedy": UNBOUNDED, "strict": 1}.get(window or "", built.bounds.window),
        )
    return built


def play(settings: Mapping[str, Any], seed: int) -> Row:
    began = time.process_time()
    tally = Tally()
    world = world_of(settings, seed, tally).run()
    audit, concurrency = world.audit, world.engines.concurrency
    rollout = world.fleet.worked_seconds / concurrency if concurrency else 0.0
    learner = tally.view.learner.seconds
    return Row(
        wall=world.seconds,
        batch_seconds=world.seconds / tally.drains,
        stall=tally.waited,
        stall_share=tally.waited / world.seconds,
        engines_idle=1 - world.fleet.busy_seconds / world.seconds,
        learner_does=max(learner, key=lambda label: learner[label]),
        blocked_by=max(tally.blocked, key=lambda cause: tally.blocked[cause], default=""),
        rollout=rollout,
        training=tally.training,
        over_ideal=world.seconds / max(rollout, tally.training) - 1,
        bypasses=audit.greatest_bypass,
        age=audit.greatest_age,
        mean_age=tally.ages / audit.trained,
        recycled=audit.recycled / audit.trained,
        wasted=tally.view.tokens.share,
        trained=audit.trained,
        lost=len(audit.owed - world.returned - world.dead_letters.prompts),
        violations=len(audit.violations),
        cpu=time.process_time() - began,
    )


def jobs(scenario: Scenario) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    for name, settings in scenario.variants.items():
        for seed in range(scenario.seeds):
            yield name, settings, seed


def combine(rows: list[Row]) -> Row:
    """Combines rows of the same variant: sums of counts, the worst of bounded values, means of all others."""
    values = {column: [asdict(row)[column] for row in rows] for column in asdict(rows[0])}
    folds: dict[str, Any] = {"bypasses": max, "age": max, "trained": sum, "lost": sum, "violations": sum}
    folds |= {"learner_does": mode, "blocked_by": mode}
    folded: dict[str, Any] = {column: folds.get(column, fmean)(several) for column, several in values.items()}
    return Row(**folded)


def broken(claims: list[dict[str, Any]], rows: Mapping[str, Row]) -> list[str]:
    """The claims that do not hold, as sentences."""
    sentences = []
    for claim in claims:
        value = asdict(rows[claim["row"]])[claim["column"]]
        unit = asdict(rows[claim["of"]])[claim["column"]] if "of" in claim else 1.0
        low, high = claim.get("at_least", float("-inf")), claim.get("at_most", float("inf"))
        if not low * unit <= value <= high * unit:
            sentences.append(f"{claim['row']}: {claim['column']} is {value:.3g}, claimed: {claim}")
    return sentences

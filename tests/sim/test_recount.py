"""What summary, page and report show follows from the raw events, also after restarts."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.atomic_files import write_atomically
from miles_async.events import (
    Event,
    GroupGenerated,
    LearnerRestored,
    ProcessSilent,
    Pulse,
    RunContinued,
    RunEnded,
    SampleDiscarded,
    encode,
)
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.page.report import RunData, report
from miles_async.observability.state.learner import Work
from miles_async.observability.summary import write_summary
from miles_async.observability.view import RunView
from miles_async.pipeline.run_ports import Ports
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Verdict
from tests import recount
from tests.configuration import run_config
from tests.recount import Comparison
from tests.sim.agents import AgentModel, AgentWorld
from tests.sim.engines import EngineModel
from tests.sim.lost_workers import LostWorkers
from tests.sim.test_advice import CASES, CONFIG
from tests.sim.test_lost_workers import config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World

RECORDED = Path(__file__).parent / "recorded_runs"
"""A run on real engines. Its driver was killed twice, with router and engine, and two rollout workers were lost."""
EQUAL = Comparison([], [])


class Driver:
    """A sink that writes event log, summary and report, as the driver does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._view = RunView()
        self._log = (folder / "events.jsonl").open("wb")

    def emit(self, event: Event) -> None:
        self._log.write(encode(event) + b"\n")
        self._view.apply(event)

    def end(self) -> None:
        self.emit(RunEnded(time=self._view.time + 0.25, reason="done"))
        self._log.close()
        write_summary(self._view, self._folder / "summary.json")
        write_atomically(self._folder / "report.html", report([RunData(self._folder, {}, self._view)]))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


@pytest.fixture
def resumed_twice(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes(gzip.decompress((RECORDED / "resumed_twice.jsonl.gz").read_bytes()))
    return tmp_path


def verdicts(folder: Path) -> dict[str, float]:
    seconds: dict[str, float] = json.loads((folder / "summary.json").read_bytes())["verdict_seconds"]
    return seconds


def change(folder: Path, kind: type[Event], **values: Any) -> None:
    """Change all events of a type in the log of a run."""
    log = folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    changed = [event | values if event["type"] == kind.__name__ else event for event in events]
    log.write_text("".join(json.dumps(event) + "\n" for event in changed))


def test_a_real_run_that_was_resumed_twice_and_rolled_back_shows_what_its_events_say(resumed_twice: Path) -> None:
    events = recount.Recount(recount.raw_events(resumed_twice))
    figures = events.summary()
    assert figures["restarts"] == {"driver": 2, "rollout_worker": 2}
    assert figures["undone_batches"] == 1
    assert figures["dropped"].keys() >= {"engine_lost", "worker_lost"}
    assert len(figures["verdict_seconds"]) > 3
    assert recount.compare(resumed_twice) == EQUAL


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_run_that_loses_rollout_workers_and_learners_shows_what_its_events_say(
    seed: int, tmp_path: Path, driver: Driver
) -> None:
    settings = config(save="anywhere", save_interval=4)
    world = LostWorkers(
        config=settings,
        kills=3,
        longest_life=900,
        learner_kills=3,
        train_seconds=2.0,
        seed=seed,
        sinks=(driver,),
    ).run()
    driver.end()
    assert world.trace.of(RunContinued)
    assert world.trace.of(LearnerRestored)
    assert recount.compare(tmp_path) == EQUAL


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_bottleneck_has_the_verdict_for_as_long_as_its_events_say(
    name: str, tmp_path: Path, driver: Driver
) -> None:
    case = CASES[name]
    kind = AgentWorld if "agents" in case.world else World
    kind(config=run_config(**CONFIG | {"num_rollout": 8} | case.config), sinks=(driver,), **case.world).run()
    driver.end()
    assert case.bottleneck in verdicts(tmp_path)
    assert recount.compare(tmp_path) == EQUAL


def test_a_run_without_a_bottleneck_is_balanced_for_as_long_as_its_events_say(tmp_path: Path, driver: Driver) -> None:
    World(
        config=run_config(**CONFIG | {"num_rollout": 20}),
        latency=lambda group, rng: 0.98,
        train_seconds=1.0,
        sinks=(driver,),
    ).run()
    driver.end()
    assert Bottleneck.BALANCED in verdicts(tmp_path)
    assert recount.compare(tmp_path) == EQUAL


def test_a_run_that_wastes_tokens_is_waste_bound_for_as_long_as_its_events_say(tmp_path: Path, driver: Driver) -> None:
    settings = run_config(rollout_batch_size=4, num_rollout=6, n_samples_per_prompt=8)
    AgentWorld(config=settings, whole_groups=True, agents=AgentModel(failure_rate=0.1), sinks=(driver,)).run()
    driver.end()
    assert Bottleneck.WASTE in verdicts(tmp_path)
    assert recount.compare(tmp_path) == EQUAL


class ChangingWorld(World):
    """Other programs use the processors in every second half minute, and the filter drops most of some prompts."""

    def _ports(self, clock: VirtualClock) -> Ports:
        return replace(
            super()._ports(clock),
            processors=lambda: 0.97 if clock.time() % 60 < 30 else 0.1,
            dynamic_filter=lambda group: Verdict.of((group.sequence or 0) % 160 < 80 or (group.sequence or 0) % 9 < 4),
        )


def test_a_run_whose_bottleneck_changes_has_each_verdict_for_as_long_as_its_events_say(
    tmp_path: Path, driver: Driver
) -> None:
    ChangingWorld(
        config=run_config(**CONFIG | {"num_rollout": 24}), latency=lambda group, rng: 4.0, sinks=(driver,)
    ).run()
    driver.end()
    assert {Bottleneck.FILTER, Bottleneck.IN_FLIGHT, Bottleneck.MACHINE} <= verdicts(tmp_path).keys()
    assert recount.compare(tmp_path) == EQUAL


@pytest.mark.parametrize("generation, training", [(3.0, 1.0), (1.0, 3.0)])
def test_a_run_whose_parts_alternate_has_the_verdicts_that_its_events_say(
    generation: float, training: float, tmp_path: Path, driver: Driver
) -> None:
    World(
        config=run_config(**CONFIG | {"num_rollout": 8}),
        schedule=Schedule.SYNCHRONOUS,
        latency=lambda group, rng: generation,
        train_seconds=training,
        sinks=(driver,),
    ).run()
    driver.end()
    assert recount.compare(tmp_path) == EQUAL


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_run_whose_wall_clock_was_set_has_each_verdict_for_as_long_as_its_events_say(
    step: float, tmp_path: Path, driver: Driver
) -> None:
    World(config=config(), wall_clock_steps={10.0: step}, engines=EngineModel(concurrency=8), sinks=(driver,)).run()
    driver.end()
    seconds = recount.Recount(recount.raw_events(tmp_path)).verdict_seconds
    assert verdicts(tmp_path) == pytest.approx(seconds, abs=1e-3)


def test_the_silence_of_a_process_decides_the_verdict_for_as_long_as_the_events_say(
    tmp_path: Path, driver: Driver
) -> None:
    class Heartbeats:
        """Learner, and later an engine, do not answer for some seconds."""

        def __init__(self) -> None:
            self._beats = 0

        def emit(self, event: Event) -> None:
            if isinstance(event, Pulse):
                self._beats += 1
                for process, begin in (("learner-0", 4), ("engine-1", 12), ("learner-0", 14)):
                    silent = 0.5 * (self._beats - begin)
                    if 0 < silent <= 8.0:
                        driver.emit(ProcessSilent(time=event.time, process=process, seconds=silent % 8.0))

    World(config=config(), latency=lambda group, rng: 1.0, sinks=(driver, Heartbeats())).run()
    driver.end()
    assert {Bottleneck.TRAINER, Bottleneck.ROLLOUT} <= verdicts(tmp_path).keys()
    assert recount.compare(tmp_path) == EQUAL


@pytest.mark.parametrize(
    "settings", [{}, {"reward_seconds": 2.0}, {"keep": lambda group: (group.sequence or 0) % 3 == 0}]
)
def test_a_simulated_run_without_restarts_shows_what_its_events_say(
    settings: dict[str, Any], tmp_path: Path, driver: Driver
) -> None:
    World(config=config(), sinks=(driver,), **settings).run()
    driver.end()
    assert recount.main([str(tmp_path)]) == 0


def test_a_number_that_does_not_follow_from_the_events_is_listed(
    resumed_twice: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("miles_async.observability.state.learner.Steps.kept", Work(groups=7))
    assert recount.main([str(resumed_twice)]) == 1
    assert "summary: groups_per_second is shown as" in capsys.readouterr().out


@pytest.mark.parametrize("constant, value", [("NEGLIGIBLE", 0.9), ("NOTABLE_WASTE", 0.01), ("MOSTLY_FILTERED", -1.0)])
def test_a_verdict_that_holds_at_other_times_than_the_events_say_is_listed(
    constant: str, value: float, resumed_twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"miles_async.observability.diagnosis.verdict.{constant}", value)
    differences = recount.compare(resumed_twice).differences
    assert any(line.startswith("summary: verdict_seconds is shown as") for line in differences)


def test_a_verdict_in_the_files_of_a_run_that_its_events_contradict_is_listed(tmp_path: Path, driver: Driver) -> None:
    World(config=config(), latency=lambda group, rng: 4.0, sinks=(driver,)).run()
    driver.end()
    assert recount.compare(tmp_path) == EQUAL
    change(tmp_path, Pulse, processors=0.97)
    differences = recount.compare(tmp_path).differences
    for where in ("summary.json on disk, summary", "report.html on disk, summary"):
        assert any(line.startswith(f"{where}: verdict_seconds is shown as") for line in differences)
    assert any(line.startswith("report.html on disk, curves: verdict:machine-bound") for line in differences)
    assert all("on disk" in line for line in differences), "a view of the changed events agrees with them"


def test_the_summary_of_a_run_that_was_resumed_later_is_that_of_the_events_before_it(
    tmp_path: Path, driver: Driver
) -> None:
    World(config=config(), sinks=(driver,)).run()
    driver.end()
    log = tmp_path / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    started = json.loads(lines[0]) | {"time": json.loads(lines[-1])["time"] + 5.0}
    log.write_bytes(b"".join(lines) + json.dumps(started).encode() + b"\n")
    assert recount.compare(tmp_path) == EQUAL


def test_a_summary_that_cannot_be_compared_is_named(
    tmp_path: Path, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    World(config=config(num_rollout=4), sinks=(driver,)).run()
    driver.end()
    file = tmp_path / "summary.json"
    summary = json.loads(file.read_bytes())
    file.write_text(json.dumps(summary | {"of_another_version": 1}))
    assert recount.main([str(tmp_path)]) == 0
    assert "not compared: summary.json: another version wrote the file" in capsys.readouterr().out
    file.write_text(json.dumps(summary | {"ended": summary["started"]}))
    assert recount.main([str(tmp_path)]) == 0
    assert "not compared: summary.json: the file was written before the run ended" in capsys.readouterr().out


@pytest.mark.parametrize("restart", [1, 2])
def test_a_driver_that_ends_before_its_rollout_worker_reports_changes_only_the_number_of_restarts(
    resumed_twice: Path, tmp_path: Path, restart: int
) -> None:
    events = recount.raw_events(resumed_twice)
    position = [position for position, event in enumerate(events) if event["type"] == "RunStarted"][restart]
    last, started = events[position - 1]["time"], events[position]
    failed = [started | {"time": last + 5.0}, {"type": "RunEnded", "time": last + 6.0, "reason": "no memory"}]
    changed = [*events[:position], *failed, *events[position:]]
    before, after = recount.Recount(events), recount.Recount(changed)
    assert after.verdict_seconds == before.verdict_seconds
    assert after.summary() == before.summary() | {"restarts": {"driver": 3, "rollout_worker": 2}}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in changed))
    assert recount.compare(tmp_path) == EQUAL


def test_tokens_of_the_time_before_the_wall_clock_was_set_back_are_not_recent(tmp_path: Path, driver: Driver) -> None:
    class Waste:
        """Makes the driver see much waste until the clock is set back."""

        def emit(self, event: Event) -> None:
            if isinstance(event, GroupGenerated) and event.time > 0:
                discarded = SampleDiscarded(
                    time=event.time,
                    sequence=event.sequence,
                    sample=None,
                    reason="failed",
                    tokens=event.response_tokens,
                    error="the tool failed",
                )
                driver.emit(discarded)

    World(
        config=config(), wall_clock_steps={10.0: -300.0}, engines=EngineModel(concurrency=8), sinks=(driver, Waste())
    ).run()
    driver.end()
    seconds = recount.Recount(recount.raw_events(tmp_path)).verdict_seconds
    assert verdicts(tmp_path) == pytest.approx(seconds, abs=1e-3)

"""What summary, page and report show follows from the raw events, also after restarts."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from miles_async.events import Event, LearnerRestored, RunContinued, encode
from miles_async.observability.state.learner import Work
from tests import recount
from tests.sim.lost_workers import LostWorkers
from tests.sim.test_lost_workers import config
from tests.sim.world import World

RECORDED = Path(__file__).parent / "recorded_runs"
"""A run on real engines. Its driver was killed twice, with router and engine, and two rollout workers were lost."""


class Log:
    """A sink that writes an event log."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._path.touch()

    def emit(self, event: Event) -> None:
        with self._path.open("ab") as file:
            file.write(encode(event) + b"\n")


@pytest.fixture
def resumed_twice(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes(gzip.decompress((RECORDED / "resumed_twice.jsonl.gz").read_bytes()))
    return tmp_path


def test_a_real_run_that_was_resumed_twice_and_rolled_back_shows_what_its_events_say(resumed_twice: Path) -> None:
    events = recount.Recount(recount.raw_events(resumed_twice))
    figures = events.summary()
    assert figures["restarts"] == {"driver": 2, "rollout_worker": 2}
    assert figures["undone_batches"] == 1
    assert figures["dropped"].keys() >= {"engine_lost", "worker_lost"}
    assert list(recount.differences(resumed_twice)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_run_that_loses_rollout_workers_and_learners_shows_what_its_events_say(
    seed: int, tmp_path: Path
) -> None:
    settings = config(save="anywhere", save_interval=4)
    world = LostWorkers(
        config=settings,
        kills=3,
        longest_life=900,
        learner_kills=3,
        train_seconds=2.0,
        seed=seed,
        sinks=(Log(tmp_path),),
    ).run()
    assert world.trace.of(RunContinued)
    assert world.trace.of(LearnerRestored)
    assert list(recount.differences(tmp_path)) == []


@pytest.mark.parametrize(
    "settings", [{}, {"reward_seconds": 2.0}, {"keep": lambda group: (group.sequence or 0) % 3 == 0}]
)
def test_a_simulated_run_without_restarts_shows_what_its_events_say(settings: dict[str, Any], tmp_path: Path) -> None:
    World(config=config(), sinks=(Log(tmp_path),), **settings).run()
    assert recount.main([str(tmp_path)]) == 0


def test_a_number_that_does_not_follow_from_the_events_is_listed(
    resumed_twice: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("miles_async.observability.state.learner.Steps.kept", Work(groups=7))
    assert recount.main([str(resumed_twice)]) == 1
    assert "summary.json: groups_per_second is shown as" in capsys.readouterr().out

"""A run loses two rollout workers, then Ray's raylet, then its driver. It is started again twice and trains to its end.

`make chaos` draws such cases by the hundred. Most of the time goes into starting runs, so one run shows all losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.chaos.cases import Strike
from benchmarks.chaos.play import Outcome, play
from miles_async.events import Event, LearnerRestored, RunEnded, RunStarted
from miles_async.observability.snapshot import read_snapshot
from miles_async.observability.trace.event_log import read_events
from tests.recount import compare

STRIKES = (
    # The first of the learner's two ranks has received its part of the second batch, and the other rank has not.
    Strike(part="rollout_worker", kind="kill", point="ranks.give_batch.before", call=4, delay=0.0),
    Strike(part="rollout_worker", kind="kill", point="channel.stage.before", call=3, delay=0.0),
    Strike(part="raylet", kind="kill", point=None, call=8, delay=0.0),
    Strike(part="driver", kind="kill", point=None, call=4, delay=0.0, earlier_ends=1),
)


@dataclass
class Continued:
    """A run that was continued twice with `--resume auto`."""

    folder: Path
    outcome: Outcome
    events: list[Event]
    """All events in the folder of the run."""

    def output(self, part: int) -> str:
        return "".join((self.folder / f"part-{part}" / name).read_text() for name in ("stdout", "stderr"))


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Continued:
    folder = tmp_path_factory.mktemp("continued")
    outcome = play(STRIKES, folder, rollouts=24)
    [log] = (folder / "runs").glob("2*/events.jsonl")
    return Continued(folder, outcome, list(read_events(log)))


def test_no_process_is_left_and_no_prompt_is_lost_or_trained_twice(continued: Continued) -> None:
    assert continued.outcome.violations == []
    assert continued.outcome.left == []


def test_a_rollout_worker_that_dies_is_replaced_and_leaves_no_rank_of_the_learner_waiting(continued: Continued) -> None:
    """The first one dies between two ranks, the second one while it stages weights."""
    *workers, raylet, _ = continued.outcome.strikes
    assert raylet.time is not None
    for worker in workers:
        assert worker.time is not None
        assert worker.recovered is not None
        assert worker.recovered < raylet.time - worker.time
    restored = [event.time for event in continued.events if isinstance(event, LearnerRestored)]
    assert min(restored) > raylet.time, "the learner goes on without a rollout worker"


def test_a_run_whose_raylet_is_killed_ends_with_a_sentence(continued: Continued) -> None:
    lost, killed = continued.outcome.ends
    assert lost.startswith("exit 1: train_async.py: ")
    assert killed.startswith("exit -9: ")


def test_a_run_that_is_started_again_continues_in_its_folder(continued: Continued) -> None:
    [folder] = (continued.folder / "runs").glob("*-chain_sum")
    assert continued.outcome.parts == 3
    for part in (1, 2):
        assert f"run {folder.name} is continued" in continued.output(part)
    assert sum(isinstance(event, RunStarted) for event in continued.events) == 3
    assert [event.reason for event in continued.events if isinstance(event, RunEnded)][-1:] == ["done"]


def test_what_a_continued_run_shows_follows_from_its_raw_events(continued: Continued) -> None:
    """Its second and its third driver started from a snapshot."""
    [folder] = (continued.folder / "runs").glob("*-chain_sum")
    assert read_snapshot(folder / "snapshot.bin") is not None
    assert compare(folder).differences == []


def test_a_continued_run_starts_from_a_checkpoint(continued: Continued) -> None:
    restored = [event.rollout for event in continued.events if isinstance(event, LearnerRestored)]
    assert len(restored) == 2
    assert all(rollout % 3 == 2 for rollout in restored), "a checkpoint is written after every third batch"

"""The only engine and the router are killed in the middle of a run on the real stack: it waits, and goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import ray

from miles_async.observability.events import EngineChanged, Event, GroupGenerated, GroupMoved, StepEnded
from tests.stack.conftest import Played, Stack
from tests.stack.signals import Signals

ROLLOUTS, BATCH = 9, 8
pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def killed(stack: Stack) -> Played:
    """In turns, so that the step's weights are those that sampled: a kill during rollout 3 and another during 6."""
    around = stack.cluster.surroundings
    router = ray.get(around.router_actor.pid.remote())
    kills = iter([(3, around.engines[0].pid, signal.SIGKILL), (6, router, signal.SIGKILL)])
    sizes = ("--num-rollout", str(ROLLOUTS), "--rollout-batch-size", str(BATCH), "--eval-size", "16")
    return stack.play("train.py", *sizes, watch=Signals(kills).watch)


def first(run: Played, kind: type[Event], fits: Callable[[Event], bool]) -> Event:
    return next(event for event in run.of(kind) if fits(event))


def test_every_batch_is_trained_and_no_group_is_lost(killed: Played) -> None:
    assert [event.rollout for event in killed.of(StepEnded)] == list(range(ROLLOUTS))
    assert killed.violations == []
    moves = killed.of(GroupMoved)
    lost = {event.feed_index for event in moves if event.reason == "engine_lost"}
    assert lost, "nothing was in flight when the engine was killed"
    assert lost <= {event.feed_index for event in moves if event.after == "published"}
    assert not (killed.folder.path / "dead_letters.jsonl").exists()


def test_the_engine_is_fenced_and_comes_back_with_the_current_weights(killed: Played) -> None:
    changes = [(event.state, event.version) for event in killed.of(EngineChanged)]
    assert changes == [("routed", None), ("fenced", 3), ("routed", 3)]


def test_every_token_was_drawn_from_the_weights_that_it_names(killed: Played) -> None:
    """The weights of the engine's start are others: a step at `lr` moves log-probabilities by more than this."""
    assert all(event.metrics["grad_norm"] > 0 for event in killed.of(StepEnded))
    assert max(event.metrics["logprob_gap_max"] for event in killed.of(StepEnded)) < 1e-4


def test_generation_goes_on_as_soon_as_the_engine_is_back(killed: Played) -> None:
    fenced, back = [event.time for event in killed.of(EngineChanged)][1:]
    after = first(killed, GroupGenerated, lambda event: event.time > fenced)
    assert after.time - back < 10


def test_colocated_engines_come_back_with_weights_and_cache_as_they_should_be(stack: Stack) -> None:
    run = stack.play("train.py", "--colocate", "--num-rollout", "3", "--rollout-batch-size", "8", "--eval-size", "0")
    assert len(run.of(StepEnded)) == 3
    assert run.violations == []
    assert run.of(EngineChanged) == run.of(EngineChanged)[:1], "no engine was lost on the way"
    assert max(event.metrics["logprob_gap_max"] for event in run.of(StepEnded)) < 1e-4

"""The main job on the real stack, played three times on one cluster: fully asynchronous, in turns, one step off."""

from __future__ import annotations

import pytest

from miles_async.events import (
    BatchDrained,
    Evaluated,
    GroupGenerated,
    PublishEnded,
    PublishStarted,
    RunStarted,
    StepEnded,
    StepStarted,
)
from tests.stack.conftest import Played, Stack

ROLLOUTS, PUBLISHES = 10, 20
"""Batches of the first run, and publishes between the first and the last batch that the second run compares."""
OVER_SAMPLED = ("--rollout-batch-size", "16", "--over-sampling-batch-size", "24", "--n-samples-per-prompt", "8")
SLOW_ROLLOUT = ("--sglang-server-concurrency", "32")
"""A quarter of a batch is sampled at a time."""
HELD = ("--custom-rm-path", "tests.stack.user_functions.held_until_a_publish", "--no-progress-abort-seconds", "60")
"""The second batch cannot be complete before the weights of the first step are live, on any machine."""


@pytest.fixture(scope="module")
def fully_async(stack: Stack) -> Played:
    return stack.play("train_async.py", "--num-rollout", str(ROLLOUTS), *OVER_SAMPLED, *SLOW_ROLLOUT, *HELD)


@pytest.fixture(scope="module")
def in_turns(stack: Stack) -> Played:
    small = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "8")
    return stack.play("train.py", "--num-rollout", str(PUBLISHES + 1), *small)


@pytest.fixture(scope="module")
def one_step_off(stack: Stack) -> Played:
    function = "miles_async.rollout.sglang_rollout.generate_rollout"
    flags = ("--num-rollout", "5", "--rollout-batch-size", "8", "--rollout-function-path", function)
    return stack.play("train_async.py", *flags)


def test_every_batch_trains_and_every_version_goes_live(fully_async: Played) -> None:
    assert [event.rollout for event in fully_async.of(StepEnded)] == list(range(ROLLOUTS))
    assert all(event.finite for event in fully_async.of(StepEnded))
    publishes = fully_async.of(PublishEnded)
    assert [event.version for event in publishes] == list(range(ROLLOUTS + 1))
    assert all(event.live and event.fenced == [] for event in publishes)


def test_every_step_reports_tokens_per_second_and_memory(fully_async: Played) -> None:
    for step in fully_async.of(StepEnded):
        assert step.metrics["tokens_per_second"] == pytest.approx(step.tokens / step.seconds)
        # A process with torch and Megatron in it, on a machine of ordinary size.
        assert 0.1 < step.metrics["memory_gib"] < 1000


def test_every_publish_reports_the_parts_of_its_pause(fully_async: Played) -> None:
    for event in fully_async.of(PublishEnded):
        assert min(event.stopping_seconds, event.write_seconds, event.resuming_seconds) > 0
        assert sum(event.pause.values()) == pytest.approx(event.paused_seconds)


def test_the_audit_finds_no_group_lost_trained_twice_or_too_old(fully_async: Played) -> None:
    assert fully_async.violations == []


def test_tokens_are_sampled_during_an_optimizer_step(fully_async: Played) -> None:
    """By weights that went live during the step, or so late in it that no answer was on its way all that time.

    The first is seen where training is the slower half, the second where generation is.
    """
    live = {event.version: event.time for event in fully_async.of(PublishEnded)}
    groups = [(group.generated, live[group.versions[1]]) for group in fully_async.of(GroupGenerated)]
    for step in fully_async.of(StepEnded):
        halfway = (step.started + step.time) / 2
        arrived = [weights for time, weights in groups if step.started < time < step.time]
        late = [time for time, _ in groups if halfway < time < step.time]
        if late or any(weights > step.started for weights in arrived):
            return
    pytest.fail("every token was sampled between the steps")


def test_a_publish_completes_while_the_queue_is_empty(fully_async: Played) -> None:
    assert any(event.version == 1 and event.queue == 0 for event in fully_async.of(PublishEnded))


def test_a_publish_does_not_wait_for_the_next_batch(fully_async: Played) -> None:
    """The version of a step becomes live while no group of the next batch can finish."""
    [live] = [event.time for event in fully_async.of(PublishEnded) if event.version == 1]
    [drained] = [event.time for event in fully_async.of(BatchDrained) if event.rollout == 1]
    assert live < drained


def test_staleness_comes_from_the_spans_and_stays_within_the_derived_bound(fully_async: Played) -> None:
    [start] = fully_async.of(RunStarted)
    assert start.slots is not None
    bound = (start.slots + start.window - 2) // start.groups_per_rollout
    ages = [age for event in fully_async.of(StepStarted) for age in event.staleness]
    assert 0 < max(ages) <= bound
    spans = [event.versions for event in fully_async.of(GroupGenerated)]
    assert any(oldest < newest for oldest, newest in spans), "no group lived through a publish"


def test_in_a_synchronous_run_every_batch_is_fresh(in_turns: Played) -> None:
    assert {age for event in in_turns.of(StepStarted) for age in event.staleness} == {0}


def test_engine_and_trainer_agree_on_every_token_at_the_start_and_after_twenty_publishes(in_turns: Played) -> None:
    """In a synchronous run each step starts from the weights that sampled, so the gap is numerical (nats, float32)."""
    gaps = [event.metrics["logprob_gap_max"] for event in in_turns.of(StepEnded)]
    tokens = [event.metrics["loss_tokens"] for event in in_turns.of(StepEnded)]
    assert min(tokens) > 0
    assert gaps[0] < 1e-4
    assert gaps[PUBLISHES] < 1e-4
    assert max(gaps) < 1e-4


def test_the_compared_versions_have_different_weights(in_turns: Played) -> None:
    assert all(event.metrics["grad_norm"] > 0 for event in in_turns.of(StepEnded))


def test_in_a_synchronous_run_nothing_is_generated_during_a_step_or_a_publish(in_turns: Played) -> None:
    steps = [(event.started, event.time) for event in in_turns.of(StepEnded)]
    for group in in_turns.of(GroupGenerated):
        assert not any(started < group.generated < ended for started, ended in steps)
    assert all(event.queue == 0 for event in in_turns.of(PublishStarted))


def test_an_ordinary_function_under_train_async_trains_one_step_off(one_step_off: Played) -> None:
    ages = [event.staleness for event in one_step_off.of(StepStarted)]
    assert set(ages[0]) == {0}
    assert {age for batch in ages[1:] for age in batch} == {1}


def test_the_held_out_problems_are_evaluated_before_and_after_training(fully_async: Played) -> None:
    assert [event.rollout for event in fully_async.of(Evaluated)] == [-1, ROLLOUTS - 1]
    assert all(event.problems == 8 for event in fully_async.of(Evaluated))


def test_a_run_that_is_stopped_during_set_up_takes_no_step(stack: Stack) -> None:
    played = stack.play("train_async.py", "--num-rollout", "50", "--rollout-batch-size", "8", stopped=True)
    assert played.of(StepStarted) == []
    assert [event.version for event in played.of(PublishEnded)] == [0]

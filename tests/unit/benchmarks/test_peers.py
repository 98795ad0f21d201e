"""How `benchmarks.peers` reads the steps of a run, and what its learner sees of a worker."""

from __future__ import annotations

from benchmarks.peers.jobs import Steps, parity
from benchmarks.peers.waits import Step, summary
from miles_async.types import Sample


def test_the_time_per_step_leaves_out_start_and_warm_up() -> None:
    steps = Steps(began=0.0, times=[50.0, 60.0, 62.0, 64.0, 66.0], rewards=[0.0] * 5)
    assert steps.seconds_per_step(warm_up=2) == 2.0


def test_the_goal_is_reached_when_the_mean_of_five_batches_is() -> None:
    steps = Steps(began=100.0, times=[101.0, 102.0, 103.0, 104.0, 105.0, 106.0], rewards=[0.5, 0.9, 0.6, 0.7, 0.7, 0.7])
    assert steps.seconds_to_goal() == 6.0


def test_a_run_that_never_reaches_the_goal_has_no_time() -> None:
    assert Steps(began=0.0, times=[float(i) for i in range(9)], rewards=[0.69] * 9).seconds_to_goal() is None


def test_the_reward_of_a_sample_is_the_parity_of_its_first_sampled_token() -> None:
    assert parity(None, Sample(index=0, tokens=[4, 4, 7, 2], response_length=2)) == 1.0
    assert parity(None, Sample(index=0, tokens=[4, 4, 2, 7], response_length=2)) == 0.0


def test_a_worker_with_waits_is_measured_from_its_first_step_to_its_last() -> None:
    steps = [
        Step(at=10.0, ages=[7, 7], calls=[9.0, 9.0], discarded=5, busy=100.0),
        Step(at=12.0, ages=[0, 1], calls=[1.0, 2.0], discarded=6, busy=108.0),
        Step(at=14.0, ages=[2, 1], calls=[2.0, 3.0], discarded=6, busy=116.0),
    ]
    assert summary(steps) == {
        "groups per second": 1.0,
        "mean age": 1.0,
        "greatest age": 2,
        "discarded per trained group": 0.25,
        "samples in progress": 4.0,
        "seconds per trained call": 2.0,
    }

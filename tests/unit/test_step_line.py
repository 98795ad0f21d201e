from __future__ import annotations

from miles_async.observability.events import StepEnded
from miles_async.observability.steps import step_facts


def ended(finite: bool = True, **metrics: float) -> StepEnded:
    return StepEnded(
        time=9.0,
        rollout=3,
        started=5.0,
        ended=7.5,
        tokens=1000,
        finite=finite,
        reward=0.123456,
        response_length=7.0,
        metrics=metrics,
    )


def test_the_line_of_a_step_tells_its_speed_its_memory_and_what_came_of_it() -> None:
    facts = step_facts(ended(tokens_per_second=400.04, memory_gib=1.23456, loss=-0.01234567, kl=1.0))
    assert facts == {
        "rollout": 3,
        "seconds": 2.5,
        "tokens_per_second": 400.0,
        "memory_gib": 1.235,
        "loss": -0.01235,
        "reward": 0.1235,
    }


def test_a_step_that_was_skipped_says_so_and_a_gpu_tells_its_utilization() -> None:
    facts = step_facts(ended(finite=False, mfu=0.41234))
    assert (facts["finite"], facts["mfu"]) == (False, 0.4123)

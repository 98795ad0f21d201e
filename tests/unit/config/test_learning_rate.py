from __future__ import annotations

from typing import Any

import pytest

from miles_async.config.learning_rate import LearningRate, learning_rate
from tests.configuration import run_config


def rates(steps: int, **settings: Any) -> list[float]:
    schedule = LearningRate(**{"peak": 1.0, "decay_steps": steps} | settings)
    return [schedule.at(step) for step in range(steps)]


def test_the_first_step_learns_and_the_last_step_of_the_warm_up_reaches_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_decay_reaches_the_floor_one_step_after_the_last() -> None:
    assert rates(4, style="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, style="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]
    assert rates(4, style="linear", floor=0.2)[2:] == pytest.approx([0.6, 0.4])


def test_a_cosine_decay_is_slow_at_both_ends() -> None:
    assert rates(5, style="cosine", decay_steps=4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_an_inverse_square_root_decay_continues_to_the_floor() -> None:
    assert rates(17, style="inverse-square-root", warmup_steps=4)[16] == pytest.approx(0.5)
    assert rates(17, style="inverse-square-root", warmup_steps=4, floor=0.7)[16] == 0.7


@pytest.mark.parametrize(
    "shape, half_way", [("linear", 0.5), ("cosine", 0.5), ("exponential", 0.414214), ("minus_sqrt", 0.292893)]
)
def test_wsd_stays_at_the_peak_until_its_last_steps(shape: str, half_way: float) -> None:
    found = rates(13, style="WSD", warmup_steps=2, decay_steps=12, wsd_decay_steps=4, wsd_decay_style=shape)
    assert found[:9] == [0.5, *[1.0] * 8]
    assert found[10] == pytest.approx(half_way, abs=1e-6)
    assert found[12] == pytest.approx(0.0, abs=1e-12)


def test_the_learning_rate_follows_the_configuration() -> None:
    def at(step: int, **settings: Any) -> float:
        wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}
        usual: dict[str, Any] = {"lr": 1.0, "num_steps_per_rollout": 2, **wsd}
        return learning_rate(run_config(**usual | settings, num_rollout=50)).at(step)

    assert at(89) == at(90) == 1.0, "it falls over the last tenth of the steps"
    assert at(95) == pytest.approx(0.5)
    assert at(95, min_lr=0.2) == pytest.approx(0.6)
    assert at(95, lr_wsd_decay_steps=20) == pytest.approx(0.25)
    assert at(95, lr_wsd_decay_style="minus_sqrt") == pytest.approx(1 - 0.5**0.5)
    assert at(15, lr_decay_steps=20, lr_decay_style="linear") == pytest.approx(0.25)


def test_the_learning_rate_falls_to_zero_over_the_run_unless_a_shape_is_set() -> None:
    schedule = learning_rate(run_config(lr=1.0, num_rollout=4))
    assert [schedule.at(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_learning_rate_stays_at_the_floor_after_the_decay() -> None:
    assert rates(9, style="cosine", decay_steps=4, floor=0.1)[5:] == [0.1] * 4


def test_the_rate_of_each_adapter_falls_to_the_floor_at_the_end_of_the_run() -> None:
    """One of several adapters takes only some of the run's steps: the last ones, or more than its share."""
    schedule = learning_rate(run_config(lr=1.0, num_rollout=8, lr_warmup_steps=2))
    late = [schedule.at(own, of_run) for own, of_run in enumerate(range(4, 9))]
    assert late == [0.5, pytest.approx(3 / 6), pytest.approx(2 / 6), pytest.approx(1 / 6), 0.0]
    assert [schedule.at(step, step) for step in range(9)] == [schedule.at(step) for step in range(9)]

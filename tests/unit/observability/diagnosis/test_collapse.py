"""A collapse of the policy is announced from the effective sample size and the reward, before most reward is lost.

`recorded_steps/` holds the figures of real runs of `configs/arithmetic-cpu.yaml`, with the command of each run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import structlog
from msgspec.structs import replace

from miles_async.events import (
    CollapseRiskChanged,
    Event,
    LearnerRestored,
    RunEnded,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.observability.diagnosis.collapse import CollapseDetector
from miles_async.observability.page.report import RunData
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.summary import summary_text
from tests.configuration import run_config
from tests.unit.example_events import RUN
from tests.waiting import PATIENCE_SECONDS

RECORDED = Path(__file__).parent / "recorded_steps"
REWARD_BATCHES = 10
"""The reward has collapsed when its mean over this many batches is below half of the highest such mean."""


class Step(NamedTuple):
    ess: float
    reward: float = 0.5


def step_ended(rollout: int, reward: float = 0.5, **metrics: float) -> StepEnded:
    return StepEnded(
        time=100.0 + rollout,
        rollout=rollout,
        seconds=1.0,
        tokens=64,
        finite=True,
        reward=reward,
        response_length=3.0,
        metrics=metrics,
    )


def changes(steps: Iterable[Step]) -> list[CollapseRiskChanged]:
    """Every change of the risk during a run."""
    detector, found = CollapseDetector(), []
    for rollout, step in enumerate(steps):
        if change := detector.observe(step_ended(rollout, step.reward, ess=step.ess)):
            found.append(change)
    return found


def recorded(name: str) -> list[Step]:
    """The batches of a real run."""
    return [Step(ess, reward) for ess, _, reward in json.loads((RECORDED / f"{name}.json").read_text())["steps"]]


def batches(points: Iterable[tuple[float, float]], noise: float = 0.03) -> list[Step]:
    """Ten batches for each mean of ESS and reward. The reward of a batch varies by `noise`, as with 256 samples."""
    random = Random(1)
    return [Step(ess, random.gauss(reward, noise)) for ess, reward in points for _ in range(REWARD_BATCHES)]


def mean_rewards(steps: list[Step]) -> list[float]:
    """The mean reward of the last REWARD_BATCHES batches, from the first batch with so many on."""
    last = range(REWARD_BATCHES, len(steps) + 1)
    return [mean(step.reward for step in steps[end - REWARD_BATCHES : end]) for end in last]


def collapsed_after(steps: list[Step]) -> int:
    """The first rollout at which the reward of the run has collapsed."""
    highest = 0.0
    for rollout, reward in enumerate(mean_rewards(steps), REWARD_BATCHES - 1):
        highest = max(highest, reward)
        if reward < highest / 2:
            return rollout
    raise AssertionError("the run did not collapse")


def on_policy(steps: int) -> list[Step]:
    """A run whose ESS is close to 1, and whose reward varies by 0.1."""
    return [Step(0.97 + 0.01 * (i % 3), 0.45 + 0.05 * (i % 3)) for i in range(steps)]


@pytest.mark.parametrize("run", ["collapses", "collapses_at_once"])
def test_the_collapse_of_a_real_run_is_announced_before_its_reward_has_fallen(run: str) -> None:
    steps = recorded(run)
    first, *_ = changes(steps)
    assert first.high
    assert first.rollout + 5 < collapsed_after(steps)


@pytest.mark.parametrize("run", ["learns_as_shipped", "learns_at_limit_8"])
def test_nothing_is_announced_in_a_real_run_that_learns(run: str) -> None:
    steps = recorded(run)
    first, *_, last = mean_rewards(steps)
    assert last > 1.4 * first
    assert changes(steps) == []


def test_a_fallen_ess_is_announced_once_with_the_figures_and_what_to_do() -> None:
    [change] = changes([*on_policy(40), *repeat(Step(0.2), 20)])
    assert change.high
    assert change.rollout == 44, "five of eight batches are low"
    assert change.time == 144.0
    assert change.why == "the effective sample size is 0.20 (usual 0.98)"
    assert "--max-weight-staleness" in change.knob


SLOW_COLLAPSE = [(0.99, 0.35), (0.95, 0.36), (0.83, 0.32), (0.78, 0.23), (0.67, 0.24), (0.80, 0.17)]
"""Means of ten batches, of the run `limit-4-stale-none-seed-2` of the study. Then the reward has collapsed."""


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_slow_collapse_is_announced_whatever_the_scale_of_the_rewards(scale: float, shift: float) -> None:
    steps = batches(SLOW_COLLAPSE)
    [change] = changes(Step(step.ess, scale * step.reward + shift) for step in steps)
    assert change.high
    assert change.rollout + 10 < collapsed_after(steps)


def test_a_fallen_reward_is_announced_with_its_figures() -> None:
    [change] = changes([*on_policy(40), *repeat(Step(0.7, 0.2), 20)])
    assert change.why == (
        "the effective sample size is 0.70 (usual 0.98), and the mean reward of 8 batches is 0.275 (highest 0.506)"
    )


def test_a_fall_of_the_reward_alone_is_not_announced() -> None:
    # Its cause is not the staleness: the reward may be wrong, or the prompts may have become harder.
    assert changes([*on_policy(40), *repeat(Step(0.97, 0.1), 40)]) == []


def test_a_moderate_fall_of_ess_alone_is_not_announced() -> None:
    assert changes([*on_policy(40), *batches([(0.6, 0.5)] * 50)]) == []


def test_a_dip_of_the_reward_of_a_run_that_learns_is_not_announced() -> None:
    # Of the run `limit-16-stale-gmpo-seed-1` of the study.
    means = (0.39, 0.42, 0.43, 0.43, 0.47, 0.45, 0.46, 0.45, 0.42, 0.41, 0.44, 0.47)
    ess = (0.89, 0.91, 0.84, 0.83, 0.80, 0.72, 0.67, 0.71, 0.70, 0.70, 0.72, 0.73)
    assert changes(batches(zip(ess, means, strict=True))) == []


def test_batches_of_few_samples_whose_rewards_vary_more_are_not_announced() -> None:
    assert changes([*on_policy(40), *batches([(0.7, 0.5)] * 50, noise=0.15)]) == []


@pytest.mark.parametrize("odd", [Step(0.01), Step(0.7, 0.0), Step(0.0, 0.0)])
def test_odd_batches_are_not_announced(odd: Step) -> None:
    steps = on_policy(60)
    steps[30], steps[40], steps[42] = odd, odd, odd._replace(reward=0.5)
    assert changes(steps) == []


def test_a_staleness_that_rises_and_falls_is_not_announced() -> None:
    # 512 groups that were admitted at once fill eight batches, each one version older than the batch before it.
    assert changes(Step(0.98**age**2) for age in [*range(1, 9)] * 20) == []


def test_an_ess_that_is_low_from_the_first_step_on_is_usual() -> None:
    # The engine computes in eight bits, for example, so the ratios differ from 1 with the current weights, too.
    assert changes(repeat(Step(0.35), 100)) == []
    [change] = changes([*repeat(Step(0.35), 100), *repeat(Step(0.1), 8)])
    assert change.why == "the effective sample size is 0.10 (usual 0.35)"


def test_a_slow_fall_of_ess_does_not_become_usual() -> None:
    [change] = changes(Step(1.0 - i / 1000) for i in range(1000))
    assert 495 <= change.rollout <= 505


def test_nothing_is_announced_during_the_first_steps() -> None:
    assert changes([Step(1.0), *repeat(Step(0.01, 0.0), 3)]) == []


def test_the_signs_are_gone_when_ess_is_back_and_a_second_fall_is_announced_again() -> None:
    fall, recovery = [Step(0.2)] * 10, [Step(0.98)] * 10
    assert [change.high for change in changes([*on_policy(40), *fall, *recovery, *fall])] == [True, False, True]
    between = [Step(0.45 + 0.2 * (i // 8 % 2)) for i in range(80)]
    assert [change.high for change in changes([*on_policy(40), *between])] == [True]


def test_the_signs_of_a_collapse_last_until_the_reward_is_back() -> None:
    """A policy that has collapsed gives all prompts the same answer, and its ESS rises again."""
    collapse, reward_back = [Step(0.7, 0.1)] * 20 + [Step(0.98, 0.1)] * 20, [Step(0.98, 0.5)] * 20
    assert [change.high for change in changes([*on_policy(40), *collapse])] == [True]
    assert [change.high for change in changes([*on_policy(40), *collapse, *reward_back])] == [True, False]


def test_figures_of_zero_announce_nothing() -> None:
    assert changes(repeat(Step(1.0, 0.0), 50)) == []
    assert changes(repeat(Step(0.0, 0.0), 50)) == []


def test_steps_without_the_figures_are_ignored() -> None:
    detector = CollapseDetector()
    for rollout in range(50):
        assert detector.observe(step_ended(rollout, value_loss=1.0)) is None
        assert detector.observe(TrainerPhaseChanged(time=100.0 + rollout, to="batch")) is None


@pytest.mark.parametrize("restored", ["sinking", "sound"])
def test_each_adapter_is_judged_alone(restored: str) -> None:
    """The batches of a sound adapter hide a fall of another, and those of one with a low ESS would look like a fall."""
    detector = CollapseDetector()

    def observed(rollouts: range, **ess: float) -> list[CollapseRiskChanged | None]:
        return [
            detector.observe(event)
            for rollout in rollouts
            for name, value in ess.items()
            for event in (
                StepStarted(time=1.0, rollout=rollout, version=1, staleness=[], groups=[], adapter=name),
                step_ended(rollout, ess=value),
            )
        ]

    assert not any(observed(range(20), sinking=0.9, low=0.3, sound=0.9))
    [announced] = filter(None, observed(range(20, 40), sinking=0.3, low=0.3, sound=0.9))
    assert announced.why == "the effective sample size of adapter sinking is 0.30 (usual 0.90)"
    gone = detector.observe(
        LearnerRestored(time=1.0, rollout=39, kept_version=1, version=2, updates=0, groups=0, adapter=restored)
    )
    assert (gone is not None) == (restored == "sinking")


def test_a_restart_clears_the_risk_and_signs_that_return_are_announced_again() -> None:
    detector = CollapseDetector()

    def observed(*events: Event) -> list[bool]:
        return [change.high for event in events if (change := detector.observe(event))]

    low = [step_ended(rollout, ess=0.2) for rollout in range(40, 50)]
    good = [step_ended(rollout, ess=0.98) for rollout in range(40)]
    assert observed(RUN, *good, *low) == [True]
    assert observed(RUN) == [False]
    assert observed(*low) == [True], "the usual value is known from before the restart"
    restored = LearnerRestored(time=1.0, rollout=39, kept_version=40, version=51, updates=0, groups=0)
    assert observed(restored) == [False]
    earlier = [step_ended(rollout, 0.2, ess=0.7) for rollout in range(40, 60)]
    assert observed(*earlier) == [], "weights of an earlier checkpoint have their own highest reward"
    assert observed(replace(RUN, configuration="a lower --lr"), *low) == [], "the usual value is measured again"


def test_a_driver_that_continues_a_run_clears_what_the_driver_before_it_announced(tmp_path: Path) -> None:
    config = run_config(run_dir=str(tmp_path))
    folder = RunFolder.create(config)
    with EventSubscribers(config, folder) as subscribers:
        subscribers.emit(RUN, *(step_ended(i, ess=0.99 if i < 8 else 0.2) for i in range(14)))
    with EventSubscribers(config, folder, continued=True) as subscribers:
        assert "miles_async_collapse_risk 1.0" in served(subscribers)
        subscribers.emit(RUN)
        assert "miles_async_collapse_risk 0.0" in served(subscribers)
        with urlopen(f"{subscribers.page_url}state.json", timeout=PATIENCE_SECONDS) as response:
            assert json.load(response)["now"]["collapse"] is None


def served(subscribers: EventSubscribers) -> str:
    with urlopen(subscribers.metrics_url, timeout=PATIENCE_SECONDS) as response:
        text: str = response.read().decode()
        return text


def test_an_announcement_is_logged_and_is_in_metrics_page_summary_and_report(tmp_path: Path) -> None:
    config = run_config(run_dir=str(tmp_path))
    folder = RunFolder.create(config)
    fall = [step_ended(rollout, ess=0.99 if rollout < 8 else 0.2) for rollout in range(14)]
    with structlog.testing.capture_logs() as logged, EventSubscribers(config, folder) as subscribers:
        subscribers.emit(RUN, *fall)
        with urlopen(subscribers.metrics_url, timeout=PATIENCE_SECONDS) as response:
            assert "miles_async_collapse_risk 1.0" in response.read().decode()
        with urlopen(f"{subscribers.page_url}state.json?span=whole", timeout=PATIENCE_SECONDS) as response:
            now = json.load(response)["now"]
        subscribers.emit(*(step_ended(rollout, ess=0.99) for rollout in range(14, 20)))
        with urlopen(subscribers.metrics_url, timeout=PATIENCE_SECONDS) as response:
            assert "miles_async_collapse_risk 0.0" in response.read().decode()
        subscribers.emit(RunEnded(time=130.0, reason="done"))
    why = "the effective sample size is 0.20 (usual 0.99)"
    announced: list[Any] = [line for line in logged if "collapse" in line["event"]]
    assert [(line["log_level"], line["event"]) for line in announced] == [
        ("warning", "the policy may collapse soon"),
        ("info", "the signs of a collapse are gone"),
    ]
    assert announced[0]["why"] == why
    assert "--max-weight-staleness" in announced[0]["knob"]
    assert (now["collapse"]["rollout"], now["collapse"]["why"]) == (12, why)
    assert now["notices"][0]["text"] == f"after rollout 12, the policy may collapse soon: {why}"
    assert json.loads(folder.summary.read_text())["collapse_announced_after_rollout"] == 12
    report = RunData.read(folder).values()
    assert report["summary"]["collapse_announced_after_rollout"] == 12
    assert report["state"]["now"]["collapse"] is None
    assert f"after rollout 12: {why}; lower --max-weight-staleness" in summary_text(RunData.read(folder).view)

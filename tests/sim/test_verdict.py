"""The verdict names the bottleneck of the real service under virtual time, one cause at a time."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.events import Event, LoopLag, ProcessSilent, RunEnded, TrainerPhaseChanged, VerdictChanged
from miles_async.observability.diagnosis.verdict import KNOBS, Announcements, Bottleneck
from miles_async.observability.view import RunView
from miles_async.scheduling.bounds import Schedule
from tests.configuration import run_config
from tests.sim.engines import EngineModel
from tests.sim.world import World


class Judging:
    """A sink of the events of a run that judges it, and the list of the announced verdicts."""

    def __init__(self) -> None:
        self.view = RunView()
        self._announcements = Announcements()
        self.announced: list[VerdictChanged] = []
        self.ended = 0.0

    def emit(self, event: Event) -> None:
        self.ended = event.time
        self.view.apply(event)
        if self.view.learner.phase and (
            found := self._announcements.take_change(self.view.finding, event.time, self.view.advise)
        ):
            self.announced.append(found)


def judged(schedule: Schedule = Schedule.FULLY_ASYNC, ratio: float | None = None, **world: Any) -> Judging:
    judging = Judging()
    config = run_config(
        num_rollout=60, rollout_batch_size=8, max_weight_staleness=2, windowed_fifo_ratio=ratio, n_samples_per_prompt=1
    )
    World(config=config, schedule=schedule, sinks=(judging,), **world).run()
    return judging


@pytest.mark.parametrize(
    "world, verdict",
    [
        (
            {"latency": lambda group, rng: 1.0, "train_seconds": 0.5, "engines": EngineModel(concurrency=2)},
            Bottleneck.ROLLOUT,
        ),
        ({"latency": lambda group, rng: 4.0, "train_seconds": 0.5}, Bottleneck.IN_FLIGHT),
        ({"latency": lambda group, rng: 0.1, "train_seconds": 2.0}, Bottleneck.TRAINER),
        (
            {"latency": lambda group, rng: 0.1, "train_seconds": 0.2, "engines": EngineModel(write_seconds=2.0)},
            Bottleneck.PUBLISH,
        ),
        (
            {
                "latency": lambda group, rng: 8.0 if (group.sequence or 0) % 8 == 0 else 0.5,
                "train_seconds": 0.1,
                "ratio": 0.0,
            },
            Bottleneck.WINDOW,
        ),
        (
            {
                "latency": lambda group, rng: 1.0,
                "train_seconds": 0.5,
                "keep": lambda group: (group.sequence or 0) % 4 == 0,
            },
            Bottleneck.FILTER,
        ),
        ({"latency": lambda group, rng: 0.2, "train_seconds": 0.5, "reward_seconds": 4.0}, Bottleneck.REWARD),
        ({"latency": lambda group, rng: 0.98, "train_seconds": 1.0}, Bottleneck.BALANCED),
    ],
    ids=lambda value: str(value) if isinstance(value, Bottleneck) else "",
)
def test_the_verdict_names_the_part_that_others_wait_for(world: dict[str, Any], verdict: Bottleneck) -> None:
    judging = judged(**world)
    assert judging.view.verdict is verdict
    assert judging.announced[-1].verdict == verdict
    assert KNOBS[verdict] in judging.announced[-1].knob


@pytest.mark.parametrize(
    "generation, training, verdict", [(3.0, 1.0, Bottleneck.ROLLOUT), (1.0, 3.0, Bottleneck.TRAINER)]
)
def test_of_two_parts_that_alternate_the_verdict_names_the_slower_one(
    generation: float, training: float, verdict: Bottleneck
) -> None:
    world = judged(Schedule.SYNCHRONOUS, latency=lambda group, rng: generation, train_seconds=training)
    assert world.view.verdict is verdict


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_jump_of_the_wall_clock_changes_no_verdict(step: float) -> None:
    slow: dict[str, Any] = {"latency": lambda group, rng: 4.0, "train_seconds": 0.5}
    stepped, steady = judged(wall_clock_steps={100.0: step}, **slow), judged(**slow)
    assert [found.verdict for found in stepped.announced] == [found.verdict for found in steady.announced]
    before, after = sum(steady.view.learner.seconds.values()), sum(stepped.view.learner.seconds.values())
    assert after == pytest.approx(before, abs=1.0)


@pytest.mark.parametrize(
    "process, verdict",
    [("learner-0", Bottleneck.TRAINER), ("engine-0", Bottleneck.ROLLOUT), ("rollout", Bottleneck.ROLLOUT)],
)
def test_the_verdict_names_an_unresponsive_process_at_once(process: str, verdict: Bottleneck) -> None:
    judging = Judging()
    for second in (99.0, 100.0):
        judging.emit(TrainerPhaseChanged(time=second, to="publish"))
    for second in range(1, 7):
        judging.emit(ProcessSilent(time=100.0 + second, process=process, seconds=float(second)))
    assert judging.announced[-1].verdict == verdict
    assert judging.announced[-1].why == f"{process} has not answered for 5s"
    judging.emit(ProcessSilent(time=108.0, process=process, seconds=0.0))
    assert judging.view.finding.verdict is Bottleneck.PUBLISH


def test_an_unresponsive_process_is_announced_even_if_the_verdict_stays_the_same() -> None:
    judging = Judging()
    for second in (99.0, 100.0):
        judging.emit(TrainerPhaseChanged(time=second, to="batch"))
    for second in range(1, 20):
        judging.emit(ProcessSilent(time=100.0 + second, process="engine-0", seconds=max(0.0, second - 8.0)))
    assert [found.verdict for found in judging.announced] == [Bottleneck.ROLLOUT] * 2
    assert judging.announced[1].why == "engine-0 has not answered for 5s"


def test_shares_add_up_to_one_and_exclude_the_time_after_the_run() -> None:
    judging = judged(latency=lambda group, rng: 1.0)
    assert sum(judging.view.finding.shares.values()) == pytest.approx(1.0)
    before = sum(judging.view.verdict_seconds.values())
    judging.emit(RunEnded(time=judging.ended + 1.0, reason="done"))
    ended = sum(judging.view.verdict_seconds.values())
    judging.emit(LoopLag(time=judging.ended + 10.0, seconds=0.0))
    assert sum(judging.view.verdict_seconds.values()) == ended > before

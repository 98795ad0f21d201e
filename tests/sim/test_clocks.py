"""Stalls are measured with a monotonic clock, and whatever works is progress."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, RouterLostError
from miles_async.events import (
    AdmissionBlocked,
    BatchDrained,
    CheckpointWritten,
    Evaluated,
    GroupGenerated,
    LoopLag,
    PublishEnded,
    Pulse,
    Stalled,
    StepEnded,
)
from miles_async.pipeline import monitor
from miles_async.pipeline.evaluate import Scores
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.scheduling.bounds import Schedule
from miles_async.types import EngineLoad, Group, StepReport
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines
from tests.sim.virtual_time import VirtualTimeLoop
from tests.sim.world import Trainer, World


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 4, "num_rollout": 20, "n_samples_per_prompt": 1, "max_weight_staleness": 3}
    return run_config(**sizes | settings)


def seconds_of(world: World) -> list[float]:
    """All durations that the events of a run report."""
    return [
        *(
            seconds
            for group in world.trace.of(GroupGenerated)
            for seconds in (group.generation_seconds, group.reward_seconds)
        ),
        *(batch.waited for batch in world.trace.of(BatchDrained)),
        *(blocked.seconds for blocked in world.trace.of(AdmissionBlocked)),
        *(step.seconds for step in world.trace.of(StepEnded)),
        *(lag.seconds for lag in world.trace.of(LoopLag)),
        *(
            seconds
            for publish in world.trace.of(PublishEnded)
            for seconds in (publish.staged_seconds, publish.paused_seconds, *publish.pause.values())
        ),
        *(
            seconds
            for pulse in world.trace.of(Pulse)
            for seconds in (pulse.head_seconds, pulse.oldest_seconds, pulse.waits_seconds, pulse.idle_seconds)
        ),
    ]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_jump_of_the_wall_clock_ends_no_run_and_changes_no_duration(
    step: float, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the learner's work would be counted at the very moment of a report, before or after it.
    monkeypatch.setattr(monitor, "WORK_POLL_SECONDS", 5.07)
    world = World(config=config(), schedule=schedule, wall_clock_steps={9.1: step}).run()
    steady = World(config=config(), schedule=schedule).run()
    assert world.trace.of(Stalled) == []
    assert world.trainer.batches == steady.trainer.batches
    assert seconds_of(world) == pytest.approx(seconds_of(steady))
    assert max(seconds_of(world)) < 60.0


def test_a_run_whose_process_was_stopped_for_longer_than_the_limit_continues() -> None:
    async def stop(rollout_id: int, source: RolloutSource) -> Scores:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        if rollout_id == 4:
            loop.call_soon(loop.stop_process, 700.0)
        return {"held_out": {"rewards": [1.0]}}

    world = World(config=config(eval_interval=5), evaluate=stop).run()
    assert world.trace.of(Stalled) == []
    assert len(world.trainer.batches) == 20


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_long_evaluation_is_progress(schedule: Schedule) -> None:
    def latency(group: Group, rng: object) -> float:
        return 650.0 if group.feed_index.startswith("eval") else 1.0

    world = World(config=config(num_rollout=2), schedule=schedule, problems=1, latency=latency).run()
    assert [scores.seconds for scores in world.trace.of(Evaluated)] == [650.0, 650.0]
    assert world.trace.of(Stalled) == []


def test_a_long_evaluation_by_a_user_function_is_progress() -> None:
    async def evaluate(rollout_id: int, source: RolloutSource) -> Scores:
        await asyncio.sleep(650.0)
        return {"held_out": {"rewards": [1.0]}}

    world = World(config=config(num_rollout=2), evaluate=evaluate).run()
    assert [scores.seconds for scores in world.trace.of(Evaluated)] == [650.0, 650.0]
    assert world.trace.of(Stalled) == []


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_long_evaluation_is_progress_while_the_engines_generate(schedule: Schedule) -> None:
    def latency(group: Group, rng: object) -> float:
        return 5000.0 if group.feed_index.startswith("eval") else 1.0

    world = World(config=config(num_rollout=2), schedule=schedule, problems=1, latency=latency).run()
    assert [scores.seconds for scores in world.trace.of(Evaluated)] == pytest.approx([5000.0, 5000.0])
    assert world.trace.of(Stalled) == []


def test_an_evaluation_whose_tokens_come_from_elsewhere_is_progress_while_its_problems_end() -> None:
    def latency(group: Group, rng: object) -> float:
        return 1000.0 * int(group.feed_index.removeprefix("eval_")) if group.feed_index.startswith("eval") else 1.0

    world = World(config=config(num_rollout=2), engine_kind=Elsewhere, problems=6, latency=latency).run()
    assert [scores.seconds for scores in world.trace.of(Evaluated)] == pytest.approx([5000.0, 5000.0])
    assert world.trace.of(Stalled) == []


async def never_returns(rollout_id: int, source: RolloutSource) -> Scores:
    """A run that waits for it should have ended before."""
    await asyncio.sleep(1e4)
    return {"held_out": {"rewards": [1.0]}}


def test_an_evaluation_by_a_user_function_that_never_returns_ends_the_run_after_the_time_limit_of_functions() -> None:
    world = World(config=config(generate_timeout_seconds=1000), evaluate=never_returns)
    with pytest.raises(FatalError, match=r"no progress for 600s.*; an evaluation runs"):
        world.run()
    assert world.trace.of(Pulse)[-1].time == pytest.approx(1600.0, abs=2.0)


def test_the_tokens_of_an_evaluation_by_a_user_function_are_progress() -> None:
    class Generating(Engines):
        """Generates for requests that the function sends itself."""

        async def loads(self) -> Sequence[EngineLoad]:
            return [EngineLoad(source="e", kv_usage=0.0, queued=0, generated=int(self._clock.monotonic()), held=0)]

    async def evaluate(rollout_id: int, source: RolloutSource) -> Scores:
        await asyncio.sleep(5000.0)
        return {"held_out": {"rewards": [1.0]}}

    world = World(config=config(num_rollout=2), evaluate=evaluate, engine_kind=Generating).run()
    assert [scores.seconds for scores in world.trace.of(Evaluated)] == pytest.approx([5000.0, 5000.0])
    assert world.trace.of(Stalled) == []


def test_requests_of_an_evaluation_that_fail_again_and_again_are_no_progress() -> None:
    class Refusing(Engines):
        """Its router answers 503, and would answer again after the run should have ended."""

        async def generate(self, group: Group) -> None:
            if self._clock.monotonic() < 1e4:
                await self._clock.sleep(0.7)
                raise RouterLostError("503")
            await super().generate(group)

    with pytest.raises(FatalError, match="no progress for 600s"):
        World(config=config(generate_timeout_seconds=1000), problems=3, engine_kind=Refusing).run()


def test_an_evaluation_that_waits_for_engines_is_no_progress() -> None:
    class Gone(Engines):
        def serving(self) -> bool:
            return False

    with pytest.raises(FatalError, match="no progress for 600s"):
        World(config=config(), problems=1, engine_kind=Gone).run()


@pytest.mark.parametrize("async_save", [True, False])
def test_a_checkpoint_that_takes_long_to_write_is_progress(async_save: bool) -> None:
    saving = config(save="checkpoints", save_interval=10, async_save=async_save)
    world = World(config=saving, save_seconds=700.0).run()
    assert sorted(world.trainer.saved) == [9, 19]
    assert [written.rollout for written in world.trace.of(CheckpointWritten)] == [9, 19]
    assert world.trace.of(Stalled) == []


def test_a_long_step_of_a_learner_that_works_is_progress() -> None:
    world = World(config=config(num_rollout=2), train_seconds=3000.0).run()
    assert [step.seconds for step in world.trace.of(StepEnded)] == [3000.0, 3000.0]
    assert world.trace.of(Stalled) == []


@pytest.mark.parametrize("schedule", list(Schedule))
def test_responses_that_take_longer_than_the_limit_are_progress_while_the_engines_generate(schedule: Schedule) -> None:
    world = World(config=config(num_rollout=3), schedule=schedule, latency=lambda group, rng: 900.0).run()
    assert len(world.trainer.batches) == 3
    assert world.trace.of(Stalled) == []


def test_one_long_response_at_the_head_of_the_window_is_progress() -> None:
    def latency(group: Group, rng: random.Random) -> float:
        return 900.0 if group.feed_index == "sample_0_40" else rng.uniform(20, 60)

    world = World(config=config(windowed_fifo_ratio=0.0), latency=latency).run()
    assert world.trace.of(Stalled) == []


def test_engines_that_stand_still_end_the_run_although_they_still_report_their_load() -> None:
    standing = EngineModel(stall_every=500.0, stall_seconds=1e6)
    with pytest.raises(FatalError, match=r"no progress for 60[0-5]s"):
        World(config=config(), engines=standing, latency=lambda group, rng: 900.0).run()


class Elsewhere(Engines):
    """The responses come from somewhere else: a generate function asks another model, or waits for a tool."""

    async def loads(self) -> Sequence[EngineLoad]:
        return [EngineLoad(source="e", kv_usage=0.0, queued=0, generated=0, held=0)]


def test_a_generate_function_has_its_own_time_limit_before_the_run_ends() -> None:
    function = config(num_rollout=2, custom_generate_function_path="mine.generate", generate_timeout_seconds=1000)
    finished = World(config=function, engine_kind=Elsewhere, latency=lambda group, rng: 990.0).run()
    assert len(finished.trainer.batches) == 2
    with pytest.raises(FatalError, match="no progress for 1600s"):
        World(config=function, engine_kind=Elsewhere, latency=lambda group, rng: 1e6).run()


def test_rewards_have_their_own_time_limit_before_the_run_ends() -> None:
    scored = config(num_rollout=2, n_samples_per_prompt=10, reward_timeout_seconds=100.0)
    assert len(World(config=scored, reward_seconds=990.0).run().trainer.batches) == 2
    with pytest.raises(FatalError, match="no progress for 1600s"):
        World(config=scored, reward_seconds=1e6).run()


def test_healthy_answers_that_take_minutes_cause_no_warning_and_longer_ones_do() -> None:
    settings = config(num_rollout=30, custom_generate_function_path="mine.generate", no_progress_abort_seconds=1e5)

    def latency(group: Group, rng: random.Random) -> float:
        return 5000.0 if group.feed_index == hangs else rng.uniform(260.0, 290.0)

    hangs = ""
    healthy = World(config=settings, engine_kind=Elsewhere, latency=latency).run()
    assert healthy.trace.of(Stalled) == []
    hangs = "sample_0_100"
    stuck = World(config=settings, engine_kind=Elsewhere, latency=latency).run()
    slow = [pulse.slow_group_seconds for pulse in stuck.trace.of(Pulse) if pulse.head_state is not None][-1]
    assert 520.0 < slow < 590.0
    warned = [stalled.seconds for stalled in stuck.trace.of(Stalled)]
    assert warned[0] == pytest.approx(580.0, abs=15.0)


class Frozen(Trainer):
    """Stops in its third step, as after SIGSTOP: no call returns any more."""

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        if rollout_id == 2:
            self.frozen = True
            await asyncio.Future()
        return await super().train(rollout_id, groups)

    async def work_seconds(self) -> float:
        if self.frozen:
            await asyncio.Future()
        return await super().work_seconds()

    frozen = False


class Deadlocked(Frozen):
    """Answers, but waits for something that never comes."""

    async def work_seconds(self) -> float:
        return 1.0


@pytest.mark.parametrize("trainer", [Frozen, Deadlocked])
def test_a_learner_that_hangs_in_its_step_is_detected(trainer: type[Trainer]) -> None:
    world = World(config=config(), trainer_kind=trainer)
    with pytest.raises(FatalError, match="no progress for 600s"):
        world.run()
    assert len(world.trainer.batches) == 2
    assert world.trace.of(Stalled)[0].seconds == pytest.approx(30.0, abs=0.5)


@pytest.mark.parametrize("trainer", [Frozen, Deadlocked])
def test_a_learner_that_hangs_is_detected_beside_an_evaluation_that_hangs(trainer: type[Trainer]) -> None:
    async def evaluate(rollout_id: int, source: RolloutSource) -> Scores:
        return {"held_out": {"rewards": [1.0]}} if rollout_id < 0 else await never_returns(rollout_id, source)

    settings = config(eval_interval=2, generate_timeout_seconds=1000)
    world = World(config=settings, trainer_kind=trainer, evaluate=evaluate)
    with pytest.raises(FatalError, match="no progress for 600s"):
        world.run()
    assert len(world.trainer.batches) == 2
    assert world.trace.of(Pulse)[-1].time == pytest.approx(1600.0, abs=20.0)

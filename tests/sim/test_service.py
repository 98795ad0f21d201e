"""`miles_async.pipeline.service` itself under virtual time; only its ports are simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, count, cycle
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import EngineLostError, FatalError, PromptTooLongError, UserError
from miles_async.events import (
    Evaluated,
    Event,
    GroupFiltered,
    GroupMoved,
    PublishEnded,
    Stalled,
    StepEnded,
    StepStarted,
)
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.rollout import external_rollout
from miles_async.rollout.contract import flat_args
from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason, Group, Sample, Verdict, VersionSpan
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines
from tests.sim.world import World


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 8, "num_rollout": 60, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    return run_config(**sizes | settings)


def ages(world: World) -> list[int]:
    return [age for step in world.trace.of(StepStarted) for age in step.staleness]


def test_the_synchronous_schedule_trains_on_fresh_groups_only() -> None:
    world = World(config=config(), schedule=Schedule.SYNCHRONOUS).run()
    assert set(ages(world)) == {0}
    assert world.audit.violations == []


def test_one_step_off_trains_every_batch_but_the_first_exactly_one_version_late() -> None:
    world = World(config=config(), schedule=Schedule.ONE_STEP_OFF).run()
    assert set(ages(world)[:8]) == {0}
    assert set(ages(world)[8:]) == {1}
    assert world.audit.violations == []


def test_fully_async_stays_within_the_bound_it_derives() -> None:
    world = World(config=config(windowed_fifo_ratio=0.3)).run()
    assert world.bounds.staleness == 3
    assert max(ages(world)) <= 3
    assert world.audit.recycled == 0
    assert world.audit.violations == []


def test_a_batch_that_is_in_the_queue_is_packed_while_the_one_before_is_trained() -> None:
    world = World(config=config(), train_seconds=30.0).run()
    assert world.trainer.packed_before == [False] + [True] * 59
    assert world.audit.violations == []


def test_the_more_a_schedule_overlaps_the_faster_the_run() -> None:
    seconds = [World(config=config(), schedule=schedule).run().seconds for schedule in Schedule]
    fully_async, one_step_off, turns = seconds
    assert fully_async < one_step_off < turns


def test_every_batch_is_full_and_every_batch_is_published() -> None:
    world = World(config=config()).run()
    assert [len(batch) for batch in world.trainer.batches] == [8] * 60
    assert [event.version for event in world.trace.of(PublishEnded)] == list(range(61))


def test_weights_are_published_at_the_update_interval_and_after_the_last_batch() -> None:
    world = World(config=config(num_rollout=7, update_weights_interval=3)).run()
    assert [event.version for event in world.trace.of(PublishEnded)] == [0, 1, 2, 3]
    assert world.audit.violations == []


def test_failed_groups_are_retried_and_dead_lettered_after_their_last_attempt() -> None:
    world = World(config=config(max_attempts=2), engines=EngineModel(failure_rate=0.4)).run()
    dead_lettered = {feed_index for feed_index, _, _ in world.dead_letters.letters}
    trained = {feed_index for batch in world.trainer.batches for feed_index in batch}
    assert dead_lettered
    assert not dead_lettered & trained
    assert {reason for _, reason, _ in world.dead_letters.letters} == {DropReason.FAILED}
    attempts = Counter(moved.feed_index for moved in world.trace.of(GroupMoved) if moved.reason == DropReason.FAILED)
    assert {attempts[feed_index] for feed_index in dead_lettered} == {2}
    assert world.audit.owed <= dead_lettered | {group.feed_index for group in world.feed.get_samples(10_000)}


def test_a_lost_engine_costs_a_prompt_none_of_its_attempts() -> None:
    world = World(config=config(max_attempts=1), engines=EngineModel(lost_rate=0.3)).run()
    assert world.service.lifecycle.ledger.dropped[DropReason.ENGINE_LOST] > 0
    assert world.dead_letters.letters == []


def test_a_prompt_under_which_every_engine_dies_is_finally_dead_lettered() -> None:
    class Brittle(Engines):
        async def generate(self, group: Group, sampling: None = None) -> None:
            if group.feed_index == "sample_0_3":
                raise EngineLostError("it ended")
            await super().generate(group)

    world = World(config=config(), engine_kind=Brittle).run()
    sentence = "its engine was lost 6 times, 3 of them while nothing else was generated: it ended"
    assert world.dead_letters.letters == [("sample_0_3", DropReason.ENGINE_LOST, sentence)]
    assert world.service.lifecycle.ledger.dropped[DropReason.ENGINE_LOST] == 6
    assert world.audit.violations == []


def test_a_group_that_becomes_too_old_in_the_queue_or_in_a_batch_is_regenerated() -> None:
    """Four batches are finished at once: the third waits as a batch, the fourth in the queue, and both grow too old."""
    world = World(
        config=config(over_sampling_batch_size=32, max_weight_staleness=1, num_rollout=6),
        schedule=Schedule.ONE_STEP_OFF,
        latency=lambda group, rng: 1.0,
    ).run()
    stale = [moved for moved in world.trace.of(GroupMoved) if moved.reason == DropReason.STALE]
    published = [event.time for event in world.trace.of(PublishEnded) if event.version == 2]
    assert Counter(moved.before for moved in stale if moved.time == published[0]) == {"leased": 8, "queued": 8}
    assert set(ages(world)) == {0, 1}
    assert [len(batch) for batch in world.trainer.batches] == [8] * 6
    assert world.audit.violations == []


@dataclass(kw_only=True)
class Preparing(World):
    """Notes the batches that are prepared."""

    prepared: list[list[str]] = field(default_factory=list)

    async def _prepare(self, rollout_id: int, groups: list[Group]) -> None:
        self.prepared.append([group.feed_index for group in groups])


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_batch_is_prepared_once_with_the_groups_that_replaced_stale_ones(schedule: Schedule) -> None:
    settings = config(over_sampling_batch_size=32, max_weight_staleness=1, num_rollout=6)
    world = Preparing(config=settings, schedule=schedule, latency=lambda group, rng: 1.0).run()
    assert world.prepared == world.trainer.batches
    if schedule is Schedule.ONE_STEP_OFF:
        assert world.service.lifecycle.ledger.dropped[DropReason.STALE] > 0


class Streaming(World):
    """A user's function that drains the stream."""

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        return await source.drain_stream(rollout_id, self.config.rollout.rollout_batch_size)


def test_a_function_that_drains_the_stream_trains_the_same_groups_as_the_queue() -> None:
    direct = World(config=config(num_rollout=20)).run()
    assert Streaming(config=config(num_rollout=20)).run().trainer.batches == direct.trainer.batches


@pytest.mark.parametrize("schedule", [Schedule.ONE_STEP_OFF, Schedule.SYNCHRONOUS])
def test_draining_the_stream_under_another_schedule_names_the_schedule_to_set(schedule: Schedule) -> None:
    with pytest.raises(UserError, match=f"the schedule is {schedule}: set --schedule fully_async"):
        Streaming(config=config(), schedule=schedule).run()


class CallingTheShippedFunction(World):
    """A user's function without a declaration, which calls the function of fully asynchronous runs."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups: list[Group] = await generate_rollout_fully_async(flat_args(self.config), rollout_id, source)
        return groups


@pytest.mark.parametrize("schedule", [Schedule.ONE_STEP_OFF, Schedule.SYNCHRONOUS])
def test_the_function_of_fully_asynchronous_runs_generates_batches_under_another_schedule(schedule: Schedule) -> None:
    shipped = World(config=config(num_rollout=20), schedule=schedule).run()
    world = CallingTheShippedFunction(config=config(num_rollout=20), schedule=schedule).run()
    assert world.trainer.batches == shipped.trainer.batches


class Collecting(World):
    """A user-defined function that collects a batch under any schedule."""

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout


def test_collecting_a_batch_beside_the_stream_names_the_schedule_to_set() -> None:
    with pytest.raises(UserError, match="call drain_stream instead, or set --schedule one_step_off"):
        Collecting(config=config()).run()


def test_a_version_is_published_while_the_queue_is_empty() -> None:
    world = World(config=config(), latency=lambda group, rng: 5.0).run()
    assert any(event.version > 0 and event.queue == 0 for event in world.trace.of(PublishEnded))


def test_a_slow_head_is_recycled_after_its_deadline_and_finally_dead_lettered() -> None:
    world = World(
        config=config(head_deadline_seconds=10.0, head_deadline_action="recycle", max_attempts=2),
        latency=lambda group, rng: 1e6 if group.feed_index == "sample_0_5" else rng.lognormvariate(0.0, 1.0),
    ).run()
    assert world.dead_letters.letters[0][:2] == ("sample_0_5", DropReason.HEAD_DEADLINE)
    assert world.audit.violations == []


def test_a_filter_that_drops_most_groups_does_not_stop_the_run() -> None:
    world = World(config=config(), keep=lambda group: int(group.feed_index.split("_")[-1]) % 3 == 0).run()
    assert len(world.trainer.batches) == 60
    assert world.audit.violations == []


def test_a_non_finite_step_does_not_raise_the_version_and_frees_its_slots() -> None:
    world = World(config=config(num_rollout=10, max_nonfinite_batches=2), finite=lambda number: number % 2 == 0).run()
    assert world.service.lifecycle.ledger.dropped[DropReason.NONFINITE] == 5 * 8
    assert [event.version for event in world.trace.of(PublishEnded)] == [0, 1, 2, 3, 4, 5]
    assert world.audit.violations == []


@pytest.mark.parametrize(
    "limit, where", [(1, "in the batch of rollout 5;"), (3, "in 3 batches in a row, up to rollout 7;")]
)
def test_batches_that_are_never_finite_stop_the_run_and_their_groups_are_kept(limit: int, where: str) -> None:
    run = config(num_rollout=20, max_nonfinite_batches=limit)
    world = World(config=run, finite=lambda rollout_id: rollout_id < 5)
    with pytest.raises(FatalError, match=f"was not finite {where}"):
        world.run()
    assert world.dead_letters.prompts == set(chain.from_iterable(world.trainer.batches[-limit:])), (
        "of all those batches"
    )
    assert {reason for _, reason, _ in world.dead_letters.letters} == {DropReason.NONFINITE}


def test_over_sampling_keeps_the_first_groups_and_returns_the_others() -> None:
    world = World(config=config(over_sampling_batch_size=16, num_rollout=5), schedule=Schedule.SYNCHRONOUS).run()
    assert [len(batch) for batch in world.trainer.batches] == [8] * 5
    assert world.service.lifecycle.ledger.dropped[DropReason.ABORTED] > 0
    trained = [feed_index for batch in world.trainer.batches for feed_index in batch]
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.ONE_STEP_OFF])
def test_an_over_sampling_filter_chooses_from_all_generated_groups(schedule: Schedule) -> None:
    offered = []

    def youngest_first(groups: list[Group]) -> list[Group]:
        offered.append(len(groups))
        return sorted(groups, key=lambda group: group.sequence or 0, reverse=True)

    settings = config(over_sampling_batch_size=12, num_rollout=5)
    world = World(config=settings, schedule=schedule, choose=youngest_first).run()
    assert offered == [12] * 5
    assert [len(batch) for batch in world.trainer.batches] == [8] * 5
    assert world.trainer.batches[0] == [f"sample_0_{position}" for position in range(4, 12)]
    dropped = [event for event in world.trace.of(GroupFiltered) if event.reason == "over_sampling"]
    assert len(dropped) == world.service.lifecycle.ledger.dropped[DropReason.FILTERED] == 20
    assert world.audit.violations == []


def test_an_over_sampling_filter_that_returns_too_few_is_named() -> None:
    settings = config(over_sampling_batch_size=12)
    with pytest.raises(UserError, match=r"returned 1 of the 12 groups it was given.*at least rollout_batch_size=8"):
        World(config=settings, schedule=Schedule.SYNCHRONOUS, choose=lambda groups: [groups[0], groups[0]]).run()


def test_the_reason_that_a_filter_gives_is_reported() -> None:
    odd = Verdict(False, "odd")
    world = World(config=config(num_rollout=5), keep=lambda group: odd if (group.sequence or 0) % 2 else True).run()
    assert {event.reason for event in world.trace.of(GroupFiltered)} == {"odd"}
    assert world.service.lifecycle.ledger.dropped[DropReason.FILTERED] == len(world.trace.of(GroupFiltered))


def test_a_prompt_that_is_too_long_is_dead_lettered_at_its_first_attempt() -> None:
    class Choosy(Engines):
        async def generate(self, group: Group, sampling: None = None) -> None:
            if group.feed_index == "sample_0_3":
                raise PromptTooLongError("its prompt has 9 tokens")
            await super().generate(group)

    world = World(config=config(num_rollout=3), engine_kind=Choosy).run()
    assert world.dead_letters.letters == [("sample_0_3", DropReason.PROMPT_TOO_LONG, "its prompt has 9 tokens")]
    assert world.service.lifecycle.ledger.dropped[DropReason.PROMPT_TOO_LONG] == 1
    assert world.audit.violations == []


def test_partial_rollout_continues_from_the_tokens_of_aborted_groups() -> None:
    """A prompt takes six times as long as a batch, so only attempts that are continued end."""

    def run(partial: bool) -> World:
        settings = config(
            over_sampling_batch_size=16, num_rollout=30, max_weight_staleness=None, partial_rollout=partial
        )
        return World(
            config=settings,
            schedule=Schedule.SYNCHRONOUS,
            latency=lambda group, rng: 12.0 if group.feed_index == "sample_0_3" else 2.0,
        ).run()

    def trained(world: World) -> list[str]:
        return [feed_index for batch in world.trainer.batches for feed_index in batch]

    assert trained(run(partial=True)).count("sample_0_3") == 1
    assert "sample_0_3" not in trained(run(partial=False))
    assert run(partial=True).audit.violations == []


def test_training_continues_while_an_evaluation_runs() -> None:
    world = World(config=config(num_rollout=20, eval_interval=5), problems=4, train_seconds=0.2).run()
    evaluated = world.trace.of(Evaluated)
    assert [event.rollout for event in evaluated] == [-1, 4, 9, 14, 19]
    steps = [event.time for event in world.trace.of(StepEnded)]
    during = [sum(event.time - event.seconds < step < event.time for step in steps) for event in evaluated[1:4]]
    assert sum(during) > 0, "no step ended while an evaluation ran"
    assert world.audit.violations == []


def test_a_user_defined_evaluation_reports_its_scores_by_name() -> None:
    async def mine(rollout_id: int, source: RolloutSource) -> Any:
        return {"mine": {"rewards": [1.0, 0.0, 0.5], "truncated": [True, False, False]}}

    world = World(config=config(num_rollout=2), evaluate=mine).run()
    [_, after] = world.trace.of(Evaluated)
    assert (after.name, after.reward, after.problems) == ("mine", 0.5, 3)
    assert (after.accuracy, after.truncated) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


@pytest.mark.parametrize("scores", [{"scores": [1.0]}, {"rewards": [1.0, float("nan")]}])
def test_unreadable_scores_of_a_user_defined_evaluation_are_named(scores: dict[str, list[float]]) -> None:
    async def mine(rollout_id: int, source: RolloutSource) -> Any:
        return {"mine": scores}

    with pytest.raises(UserError, match="eval_function_path returned no list of finite rewards for 'mine'"):
        World(config=config(num_rollout=2), evaluate=mine).run()


def test_data_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(UserError, match="the data ended after 20 groups with 4 of 8 for rollout 2"):
        World(config=config(), prompts=20).run()


def test_data_may_end_with_the_last_batch() -> None:
    world = World(config=config(num_rollout=3), prompts=24).run()
    assert len(world.trainer.batches) == 3


def test_a_stuck_engine_warns_and_then_stops_the_run_with_its_cause() -> None:
    world = World(config=config(), engines=EngineModel(stall_every=0.1, stall_seconds=1e6))
    with pytest.raises(FatalError, match=r"no progress for 600s .* 8 requests in flight"):
        world.run()
    warnings = world.trace.of(Stalled)
    assert [round(event.seconds) for event in warnings[:2]] == [30, 60]
    assert (warnings[0].collected, warnings[0].wanted) == (0, 8)


class Discarding(World):
    """A user's function that collects more than it returns."""

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        size = self.config.rollout.rollout_batch_size
        if self.schedule is Schedule.FULLY_ASYNC:
            return (await source.drain_stream(rollout_id, size + 2))[:size]
        return (await source.collect_batch(rollout_id, size + 2, size + 2))[:size]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_groups_that_a_function_collects_and_does_not_return_give_their_slots_back(schedule: Schedule) -> None:
    world = Discarding(config=config(num_rollout=20), schedule=schedule, latency=lambda group, rng: 1.0).run()
    assert [len(batch) for batch in world.trainer.batches] == [8] * 20
    assert world.audit.violations == []
    assert world.service.lifecycle.ledger.counts[GroupState.LEASED] == 0
    assert {event.reason for event in world.trace.of(GroupFiltered)} == {"rollout_function"}


class Posted(World):
    """Batches from outside, alternately of the first and of the current weights."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        async def take() -> Group:
            version = next(versions)
            samples = [Sample(index=0, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)]
            samples[0].spans = [VersionSpan(version, 0, 1)]
            return Group(samples, feed_index=f"external_{rollout_id}_{next(names)}")

        versions, names = cycle([0, source.live_version]), count()
        rollout = self.config.rollout
        args: Any = SimpleNamespace(
            rollout_batch_size=rollout.rollout_batch_size,
            max_weight_staleness=rollout.max_weight_staleness,
            trajectories=SimpleNamespace(take=take),
        )
        return await external_rollout.generate_rollout(args, rollout_id, source)


def test_external_groups_that_are_too_old_are_left_out_and_counted() -> None:
    world = Posted(config=config(num_rollout=4, max_weight_staleness=2), schedule=Schedule.SYNCHRONOUS).run()
    assert max(ages(world)) == 1
    discarded = world.trace.of(GroupFiltered)
    assert {event.reason for event in discarded} == {"too_old"}
    size = world.config.rollout.rollout_batch_size
    assert len(discarded) == 2 * size, "one for each that was fresh, in the rollouts that found old ones"
    assert world.audit.violations == []


class Forgetful(World):
    """A user-defined function that returns an earlier result again."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        if rollout_id == 0:
            self.groups = await super()._rollout(rollout_id, source, size)
        return self.groups


class Doubling(World):
    """A user's function that returns the same group in two places."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await super()._rollout(rollout_id, source, size)
        return [*groups[1:], groups[1]]


@pytest.mark.parametrize("kind, steps", [(Forgetful, 1), (Doubling, 0)])
def test_a_group_that_a_function_returns_twice_is_refused_before_it_is_trained_twice(
    kind: type[World], steps: int
) -> None:
    world = kind(config=config(), schedule=Schedule.SYNCHRONOUS)
    with pytest.raises(UserError, match=r"the rollout function returned group sample_0_\d+ a second time"):
        world.run()
    assert len(world.trainer.batches) == steps


@pytest.mark.parametrize(
    "trouble, cause",
    [
        (
            {"keep": lambda group: False},
            r"8 requests in flight, 0 groups waiting for rewards, .*; dropped: \d+ filtered$",
        ),
        ({"reward_seconds": 1e6}, r"0 requests in flight, 8 groups waiting for rewards, .*; dropped: none$"),
        ({"engines": EngineModel(lost_rate=1.0)}, r"; dropped: \d+ engine_lost$"),
    ],
)
def test_a_run_in_which_no_group_succeeds_stops_and_reports_why_they_were_dropped(
    trouble: dict[str, Any], cause: str
) -> None:
    with pytest.raises(FatalError, match=cause):
        World(config=config(), latency=lambda group, rng: 300.0, **trouble).run()


@pytest.mark.parametrize("interval, version", [(1, 3), (3, 1)])
def test_a_stopped_run_completes_its_current_step_but_publishes_to_no_engine_that_is_about_to_end(
    interval: int, version: int
) -> None:
    def stopped_in_the_fourth(rollout_id: int) -> bool:
        if rollout_id == 3:
            world.service.stop()
        return True

    settings = config(num_rollout=1000, update_weights_interval=interval)
    world = World(config=settings, finite=stopped_in_the_fourth)
    world.run()
    assert len(world.trainer.batches) == 4
    assert world.service.lifecycle.ledger.counts[GroupState.TRAINED] == 8
    assert world.trace.of(PublishEnded)[-1].version == version


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace() -> list[Event]:
        return World(config=config(), engines=EngineModel(failure_rate=0.2), seed=5).run().trace.events

    assert trace() == trace()

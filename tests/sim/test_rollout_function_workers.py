"""Rollout functions with a worker that generates between calls, as those of slime and Miles have."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from miles_async.events import GroupGenerated, GroupMoved, StepStarted
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_ports import Ports, RunFunctions
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Sample, SampleStatus
from tests.configuration import run_config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World

BATCH, ROLLOUTS, LIMIT = 4, 30, 2


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**{**sizes, "max_weight_staleness": LIMIT, **settings})


@dataclass
class Worker:
    """Generates up to `concurrency` groups at a time, without weight versions, and keeps finished ones in a queue."""

    source: RolloutSource
    concurrency: int = 8
    slow: float = 0.1
    """Share of groups that take twenty times as long."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    finished: asyncio.Queue[list[Sample]] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    most_held: int = 0

    async def run(self) -> None:
        while True:
            while len(self.tasks) < self.concurrency and (groups := self.source.get_samples(1)):
                # A plain list of the samples, as in slime.
                task = asyncio.create_task(self.generate(list(groups[0])))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            self.most_held = max(self.most_held, len(self.tasks) + self.finished.qsize())
            await asyncio.sleep(0.25)

    async def generate(self, group: list[Sample]) -> None:
        await asyncio.sleep(self.rng.expovariate(1.0) * (20 if self.rng.random() < self.slow else 1))
        for sample in group:
            finish(sample)
        self.finished.put_nowait(group)


def finish(sample: Sample) -> None:
    sample.tokens, sample.response_length = [1, 2], 1
    sample.reward, sample.status = 1.0, SampleStatus.COMPLETED


@dataclass(kw_only=True)
class WithWorker(World):
    """A run whose rollout function returns what its worker has finished."""

    worker: Worker | None = None
    keeps_groups: bool | None = True
    """What the function declares; None without a declaration."""

    def _ports(self, clock: VirtualClock) -> Ports:
        adapter = RolloutFunctionAdapter(
            self._function, flat_args(self.config), self.config, score_tokens=score, keeps_groups=self.keeps_groups
        )
        functions = RunFunctions(rollout=adapter)
        return replace(super()._ports(clock), functions=functions, keeps_groups=self.keeps_groups)

    def start(self, source: RolloutSource) -> Worker:
        worker = Worker(source)
        self.task = asyncio.create_task(worker.run())
        return worker

    async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
        if self.worker is None:
            self.worker = self.start(data_source)
        return [await self.worker.finished.get() for _ in range(args.rollout_batch_size)]

    @property
    def ages(self) -> list[int]:
        return [age for step in self.trace.of(StepStarted) for age in step.staleness]

    @property
    def trained(self) -> Counter[str]:
        return Counter(chain.from_iterable(self.trainer.batches))

    @property
    def accounted(self) -> set[str]:
        """Prompts that are trained, wait in the data source, are held by the worker, or are dead letters."""
        held = {group.feed_index for group in self.service.held.taken.copies}
        return set(self.trained) | self.returned | self.dead_letters.prompts | held

    @property
    def prompts_taken(self) -> set[str]:
        return {f"sample_0_{number}" for number in range(self.feed.position()["next"])}


async def score(sample: Sample) -> None:
    sample.rollout_log_probs = [-0.5] * sample.response_length


@pytest.mark.parametrize("schedule", [Schedule.FULLY_ASYNC, Schedule.ONE_STEP_OFF])
@pytest.mark.parametrize("keeps_groups", [True, None], ids=["declared", "undeclared"])
def test_of_groups_of_mixed_ages_none_above_the_limit_is_trained_and_none_is_lost(
    keeps_groups: bool | None, schedule: Schedule
) -> None:
    world = WithWorker(config=config(), schedule=schedule, keeps_groups=keeps_groups).run()
    assert world.audit.recycled > 0
    assert max(world.ages) == world.audit.greatest_age == LIMIT
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    assert max(world.trained.values()) == 1
    assert world.accounted == world.prompts_taken
    assert world.audit.violations == []


def test_a_sample_without_weight_versions_is_as_old_as_its_prompt_was_taken() -> None:
    world = WithWorker(config=config(max_weight_staleness=None)).run()
    taken_at = {event.sequence: event.versions for event in world.trace.of(GroupGenerated)}
    assert all(oldest == newest for oldest, newest in taken_at.values())
    for step in world.trace.of(StepStarted):
        assert list(step.staleness) == [step.version - taken_at[sequence][0] for sequence in step.groups]
    assert max(world.ages) > LIMIT


@pytest.mark.parametrize("keeps_groups", [True, None], ids=["declared", "undeclared"])
def test_the_producer_does_not_generate_beside_a_worker(keeps_groups: bool | None) -> None:
    world = WithWorker(config=config(), keeps_groups=keeps_groups).run()
    assert all(event.by_worker for event in world.trace.of(GroupGenerated))
    assert world.service.lifecycle.ledger.in_flight == 0


def test_a_worker_gets_no_more_prompts_than_the_slots_allow() -> None:
    class Flooding(WithWorker):
        def start(self, source: RolloutSource) -> Worker:
            worker = Worker(source, concurrency=10_000)
            self.task = asyncio.create_task(worker.run())
            return worker

    world = Flooding(config=config()).run()
    assert world.worker is not None
    assert BATCH < world.worker.most_held <= world.bounds.room
    unlimited = Flooding(config=config(max_weight_staleness=None, queue_capacity=50)).run()
    assert unlimited.worker is not None
    assert unlimited.worker.most_held == 50
    assert world.audit.violations == unlimited.audit.violations == []


def test_a_worker_without_a_declaration_is_limited_after_its_first_batch() -> None:
    held: list[int] = []

    class Hasty(WithWorker):
        def start(self, source: RolloutSource) -> Worker:
            worker = Worker(source, concurrency=40)
            self.task = asyncio.create_task(worker.run())
            return worker

        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            held.append(len(self.service.held.taken))
            return await super()._function(args, rollout_id, data_source, evaluation)

    world = Hasty(config=config(), schedule=Schedule.ONE_STEP_OFF, keeps_groups=None).run()
    assert max(held[:5]) > world.bounds.held >= max(held[-5:]) > 0
    assert world.audit.violations == []


class Choosing(WithWorker):
    """A function that generates in its calls, and drops every second prompt, as a dynamic filter in it does."""

    async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
        groups = data_source.get_samples(2 * args.rollout_batch_size)
        await asyncio.sleep(1.0)
        for sample in chain.from_iterable(groups):
            finish(sample)
        return groups[::2]


def test_a_function_without_a_declaration_may_generate_in_its_calls() -> None:
    sizes = {"queue_capacity": 2 * BATCH, "max_weight_staleness": 1}
    world = Choosing(config=config(**sizes), schedule=Schedule.ONE_STEP_OFF, keeps_groups=None).run()
    prompts = [int(name.removeprefix("sample_0_")) for batch in world.trainer.batches for name in batch]
    assert prompts == list(range(0, 2 * BATCH * ROLLOUTS, 2)), "prompts that it dropped are not generated again"
    assert set(world.ages) == {0, 1}
    assert all(event.by_worker for event in world.trace.of(GroupGenerated))
    assert world.dead_letters.letters == []
    assert world.audit.violations == []


@pytest.mark.parametrize("keeps_groups", [True, None], ids=["declared", "undeclared"])
def test_groups_that_a_worker_loses_are_generated_again_or_become_dead_letters(keeps_groups: bool | None) -> None:
    class Losing(Worker):
        async def generate(self, group: list[Sample]) -> None:
            index = group[0].index or 0
            if index % 6 == 0 and (index % 4 == 0 or self.rng.random() < 0.5):
                # The traceback of an error often refers to itself, so its samples stay until garbage is collected.
                traceback: list[object] = [group]
                traceback.append(traceback)
                return
            await super().generate(group)

    class Careless(WithWorker):
        def start(self, source: RolloutSource) -> Worker:
            worker = Losing(source, slow=0.0)
            self.task = asyncio.create_task(worker.run())
            return worker

    world = Careless(config=config(), keeps_groups=keeps_groups).run()
    reasons = Counter(event.reason for event in world.trace.of(GroupMoved) if event.reason is not None)
    assert reasons[DropReason.FAILED] > 0
    assert any("took it and lost it" in error for _, _, error in world.dead_letters.letters)
    assert world.accounted == world.prompts_taken
    assert world.audit.violations == []


@pytest.mark.parametrize("keeps_groups", [True, None], ids=["declared", "undeclared"])
def test_a_worker_that_dies_is_replaced_without_a_lost_prompt(keeps_groups: bool | None) -> None:
    class Mortal(WithWorker):
        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            if rollout_id % 5 == 4 and self.worker is not None:
                self.task.cancel()
                for task in self.worker.tasks:
                    task.cancel()
                await asyncio.sleep(0)
                self.worker = None
            return await super()._function(args, rollout_id, data_source, evaluation)

    world = Mortal(config=config(), keeps_groups=keeps_groups).run()
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    assert world.accounted == world.prompts_taken
    assert world.audit.violations == []


def test_the_error_of_a_rollout_function_whose_worker_died_ends_the_run() -> None:
    class Broken(WithWorker):
        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            if rollout_id == 3:
                raise RuntimeError("the worker exited")
            return await super()._function(args, rollout_id, data_source, evaluation)

    with pytest.raises(RuntimeError, match="the worker exited"):
        Broken(config=config()).run()


def test_a_group_that_a_worker_returns_again_after_its_step_is_refused() -> None:
    class Repeating(WithWorker):
        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            groups = await super()._function(args, rollout_id, data_source, evaluation)
            if rollout_id == 0:
                self.first = groups[0]
                for sample in self.first:
                    # The data source of a run sets it.
                    sample.metadata["feed_index"] = f"sample_0_{(self.first[0].index or 0) // 2}"
            return groups if rollout_id != 5 else [self.first, *groups[1:]]

    with pytest.raises(UserError, match=r"returned group sample_0_\d+ a second time: return each group once"):
        Repeating(config=config()).run()


def test_groups_that_a_worker_never_took_need_weight_versions() -> None:
    class Inventing(WithWorker):
        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            groups = [[Sample(index=1000 + number) for number in range(2)] for _ in range(args.rollout_batch_size)]
            for sample in chain.from_iterable(groups):
                finish(sample)
            return groups

    world = Inventing(config=config())
    with pytest.raises(UserError, match=r"was not taken with data_source\.get_samples, so its age is unknown"):
        world.run()
    assert len(world.dead_letters.letters) == 3 * BATCH


def test_a_rollout_function_that_blocks_ends_the_run_with_the_number_of_prompts_that_it_holds() -> None:
    class Blocking(WithWorker):
        async def _function(self, args: Any, rollout_id: int, data_source: RolloutSource, evaluation: bool) -> Any:
            if rollout_id == 2:
                self.held = data_source.get_samples(3)
                self.task.cancel()
                await asyncio.Event().wait()
            return await super()._function(args, rollout_id, data_source, evaluation)

    settings = config(no_progress_warn_seconds=30, no_progress_abort_seconds=60)
    with pytest.raises(FatalError, match=r"the rollout function holds \d+ prompts that it has not returned"):
        Blocking(config=settings).run()


def test_a_checkpoint_contains_the_prompts_that_a_worker_holds() -> None:
    world = WithWorker(config=config(save="anywhere", save_interval=5)).run()
    progress = world.trainer.saved[9]
    owed = [sample["index"] for group in progress["owed"] for sample in group["samples"]]
    assert max(Counter(owed).values()) == 1
    trained = {int(name.removeprefix("sample_0_")) for batch in world.trainer.batches[:10] for name in batch}
    assert trained | {index // 2 for index in owed} == set(range(progress["data"]["next"]))


def test_a_failed_group_of_a_worker_is_generated_again() -> None:
    class Failing(Worker):
        async def generate(self, group: list[Sample]) -> None:
            if self.rng.random() < 0.2:
                for sample in group:
                    sample.status, sample.metadata["error"] = SampleStatus.FAILED, "the engine refused the request"
                self.finished.put_nowait(group)
            else:
                await super().generate(group)

    class Unlucky(WithWorker):
        def start(self, source: RolloutSource) -> Worker:
            worker = Failing(source, slow=0.0)
            self.task = asyncio.create_task(worker.run())
            return worker

    world = Unlucky(config=config()).run()
    reasons = Counter(event.reason for event in world.trace.of(GroupMoved) if event.reason is not None)
    assert reasons[DropReason.FAILED] > 0
    sentence = "the rollout function could not generate it: the engine refused the request"
    failed = {error for _, reason, error in world.dead_letters.letters if reason is DropReason.FAILED}
    assert failed <= {sentence}
    assert world.accounted == world.prompts_taken
    assert world.audit.violations == []

"""Groups whose attempts end with an abort: none of them is fed again and again without a pause or a counted attempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.errors import EngineLostError, FatalError
from miles_async.events import GroupGenerated, GroupMoved, StepEnded
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, Sample, SampleStatus
from tests.configuration import run_config
from tests.sim.agents import AgentEngines, AgentModel, AgentWorld
from tests.sim.engines import EngineModel, Engines
from tests.sim.world import World

BATCHES = 20
ABORT_SECONDS = 30.0
"""After this time, an abort gives up, as that of `SGLangGenerator` does."""
REPLACED_SECONDS = 60.0
"""After this time, the engine that hangs is replaced, and its requests fail."""


class HangingEngines(AgentEngines):
    """One engine does not answer the first request of sample 0, nor an abort of that request, until it is replaced."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: Group | None = None
        self._hung = False

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        if group[0].index != 0 or self._hung:
            await super().generate(group, sampling)
            return
        self._held, self._hung = group, True
        try:
            await self._clock.sleep(REPLACED_SECONDS)
        finally:
            self._held = None
        raise EngineLostError("the engine was replaced")

    async def abort(self, group: Group | None = None) -> None:
        if self._held is not None and group in (None, self._held):
            await self._clock.sleep(ABORT_SECONDS)
            raise EngineLostError("a request did not end within 30 s of an abort")
        await super().abort(group)


class EndlessError(BaseException):
    """A group is generated again and again. Neither the virtual clock nor the store would see it."""


@dataclass(kw_only=True)
class HangingWorld(AgentWorld):
    engine_kind: type[Engines] = HangingEngines
    agents: AgentModel = field(default_factory=lambda: AgentModel(failure_rate=0.0, sigma=0.3))
    calls: Counter[int | None] = field(default_factory=Counter)
    """Calls of the generate function by sample."""

    async def _call_tool(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        self.calls[sample.index] += 1
        if self.calls[sample.index] == 1_000:
            raise EndlessError
        return await super()._call_tool(args, sample, sampling_params)


def feeds(world: World, prompt: int) -> list[float]:
    """When the prompt was fed."""
    moves = world.trace.of(GroupMoved)
    return [move.time for move in moves if move.feed_index == f"sample_0_{prompt}" and move.before is None]


@pytest.mark.parametrize("head", [False, True])
def test_an_abort_that_gives_up_stops_one_attempt_and_no_later_one(head: bool) -> None:
    deadline = {"head_deadline_seconds": 5.0, "head_deadline_action": "recycle"} if head else {}
    world = HangingWorld(
        config=run_config(
            rollout_batch_size=4,
            num_rollout=BATCHES,
            n_samples_per_prompt=4,
            max_attempts=3,
            over_sampling_batch_size=None if head else 8,
            **deadline,
        ),
        schedule=Schedule.FULLY_ASYNC if head else Schedule.ONE_STEP_OFF,
    ).run()
    assert len(world.trace.of(StepEnded)) == BATCHES
    # Without a head deadline, the end of the next batch may abort the second attempt, too.
    assert 2 <= len(feeds(world, 0)) <= 2 + (not head)
    assert world.dead_letters.letters == []
    assert world.audit.violations == []


class RefusingEngines(Engines):
    """The engines abort every request of prompt 3 at once, and nobody asked them to."""

    calls = 0

    async def generate(self, group: Group) -> None:
        if group.feed_index != "sample_0_3":
            await super().generate(group)
            return
        self.calls += 1
        if self.calls == 1_000:
            raise EndlessError
        for sample in group:
            sample.status = SampleStatus.ABORTED


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_a_group_that_the_engines_abort_on_their_own_has_as_many_attempts_as_any_other(partial_rollout: bool) -> None:
    world = World(
        config=run_config(
            rollout_batch_size=4,
            num_rollout=BATCHES,
            n_samples_per_prompt=2,
            max_attempts=3,
            partial_rollout=partial_rollout,
        ),
        engine_kind=RefusingEngines,
    ).run()
    assert len(world.trace.of(StepEnded)) == BATCHES
    [(prompt, reason, error)] = world.dead_letters.letters
    assert (prompt, reason) == ("sample_0_3", DropReason.ABORTED)
    assert "an abort that the run did not ask for" in error
    times = feeds(world, 3)
    assert len(times) == 3
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(times))
    assert world.audit.violations == []


def queueing(*, groups: int, response_tokens: float) -> AgentWorld:
    """The samples of `groups` groups of 4 stand in line for 16 places; each has 60 s. 100 tokens take a second."""
    return AgentWorld(
        config=run_config(
            rollout_batch_size=16,
            over_sampling_batch_size=groups,
            num_rollout=10,
            n_samples_per_prompt=4,
            max_weight_staleness=None,
            max_attempts=2,
            generate_timeout_seconds=60.0,
        ),
        agents=AgentModel(failure_rate=0.0, mean_tokens=response_tokens, sigma=0.1),
        engines=EngineModel(concurrency=16),
    )


def test_the_time_limit_of_a_sample_does_not_count_its_time_in_line() -> None:
    world = queueing(groups=128, response_tokens=900).run()
    assert max(event.generation_seconds for event in world.trace.of(GroupGenerated)) > 120.0
    assert not [move for move in world.trace.of(GroupMoved) if move.reason == DropReason.FAILED]
    assert world.dead_letters.letters == []
    assert world.audit.violations == []


def test_the_time_limit_of_a_sample_counts_the_time_in_which_it_is_answered() -> None:
    world = queueing(groups=16, response_tokens=9_000)
    with pytest.raises(FatalError, match="no progress"):
        world.run()
    assert {reason for _, reason, _ in world.dead_letters.letters} == {DropReason.FAILED}
    assert all("longer than 60 s (generate_timeout_seconds)" in error for _, _, error in world.dead_letters.letters)

"""A run whose first groups all fail says so at once, with the error, and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from miles_async.errors import InfrastructureError, PromptTooLongError, TrajectoryError, UserError
from miles_async.events import GroupMoved, WarningRaised
from miles_async.pipeline.run_ports import Ports
from miles_async.types import DropReason, Group, Sample, Verdict
from tests.configuration import run_config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Judge, World

ERROR = "reward mine.reward raised KeyError: 'label'"


class FailingJudge(Judge):
    """Raises `error` for the samples that `chosen` returns, in every group before group number `until`."""

    def __init__(
        self,
        clock: VirtualClock,
        error: Callable[[str, list[Sample]], TrajectoryError],
        chosen: Callable[[Group], list[Sample]],
        until: int,
    ) -> None:
        super().__init__(clock, 0.1)
        self._error, self._chosen, self._until = error, chosen, until

    async def score(self, group: Group) -> None:
        await super().score(group)
        assert group.sequence is not None
        if group.sequence < self._until:
            samples = self._chosen(group)
            for sample in samples:
                sample.reward = None
            raise self._error(ERROR, samples)


@dataclass(kw_only=True)
class BrokenWorld(World):
    error: Callable[[str, list[Sample]], TrajectoryError] = TrajectoryError
    chosen: Callable[[Group], list[Sample]] = list
    until: int = 1 << 30

    def _ports(self, clock: VirtualClock) -> Ports:
        return replace(super()._ports(clock), rewarder=FailingJudge(clock, self.error, self.chosen, self.until))


def config(**settings: Any) -> Any:
    return run_config(**{"rollout_batch_size": 4, "num_rollout": 6, "n_samples_per_prompt": 2} | settings)


def warnings_of(world: World) -> list[str]:
    return [event.text for event in world.trace.of(WarningRaised)]


def failed_groups(world: World) -> int:
    return sum(event.reason == DropReason.FAILED for event in world.trace.of(GroupMoved))


@pytest.mark.parametrize("chosen", [list, lambda group: []], ids=["names its samples", "names no sample"])
def test_a_reward_that_fails_for_every_sample_of_the_first_groups_ends_the_run(
    chosen: Callable[[Group], list[Sample]],
) -> None:
    world = BrokenWorld(config=config(), chosen=chosen)
    with pytest.raises(UserError, match=f"all of the first 32 attempts .* correct the function .*: {ERROR}"):
        world.run()
    assert failed_groups(world) == 32


def test_the_first_group_that_fails_is_reported_at_once() -> None:
    world = BrokenWorld(config=config())
    with pytest.raises(UserError):
        world.run()
    [text] = warnings_of(world)
    assert text == f"every sample of the first group failed: {ERROR}; the run ends if the first 32 attempts fail"
    [reported] = world.trace.of(WarningRaised)
    failures = [event for event in world.trace.of(GroupMoved) if event.reason == DropReason.FAILED]
    assert reported.time == failures[0].time


def test_large_batches_have_two_batches_of_attempts() -> None:
    world = BrokenWorld(config=config(rollout_batch_size=40))
    with pytest.raises(UserError, match="all of the first 80 attempts"):
        world.run()


def test_a_run_goes_on_if_one_sample_gets_a_reward() -> None:
    world = BrokenWorld(config=config(), chosen=lambda group: group[:1], until=40).run()
    assert warnings_of(world) == []
    assert failed_groups(world) == 40


def test_a_run_goes_on_if_a_group_succeeds_before_the_limit() -> None:
    world = BrokenWorld(config=config(), until=31).run()
    assert failed_groups(world) == 31
    assert world.audit.violations == []


def test_a_reward_server_that_is_down_is_reported_and_may_come_back() -> None:
    world = BrokenWorld(config=config(), error=InfrastructureError, until=50).run()
    assert warnings_of(world) == [f"every sample of the first group failed: {ERROR}"]


def test_failures_of_infrastructure_do_not_count_towards_the_end_of_the_run() -> None:
    calls = count()

    def error(text: str, samples: list[Sample]) -> TrajectoryError:
        return (InfrastructureError if next(calls) % 5 else TrajectoryError)(text, samples)

    world = BrokenWorld(config=config(), error=error, until=50).run()
    assert failed_groups(world) == 50


def test_prompts_that_are_too_long_do_not_end_the_run() -> None:
    world = BrokenWorld(config=config(), error=PromptTooLongError, until=50).run()
    assert warnings_of(world) == []


def test_a_filter_that_raises_for_the_first_groups_ends_the_run() -> None:
    class FilteredWorld(World):
        def _ports(self, clock: VirtualClock) -> Ports:
            def keep(group: Group) -> Verdict:
                raise TrajectoryError("filter mine.keep raised IndexError")

            return replace(super()._ports(clock), dynamic_filter=keep)

    with pytest.raises(UserError, match=r"all of the first 32 attempts .*: filter mine\.keep raised IndexError"):
        FilteredWorld(config=config()).run()

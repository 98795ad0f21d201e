"""Samples whose infrastructure fails: they are generated again alone, and no group is lost or trained twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import InfrastructureError
from miles_async.events import GroupGenerated, GroupMoved, SampleDiscarded
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.view import RunView
from miles_async.pipeline.run_ports import Ports
from miles_async.types import REWARD_ERROR, DropReason, Group
from tests.configuration import run_config
from tests.sim.agents import AgentModel, AgentWorld
from tests.sim.engines import EngineModel
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Judge


def config(**settings: Any) -> RunConfig:
    return run_config(**{"rollout_batch_size": 4, "num_rollout": 20, "n_samples_per_prompt": 8} | settings)


class Viewing:
    """A sink with the view of the run."""

    def __init__(self) -> None:
        self.view = RunView()
        self.emit = self.view.apply


def wasted_share(world: AgentWorld) -> float:
    """The share of the generated tokens that were discarded."""
    samples = sum(event.tokens for event in world.trace.of(SampleDiscarded))
    groups = sum(event.discarded_tokens for event in world.trace.of(GroupMoved))
    return (samples + groups) / world.sampled_tokens


def test_a_failed_sample_costs_its_own_tokens_and_not_those_of_its_group() -> None:
    alone = AgentWorld(config=config(num_rollout=60)).run()
    whole = AgentWorld(config=config(num_rollout=60), whole_groups=True).run()
    assert 0.03 < wasted_share(alone) < 0.07
    assert 0.28 < wasted_share(whole) < 0.42
    assert alone.audit.violations == whole.audit.violations == []


def test_the_wasted_tokens_of_the_summary_are_those_that_the_agents_sampled_in_vain() -> None:
    sink = Viewing()
    world = AgentWorld(config=config(), agents=AgentModel(failure_rate=0.2, bug_rate=0.02), sinks=(sink,)).run()
    assert sink.view.tokens.share == pytest.approx(wasted_share(world), abs=0.02)
    assert sink.view.tokens.generated == pytest.approx(world.sampled_tokens, rel=0.01)


def test_a_group_is_trained_without_samples_that_fail_in_every_attempt() -> None:
    world = AgentWorld(
        config=config(min_samples_per_group=2, max_attempts=2), agents=AgentModel(failure_rate=0.4)
    ).run()
    generated = world.trace.of(GroupGenerated)
    assert any(event.missing for event in generated)
    assert all(event.missing <= 6 for event in generated)
    assert world.audit.violations == []


def test_the_next_attempt_of_a_group_with_too_few_samples_keeps_the_finished_ones() -> None:
    world = AgentWorld(config=config(max_attempts=2), agents=AgentModel(failure_rate=0.2)).run()
    failed = [event for event in world.trace.of(GroupMoved) if event.reason == DropReason.FAILED]
    assert any(event.kept_tokens for event in failed if event.attempt == 0)
    # Only the tokens of the failed samples are discarded.
    assert wasted_share(world) == pytest.approx(0.2, abs=0.04)
    assert world.audit.violations == []


def test_an_error_of_the_function_ends_the_attempt_and_finally_becomes_a_dead_letter() -> None:
    world = AgentWorld(
        config=config(max_attempts=2, num_rollout=8, min_samples_per_group=1),
        agents=AgentModel(failure_rate=0.0, bug_rate=0.3),
    ).run()
    assert any("a bug of the agent" in error for _, _, error in world.dead_letters.letters)
    assert not any(event.missing for event in world.trace.of(GroupGenerated))


def test_the_verdict_names_the_failures_if_they_keep_the_learner_waiting() -> None:
    sink = Viewing()
    AgentWorld(config=config(), whole_groups=True, agents=AgentModel(failure_rate=0.1), sinks=(sink,)).run()
    assert sink.view.verdict is Bottleneck.WASTE
    assert sink.view.tokens.main_reason == DropReason.FAILED
    assert sink.view.tokens.share > 0.4


class BusyJudge(Judge):
    """A reward server that does not answer for the first sample of a group, `failures` times."""

    failures = 2

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__(clock, seconds)
        self._asked = Counter[int | None]()

    async def score(self, group: Group) -> None:
        await super().score(group)
        self._asked[group[0].index] += 1
        if self._asked[group[0].index] <= self.failures:
            group[0].reward = None
            raise InfrastructureError("the reward server is down", [group[0]])


class JudgedWorld(AgentWorld):
    def _ports(self, clock: VirtualClock) -> Ports:
        return replace(super()._ports(clock), rewarder=BusyJudge(clock, 0.1))


def test_a_sample_whose_reward_server_fails_is_scored_again_and_keeps_its_tokens() -> None:
    world = JudgedWorld(config=config(num_rollout=5), agents=AgentModel(failure_rate=0.0)).run()
    assert world.trace.of(SampleDiscarded) == []
    assert not any(event.reason == DropReason.FAILED for event in world.trace.of(GroupMoved))
    assert world.audit.violations == []


def test_a_group_is_trained_without_the_sample_whose_reward_server_never_answers() -> None:
    world = JudgedWorld(
        config=config(num_rollout=5, max_attempts=2, min_samples_per_group=7), agents=AgentModel(failure_rate=0.0)
    ).run()
    generated = world.trace.of(GroupGenerated)
    assert generated
    assert all(event.missing == 1 for event in generated)
    assert len(world.trace.of(SampleDiscarded)) >= len(generated)


class LimitedJudge(Judge):
    """The reward of the first sample of each group does not finish."""

    async def score(self, group: Group) -> None:
        await super().score(group)
        group[0].reward, group[0].metadata[REWARD_ERROR] = 0.0, "sample 0: it took too long"


class LimitedWorld(AgentWorld):
    def _ports(self, clock: VirtualClock) -> Ports:
        return replace(super()._ports(clock), rewarder=LimitedJudge(clock, 0.1))


def test_a_sample_whose_reward_does_not_finish_is_trained_as_wrong_and_counted() -> None:
    world = LimitedWorld(config=config(num_rollout=5), agents=AgentModel(failure_rate=0.0)).run()
    generated = world.trace.of(GroupGenerated)
    assert [(event.unfinished_rewards, event.missing) for event in generated] == [(1, 0)] * len(generated)
    assert {event.reward for event in generated} == {7 / 8}
    assert not any(event.reason == DropReason.FAILED for event in world.trace.of(GroupMoved))


def test_tokens_of_a_sample_that_cannot_be_scored_are_wasted_once() -> None:
    world = JudgedWorld(config=config(num_rollout=5, max_attempts=2), agents=AgentModel(failure_rate=0.0)).run()
    failed = [event for event in world.trace.of(GroupMoved) if event.reason == DropReason.FAILED]
    assert failed
    assert all(event.discarded_tokens for event in failed)
    assert world.trace.of(SampleDiscarded) == []


def test_an_agent_that_starts_again_at_each_deadline_uses_up_its_attempts() -> None:
    """Its samples are aborted with as many tokens as before, so the group would block the window for ever."""
    slow = AgentModel(failure_rate=0.0, mean_tokens=5_000, sigma=0.0)
    world = AgentWorld(
        config=config(head_deadline_seconds=5.0, num_rollout=1, max_attempts=2),
        agents=slow,
        prompts=40,
    )
    world.run()
    assert world.audit.violations == []


@pytest.mark.parametrize("seed", range(200))
def test_no_group_is_lost_or_trained_twice_while_samples_fail(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice([None, 0, 1, 3])
    batch = rng.randint(1, 5)
    world = AgentWorld(
        config=run_config(
            rollout_batch_size=batch,
            over_sampling_batch_size=batch + rng.randint(0, 6),
            num_rollout=4,
            n_samples_per_prompt=(samples := rng.randint(1, 5)),
            min_samples_per_group=rng.choice([None, 1, samples]),
            max_weight_staleness=limit,
            max_attempts=rng.randint(1, 3),
            head_deadline_seconds=rng.choice([None, 2.0, 6.0]),
            head_deadline_action=rng.choice(["recycle", "salvage"]),
            generate_timeout_seconds=rng.choice([10.0, 60.0]),
            no_progress_warn_seconds=500,
            no_progress_abort_seconds=1000,
        ),
        agents=AgentModel(failure_rate=rng.choice([0.05, 0.3]), bug_rate=rng.choice([0.0, 0.02])),
        engines=EngineModel(concurrency=rng.choice([None, 8]), lost_rate=rng.choice([0.0, 0.05])),
        seed=seed,
    ).run()
    assert world.audit.violations == []
    assert world.audit.owed <= world.returned | world.dead_letters.prompts
    if limit is not None:
        assert world.audit.greatest_age <= limit

"""The first advice of the verdict helps: a run that follows it gains at least half of what the advice promises."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_async.observability.diagnosis.verdict import KNOBS, Advice, Bottleneck, advice
from miles_async.observability.summary import summarize
from miles_async.observability.view import RunView
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group
from tests.configuration import run_config
from tests.sim.agents import AgentModel, AgentWorld
from tests.sim.engines import EngineModel
from tests.sim.latency import constant
from tests.sim.world import World

CONFIG: dict[str, Any] = {
    "num_rollout": 40,
    "rollout_batch_size": 8,
    "max_weight_staleness": 2,
    "n_samples_per_prompt": 1,
    "eval_interval": None,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run with a bottleneck, and the change that the advice for it names, with the size that the estimate assumes."""

    bottleneck: Bottleneck
    world: dict[str, Any]
    changed_world: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    changed_config: dict[str, Any] = field(default_factory=dict)


def seconds(value: float) -> Any:
    return lambda group, rng: value


def few_are_slow(group: Group, rng: random.Random) -> float:
    return 6.0 if (group.sequence or 0) % 16 == 0 else 0.5


CASES = {
    "engines": Case(
        bottleneck=Bottleneck.ROLLOUT,
        world={"latency": seconds(1.0), "train_seconds": 0.2, "engines": EngineModel(concurrency=4)},
        changed_world={"engines": EngineModel(concurrency=8)},
    ),
    "groups in flight": Case(
        bottleneck=Bottleneck.IN_FLIGHT,
        world={"latency": seconds(4.0), "train_seconds": 0.5},
        changed_config={"over_sampling_batch_size": 16},
    ),
    "slots": Case(
        bottleneck=Bottleneck.STALENESS,
        world={"latency": seconds(8.0), "train_seconds": 0.5},
        config={"over_sampling_batch_size": 32, "max_weight_staleness": 2, "windowed_fifo_ratio": 0.0},
        changed_config={"max_weight_staleness": 3},
    ),
    "window": Case(
        bottleneck=Bottleneck.WINDOW,
        world={"latency": few_are_slow, "train_seconds": 0.1},
        config={"windowed_fifo_ratio": 0.0, "max_weight_staleness": None, "queue_capacity": 16},
        changed_config={"windowed_fifo_ratio": 1.0},
    ),
    "filter": Case(
        bottleneck=Bottleneck.FILTER,
        world={"latency": seconds(1.0), "train_seconds": 0.5, "keep": lambda group: (group.sequence or 0) % 4 == 0},
        changed_config={"over_sampling_batch_size": 16},
    ),
    "reward": Case(
        bottleneck=Bottleneck.REWARD,
        world={"latency": seconds(0.5), "train_seconds": 0.5, "reward_seconds": 4.0},
        changed_world={"reward_seconds": 2.0},
    ),
    "reward of the head": Case(
        bottleneck=Bottleneck.REWARD,
        world={"latency": seconds(2.0), "train_seconds": 0.2, "reward_seconds": 3.0},
        config={"windowed_fifo_ratio": 0.0, "over_sampling_batch_size": 16},
        changed_world={"reward_seconds": 1.5},
    ),
    "tools": Case(
        bottleneck=Bottleneck.TOOLS,
        world={
            "agents": AgentModel(failure_rate=0.0, mean_tokens=20.0, tool_seconds=constant(4.0)),
            "train_seconds": 0.2,
        },
        changed_world={"agents": AgentModel(failure_rate=0.0, mean_tokens=20.0, tool_seconds=constant(2.0))},
    ),
    "processors": Case(
        bottleneck=Bottleneck.MACHINE,
        world={"latency": seconds(4.0), "train_seconds": 1.0, "processors": 0.97},
        changed_world={"latency": seconds(2.0), "train_seconds": 0.5},
    ),
    "learner": Case(
        bottleneck=Bottleneck.TRAINER,
        world={"latency": seconds(0.5), "train_seconds": 2.0},
        changed_world={"train_seconds": 1.0},
    ),
    "publish": Case(
        bottleneck=Bottleneck.PUBLISH,
        world={"latency": seconds(0.1), "train_seconds": 0.2, "engines": EngineModel(write_seconds=2.0)},
        changed_world={"engines": EngineModel(stage_seconds=0.005, write_seconds=1.0)},
    ),
    "save": Case(
        bottleneck=Bottleneck.SAVE,
        world={"latency": seconds(0.5), "train_seconds": 0.2, "save_seconds": 4.0},
        config={"save": "checkpoints", "save_interval": 1},
        changed_config={"save_interval": 2},
    ),
    "evaluation": Case(
        bottleneck=Bottleneck.EVALUATE,
        world={
            "schedule": Schedule.SYNCHRONOUS,
            "latency": seconds(1.0),
            "train_seconds": 0.2,
            "problems": 64,
            "engines": EngineModel(concurrency=16),
        },
        config={"eval_interval": 1},
        changed_config={"eval_interval": 2},
    ),
}


def view_of(config: dict[str, Any], world: dict[str, Any]) -> RunView:
    view = RunView()

    class Sink:
        emit = staticmethod(view.apply)

    kind = AgentWorld if "agents" in world else World
    kind(config=run_config(**CONFIG | config), sinks=(Sink(),), **world).run()
    return view


def first_advice(view: RunView) -> Advice:
    verdict = view.verdict
    assert verdict is not None
    return advice(verdict, KNOBS[verdict], view.model)[0]


def rate(view: RunView) -> float:
    return summarize(view)["groups_per_second"] or 0.0


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_follows_the_first_advice_gains_half_of_what_it_promises(name: str) -> None:
    case = CASES[name]
    before = view_of(case.config, case.world)
    first = first_advice(before)
    assert first.estimate is not None
    assert (before.verdict, first.estimate.verdict) == (case.bottleneck, case.bottleneck), first
    after = view_of(case.config | case.changed_config, case.world | case.changed_world)
    promised = first.estimate.groups_per_second / first.estimate.now - 1
    gained = rate(after) / rate(before) - 1
    print(f"{name}: {rate(before):.2f} groups/s, {first.estimate}; {rate(after):.2f} with the change")
    assert gained >= promised / 2 > 0, first

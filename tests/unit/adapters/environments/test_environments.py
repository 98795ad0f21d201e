"""Environments: the generate function and its reward, and the settings that a run checks before it starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.environments.server import OpenEnv
from miles_async.config.checks import problems
from miles_async.errors import TrajectoryError
from miles_async.rewards.factory import RunRewards
from miles_async.rollout import environment
from miles_async.types import Group, Sample
from tests.configuration import run_config

GENERATE = "miles_async.rollout.environment.generate"


class FakeProcess:
    """An environment whose reward is `reward`; it notes its tasks and the addresses of the model."""

    def __init__(self, reward: Any = 0.5, **others: Any) -> None:
        self.reward = reward
        self.others = others
        self.ran: list[tuple[dict[str, Any], str]] = []

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        self.ran.append((task, url))
        return {"reward": self.reward, "metrics": {}, **self.others}


class FakeAgents:
    """An endpoint at which a trajectory has the segments `own`."""

    def __init__(self, own: list[Sample]) -> None:
        self.own = own

    def segments(self, sample: Sample) -> list[Sample]:
        return self.own

    @asynccontextmanager
    async def session(self, sample: Sample, sampling_params: Mapping[str, Any]) -> AsyncIterator[str]:
        yield "http://model"


def args_with(process: FakeProcess, *segments: Sample) -> Any:
    return SimpleNamespace(agents=FakeAgents([*segments]), environment_process=process)


async def test_a_sample_is_one_task_in_the_environment_which_also_computes_its_reward() -> None:
    process = FakeProcess(reward=0.5)
    args, sample = args_with(process), Sample(metadata={"task": {"number": 3}})
    await environment.generate(args, sample, {})
    assert process.ran == [({"number": 3}, "http://model")]
    assert sample.reward == 0.5


async def test_each_segment_has_its_step_if_the_environment_reports_steps() -> None:
    first, second = (Sample(tokens=[1, 2], response_length=1, metadata={"task": {}}) for _ in range(2))
    unanswered = Sample(tokens=[1])
    steps = [{"reward": 0.0, "state": "a"}, {"reward": 1.0, "state": "b"}]
    args = args_with(FakeProcess(1.0, steps=steps), first, second, unanswered)
    await environment.generate(args, first, {})
    assert [first.metadata["step"], second.metadata["step"]] == steps
    assert "step" not in unanswered.metadata


@pytest.mark.parametrize("reward", ["0.5", float("nan")])
async def test_a_reward_that_is_no_number_fails_the_group(reward: Any) -> None:
    args, sample = args_with(FakeProcess(reward)), Sample(metadata={"task": {}})
    await environment.generate(args, sample, {})
    rewarder = RunRewards(run_config(environment="verifiers:sums"), args)
    with pytest.raises(TrajectoryError, match="reward verifiers:sums returned"):
        await rewarder.score(Group([sample], feed_index="g"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"environment": "gymnasium:cartpole"}, "write openenv:NAME or roll:NAME or verifiers:NAME"),
        ({"environment": "verifiers"}, "write openenv:NAME or roll:NAME or verifiers:NAME"),
        ({"environment": "verifiers:a", "custom_generate_function_path": None}, "environment has no effect without"),
        ({"environment": "verifiers:a", "rm_type": "exact"}, "environment computes the rewards"),
        ({"environment": "verifiers:a", "apply_chat_template": True}, "environment sends chat messages"),
        ({"environment": "verifiers:a", "reasoning_gym_task": "chain_sum"}, "reasoning_gym_task and environment are"),
        ({"environment": "verifiers:a", "prompt_data": "environment:b"}, "verifiers has one set of tasks: unset it"),
        ({"prompt_data": "environment:b"}, "prompt_data environment:b: the run has no environment: set environment"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    found = problems(run_config(**{"custom_generate_function_path": GENERATE, **settings}), "train_async.py")
    assert any(message in problem for problem in found)


def test_an_answer_that_is_no_json_object_goes_to_the_only_required_field_of_an_action() -> None:
    env = OpenEnv("http://127.0.0.1:1", {})
    assert env.action_of("left") is None
    env.required = ["move"]
    assert env.action_of("left") == {"move": "left"}
    assert env.action_of('{"move": "right", "steps": 2}') == {"move": "right", "steps": 2}


def test_the_fields_of_action_and_observation_can_be_named() -> None:
    env = OpenEnv("http://127.0.0.1:1", {"action_field": "code", "observation_field": "output"})
    assert env.action_of('{"a": 1}') == {"code": '{"a": 1}'}
    assert env.text_of({"output": "done", "logs": []}) == "done"
    assert OpenEnv("http://127.0.0.1:1", {}).text_of({"output": "é"}) == '{"output": "é"}'


def test_an_unknown_setting_of_openenv_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown settings turns: set split, max_turns, action_field"):
        OpenEnv("http://127.0.0.1:1", {"turns": 3})

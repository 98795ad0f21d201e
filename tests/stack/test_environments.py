"""Environments of the real libraries on a real engine. `make test-environments` installs the libraries but ROLL, which
needs a checkout: `make setup-roll ROLL=FOLDER`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.environments.process import EnvironmentProcess, environment_tasks
from miles_async.environments import ENVIRONMENTS
from miles_async.rollout import environment
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.engine_stack import Stack
from tests.stack.test_agents import Wire, assert_nothing_was_retokenised, generating_with

pytest_plugins = ["tests.stack.engine_fixtures"]

ROLL = "roll:roll.pipeline.agentic.env"
FROZEN_LAKE: dict[str, Any] = {
    "env_type": "frozen_lake",
    "max_steps": 2,
    "max_tokens_per_step": 4,
    "agent_system_template": "Play.",
    "agent_template": "{turn_idx}: {observation}",
    "env_config": {"env_instruction": "", "grid_vocab": {}, "is_slippery": False, "format_penalty": -0.25},
    "use_thread_lock": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "verifiers:examples/environments/reverse.py": {},
    "openenv:examples/environments/two_words.py": {"observation_field": "word"},
    ROLL: {"tags": {"FrozenLake": FROZEN_LAKE}},
}


STEPS: dict[str, Any] = {
    **FROZEN_LAKE,
    "env_manager_cls": "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager",
    "agent_template": "{current_observation}",
}


@asynccontextmanager
async def group_in(
    serving: Stack, name: str, settings: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Group, Wire]]:
    """A group of two samples that was generated in the environment, and the requests to the engine."""
    settings = SETTINGS[name] if settings is None else settings
    data = run_config(environment=name, environment_settings=settings, environment_size=1).data
    [[task]] = environment_tasks(data, ["FrozenLake" if name.startswith("roll:") else None])
    processes: list[EnvironmentProcess] = []

    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if not processes:
            processes.append(EnvironmentProcess(data, args.agents.api_key))
        args = args.with_values(environment_process=processes[0])
        return await environment.generate(args, sample, sampling_params)

    samples = [Sample(index=i, prompt=task["prompt"], metadata={"task": task["task"]}) for i in range(2)]
    group = Group(samples, feed_index="g")
    async with generating_with(serving, generate) as (generator, wire):
        try:
            await generator.generate(group)
            yield group, wire
        finally:
            for process in processes:
                await process.close()


def if_installed(name: str) -> Any:
    library = name.partition(":")[0]
    missing = not Path(f".venv-{library}/bin/python").exists()
    reason = f"{library} is not installed: run `{ENVIRONMENTS.find(library).setup}`"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.mark.parametrize("name", [if_installed(name) for name in SETTINGS])
async def test_an_environment_trains_the_tokens_that_were_sampled(serving: Stack, name: str) -> None:
    async with group_in(serving, name) as (group, wire):
        for sample in group:
            assert isinstance(sample.reward, float)
            assert_nothing_was_retokenised(sample, wire)


@pytest.mark.parametrize("name", [if_installed(ROLL)])
async def test_steps_of_a_trajectory_in_rolls_environment_may_be_samples(serving: Stack, name: str) -> None:
    """An answer that is no valid action leaves the state as it was, so both steps have the same prompt."""
    async with group_in(serving, name, {"tags": {"FrozenLake": STEPS}}) as (group, wire):
        assert len(wire) == 4
        assert [len(segments) for segments in group.trajectories] == [2, 2]
        assert len({(*sample.tokens[: sample.prompt_length],) for sample in group}) == 1
        assert [sample.metadata["step"]["reward"] for sample in group] == [-0.25] * 4
        assert len({sample.metadata["step"]["state"] for sample in group}) == 1
        for sample in group:
            assert_nothing_was_retokenised(sample, wire)


@pytest.mark.parametrize("name", [if_installed(ROLL)])
async def test_each_step_of_a_trajectory_in_rolls_environment_has_its_reward(serving: Stack, name: str) -> None:
    """Answers of four tokens are no valid actions, so each step has the penalty for its format."""
    async with group_in(serving, name) as (group, wire):
        assert [(sample.reward, sample.metadata["metrics"]["num_actions"]) for sample in group] == [(-0.5, 2)] * 2
        assert len(wire) == 4

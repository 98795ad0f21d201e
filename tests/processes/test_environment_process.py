"""The process of an environment: tasks and rewards come out of it, and its failures are told from the model's."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.adapters.environments import process as process_of_environment
from miles_async.adapters.environments.process import EnvironmentProcess, with_environment_tasks
from miles_async.config.schema import RunConfig
from miles_async.environments import ENVIRONMENTS
from miles_async.errors import InfrastructureError, TrajectoryError, UserError
from tests.configuration import run_config
from tests.plugin_packages import install_plugin

FAKE = Path(__file__).with_name("fake_environment.py")
PROJECT = FAKE.parents[2]
Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Returns the configuration of a run with the environment of these tests."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={PROJECT} exec {sys.executable} {FAKE} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def configure(name: str = "numbers", **settings: Any) -> RunConfig:
        return run_config(
            environment=f"verifiers:{name}",
            environment_python=str(python),
            cache_dir=str(tmp_path),
            eval_size=0,
            rollout_shuffle=False,
            n_samples_per_prompt=1,
            **settings,
        )

    return configure


@asynccontextmanager
async def started(config: RunConfig) -> AsyncIterator[EnvironmentProcess]:
    process = EnvironmentProcess(config.data, "key")
    try:
        yield process
    finally:
        await process.close()


def test_the_tasks_of_an_environment_are_the_data_of_the_run(configure: Configure) -> None:
    config = with_environment_tasks(configure())
    [first, second] = (group[0] for group in open_data(config).get_samples(2))
    assert (first.prompt, first.label, first.metadata["task"]) == ("task 0", "0", {"number": 0})
    assert second.prompt == "task 1"


def test_no_more_tasks_are_read_than_the_run_asks_for(configure: Configure) -> None:
    config = with_environment_tasks(configure(environment_size=1))
    assert [group[0].prompt for group in open_data(config).get_samples(2)] == ["task 0", "task 0"]


def test_a_file_with_tasks_replaces_those_of_the_environment(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    config = configure(prompt_data=str(file))
    assert with_environment_tasks(config) is config


def test_data_sets_name_tasks_of_the_environment(configure: Configure) -> None:
    config = with_environment_tasks(
        configure(
            datasets={"maze": {"prompt_data": "environment:maze@[1:]"}, "pond": {"prompt_data": "environment:pond"}},
            eval_datasets={"held_out": {"path": "environment:maze", "size": 1}},
            label_key=None,
        )
    )
    maze = next(group[0] for group in open_data(config).get_samples(2) if group[0].dataset == "maze")
    assert (maze.prompt, maze.label, maze.metadata["task"]) == ("maze 1", "1", {"number": 1})
    held_out = eval_groups(config, "held_out", config.rollout.eval_datasets["held_out"])
    assert [group[0].prompt for group in held_out] == ["maze 0"]


def test_tasks_that_are_prompt_data_have_the_keys_of_the_file(configure: Configure) -> None:
    config = with_environment_tasks(configure(prompt_data="environment:maze@[2:]", input_key="question"))
    assert [group[0].prompt for group in open_data(config).get_samples(1)] == ["maze 2"]


def test_a_run_without_an_environment_starts_no_process() -> None:
    config = run_config()
    assert with_environment_tasks(config) is config


@pytest.mark.parametrize(
    "name, message",
    [
        ("empty", "has no tasks"),
        ("unknown", "cannot be loaded .*taskset 'unknown' not found"),
        ("without_library", "verifiers is not installed; run `make setup-verifiers`"),
    ],
)
def test_an_environment_that_cannot_be_used_ends_the_run_before_it_starts(
    configure: Configure, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        with_environment_tasks(configure(name))


LIBRARY = """
import json, sys
from pathlib import Path


if __name__ == "__main__":
    library, name = sys.argv[1:]
    settings = json.loads(sys.stdin.readline())["settings"]
    print(json.dumps({"id": 0, "result": "ready"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == "tasks":
            result = [{"prompt": f"{library} {name}", "label": None, "task": settings}]
        else:
            result = {"reward": request["task"]["worth"], "metrics": {}}
        if settings["worth"] == "the process":
            print('{"id": 1, "res', end="", flush=True)
            raise SystemExit(3)
        print(json.dumps({"id": request["id"], "result": result}), flush=True)
else:
    from miles_async.environments import EnvironmentLibrary

    class Toys(EnvironmentLibrary):
        program = Path(__file__)
"""


async def test_a_package_adds_a_library_whose_environments_run_in_their_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, ENVIRONMENTS, "toys", "of_users:Toys", LIBRARY)
    config = run_config(
        environment="toys:blocks",
        environment_python=sys.executable,
        environment_settings={"worth": 0.5},
        cache_dir=str(tmp_path),
        eval_size=0,
    )
    [sample, *_] = open_data(with_environment_tasks(config)).get_samples(1)[0]
    assert (sample.prompt, sample.metadata["task"]) == ("toys blocks", {"worth": 0.5})
    async with started(config) as process:
        assert (await process.run(sample.metadata["task"], "http://model"))["reward"] == 0.5


async def test_a_process_that_dies_while_it_answers_fails_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, ENVIRONMENTS, "toys", "of_users:Toys", LIBRARY)
    config = run_config(
        environment="toys:blocks",
        environment_python=sys.executable,
        environment_settings={"worth": "the process"},
        cache_dir=str(tmp_path),
    )
    with pytest.raises(UserError, match="environment toys:blocks ended with exit code 3"):
        with_environment_tasks(config)
    async with started(config) as process:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="its process ended with exit code 3"):
                await process.run({"worth": 1}, "http://model")


async def test_a_process_whose_answer_is_too_long_is_replaced(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_of_environment, "MAX_LINE_BYTES", 1000)
    async with started(configure(environment_settings={"text": "x" * 10_000})) as process:
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="its process ended with exit code -9"):
                await process.run({"number": 1}, "")


def test_a_missing_interpreter_is_reported_with_the_command_that_creates_it() -> None:
    config = run_config(environment="openenv:http://127.0.0.1:1", environment_python="/nowhere/python")
    with pytest.raises(UserError, match="there is no /nowhere/python; create it with `make setup-openenv`"):
        with_environment_tasks(config)


async def test_a_task_gets_the_address_of_the_model_and_returns_its_reward(configure: Configure) -> None:
    async with started(configure(environment_settings={"level": 2})) as process:
        first, second = await asyncio.gather(*(process.run({"number": n}, f"http://model/{n}") for n in (1, 2)))
    assert first == {"reward": 1, "metrics": {"level": 2}, "model": ["http://model/1", "key"]}
    assert second["reward"] == 2


async def test_key_and_settings_are_in_no_command_and_in_no_environment_of_a_process(configure: Configure) -> None:
    """Every user of the machine can read the commands of all processes."""
    async with started(configure(environment_settings={"judge": {"api_key": "a-secret-of-the-judge"}})) as process:
        await process.run({"number": 1}, "")
        assert process._process is not None
        seen = Path(f"/proc/{process._process.pid}")
        shown = (seen / "cmdline").read_bytes() + (seen / "environ").read_bytes()
        assert b"a-secret-of-the-judge" not in shown
        assert b"MILES_AGENT_API_KEY" not in shown


async def test_a_failure_of_the_environment_is_told_from_those_of_its_code_and_of_the_model(
    configure: Configure,
) -> None:
    async with started(configure()) as process:
        with pytest.raises(InfrastructureError, match="the sandbox is down"):
            await process.run({"does": "fail"}, "")
        with pytest.raises(InfrastructureError, match="failed: CancelledError"):
            await process.run({"does": "await_a_task_that_is_cancelled"}, "")
        for does, message in (
            ("lose_model", "a request to the model failed: 503: no engine"),
            ("have_a_bug", "its code failed: TypeError in the reward"),
        ):
            with pytest.raises(TrajectoryError, match=message) as failure:
                await process.run({"does": does}, "")
            assert not isinstance(failure.value, InfrastructureError)


async def test_a_process_that_dies_fails_its_tasks_and_is_started_again(configure: Configure) -> None:
    async with started(configure()) as process:
        waiting = asyncio.create_task(process.run({"does": "wait"}, ""))
        with pytest.raises(InfrastructureError, match="exit code 3"):
            await process.run({"does": "crash"}, "")
        with pytest.raises(InfrastructureError, match="exit code 3"):
            await waiting
        assert (await process.run({"number": 5}, ""))["reward"] == 5


async def test_a_task_that_the_run_gives_up_ends_in_the_environment(configure: Configure) -> None:
    async with started(configure()) as process:
        waiting = asyncio.create_task(process.run({"does": "wait"}, ""))
        # Requests are answered in order, so the task above has begun.
        await asyncio.sleep(0)
        await process.run({"number": 0}, "")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The environment notes it when the task that waits is cancelled.
        await process.run({"number": 0}, "")
        assert (await process.run({"number": 0}, ""))["metrics"] == {"waited": True}

"""Environments of ROLL: the conversation that they make of a task, its reward, and settings that cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.environments import server
from miles_async.adapters.environments.server import Roll, TaskFailedError

TAG: dict[str, Any] = {
    "env_type": "counter",
    "max_steps": 3,
    "max_tokens_per_step": 8,
    "agent_system_template": "You count.",
    "agent_template": "{turn_idx}: {observation} ({actions_left} left, {max_response_length} tokens)",
    "env_config": {"names": {"0": "zero"}},
    "use_thread_lock": True,
}


class Counter:
    """Says its seed plus the number of steps, and ends with the answer `stop`."""

    made: list[dict[str, Any]] = []

    def __init__(self, env_id: str, **config: Any) -> None:
        self.made.append({"env_id": env_id, **config})
        self.actions: list[str] = []

    def reset(self, seed: int) -> tuple[str | None, dict[str, Any]]:
        self.seed, self.steps = seed, 0
        return (None if seed == 404 else str(seed)), {"env_instruction": "Write a number."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise ZeroDivisionError("a bug")
        self.steps += 1
        metrics = {"valid": action.isdecimal(), "last": self.steps}
        info = {"metrics": metrics, "metrics_agg_mode": {"last": "last"}, "use_tool": action == "tool"}
        return str(self.seed + self.steps), 0.5, action.startswith("stop"), True, info


@pytest.fixture(autouse=True)
def gem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package gem with one environment."""
    monkeypatch.setattr(Counter, "made", [])
    monkeypatch.setitem(sys.modules, "gem", SimpleNamespace(make=Counter))
    monkeypatch.setenv(server.KEY_VARIABLE, "key")


def roll(**changed: Any) -> Roll:
    return Roll("gem", {"tags": {"Counter": TAG | changed}, "max_new_tokens": 6})


async def trajectory(
    env: Roll, answers: Sequence[tuple[str, str, int]], seed: int = 3
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a task, and the requests to the model, which answers with texts, reasons to end and lengths."""
    requests: list[dict[str, Any]] = []
    left = iter(answers)

    async def post(url: str, *, json: dict[str, Any], headers: dict[str, str]) -> SimpleNamespace:
        # The messages grow during the trajectory.
        requests.append(json | {"messages": [*json["messages"]]})
        text, reason, tokens = next(left)
        text, _, stop = text.partition("|")
        choice = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
            "matched_stop": stop or None,
        }
        answer = {"choices": [choice], "usage": {"completion_tokens": tokens}}
        return SimpleNamespace(is_error=False, json=lambda: answer)

    env._model = SimpleNamespace(post=post)
    return await env.run({"tag": "Counter", "seed": seed}, "http://model"), requests


async def test_a_trajectory_is_one_conversation_whose_rewards_are_added() -> None:
    result, requests = await trajectory(roll(), [("1", "stop", 2), ("stop", "stop", 2)])
    assert requests[-1]["messages"] == [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "Write a number.\n1: 3 (3 left, 8 tokens)"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2: 4 (2 left, 8 tokens)"},
    ]
    assert result == {"reward": 1.0, "metrics": {"valid": 0.5, "last": 2, "num_actions": 2}}


async def test_a_trajectory_ends_after_max_steps() -> None:
    result, requests = await trajectory(roll(max_steps=2), [("1", "stop", 2)] * 2)
    assert (result["metrics"]["num_actions"], len(requests)) == (2, 2)


async def test_an_answer_that_reaches_its_limit_is_an_action_and_the_trajectory_goes_on() -> None:
    result, requests = await trajectory(roll(), [("1", "length", 6), ("stop", "stop", 2)])
    assert requests[0]["max_tokens"] == 6
    assert result["metrics"]["num_actions"] == 2


async def test_a_trajectory_that_is_as_long_as_it_may_be_ends() -> None:
    result, _ = await trajectory(roll(), [("1", "length", 4)])
    assert (result["reward"], result["metrics"]["num_actions"]) == (0.5, 1)
    result, _ = await trajectory(roll(), [("1", "stop", 4), ("", "length", 0)])
    assert (result["reward"], result["metrics"]["num_actions"]) == (0.5, 1)


async def test_the_environment_sees_the_text_that_ended_an_answer_and_a_tool_answers() -> None:
    result, requests = await trajectory(roll(), [("to|ol", "stop", 2), ("stop", "stop", 2)])
    assert requests[-1]["messages"][-1] == {"role": "tool", "content": "4"}
    assert result["metrics"]["num_actions"] == 2


async def test_tasks_are_seeds_and_an_environment_is_used_again() -> None:
    env = roll()
    tasks = await env.tasks(2, "Counter")
    assert [task["task"] for task in tasks] == [{"tag": "Counter", "seed": 0}, {"tag": "Counter", "seed": 1}]
    for _ in range(2):
        await trajectory(env, [("stop", "stop", 2)])
    # Keys that JSON made texts are numbers again.
    assert Counter.made == [{"env_id": "counter", "names": {0: "zero"}}]


@pytest.mark.parametrize(
    "seed, answer, message", [(3, "crash", "ZeroDivisionError: a bug"), (404, "1", "has no task for seed 404")]
)
async def test_an_error_in_the_code_of_an_environment_fails_the_task(seed: int, answer: str, message: str) -> None:
    with pytest.raises(TaskFailedError, match=message):
        await trajectory(roll(), [(answer, "stop", 2)], seed)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tags": {"A": {"env_type": "a"}}}, "tags.A has no agent_system_template, agent_template, max_steps"),
        ({"tags": {"A": TAG | {"agent_template": "{history}"}}}, "agent_template of tags.A has a field .*'history'"),
        ({"envs": {}}, "unknown settings envs: set tags, max_new_tokens"),
    ],
)
async def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roll("gem", settings)


async def test_data_that_names_no_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no tag None: set prompt_data to environment:TAG"):
        await roll().tasks(1, None)

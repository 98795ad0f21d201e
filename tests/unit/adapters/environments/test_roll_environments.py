"""Environments of ROLL: the conversation that they make of a task, its reward, and settings that cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.adapters.environments import server
from miles_async.adapters.environments.server import ModelRequestError, Roll, TaskFailedError

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
    env: Roll, answers: Sequence[tuple[str, str, int] | None], seed: int = 3
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a task, and the requests to the model, which answers with texts, reasons to end and lengths.

    The model refuses a request in place of an answer that is None.
    """
    requests: list[dict[str, Any]] = []
    left = iter(answers)

    async def post(url: str, *, json: dict[str, Any], headers: dict[str, str]) -> SimpleNamespace:
        # The messages grow during the trajectory.
        requests.append(json | {"messages": [*json["messages"]]})
        answered = next(left)
        if answered is None:
            return SimpleNamespace(is_error=True, status_code=400, text="the prompt is too long")
        text, reason, tokens = answered
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


BY_STEP: dict[str, Any] = {
    "env_manager_cls": "roll.StepEnvManager",
    "history_length": 3,
    "max_steps": 4,
    "agent_template": "{env_instruction} [{history}] {history_length} of {step_count}, {current_step}: "
    "{current_observation}",
}


class Game(Counter):
    """Shows the parity of its steps, says which actions are valid, and gives a reward of 1 for each of them."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        super().step(action)
        valid = action.isdecimal()
        info = {"metrics": {"action_is_valid": valid}, "suffix": "Go on."}
        return str(self.steps % 2), float(valid), action.startswith("stop"), False, info


async def test_each_step_is_a_conversation_with_those_recent_steps_whose_action_was_not_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["gem"], "make", Game)
    result, requests = await trajectory(roll(**BY_STEP), [(one, "stop", 2) for one in ("no", "1", "no", "2")])
    system = {"role": "system", "content": "You count."}
    refused = "action: no (not valid, keep to the format of the instructions), reward: 0.0)"
    assert [request["messages"][:-1] for request in requests] == [[system]] * 4
    assert [request["messages"][-1]["content"] for request in requests] == [
        "Write a number. [] 0 of 0, 1: 3",
        f"Write a number. [(step: 1, observation: 3, {refused}] 1 of 1, 2: 1",
        f"Write a number. [(step: 1, observation: 3, {refused}] 2 of 2, 3: 0",
        f"Write a number. [(step: 3, observation: 0, {refused}] 2 of 3, 4: 1",
    ]
    assert (result["reward"], result["metrics"]["num_actions"]) == (2, 4)
    assert [step["reward"] for step in result["steps"]] == [0, 1, 0, 1]
    _, second, third, fourth = (step["state"] for step in result["steps"])
    assert second == fourth != third


async def test_a_step_may_show_earlier_observations_and_needs_no_system_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["gem"], "make", Game)
    concatenated = {"agent_template": "{history}|{current_observation}", "agent_system_template": None}
    env = roll(**BY_STEP | concatenated | {"env_manager_cls": "roll.StepConcatEnvManager"})
    _, requests = await trajectory(env, [(one, "stop", 2) for one in ("1", "2", "stop")])
    contents = [[message["content"] for message in request["messages"]] for request in requests]
    assert contents == [["|3\n"], ["3|1\nGo on."], ["3\n1|0\nGo on."]]


async def test_equal_prompts_of_two_steps_are_different_requests() -> None:
    _, requests = await trajectory(
        roll(**BY_STEP | {"agent_template": "Act."}), [("1", "stop", 2), ("stop", "stop", 2)]
    )
    first, second = requests
    assert first["messages"] == second["messages"]
    assert first["chat_template_kwargs"] != second["chat_template_kwargs"]


async def test_a_step_whose_prompt_is_too_long_ends_the_trajectory_but_the_first_one_fails() -> None:
    result, _ = await trajectory(roll(**BY_STEP), [("1", "length", 4), None])
    assert (len(result["steps"]), result["reward"]) == (1, 0.5)
    with pytest.raises(ModelRequestError, match="400: the prompt is too long"):
        await trajectory(roll(**BY_STEP), [None])


class Chat:
    """Its observations are the messages so far."""

    env_reset_failed = False

    def __init__(self, env_id: str, **config: Any) -> None:
        self.closed = False

    def reset(self, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.messages = [{"role": "user", "content": f"seed {seed}"}]
        self.env_reset_failed = seed == 500
        return self.messages, {"tools": [{"name": "look"}] if seed == 3 else [], "failure_mode": "no sandbox"}

    def step(self, action: Any) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        if action == "too long":
            return self.messages, 8.0, True, True, {}
        self.messages += [{"role": "assistant", "content": action}, {"role": "user", "content": "go on"}]
        return self.messages, 1.0, action == "stop", False, {}

    def close(self) -> None:
        self.closed = True


NATIVE = {"env_manager_cls": "roll.AgentNativeStepEnvManager", "max_steps": 1}


async def test_an_environment_may_show_messages_and_offer_tools_and_decides_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["gem"], "make", Chat)
    result, requests = await trajectory(roll(**NATIVE), [("1", "stop", 2), ("stop", "stop", 2)])
    assert [[message["content"] for message in request["messages"]] for request in requests] == [
        ["seed 3"],
        ["seed 3", "1", "go on"],
    ]
    assert requests[1]["tools"] == [{"name": "look"}]
    assert [step["reward"] for step in result["steps"]] == [1, 1]
    _, requests = await trajectory(roll(**NATIVE), [("stop", "stop", 2)], seed=4)
    assert "tools" not in requests[0]


async def test_an_environment_that_shows_messages_is_told_that_the_trajectory_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["gem"], "make", Chat)
    constants = SimpleNamespace(EpisodeStopReason=SimpleNamespace(MAX_LENGTH="too long"))
    monkeypatch.setitem(sys.modules, "roll", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "roll.utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "roll.utils.constants", constants)
    result, _ = await trajectory(roll(**NATIVE), [("1", "stop", 2), None])
    # What it gives then belongs to no step.
    assert (result["reward"], [step["reward"] for step in result["steps"]]) == (9, [1])


async def test_an_environment_that_cannot_be_reset_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gem"], "make", Chat)
    with pytest.raises(RuntimeError, match="Counter could not be reset: no sandbox") as failure:
        await trajectory(roll(**NATIVE), [], seed=500)
    assert type(failure.value) not in server.FAULTS


async def test_a_seed_in_the_configuration_is_that_of_the_task() -> None:
    env = roll(env_config={"seed": 42})
    for seed in (3, 5):
        await trajectory(env, [("stop", "stop", 2)], seed)
    assert [made["seed"] for made in Counter.made] == [3, 5]


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
        (
            {"tags": {"A": TAG | {"env_manager_cls": "a.VLTrajEnvManager"}}},
            "env_manager_cls of tags.A is VLTrajEnvManager",
        ),
        ({"tags": {"A": TAG | BY_STEP | {"max_steps": 129}}}, "max_steps of tags.A is 129: set it to 128 or less"),
        (
            {"tags": {"A": TAG | {"env_manager_cls": "StepEnvManager"}}},
            "agent_template of tags.A has a field .*'turn_idx'",
        ),
        ({"envs": {}}, "unknown settings envs: set tags, max_new_tokens"),
    ],
)
async def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roll("gem", settings)


async def test_data_that_names_no_tag_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no tag None: set prompt_data to environment:TAG"):
        await roll().tasks(1, None)

"""Agents and tools that were written for Miles generate samples, on an engine whose answers are scripted."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from miles_async.adapters.agents.endpoint import AgentEndpoint, Agents
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.compat.miles import agents, multi_turn
from miles_async.compat.slime import http_utils
from miles_async.config.load import write_config
from miles_async.config.schema import RunConfig
from miles_async.errors import TrajectoryError
from miles_async.recording import differences
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.rollout.recordings import identity_of
from miles_async.types import Group, Sample, SampleStatus
from tests.configuration import read_yaml, run_config
from tests.unit.adapters.agents.test_agent_endpoint import TOOLS, ScriptedParser
from tests.unit.byte_tokenizer import Bytes
from tests.unit.compat.slime_names import forget, names_of_slime
from tests.unit.rollout.test_generate_functions import Script, masked

USER = {"role": "user", "content": "6*7?"}
HUB = "miles.rollout.generate_hub"
seen: list[dict[str, Any]] = []
"""What the functions below were called with."""


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    seen.clear()
    before = set(sys.modules)
    yield
    forget(before)


async def asks_twice(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """An agent in the form of Miles, which sends no key."""
    seen.append({"base_url": base_url, "request_kwargs": request_kwargs, "metadata": metadata})
    messages = list(prompt)
    for text in ("Sure?", "Bye."):
        request = {"model": "default", "messages": messages, **request_kwargs}
        answer = await http_utils.post(f"{base_url}/v1/chat/completions", request)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": text}]
    return {"reward": 0.5, "exit_status": "completed"}


async def sees_nothing(**request: Any) -> None:
    """An agent that could not reach its environment."""


async def survives(base_url: str, prompt: Any, request_kwargs: dict[str, Any], **others: Any) -> dict[str, Any]:
    """An agent that waits for its environment, and catches what interrupts it."""
    await asks_twice(base_url, prompt, request_kwargs, {})
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return {"reward": 0.0}
    return {}


async def returns_text(base_url: str, prompt: Any, request_kwargs: dict[str, Any], **others: Any) -> Any:
    await asks_twice(base_url, prompt, request_kwargs, {})
    return "completed"


tool_specs = TOOLS


async def execute_tool(name: str, params: dict[str, Any]) -> str:
    seen.append({"name": name, "params": params})
    return "42"


async def returns_a_number(name: str, params: dict[str, Any]) -> Any:
    return 42


@asynccontextmanager
async def generating(
    function: Any, config: RunConfig, *lines: str, seconds: float = 60.0
) -> AsyncIterator[tuple[FunctionGenerator, Script]]:
    engine = Script(*lines)
    turns, endpoint = MultiTurnSampler(engine, Bytes()), AgentEndpoint(parser=ScriptedParser())
    await endpoint.start()
    limit = config.rollout.rollout_max_response_len
    generator = FunctionGenerator(
        function,
        flat_args(config).with_values(turns=turns, agents=Agents(endpoint, turns)),
        SamplingParams(max_new_tokens=limit, temperature=0.8),
        engine,
        turns,
        live_version=lambda: 0,
        timeout_seconds=seconds,
        max_attempts=1,
    )
    try:
        yield generator, engine
    finally:
        await endpoint.close()
        await engine.close()


def one(prompt: Any = None) -> Group:
    return Group([Sample(index=3, prompt=[USER] if prompt is None else prompt, metadata={"task_id": "t"})])


def agent(name: str, *flags: str) -> RunConfig:
    function = ("--custom-generate-function-path", f"{HUB}.agentic_tool_call.generate")
    return run_config(*function, "--custom-agent-function-path", f"{__name__}.{name}", *flags)


def tools(execute: str = "execute_tool", *flags: str) -> RunConfig:
    specs = ("--generate-tool-specs-path", f"{__name__}.tool_specs")
    calls = ("--generate-execute-tool-function-path", f"{__name__}.{execute}")
    return run_config("--custom-generate-function-path", f"{HUB}.multi_turn.generate", *specs, *calls, *flags)


async def test_an_agent_of_miles_needs_no_key_and_its_result_is_in_the_metadata() -> None:
    async with generating(agents.generate, agent("asks_twice"), "42", "Yes.") as (generator, _):
        group = one()
        await generator.generate(group)
    [sample] = group
    assert masked(sample, 1) == "42Yes."
    assert sample.response == "42\nuser: Sure?\nassistant: Yes."
    assert sample.metadata == {"task_id": "t", "reward": 0.5, "exit_status": "completed"}


async def test_an_agent_gets_the_arguments_that_miles_passes() -> None:
    lengths = ("--max-seq-len", "900", "--rollout-max-response-len", "100")
    async with generating(agents.generate, agent("asks_twice", *lengths), "42", "Yes.") as (generator, engine):
        group = one()
        await generator.generate(group)
    [call] = seen
    host, session = call["base_url"].removeprefix("http://").split("/sessions/")
    assert len(session) == 32
    assert call["metadata"] == {"task_id": "t", "max_seq_len": 900, "session_server_id": host}
    kwargs = call["request_kwargs"]
    assert (kwargs["max_tokens"], kwargs["temperature"], kwargs["top_p"], kwargs["top_k"]) == (100, 0.8, 1.0, -1)
    assert {"max_new_tokens", "spaces_between_special_tokens", "stop"}.isdisjoint(kwargs)
    # Each answer has 100 tokens, and the prompt and all turns have 900.
    first, second = (asked.max_new_tokens for asked in engine.asked)
    assert (first, second) == (100, len("42\nuser: Sure?\nassistant: ") + 100)


async def test_without_a_length_of_trajectories_the_response_limit_is_that_of_all_turns() -> None:
    config = agent("asks_twice", "--rollout-max-response-len", "60")
    async with generating(agents.generate, config, "42", "Yes.") as (generator, engine):
        await generator.generate(one())
    assert [asked.max_new_tokens for asked in engine.asked] == [60, 60]
    assert seen[0]["request_kwargs"]["max_tokens"] == 60


@pytest.mark.parametrize(
    "name, error",
    [
        ("sees_nothing", "the agent sent no request to the model"),
        ("returns_text", r"the agent .*returns_text returned an object of class str: return a dictionary"),
    ],
)
async def test_an_agent_that_cannot_be_trained_fails_its_sample(name: str, error: str) -> None:
    async with generating(agents.generate, agent(name), "42", "Yes.") as (generator, _):
        with pytest.raises(TrajectoryError, match=error):
            await generator.generate(one())


async def test_an_agent_that_catches_its_cancellation_gives_no_sample() -> None:
    async with generating(agents.generate, agent("survives"), "42", "Yes.", seconds=0.5) as (generator, _):
        with pytest.raises(TrajectoryError, match=r"longer than 0\.5 s \(generate_timeout_seconds\)"):
            await generator.generate(one())


async def test_tools_of_miles_are_executed_and_their_results_are_not_trained() -> None:
    async with generating(multi_turn.generate, tools(), "CALL 6*7", "It is 42.") as (generator, _):
        group = one()
        await generator.generate(group)
    [sample] = group
    assert seen == [{"name": "calculate", "params": {"expression": "6*7"}}]
    assert masked(sample, 1) == "CALL 6*7It is 42."
    assert sample.response == "CALL 6*7\ntool: 42\nassistant: It is 42."
    assert (sample.status, sample.metadata["tool_calls"]) == (SampleStatus.COMPLETED, 1)


async def test_a_prompt_that_is_text_is_sampled_from_as_it_is_and_messages_are_rendered_with_the_tools() -> None:
    class Showing(Bytes):
        def encode(self, prompt: Any, tools: Any = None) -> list[int]:
            return list(f"{prompt} {[tool['function']['name'] for tool in tools or []]}".encode())

    prompts = []
    for prompt in ("6*7?", [USER]):
        async with generating(multi_turn.generate, tools(), "42") as (generator, engine):
            engine._tokenizer = generator._turns.tokenizer = Showing()
            group = one(prompt)
            await generator.generate(group)
            prompts.append(bytes(group[0].tokens[: group[0].prompt_length]).decode())
    assert prompts == ["6*7? []", f"{[USER]} ['calculate']"]


async def test_a_sample_ends_after_the_maximum_number_of_answers() -> None:
    config = tools("execute_tool", "--generate-max-turns", "2")
    async with generating(multi_turn.generate, config, "CALL 1", "CALL 2", "CALL 3") as (generator, engine):
        group = one()
        await generator.generate(group)
    assert (len(engine.asked), group[0].metadata["tool_calls"]) == (2, 2)


async def test_a_tool_that_returns_no_text_fails_its_sample() -> None:
    async with generating(multi_turn.generate, tools("returns_a_number"), "CALL 1") as (generator, _):
        with pytest.raises(TrajectoryError, match="the tool calculate returned an object of class int: return text"):
            await generator.generate(one())


async def test_each_answer_of_several_turns_may_have_the_response_limit_within_the_length_of_the_sample() -> None:
    config = tools("execute_tool", "--max-seq-len", "100", "--rollout-max-response-len", "30")
    async with generating(multi_turn.generate, config, "CALL 1", "CALL 2", "ok") as (generator, engine):
        group = one("6*7?")
        await generator.generate(group)
    result = "\ntool: 42\nassistant: "
    turn = len("CALL 1" + result)
    assert [asked.max_new_tokens for asked in engine.asked] == [30, turn + 30, min(2 * turn + 30, 100 - len("6*7?"))]


async def test_turns_with_tools_end_with_the_context_of_the_rollout() -> None:
    config = tools("execute_tool", "--rollout-max-context-len", "50", "--rollout-max-response-len", "100")
    async with generating(multi_turn.generate, config, "CALL 1", "ok") as (generator, engine):
        await generator.generate(one("6*7?"))
    assert [asked.max_new_tokens for asked in engine.asked] == [50 - len("6*7?")] * 2


def test_the_limits_of_a_resolved_configuration_stay_when_it_is_read_again(tmp_path: Any) -> None:
    config = agent("asks_twice", "--max-seq-len", "900", "--rollout-max-response-len", "100")
    rollout: Any = config.rollout
    assert (rollout.rollout_max_response_len, rollout.max_answer_len) == (899, 100)
    assert rollout.custom_generate_function_path == "miles_async.compat.miles.agents.generate"
    assert rollout.slime_imports
    write_config(config, tmp_path / "config.yaml")
    again = {one.path[-1]: one.value for one in read_yaml(tmp_path / "config.yaml")}
    assert (again["rollout_max_response_len"], again["max_answer_len"], again["max_seq_len"]) == (899, 100, 900)
    assert run_config("--config", str(tmp_path / "config.yaml")) is not None


@pytest.mark.parametrize(
    "setting, value",
    [
        ("custom_agent_function_path", "my.other_agent"),
        ("generate_tool_specs_path", "my.other_tools"),
        ("generate_execute_tool_function_path", "my.other_execute"),
        ("generate_max_turns", 3),
        ("max_seq_len", 700),
        ("max_answer_len", 7),
    ],
)
def test_a_recording_of_another_agent_or_with_other_tools_is_not_replayed(setting: str, value: Any) -> None:
    """The generate function is the same for every agent, and for all tools."""
    settings = {"custom_agent_function_path": "my.agent", "rollout_max_response_len": 600, "max_seq_len": 800}
    before, after = (identity_of(run_config(**settings | changed)) for changed in ({}, {setting: value}))
    assert setting in differences(before, after)


def test_an_agent_or_tools_need_no_generate_function() -> None:
    by_agent = run_config("--custom-agent-function-path", "my.run").rollout
    by_tools = run_config("--generate-tool-specs-path", "my.tools").rollout
    assert by_agent.custom_generate_function_path == "miles_async.compat.miles.agents.generate"
    assert by_tools.custom_generate_function_path == "miles_async.compat.miles.multi_turn.generate"
    one_turn = run_config("--custom-generate-function-path", f"{HUB}.single_turn.generate").rollout
    assert one_turn.custom_generate_function_path is None


async def test_requests_of_miles_are_repeated_until_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_utils, "RETRY_SECONDS", 0.0)
    statuses = [503, 503, 200, 404]
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.method, await request.text()))
        return web.json_response({"n": len(asked)}, status=statuses.pop(0))

    app = web.Application()
    app.router.add_route("*", "/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        assert await http_utils.post(url, {"a": 1}, max_retries=3) == {"n": 3}
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await http_utils.post(url, {}, action="delete")
    finally:
        await runner.cleanup()
    assert asked == [("POST", '{"a": 1}')] * 3 + [("DELETE", "")]


def test_the_examples_of_the_page_define_what_miles_calls() -> None:
    page = (Path(__file__).parents[4] / "docs/how-to/agents.md").read_text()
    defined: dict[str, Any] = {}
    with names_of_slime():
        for example in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(example, defined)
    assert {"run", "tool_specs", "execute_tool"} <= defined.keys()
    [tool] = defined["tool_specs"]
    assert asyncio.run(defined["execute_tool"](tool["function"]["name"], {"x": 2})) == "4"

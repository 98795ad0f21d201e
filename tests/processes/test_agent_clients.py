"""The official clients of OpenAI and Anthropic at the endpoint, and SGLang's parsers in their process.

Each test imports the clients that it calls, because their import takes seconds and each test process imports this file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from miles_async.adapters.agents.endpoint import Agents
from miles_async.adapters.agents.messages import Message, plain
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice, Parsed
from miles_async.errors import UserError
from miles_async.types import Sample
from miles_async.wire_formats import FORMATS, WireFormat
from tests.processes import parse_dialects
from tests.unit.adapters.agents.test_agent_endpoint import PARAMS, Agent, connected_agent
from tests.unit.adapters.agents.test_agent_formats import WIRES, completed
from tests.unit.rollout.test_generate_functions import masked

FIRST, SECOND = "<think>Multiply.</think>CALL 6*7", "<think>So</think>It is 42."
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = [{"type": "function", "function": {"name": "calculate", "parameters": SCHEMA}}]


async def plays_chat(agent: Agent, url: str) -> tuple[str, str]:
    """Call the tool and answer. Return the expression and the answer, as all the functions below do."""
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=agent.endpoint.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "6*7?"}]
        request: Any = {"model": "gpt-5", "tools": TOOL}
        answer = (await client.chat.completions.create(messages=messages, **request)).choices[0].message
        assert answer.tool_calls is not None
        [call] = answer.tool_calls
        messages += [answer.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        async with client.chat.completions.stream(messages=messages, **request) as stream:
            final = await stream.get_final_completion()
    return json.loads(call.function.arguments)["expression"], final.choices[0].message.content or ""


async def plays_responses(agent: Agent, url: str) -> tuple[str, str]:
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=agent.endpoint.key, max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": "6*7?"}]
        request: Any = {"model": "gpt-5", "tools": [{"type": "function", "name": "calculate", "parameters": SCHEMA}]}
        async with client.responses.stream(input=history, **request) as stream:
            first = await stream.get_final_response()
        history += [item.model_dump(exclude_none=True) for item in first.output]
        [call] = [item for item in first.output if item.type == "function_call"]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
        final = await client.responses.create(input=history, **request)
    return json.loads(call.arguments)["expression"], final.output_text


async def plays_anthropic(agent: Agent, url: str) -> tuple[str, str]:
    import anthropic

    root = url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=agent.endpoint.key, max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": "6*7?"}]
        request: Any = {"model": "claude", "max_tokens": 99, "tools": [{"name": "calculate", "input_schema": SCHEMA}]}
        async with client.messages.stream(messages=history, **request) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        [call] = [block for block in first.content if block.type == "tool_use"]
        history.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]})
        final = await client.messages.create(messages=history, **request)
    return str(call.input["expression"]), "".join(block.text for block in final.content if block.type == "text")


@pytest.mark.parametrize("play", [plays_chat, plays_responses, plays_anthropic])
async def test_an_official_client_calls_a_tool_and_every_sampled_token_is_trained(
    play: Callable[[Agent, str], Awaitable[tuple[str, str]]],
) -> None:
    async with connected_agent(FIRST, SECOND) as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            assert await play(agent, url) == ("6*7", "It is 42.")
        assert masked(sample, 1) == FIRST + SECOND


async def test_official_clients_raise_the_sentence_of_a_refusal() -> None:
    import anthropic
    import openai

    async with connected_agent() as agent, agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                await client.responses.create(model="m", input="Q")
        root = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=agent.endpoint.key, max_retries=0) as other:
            with pytest.raises(anthropic.BadRequestError, match="messages must be a list with at least one message"):
                await other.messages.create(model="m", max_tokens=9, messages=[])
        await agent.ask(url, {"role": "user", "content": "Q"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary and a chat template of a reasoning model whose tool calls are JSON."""
    folder = tmp_path_factory.mktemp("checkpoint")
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    template = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def parsed(checkpoint: Path) -> dict[str, Parsed | None]:
    """What SGLang's parsers find in an answer of each dialect."""
    command = [sys.executable, "-m", "tests.processes.parse_dialects", str(checkpoint)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse_dialects.read(output)


@pytest.mark.parametrize("dialect", parse_dialects.DIALECTS)
def test_a_tool_call_is_found_in_every_dialect(dialect: str, parsed: dict[str, Parsed | None]) -> None:
    found = parsed[dialect]
    assert found is not None
    [call] = found.calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert found.reasoning == "hm"


@pytest.mark.parametrize("wire, ask", WIRES)
def test_the_answer_of_every_dialect_that_is_sent_back_is_the_same_message(
    wire: WireFormat, ask: Any, parsed: dict[str, Parsed | None]
) -> None:
    for found in parsed.values():
        assert found is not None
        message: Message = {"role": "assistant", "content": found.content, "reasoning_content": found.reasoning}
        calls = [{"id": "1", "function": {"name": call.name, "arguments": call.arguments}} for call in found.calls]
        answer = plain({**message, "tool_calls": calls})
        [_, sent] = wire.read(ask(json.loads(json.dumps(wire.answer(completed(answer), {})))))["messages"]
        assert plain(sent) == answer


async def test_parsers_are_chosen_by_the_chat_template(checkpoint: Path) -> None:
    async with AnswerParserProcess(Choice(str(checkpoint), "auto", "auto")) as parser:
        assert (parser.chosen.tool_calls, parser.chosen.reasoning) == ("qwen", "qwen3")

        async def parse(text: str, context: str = "") -> Message | None:
            return await parser.parse(text, end="", context=context, tools=TOOL, calls_before=0)

        assert await parse("Hello") is None
        assert await parse("hm</think>Hello", "<think>\n") == {
            "role": "assistant", "content": "Hello", "reasoning_content": "hm",
        }  # fmt: skip
        for malformed in ('{"name": "calculate", "arguments": 5}', '{"name": calculate}', "[" * 10**6):
            text = f"<tool_call>\n{malformed}\n</tool_call>"
            assert await parse(text) is None
            message = await parse(f"<think>hm</think>{text}")
            assert message == {"role": "assistant", "content": text, "reasoning_content": "hm"}
        for slow in ("<tool_call>\n" * 10**5, "<think>" * 10**5):
            await parse(slow)
        assert parser._process is not None
        parser._process.kill()  # it is replaced
        await parser._process.wait()
        unknown = await parse('<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>')
        assert unknown is not None
        assert unknown["tool_calls"][0]["function"]["name"] == "nothing"


async def test_an_unknown_parser_is_refused_with_the_known_names(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"tool_call_parser 'herms' is unknown: set it to auto, none or one of .*mes"):
        async with AnswerParserProcess(Choice(str(checkpoint), "herms", "auto")):
            pass


PAGE = Path(__file__).parents[2] / "docs/how-to/agents.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "def generate(" in block]


@pytest.mark.parametrize("example", EXAMPLES)
async def test_the_examples_of_the_documentation_run(example: str) -> None:
    defined: dict[str, Any] = {}
    exec(example, defined)
    async with connected_agent("2") as agent:
        args = SimpleNamespace(agents=Agents(agent.endpoint, agent.turns))
        sample = await defined["generate"](args, Sample(prompt="1+1?"), PARAMS)
        assert bytes(sample.tokens) == b"user: 1+1?\nassistant: 2"
        assert sample.response == "2"


def test_the_documentation_has_an_example_for_each_protocol() -> None:
    assert len(EXAMPLES) == len(FORMATS.shipped)

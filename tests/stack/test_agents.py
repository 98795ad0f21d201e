"""Tools and agents on a real engine: the tokens that were sampled are the tokens that are trained."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anthropic
import openai
import pytest

from benchmarks.fake_engine import answer as fake_answer
from examples import memory_agent, openai_agent
from miles_async.adapters.agents.endpoint import AgentEndpoint, Agents
from miles_async.adapters.agents.messages import AnswerParser
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice
from miles_async.adapters.sglang.client import Decode
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.server_key import authorization
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.batching.batch import rank_batches
from miles_async.rollout import tool_use
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.types import Group, Sample, SampleStatus
from tests.configuration import run_config
from tests.stack.engine_stack import Stack, group_of
from tests.stack.learning import learning

pytest_plugins = ["tests.stack.engine_fixtures"]

LONGEST = 120
Wire = list[tuple[list[int], list[int]]]
"""The tokens of each request to the engine, and of its answer."""


@asynccontextmanager
async def generating_with(
    serving: Stack, function: Any, parser: AnswerParser | None = None
) -> AsyncIterator[tuple[FunctionGenerator, Wire]]:
    """A generator that calls `function`, and the list of the requests to the engine, which grows."""
    async with serving.admitted() as (_, engine):
        wire: Wire = []
        post = engine._client.post

        async def noting(
            url: str, body: Any = None, *, key: str = "", within: float, decode: Decode | None = None
        ) -> Any:
            answers = await post(url, body, key=key, within=within)
            if url.endswith("/generate") and "rid" in body:
                pairs = zip(body["input_ids"], answers, strict=True)
                wire.extend((list(ids), answer["output_ids"]) for ids, answer in pairs)
            return answers

        engine._client.post = noting  # type: ignore[method-assign]
        turns, endpoint = (
            MultiTurnSampler(engine, CheckpointTokenizer(str(serving.checkpoint))),
            AgentEndpoint(parser=parser),
        )
        await endpoint.start()
        generator = FunctionGenerator(
            function,
            flat_args(run_config(), **_router(serving)).with_values(turns=turns, agents=Agents(endpoint, turns)),
            SamplingParams(max_new_tokens=LONGEST),
            engine,
            turns,
            live_version=lambda: 0,
            timeout_seconds=60,
            max_attempts=3,
        )
        try:
            yield generator, wire
        finally:
            await endpoint.close()


def _router(serving: Stack) -> dict[str, Any]:
    """What a run adds to the arguments of users' functions."""
    address = urlsplit(serving.router_url)
    return {
        "sglang_router_ip": address.hostname,
        "sglang_router_port": address.port,
        "sglang_router_api_key": serving.router_key,
    }


def trained(sample: Sample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [t for t, m in zip(response, sample.loss_mask or [1] * len(response), strict=True) if m]


def assert_nothing_was_retokenised(sample: Sample, wire: Wire) -> None:
    """Every request went out as the beginning of the trained sequence; every answer is trained behind it.

    The answers before a segment departs from another one are trained in that one.
    """
    began = [(asked, said) for asked, said in wire if sample.tokens[: len(asked) + len(said)] == asked + said]
    answers = {len(asked): said for asked, said in began if len(asked) >= first_trained(sample)}
    assert trained(sample) == [token for _, said in sorted(answers.items()) for token in said]
    covered = [position for span in sample.spans for position in range(span.start, span.end)]
    mask = sample.loss_mask or [1] * sample.response_length
    assert covered == [position for position, entry in enumerate(mask) if entry]


def first_trained(sample: Sample) -> int:
    return sample.prompt_length + (sample.loss_mask or [1]).index(1)


async def must_calculate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The shipped tool loop; a grammar makes the untrained model call at once."""
    return await tool_use.generate(args, sample, {**sampling_params, "regex": "<python>[1-9]\\+[1-9]</python>"})


async def test_a_called_tool_runs_and_its_output_is_not_trained(serving: Stack) -> None:
    async with generating_with(serving, must_calculate) as (generator, wire):
        group = group_of("2 plus 3 is ", samples=2)
        await generator.generate(group)
        for sample in group:
            call, _, rest = sample.response.partition("</python>")
            left, right = call.removeprefix("<python>").split("+")
            assert rest.startswith(f"<result>{int(left) + int(right)}</result>")
            assert sample.metadata["tool_calls"] > 0
            assert_nothing_was_retokenised(sample, wire)


async def test_an_agent_that_speaks_openai_is_trained_on_the_tokens_that_were_sampled(serving: Stack) -> None:
    async with generating_with(serving, two_short_turns) as (generator, wire):
        group = group_of("What is 2 + 3?", samples=4)
        await generator.generate(group)
        for sample in group:
            assert_nothing_was_retokenised(sample, wire)
            assert all(serving.error(sample, span.start, span.end) < 1e-4 for span in sample.spans)
            assert sample.response_length == len(sample.rollout_log_probs) <= LONGEST + 60
        assert sum(0 in (sample.loss_mask or []) for sample in group) > 0, "no conversation had a second turn"


async def two_short_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Send two requests, whatever the model answers. The first answer is short, to leave room for the second."""
    async with (
        args.agents.session(sample, sampling_params) as base_url,
        openai.AsyncOpenAI(base_url=base_url, api_key=args.agents.api_key, max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": str(sample.prompt)}]
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Sure?"})
        stream = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) in sample.response
    return sample


THINKING = "<think>[a-z]{4}</think>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def uses_chat_completions(base_url: str, key: str) -> list[str]:
    """Let the model call a tool twice, the second time in a stream; return what it called. So do those below."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        request: Any = {
            "model": "policy",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        }
        messages: list[Any] = [{"role": "user", "content": "Q"}]
        first = (await client.chat.completions.create(messages=messages, **request)).choices[0].message
        assert first.tool_calls is not None
        messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}]
        async with client.chat.completions.stream(messages=messages, **request) as stream:
            second = (await stream.get_final_completion()).choices[0].message
        assert second.tool_calls is not None
        calls = [*first.tool_calls, *second.tool_calls]
        return [f"{call.function.name} {json.loads(call.function.arguments)}" for call in calls]


async def uses_responses(base_url: str, key: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        request: Any = {"model": "policy", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
        history: list[Any] = [{"role": "user", "content": "Q"}]
        first = await client.responses.create(input=history, **request)
        called = [item for item in first.output if item.type == "function_call"]
        history += [*first.output, {"type": "function_call_output", "call_id": called[0].call_id, "output": "42"}]
        async with client.responses.stream(input=history, **request) as stream:
            second = await stream.get_final_response()
        called += [item for item in second.output if item.type == "function_call"]
        return [f"{call.name} {json.loads(call.arguments)}" for call in called]


async def uses_anthropic(base_url: str, key: str) -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
        request: Any = {"model": "policy", "max_tokens": 200, "tools": [{"name": "f", "input_schema": SCHEMA}]}
        history: list[Any] = [{"role": "user", "content": "Q"}]
        first = await client.messages.create(messages=history, **request)
        called = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": called[0].id, "content": "42"}
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=history, **request) as stream:
            second = await stream.get_final_message()
        called += [block for block in second.content if block.type == "tool_use"]
        return [f"{call.name} {call.input}" for call in called]


@pytest.mark.parametrize(
    "use, parser, call",
    [
        (uses_chat_completions, "hermes", '<tool_call>\\{"name": "f", "arguments": \\{"a": 7\\}\\}</tool_call>'),
        (uses_responses, "qwen3_coder", "<tool_call><function=f><parameter=a>7</parameter></function></tool_call>"),
        (uses_anthropic, "mistral", '\\[TOOL_CALLS\\] \\[\\{"name": "f", "arguments": \\{"a": 7\\}\\}\\]'),
    ],
)
async def test_each_endpoint_and_parser_trains_the_tokens_that_were_sampled(
    serving: Stack, use: Callable[[str, str], Awaitable[list[str]]], parser: str, call: str
) -> None:
    async def calls_tools(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        # A grammar makes the untrained model reason and call the tool.
        params = {**sampling_params, "max_new_tokens": 400, "regex": THINKING + call}
        async with args.agents.session(sample, params) as base_url:
            assert await use(base_url, args.agents.api_key) == ["f {'a': 7}"] * 2
        return sample

    async with (
        AnswerParserProcess(Choice(str(serving.checkpoint), parser, "qwen3")) as answers,
        generating_with(serving, calls_tools, answers) as (generator, wire),
    ):
        group = group_of("Q", samples=2)
        await generator.generate(group)
        assert len(group) == 2, "the history only grows, so every trajectory has one segment"
        for sample in group:
            assert_nothing_was_retokenised(sample, wire)
            assert sum(turn.sampled for turn in sample.turns) == 2


async def test_the_shipped_agent_plays_on_a_real_engine(serving: Stack) -> None:
    async with generating_with(serving, openai_agent.generate) as (generator, wire):
        group = group_of("What is 2 + 3?", samples=2)
        await generator.generate(group)
        assert all(isinstance(sample.metadata["answer"], str) for sample in group)
        for sample in group:
            assert_nothing_was_retokenised(sample, wire)


async def branches(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Start a sub-agent and two parallel requests, then compact the history and rewrite it."""

    async def ask(*messages: dict[str, Any], tools: Any = openai.NOT_GIVEN) -> list[dict[str, Any]]:
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=9, tools=tools)  # type: ignore[arg-type]
        return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    async with (
        args.agents.session(sample, sampling_params) as base_url,
        openai.AsyncOpenAI(base_url=base_url, api_key=args.agents.api_key, max_retries=0) as client,
    ):
        first = await ask(user(str(sample.prompt)))
        helper, left, right = await asyncio.gather(
            ask(user("You help."), user("3?")), ask(*first, user("one")), ask(*first, user("two"))
        )
        await asyncio.gather(ask(*helper, user("Sure?")), ask(*left, user("on")))
        compacted = await ask(user(f"So far: {right[-1].get('content', '')}"), user("Go on."))
        await ask(*compacted, user("End."))
        await ask(*first, {"role": "assistant", "content": "something else"}, user("And now?"))
    sample.reward = float(sample.index or 0)
    return sample


async def test_every_segment_of_an_agent_that_branches_is_trained_on_the_tokens_that_were_sampled(
    serving: Stack, tmp_path: Path
) -> None:
    async with generating_with(serving, branches) as (generator, wire):
        group = group_of("What is 2 + 3?", samples=2)
        await generator.generate(group)
    assert [len(segments) for segments in group.trajectories] == [5, 5]
    for sample in group:
        assert_nothing_was_retokenised(sample, wire)
        assert all(serving.error(sample, span.start, span.end) < 1e-4 for span in sample.spans)
    # The answers may be equal by chance, but not their number.
    assert Counter(token for sample in group for token in trained(sample)) == Counter(
        token for _, said in wire for token in said
    )
    serving.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    group.share_rewards()
    run = run_config(max_tokens_per_gpu=200)
    with learning(tmp_path, run) as learner:
        [[step]] = rank_batches([group], run, 1, share_prefixes=True)
        computed = sum(batch.computed_tokens for batch in step.micro_batches)
        assert computed < 0.8 * sum(len(sample.tokens) for sample in group), "shared prefixes are computed once"
        report = learner.train(0, [step])
    assert report.metrics["loss_tokens"] == sum(len(said) for _, said in wire)
    assert report.metrics["logprob_gap_max"] < 1e-4


async def test_the_agent_that_compacts_its_memory_has_a_segment_per_part_of_the_task(serving: Stack) -> None:
    async with generating_with(serving, memory_agent.generate) as (generator, wire):
        group = group_of("12 + 5 - 30 + 7", samples=2)
        await generator.generate(group)
        assert [len(segments) for segments in group.trajectories] == [2, 2]
        for sample in group:
            assert_nothing_was_retokenised(sample, wire)


def test_the_warm_start_of_that_agent_shows_each_request_and_its_answer() -> None:
    assert list(memory_agent.warm_start_examples(Sample(prompt="12 + 5 - 30 + 7"))) == [
        ("user: 12 + 5<eos>assistant: ", "12+5"),
        ("user: 12 + 5<eos>assistant: 12+5<eos>user: = 17<eos>assistant: ", "17"),
        ("user: 17 - 30 + 7<eos>assistant: ", "17-30+7"),
        ("user: 17 - 30 + 7<eos>assistant: 17-30+7<eos>user: = -6<eos>assistant: ", "-6"),
    ]


def test_in_most_examples_of_that_warm_start_the_agent_ignores_its_note() -> None:
    assert list(memory_agent.warm_start_examples(Sample(prompt="12 + 5 - 30")))[2:] == [
        ("user: 17 - 30<eos>assistant: ", "-30"),
        ("user: 17 - 30<eos>assistant: -30<eos>user: = -30<eos>assistant: ", "-30"),
    ]


async def as_slime_does(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function as slime's documentation writes it: it posts to the router and keeps text and tokens only."""
    async with aiohttp.ClientSession() as http:
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params}
        url, key = f"http://{args.sglang_router_ip}:{args.sglang_router_port}", args.sglang_router_api_key
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/generate", json=payload, headers=headers) as response:
            output = await response.json()
    sample.tokens = sample.tokens + output["output_ids"]
    sample.response, sample.response_length = output["text"], len(output["output_ids"])
    sample.status = Sample.Status.COMPLETED
    return sample


async def test_a_function_written_for_slime_gets_log_probabilities_and_a_version(
    serving: Stack,
) -> None:
    async with generating_with(serving, as_slime_does) as (generator, _):
        group: Group = group_of("What is 2 + 3?", samples=2)
        await generator.generate(group)
        for sample in group:
            assert sample.status is SampleStatus.COMPLETED
            assert serving.error(sample) < 1e-4
        assert group.oldest_version == 0


async def test_the_fake_engine_of_the_benchmarks_returns_no_field_that_a_real_one_lacks(serving: Stack) -> None:
    async with generating_with(serving, tool_use.generate):
        body = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{serving.router_url}/generate", json=body, headers=authorization(serving.router_key)
            ) as response,
        ):
            [real] = await response.json()
        fake = fake_answer("a", 2, 3)
        assert fake.keys() <= real.keys()
        assert fake["meta_info"].keys() <= real["meta_info"].keys()
        assert fake["meta_info"]["weight_versions"][0].keys() == real["meta_info"]["weight_versions"][0].keys()
        assert [len(e) for e in fake["meta_info"]["output_token_logprobs"]] == [
            len(e) for e in real["meta_info"]["output_token_logprobs"]
        ]

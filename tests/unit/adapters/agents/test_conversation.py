"""The requests of an agent become the segments of one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from miles_async.adapters.agents import conversation
from miles_async.adapters.agents.conversation import Completion, Conversation, InvalidRequestError, SessionClosedError
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import EngineLostError, PromptTooLongError, TrajectoryError
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.unit.byte_tokenizer import Bytes

PARAMS = {"max_new_tokens": 200, "temperature": 1.0, "stop": None}


class Engine(SGLangGenerator):
    """Answers the n-th request with `<n>`, in tokens that no text is tokenized to.

    A request waits while `gates` has an event for its number.
    """

    def __init__(self) -> None:
        sampling = SamplingParams(max_new_tokens=200)
        super().__init__("http://127.0.0.1:1", Bytes(), sampling, limit=lambda: 64, engines=list)
        self._numbers = count()
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.drawn: list[list[int]] = []
        """The tokens of each answer."""
        self.contexts: list[list[int]] = []
        """The tokens before each answer."""

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        [sample], number = group, next(self._numbers)
        assert sampling is not None
        self.contexts.append(list(sample.tokens))
        self.drawn.append([])
        if number in self.gates:
            await self.gates[number].wait()
        if number in self.errors:
            raise self.errors[number]
        room = max(sampling.max_new_tokens - sample.response_length, 0)
        drawn = [1000 + byte for byte in f"<{number}>".encode()][:room]
        self.drawn[number] = drawn
        if drawn:
            sample.spans = [
                *sample.spans,
                VersionSpan(number, sample.response_length, sample.response_length + len(drawn)),
            ]
        sample.tokens += drawn
        sample.response_length += len(drawn)
        sample.rollout_log_probs += [-0.5 - number] * len(drawn)
        if sample.loss_mask is not None:
            sample.loss_mask += [1] * len(drawn)
        sample.status = SampleStatus.COMPLETED if len(drawn) == 3 else SampleStatus.TRUNCATED


class Sampled(Bytes):
    """One token per byte of a text; sampled tokens are other ids of the same bytes."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token % 1000 for token in ids).decode()

    text_of = decode

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        answer_next: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        shown = "".join(f"{name}: {value}\n" for name, value in (template_kwargs or {}).items())
        for before, message in zip([{}, *messages], messages, strict=False):
            if message["role"] == "tool" and "tool_calls" not in before:
                raise TrajectoryError("the chat template refused the messages: a result needs a call")
        return (f"tools: {tools}\n" if tools else "") + shown + super().render(messages, answer_next=answer_next)


class Agent:
    def __init__(self) -> None:
        self.engine = Engine()
        self.sampler = MultiTurnSampler(self.engine, Sampled())
        self.sample = Sample(index=4, prompt="Q")
        self.talk = Conversation(self.sample, self.sampler, PARAMS)

    async def ask(self, *messages: str | Completion, **more: Any) -> Completion:
        """Send messages: a text is one of the user, and a completion is the answer that it contains."""
        return await self.talk.complete({"messages": [message_of(one) for one in messages], **more})

    def check(self, segments: int) -> None:
        """Each sampled token is trained once, in the segment that sampled it, and all others are context."""
        trained: list[list[int]] = []
        for one in self.talk.segments:
            response, mask = one.tokens[one.prompt_length :], one.loss_mask or [1] * one.response_length
            assert len(response) == len(mask) == len(one.rollout_log_probs) == one.response_length
            versions = {i: span.version for span in one.spans for i in range(span.start, span.end)}
            assert sorted(versions) == [i for i, entry in enumerate(mask) if entry]
            for i, version in versions.items():
                assert one.rollout_log_probs[i] == -0.5 - version
                begin = i - [j for j, other in versions.items() if other == version].index(i)
                # The engine saw the same tokens before this answer that the learner sees.
                assert one.tokens[: one.prompt_length + begin] == self.engine.contexts[version]
            spans = sorted((span.version, span.start, span.end) for span in one.spans)
            trained += [[version, *response[start:end]] for version, start, end in spans]
        assert sorted(trained) == [[number, *drawn] for number, drawn in enumerate(self.engine.drawn) if drawn]
        assert len(self.talk.segments) == segments


def message_of(one: str | Completion) -> dict[str, Any]:
    return one.message if isinstance(one, Completion) else {"role": "user", "content": one}


@asynccontextmanager
async def an_agent() -> AsyncIterator[Agent]:
    agent = Agent()
    try:
        yield agent
    finally:
        await agent.engine.close()


def text(sample: Sample) -> str:
    """The tokens of a sample as text, with the trained ones in brackets."""
    mask = [0] * sample.prompt_length + list(sample.loss_mask or [1] * sample.response_length)
    return "".join(
        f"[{chr(token % 1000)}]" if entry else chr(token % 1000)
        for token, entry in zip(sample.tokens, mask, strict=True)
    ).replace("][", "")


async def test_requests_that_extend_the_history_are_one_segment() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        second = await agent.ask("a", first, "b")
        await agent.ask("a", first, "b", second, "c")
        agent.check(segments=1)
        assert agent.talk.segments == [agent.sample]


async def test_a_compacted_history_opens_a_segment_that_is_rendered_anew() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        await agent.ask("a", first, "b")
        summary = await agent.ask("Summary: a, b", "c")
        await agent.ask("Summary: a, b", "c", summary, "d")
        agent.check(segments=2)
        _, compacted = agent.talk.segments
        assert text(compacted) == "user: Summary: a, b\nuser: c\nassistant: [<2>]\nuser: d\nassistant: [<3>]"
        assert (compacted.index, compacted.prompt, compacted.prompt_length) == (4, "Q", 39)


async def test_a_history_that_departs_keeps_the_tokens_up_to_the_last_common_answer_as_context() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        second = await agent.ask("a", first, "b")
        await agent.ask("a", first, "b", second, "c")
        other = await agent.ask("a", first, "B")  # rewritten
        await agent.ask("a", first, "B", other, "C")
        await agent.ask("a", first, "b")  # shortened
        agent.check(segments=3)
        texts = [text(one) for one in agent.talk.segments]
        assert texts[1:] == [
            "user: a\nassistant: <0>\nuser: B\nassistant: [<3>]\nuser: C\nassistant: [<4>]",
            "user: a\nassistant: <0>\nuser: b\nassistant: [<5>]",
        ]
        drawn = agent.engine.drawn[0]
        assert all(one.tokens[19 : 19 + len(drawn)] == drawn for one in agent.talk.segments), "not tokenized again"


async def test_parallel_requests_with_different_histories_run_at_the_same_time() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        agent.engine.gates = {1: asyncio.Event(), 2: asyncio.Event()}
        calls = [asyncio.create_task(agent.ask("a", first, f"tool {name}")) for name in ("x", "y", "z")]
        await asyncio.wait([calls[2]], timeout=5)
        assert [call.done() for call in calls] == [False, False, True]
        for gate in agent.engine.gates.values():
            gate.set()
        x, y, z = [call.result().message["content"] for call in calls if await call]
        assert (x, y, z) == ("<1>", "<2>", "<3>")
        await agent.ask("a", first, "tool y", calls[1].result(), "on")
        agent.check(segments=3)
        assert text(agent.talk.segments[-1]) == (
            "user: a\nassistant: <0>\nuser: tool y\nassistant: [<2>]\nuser: on\nassistant: [<4>]"
        ), "the segment that was answered last is the last one"


async def test_a_sub_agent_with_other_messages_or_tools_has_its_own_segment() -> None:
    async with an_agent() as agent:
        tools = [{"name": "search"}]
        first = await agent.ask("a", tools=tools)
        found = await agent.ask("find b")
        await agent.ask("find b", found, "more")
        await agent.ask("a", first, "found", tools=tools)
        await agent.ask("a", first, "found it")  # the last request offers no tools
        agent.check(segments=3)
        _, main, last = map(text, agent.talk.segments)
        assert main == ("tools: [{'name': 'search'}]\nuser: a\nassistant: [<0>]\nuser: found\nassistant: [<3>]"), (
            "went on after the sub-agent"
        )
        assert last == "user: a\nassistant: <0>\nuser: found it\nassistant: [<4>]"


async def test_a_repeated_request_gets_the_same_answer_also_while_the_first_one_is_sampled() -> None:
    async with an_agent() as agent:
        agent.engine.gates[0] = asyncio.Event()
        requests = [asyncio.create_task(agent.ask("a")) for _ in range(2)]
        await asyncio.sleep(0)
        agent.engine.gates[0].set()
        first, again = [await request for request in requests]
        assert first is again
        await agent.ask("b")
        assert await agent.ask("a") is first
        agent.check(segments=2)


async def test_a_request_with_other_limits_is_another_attempt_in_its_own_segment() -> None:
    async with an_agent() as agent:
        cut = await agent.ask("a", max_tokens=2)
        assert (cut.message["content"], cut.finish_reason) == ("<0", "length")
        whole = await agent.ask("a", max_tokens=9)
        assert (whole.message["content"], whole.finish_reason) == ("<1>", "stop")
        assert await agent.ask("a", max_tokens=9) is whole
        assert (await agent.ask("a", max_tokens=9, stop=["END"])).message["content"] == "<2>"
        await agent.ask("a", whole, "b")
        agent.check(segments=3)
        assert text(agent.talk.segments[-1]) == "user: a\nassistant: [<1>]\nuser: b\nassistant: [<3>]"


async def test_another_attempt_at_a_later_answer_departs_at_the_answer_before_it() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        await agent.ask("a", first, "b", max_tokens=1)
        await agent.ask("a", first, "b")
        agent.check(segments=2)
        assert [text(one) for one in agent.talk.segments] == [
            "user: a\nassistant: [<0>]\nuser: b\nassistant: [<]",
            "user: a\nassistant: <0>\nuser: b\nassistant: [<2>]",
        ]


async def test_other_arguments_of_the_chat_template_are_another_history() -> None:
    async with an_agent() as agent:
        brief = {"enable_thinking": False}
        first = await agent.ask("a")
        other = await agent.ask("a", template_kwargs=brief)
        await agent.ask("a", other, "b", template_kwargs=brief)
        await agent.ask("a", first, "b")
        agent.check(segments=2)
        assert [text(one) for one in agent.talk.segments] == [
            "enable_thinking: False\nuser: a\nassistant: [<1>]\nuser: b\nassistant: [<2>]",
            "user: a\nassistant: [<0>]\nuser: b\nassistant: [<3>]",
        ]


async def test_messages_that_the_chat_template_refuses_are_refused_and_the_conversation_goes_on() -> None:
    async with an_agent() as agent:
        result = Completion({"role": "tool", "tool_call_id": "1", "content": "42"}, "", [], [], 0)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="refused the messages: a result needs a call"):
                await agent.ask("a", result)
        assert not agent.talk.segments
        first = await agent.ask("a")
        with pytest.raises(InvalidRequestError, match="a result needs a call"):
            await agent.ask("a", first, result)
        await agent.ask("a", first, "b")
        agent.check(segments=1)
        assert agent.talk.segments == [agent.sample]


async def test_a_request_that_ends_with_a_recorded_answer_is_refused() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        await agent.ask("a", first, "b")
        with pytest.raises(InvalidRequestError, match="add a message after the last answer"):
            await agent.ask("a", first)
        agent.check(segments=1)


async def test_a_segment_in_which_nothing_was_sampled_is_no_part_of_the_trajectory() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        cut = await agent.ask("a", first, "x" * 300)
        assert (cut.finish_reason, cut.tokens) == ("length", [])
        other = await agent.ask("a", "y" * 300)
        assert other.finish_reason == "stop", "the limit is that of one segment"
        cut = await agent.ask("a", first, "x" * 299)
        assert (cut.finish_reason, cut.tokens) == ("length", [])
        agent.check(segments=2)


async def test_a_new_segment_that_is_too_long_is_refused_and_the_agent_can_go_on() -> None:
    async with an_agent() as agent:
        agent.engine.errors[1] = PromptTooLongError("its prompt has 900 tokens")
        await agent.ask("a")
        with pytest.raises(InvalidRequestError, match="its prompt has 900 tokens"):
            await agent.ask("b" * 800)
        await agent.ask("b")
        agent.check(segments=2)


async def test_an_agent_that_rewrites_its_history_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_SEGMENTS", 2)
    async with an_agent() as agent:
        first = await agent.ask("a")
        await agent.ask("b")
        with pytest.raises(InvalidRequestError, match="has 2 segments already: extend the history"):
            await agent.ask("c")
        await agent.ask("a", first, "c")
        agent.check(segments=2)


async def test_the_failure_of_one_segment_ends_the_conversation() -> None:
    async with an_agent() as agent:
        agent.engine.errors[1] = EngineLostError("the engine was lost")
        await agent.ask("a")
        for messages in ("b", "c"):
            with pytest.raises(SessionClosedError, match="the engine was lost"):
                await agent.ask(messages)
        assert isinstance(agent.talk.failure, EngineLostError)


async def test_an_abort_of_the_sample_stops_all_its_segments() -> None:
    async with an_agent() as agent:
        with agent.sampler.generating([agent.sample]):
            await agent.ask("a")
            await agent.ask("b")
            await agent.sampler.stop([agent.sample], everything=False)
            for messages in ("c", "d"):
                with pytest.raises(SessionClosedError, match="the run aborted the sample"):
                    await agent.ask(messages)
            assert agent.sampler.aborted(agent.sample)
            agent.sampler.forget(agent.sample)
            assert agent.sampler.stopped(agent.sample), "the run has stopped the sample, not one attempt at it"
        await Conversation(agent.sample, agent.sampler, PARAMS).complete({"messages": [message_of("again")]})
        assert agent.sampler.segments(agent.sample) == [agent.sample]
        assert not agent.sampler._trajectories


async def test_an_answer_that_the_agent_did_not_wait_for_leaves_the_rest_of_its_trajectory_trainable() -> None:
    async with an_agent() as agent:
        first = await agent.ask("a")
        agent.engine.gates = {1: asyncio.Event(), 2: asyncio.Event()}
        left = [asyncio.create_task(agent.ask("a", first, "b")), asyncio.create_task(agent.ask("c"))]
        await asyncio.sleep(0)
        for request in left:
            request.cancel()
        await asyncio.wait(left)
        agent.check(segments=1)
        statuses = [segment.status for segment in agent.sampler.segments(agent.sample)]
        assert statuses == [SampleStatus.COMPLETED]

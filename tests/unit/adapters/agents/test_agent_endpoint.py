"""The endpoint for agents and external generators, on an engine whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_async.adapters.agents import endpoint, trajectories
from miles_async.adapters.agents.endpoint import AgentEndpoint
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.system.network_ports import free_port
from miles_async.errors import StoreError, TrajectoryError, UserError
from miles_async.pipeline.journal import Journal
from miles_async.stored_run import Changes
from miles_async.types import Sample, VersionSpan
from miles_async.wire_formats import FORMATS
from tests.plugin_packages import install_plugin
from tests.sim.lost_workers import MemoryStore
from tests.sim.world import DirectOutbox, Trace
from tests.unit.byte_tokenizer import Bytes
from tests.unit.rollout.test_generate_functions import Script, masked

PARAMS = {"max_new_tokens": 200, "temperature": 1.0, "stop": None}
USER: dict[str, Any] = {"role": "user", "content": "1+1?"}
TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}]


class ScriptedParser:
    """Reads `CALL x` as a call of the calculator, and the text between two tags as reasoning."""

    async def parse(
        self, text: str, *, end: str, context: str, tools: Sequence[Mapping[str, Any]] | None, calls_before: int
    ) -> dict[str, Any] | None:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if text.startswith("<think>"):
            reasoning, _, message["content"] = text.removeprefix("<think>").partition("</think>")
            message["reasoning_content"] = reasoning
        text, called, expression = message["content"].partition("CALL ")
        if tools and called:
            arguments = json.dumps({"expression": expression}, separators=(",", ":"))
            function = {"name": "calculate", "arguments": arguments}
            message |= {"content": text, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        return message


class Agent:
    """Speaks HTTP to the endpoint; answers are `(status, body)`."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoint: AgentEndpoint,
        engine: Script,
        turns: MultiTurnSampler,
        trajectories: TrajectoryBuffer,
    ) -> None:
        self.trajectories = trajectories
        self.http, self.endpoint, self.engine, self.turns = http, endpoint, engine, turns
        self.headers = {"Authorization": f"Bearer {endpoint.key}"}

    async def post(self, url: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(url, json=body, headers={**self.headers, **headers}) as response:
            return response.status, await response.json()

    async def ask(self, base_url: str, *messages: Any, **more: Any) -> tuple[int, Any]:
        return await self.post(f"{base_url}/chat/completions", {"messages": list(messages), **more})

    async def trajectory(self, samples: Any, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self.post(f"{self.endpoint.url}/trajectories", {"samples": samples}, **headers)


class SlowStore(MemoryStore):
    """A store that can be stopped, and that can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.works = asyncio.Event()
        self.works.set()
        self.full = False

    async def write(self, changes: Changes) -> None:
        await self.works.wait()
        if self.full:
            raise StoreError("the disk is full")
        await super().write(changes)


@asynccontextmanager
async def connected_agent(
    *lines: str | None,
    capacity: int = 2,
    size: int = 1,
    store: MemoryStore | None = None,
    live: bool = True,
    session_seconds: float = 60.0,
    expired: Callable[[], None] = lambda: None,
) -> AsyncIterator[Agent]:
    """An agent at the endpoint of an engine that answers with `lines`, and of the run in `store`."""
    engine, store = Script(*lines), store or MemoryStore()
    stored = await store.read()
    journal = Journal(store, DirectOutbox(Trace()), SystemClock(), number=0 if stored is None else stored.number)
    buffer = TrajectoryBuffer(capacity, size, log=journal, stored=stored)
    if stored is not None:
        buffer.restore(stored.posted)
    turns = MultiTurnSampler(engine, Bytes())
    served = AgentEndpoint(buffer, parser=ScriptedParser(), session_seconds=session_seconds, on_expired=expired)
    await served.start()
    served.accept_external(turns, PARAMS, live=lambda: live)
    try:
        async with aiohttp.ClientSession() as http:
            yield Agent(http, served, engine, turns, buffer)
    finally:
        await served.close()
        await engine.close()


def said(answer: tuple[int, Any]) -> Any:
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


PLAIN = """
from miles_async.wire_formats import WireFormat


class Plain(WireFormat):
    def read(self, request):
        messages = [{"role": "user", "content": request["text"]}]
        return {"messages": messages, "tools": None, "template_kwargs": {}, "max_tokens": None, "stop": []}

    def answer(self, completion, request):
        return {"text": completion.message["content"]}
"""


async def test_a_package_adds_a_wire_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, FORMATS, "plain", "of_users:Plain", PLAIN)
    sample = Sample()
    async with connected_agent("2") as agent, agent.endpoint.session(sample, agent.turns, PARAMS) as url:
        assert await agent.post(f"{url}/plain", {"text": "1+1?"}) == (200, {"text": "2"})
    assert sample.response == "2"


async def test_a_conversation_becomes_one_sample_whose_other_turns_are_masked() -> None:
    async with connected_agent("2", "Yes.") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            first = said(await agent.ask(url, USER))
            said(await agent.ask(url, USER, first, {"role": "user", "content": "Sure?"}))
        assert bytes(sample.tokens[: sample.prompt_length]) == b"user: 1+1?\nassistant: "
        assert sample.response == "2\nuser: Sure?\nassistant: Yes."
        assert masked(sample, 1) == "2Yes."
        assert [(span.start, span.end) for span in sample.spans] == [(0, 1), (25, 29)]


async def test_a_session_that_needs_no_key_is_served_without_one_and_no_other_session_is() -> None:
    async with connected_agent("2") as agent:
        agent.headers = {}
        async with (
            agent.endpoint.session(Sample(), agent.turns, PARAMS, needs_key=False) as open_url,
            agent.endpoint.session(Sample(), agent.turns, PARAMS) as url,
        ):
            assert said(await agent.ask(open_url, USER))["content"] == "2"
            assert (await agent.ask(url, USER))[0] == 401
            agent.headers = {"Authorization": f"Bearer {agent.endpoint.key}"}
            assert (await agent.ask(url, USER))[0] == 200
            agent.headers = {}
        assert (await agent.ask(open_url, USER))[0] == 401, "the session has ended"


async def test_a_repeated_request_returns_the_same_reply_without_sampling_again() -> None:
    async with connected_agent() as agent:
        async with agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
            assert said(await agent.ask(url, USER)) == said(await agent.ask(url, USER))
        assert len(agent.engine.asked) == 1


async def test_tool_calls_are_parsed_from_the_text_and_trained_as_sampled() -> None:
    async with connected_agent("CALL 6*7", "ok") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            message = said(await agent.ask(url, USER, tools=TOOLS))
            [made] = message["tool_calls"]
            assert made["function"] == {"name": "calculate", "arguments": '{"expression":"6*7"}'}
            result = {"role": "tool", "tool_call_id": made["id"], "content": "42"}
            said(await agent.ask(url, USER, message, result, tools=TOOLS))
        assert masked(sample, 1) == "CALL 6*7ok"


async def test_a_client_that_sends_no_reasoning_back_continues_its_conversation() -> None:
    async with connected_agent("<think>hm</think>2", "ok") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            message = said(await agent.ask(url, USER))
            assert message == {"role": "assistant", "content": "2", "reasoning_content": "hm"}
            said(await agent.ask(url, USER, {"role": "assistant", "content": "2"}, USER))
        assert masked(sample, 1) == "<think>hm</think>2ok"


async def test_a_stop_string_is_trained_but_the_agent_does_not_see_it() -> None:
    async with connected_agent("Think.END", "ok") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            message = said(await agent.ask(url, USER, stop="END"))
            assert message["content"] == "Think."
            said(await agent.ask(url, USER, message, USER))
        assert masked(sample, 1) == "Think.ENDok"


async def test_requests_may_shorten_a_response_but_not_change_its_distribution() -> None:
    async with connected_agent() as agent:
        async with agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
            await agent.ask(url, USER, max_tokens=5, temperature=0.1, stop=["END"])
        [asked] = agent.engine.asked
        assert (asked.max_new_tokens, asked.temperature, asked.stop) == (5, 1.0, ("END",))


@pytest.mark.parametrize(
    "request_, complaint",
    [
        ({"messages": []}, "at least one message"),
        ({"messages": ["hello"]}, "messages[0]: expected object, got str"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "but the model reads only text"),
        ({"messages": [USER], "max_tokens": "many"}, "max_tokens: expected int | null, got str"),
        ({"messages": [USER], "stop": [""]}, "stop[0]: expected str of length >= 1"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "lacks the entry function"),
        ({"messages": [USER], "n": 2}, "n must be 1"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "does not have the format of a chat message",
        ),
    ],
)
async def test_an_invalid_request_is_refused_with_an_explanation(request_: dict[str, Any], complaint: str) -> None:
    async with connected_agent() as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            status, body = await agent.post(f"{url}/chat/completions", request_)
            assert status == 400
            assert complaint in body["error"]["message"]
            said(await agent.ask(url, USER))


async def test_an_agent_that_disconnects_in_the_middle_of_a_turn_leaves_its_sample_unchanged() -> None:
    async with connected_agent(None) as agent:
        sample = Sample(index=5)

        async def leave() -> None:
            async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
                asking = asyncio.create_task(agent.ask(url, USER))
                await agent.engine.begun.wait()
                asking.cancel()

        with pytest.raises(TrajectoryError, match="sample 5: the agent sent no request to the model"):
            await leave()
        before = list(sample.tokens)
        agent.engine._ended.set()
        await asyncio.sleep(0.05)
        assert sample.tokens == before


async def test_the_generation_for_an_agent_that_disconnects_ends_and_its_session_goes_on() -> None:
    async with connected_agent("2", None, "3") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            first = said(await agent.ask(url, USER))
            agent.engine.begun.clear()
            asking = asyncio.create_task(agent.ask(url, USER, first, USER, stream=True))
            await agent.engine.begun.wait()
            asking.cancel()
            assert said(await agent.ask(url, USER, first, {"role": "user", "content": "2+1?"}))["content"] == "3"
        assert agent.engine.cancelled == 1
        assert masked(sample, 0) == "\nuser: 2+1?\nassistant: "
        assert masked(sample, 1) == "23"


async def test_a_stream_contains_pings_while_the_model_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PING_SECONDS", 0.01)
    async with connected_agent(None) as agent:

        async def read_stream(url: str) -> None:
            request = {"messages": [USER], "stream": True, "max_tokens": 9}
            async with agent.http.post(f"{url}/messages", json=request, headers=agent.headers) as response:
                assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
                await agent.engine.abort()
                *_, last = (await response.text()).split("\n\n")[:-1]
            assert last.startswith("event: error\n")
            assert "the run aborted the sample" in last

        with pytest.raises(TrajectoryError, match="the run aborted the sample"):
            async with agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
                await read_stream(url)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_the_same_question_gets_the_same_answer_in_every_format(path: str) -> None:
    async with connected_agent("2") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            status, body = await agent.post(f"{url}/{path}", {"messages": [USER], "input": [USER], "max_tokens": 9})
        assert status == 200
        assert '"2"' in json.dumps(body)
        assert bytes(sample.tokens) == b"user: 1+1?\nassistant: 2"


async def test_the_client_of_anthropic_sends_the_key_in_its_own_header() -> None:
    async with connected_agent("2") as agent, agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
        request = {"messages": [USER], "max_tokens": 9}
        for key, expected in ((agent.endpoint.key, 200), ("wrong", 401)):
            async with agent.http.post(f"{url}/messages", json=request, headers={"x-api-key": key}) as response:
                assert response.status == expected


async def test_a_request_that_is_too_large_is_refused_before_it_is_read() -> None:
    async with connected_agent("2") as agent, agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:

        async def body() -> AsyncIterator[bytes]:
            for _ in range(100):
                sent.append(len(sent))
                yield b" " * 2**20

        sent: list[int] = []
        headers = {**agent.headers, "Content-Length": str(100 * 2**20)}
        async with agent.http.post(f"{url}/chat/completions", data=body(), headers=headers) as response:
            assert response.status == 413
            assert "more than 64 MiB" in (await response.json())["error"]["message"]
        assert len(sent) < 64
        said(await agent.ask(url, USER))


async def test_a_session_that_nobody_uses_is_closed_and_counted() -> None:
    expired = asyncio.Event()
    async with connected_agent(session_seconds=0.05, expired=expired.set) as agent:
        session = await played(agent)
        await expired.wait()
        status, body = await agent.trajectory([{"session": session, "reward": 1}])
        assert (status, "closed after 0.05 s without a request" in body["error"]["message"]) == (400, True)
        assert not agent.endpoint._sessions


async def test_a_request_whose_session_ends_before_it_is_read_changes_nothing() -> None:
    async with connected_agent("2") as agent:
        sample, ended = Sample(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"messages": [{"role": "user", '
            await ended.wait()
            yield b'"content": "Q"}]}'

        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            said(await agent.ask(url, USER))
            late = asyncio.create_task(
                agent.http.post(f"{url}/chat/completions", data=body(), headers=agent.headers).__aenter__()
            )
            await asyncio.sleep(0.02)
        ended.set()
        response = await late
        assert (response.status, len(agent.engine.asked)) == (404, 1)
        response.release()


async def test_a_request_with_an_unexpected_error_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*given: Any, **named: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("an error of this program")

    monkeypatch.setattr(ScriptedParser, "parse", fails)
    async with connected_agent("2", "3") as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            request = {"messages": [USER]}
            async with agent.http.post(f"{url}/chat/completions", json=request, headers=agent.headers) as response:
                assert response.status == 500
            assert said(await agent.ask(url, USER))["content"] == "3"
        assert sample.response == "3"


async def test_an_unknown_address_is_answered_with_those_that_exist() -> None:
    async with connected_agent("2") as agent, agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
        status, body = await agent.post(f"{url}/v1/messages", {})
        assert (status, "are /v1/chat/completions, " in body["error"]["message"]) == (404, True)
        said(await agent.ask(url, USER))


async def test_an_agent_cannot_make_its_sample_longer_than_allowed() -> None:
    async with connected_agent() as agent:
        sample = Sample()
        async with agent.endpoint.session(sample, agent.turns, PARAMS) as url:
            first = said(await agent.ask(url, USER))
            await agent.ask(url, USER, first, {"role": "user", "content": "x" * 1000})
        assert masked(sample, 0).count("x") < 200


async def test_a_session_that_has_ended_is_not_found() -> None:
    async with connected_agent() as agent:
        async with agent.endpoint.session(Sample(), agent.turns, PARAMS) as url:
            said(await agent.ask(url, USER))
        assert (await agent.ask(url, USER))[0] == 404


async def test_the_endpoint_listens_at_the_given_port() -> None:
    port = free_port()
    one, other = AgentEndpoint(), AgentEndpoint()
    try:
        await one.start(port)
        assert one.url == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=f"agent_port {port} is not available"):
            await other.start(port)
    finally:
        await one.close()
        await other.close()


async def played(agent: Agent) -> str:
    """A session opened from outside, with one answer in it."""
    status, body = await agent.post(f"{agent.endpoint.url}/sessions", {})
    assert status == 200
    said(await agent.ask(body["base_url"], USER))
    return str(body["session"])


async def test_an_external_generator_posts_what_was_sampled_in_its_sessions() -> None:
    async with connected_agent("a", "b", size=2) as agent:
        sessions = [await played(agent), await played(agent)]
        samples = [{"session": session, "reward": position} for position, session in enumerate(sessions)]
        assert (await agent.trajectory(samples))[0] == 200
        group = await agent.trajectories.take()
        assert [(sample.index, sample.reward, sample.response) for sample in group] == [(0, 0.0, "a"), (1, 1.0, "b")]
        assert group.oldest_version == 7
        status, body = await agent.trajectory(samples)
        assert (status, "was posted already" in body["error"]["message"]) == (400, True)


OWN: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "response_length": 2,
    "rollout_log_probs": [-0.1, -0.2],
    "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    "reward": 1,
}


async def test_a_generator_that_samples_by_itself_posts_its_tokens() -> None:
    async with connected_agent() as agent:
        assert (await agent.trajectory([OWN]))[0] == 200
        [sample] = await agent.trajectories.take()
        assert (sample.tokens, sample.spans, sample.reward) == ([1, 2, 3], [VersionSpan(4, 0, 2)], 1.0)


@pytest.mark.parametrize(
    "samples, complaint",
    [
        ([], "n_samples_per_prompt=1 samples, not 0"),
        ([{**OWN, "reward": None}], "sample 0: it has no reward; add the field reward"),
        ([{"session": "s", "reward": 1}], "session 's' is unknown"),
        ([{"reward": 1}], "name a session, or post a prompt and a response"),
        ([{**OWN, "rollout_log_probs": []}], "0 rollout_log_probs, but response_length is 2"),
        ([{**OWN, "weight_versions": []}], "weight_versions for 0 of its 2 response tokens"),
        ([{**OWN, "metadata": [1]}], "metadata: expected object, got array"),
        ([{**OWN, "response_length": 3, "rollout_log_probs": [0] * 3}], "3 tokens, 3 of them response"),
    ],
)
async def test_a_trajectory_that_cannot_be_trained_is_refused_with_an_explanation(samples: Any, complaint: str) -> None:
    async with connected_agent() as agent:
        status, body = await agent.trajectory(samples)
        assert status == 400
        assert complaint in body["error"]["message"]


async def test_a_session_with_an_unfinished_request_cannot_be_posted() -> None:
    async with connected_agent("2", None) as agent:
        _, body = await agent.post(f"{agent.endpoint.url}/sessions", {})
        said(await agent.ask(body["base_url"], USER))
        begun, generate = asyncio.Event(), agent.engine.generate

        async def tells(*given: Any) -> None:
            begun.set()
            await generate(*given)

        agent.engine.generate = tells  # type: ignore[method-assign, assignment]
        answered = {"role": "assistant", "content": "2"}
        going_on = asyncio.create_task(agent.ask(body["base_url"], USER, answered, USER))
        await begun.wait()
        status, answer = await agent.trajectory([{"session": body["session"], "reward": 1}])
        assert (status, "a request is in progress" in answer["error"]["message"]) == (400, True)
        await agent.engine.abort()
        await going_on


async def test_a_posted_group_is_acknowledged_when_it_is_stored() -> None:
    store = SlowStore()
    async with connected_agent(store=store) as agent:
        store.works.clear()
        posting = asyncio.create_task(agent.trajectory([OWN]))
        await asyncio.sleep(0.1)
        assert not posting.done()
        store.works.set()
        assert await posting == (200, {"group": "external_0"})
    stored = await store.read()
    assert stored is not None
    assert stored.posted == ["external_0"]


async def test_a_group_that_cannot_be_stored_is_not_acknowledged() -> None:
    store = SlowStore()
    async with connected_agent(store=store) as agent:
        store.full = True
        status, body = await agent.trajectory([OWN], key="a")
        assert (status, "repeat the request with the same Idempotency-Key" in body["error"]["message"]) == (503, True)


async def test_a_request_with_the_same_idempotency_key_adds_no_second_group() -> None:
    async with connected_agent() as agent:
        answers = [await agent.trajectory([OWN], key=key) for key in ("a", "b", "a")]
        assert answers == [(200, {"group": name}) for name in ("external_0", "external_1", "external_0")]
        assert [(await agent.trajectories.take()).feed_index for _ in range(2)] == ["external_0", "external_1"]
        assert (await agent.trajectory([OWN], key="k" * 256))[0] == 400


async def test_groups_keys_and_numbers_outlive_the_rollout_worker() -> None:
    store = MemoryStore()
    async with connected_agent(store=store) as lost:
        await lost.trajectory([OWN], key="a")
        await lost.trajectory([{**OWN, "reward": 2}])
    async with connected_agent(store=store, capacity=3) as agent:
        assert await agent.trajectory([OWN], key="a") == (200, {"group": "external_0"})
        assert await agent.trajectory([OWN]) == (200, {"group": "external_2"})
        groups = [await agent.trajectories.take() for _ in range(3)]
        assert [group.feed_index for group in groups] == ["external_0", "external_1", "external_2"]
        assert [group[0].reward for group in groups] == [1.0, 2.0, 1.0]


async def test_the_oldest_idempotency_key_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_KEYS", 2)
    store = MemoryStore()
    async with connected_agent(store=store, capacity=9) as agent:
        for key in ("a", "b", "c"):
            await agent.trajectory([OWN], key=key)
        assert await agent.trajectory([OWN], key="b") == (200, {"group": "external_1"})
        assert await agent.trajectory([OWN], key="a") == (200, {"group": "external_3"})
    stored = await store.read()
    assert stored is not None
    assert list(stored.keys) == ["c", "a"]


async def test_groups_are_not_accepted_before_the_engines_hold_weights_of_the_run() -> None:
    async with connected_agent(live=False) as agent:
        assert (await agent.trajectory([OWN]))[0] == 503


async def test_a_full_buffer_asks_the_client_to_retry() -> None:
    async with connected_agent(capacity=2) as agent:
        assert [(await agent.trajectory([OWN]))[0] for _ in range(3)] == [200, 200, 429]

"""Clients that are slow, that send nonsense, and models that write it, cost nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from miles_async.adapters.agents import connections, endpoint
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice, Parsed, Question
from miles_async.observability import http_server
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import LivePage
from miles_async.observability.view import RunView
from tests.processes.test_agent_clients import checkpoint
from tests.unit.adapters.agents.test_agent_endpoint import USER, Agent, connected_agent
from tests.waiting import PATIENCE_SECONDS

__all__ = ["checkpoint"]

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
HEAD = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nX:"
"""The beginning of a request that never ends."""


def question(name: str, arguments: str = "{}") -> Question:
    call = f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return Question(call, "", json.dumps([TOOL]))


HONEST = question('"f"', '{"a": 1}')
NAMES = {
    "half a surrogate pair": r'"\ud83d"',
    "a number": "5",
    "nothing": "null",
    "a list": "[1]",
    "an object": '{"a": 1}',
    "a huge number": "9" * 5000,
    "deep brackets": "[" * 100_000,
    "a control character": r'"\u0000"',
}


@pytest.mark.parametrize("name", NAMES)
async def test_no_name_of_a_tool_ends_the_parser_of_answers(checkpoint: Path, name: str) -> None:
    async with AnswerParserProcess(Choice(str(checkpoint), "hermes", "none")) as parser:
        process = parser._process
        hostile = [question(NAMES[name]), question('"f"', f'{{"a": {NAMES[name]}}}')]
        answers = await asyncio.gather(*map(parser.ask, [*hostile, *[HONEST] * 5]))
        assert [answer.calls[0].name for answer in answers[2:] if answer] == ["f"] * 5
        assert parser._process is process


async def test_a_parser_that_dies_of_a_text_costs_the_other_agents_nothing(checkpoint: Path) -> None:
    async with AnswerParserProcess(Choice(str(checkpoint), "hermes", "none")) as parser:
        first = parser._process
        assert first is not None
        os.kill(first.pid, 19)  # SIGSTOP: the questions wait
        waiting = [asyncio.create_task(parser.ask(HONEST)) for _ in range(6)]
        await asyncio.sleep(0)
        first.kill()
        dead, *others = await asyncio.gather(*waiting)
        assert dead is None
        assert [answer for answer in others if not isinstance(answer, Parsed)] == []
        assert parser._process is not first


@pytest.fixture
def page() -> Iterator[HttpServer]:
    server = HttpServer(CollectorRegistry(), LivePage(RunView()), 0)
    yield server
    server.close()


def connect(port: int, sent: bytes = HEAD) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    client.sendall(sent)
    return client


def answer_of(port: int) -> bytes:
    with closing(connect(port, b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")) as client:
        return client.recv(15)


def drip(client: socket.socket, stop: threading.Event) -> None:
    """Send a byte again and again, faster than the time limit for the next byte."""
    with suppress(OSError):
        while not stop.wait(http_server.CLIENT_TIMEOUT_SECONDS / 4):
            client.sendall(b"a")


def test_a_client_that_sends_byte_by_byte_does_not_delay_the_end_of_a_run(page: HttpServer) -> None:
    """The server ends the connection itself: the client would go on for ever."""
    stop = threading.Event()
    with closing(connect(page.server_port)) as client:
        thread = threading.Thread(target=drip, args=(client, stop))
        thread.start()
        page.close()
        client.settimeout(PATIENCE_SECONDS)
        assert ended(client)
        stop.set()
        thread.join()


def ended(client: socket.socket) -> bool:
    """Whether the server ends the connection."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_request_to_the_page_has_a_time_limit_as_a_whole(page: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 0.5)
    stop = threading.Event()
    with closing(connect(page.server_port)) as client:
        thread = threading.Thread(target=drip, args=(client, stop))
        thread.start()
        assert ended(client)
        stop.set()
        thread.join()


def test_many_half_sent_requests_do_not_keep_others_from_the_page(
    page: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    clients = [connect(page.server_port) for _ in range(40)]
    try:
        assert answer_of(page.server_port) == b"HTTP/1.0 200 OK"
        assert ended(clients[0])
    finally:
        for client in clients:
            client.close()


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with connected_agent("2", "2", "2") as agent:
        yield agent


async def session_of(agent: Agent) -> str:
    _, opened = await agent.post(f"{agent.endpoint.url}/sessions", {})
    return str(opened["base_url"])


def port_of(agent: Agent) -> int:
    return int(agent.endpoint.url.rsplit(":", 1)[1])


async def test_half_sent_requests_make_room_for_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    async with connected_agent("2") as agent:
        clients = [await asyncio.to_thread(connect, port_of(agent)) for _ in range(40)]
        status, _ = await agent.ask(await session_of(agent), USER)
        assert status == 200
        assert await asyncio.to_thread(ended, clients[0])
        for client in clients:
            client.close()


async def test_a_half_sent_request_is_ended_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "Connections", partial(connections.Connections, wait_seconds=0.2))
    async with connected_agent("2") as agent:
        with closing(await asyncio.to_thread(connect, port_of(agent))) as client:
            assert await asyncio.to_thread(ended, client)


async def test_a_half_sent_body_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.2)
    async with connected_agent("2") as agent:
        url = await session_of(agent)
        path = url.split(agent.endpoint.url)[1]
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
        request = f"{head}Authorization: Bearer {agent.endpoint.key}\r\n\r\n{{".encode()
        with closing(await asyncio.to_thread(connect, port_of(agent), request)) as client:
            assert (await asyncio.to_thread(client.recv, 12)) == b"HTTP/1.1 408"


async def test_a_slow_answer_is_not_ended_for_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(endpoint, "Connections", partial(connections.Connections, wait_seconds=0.2))
    async with connected_agent("2", None) as agent:
        url = await session_of(agent)
        go_on = asyncio.Event()
        generate = agent.engine.generate

        async def slow(*arguments: Any, **more: Any) -> None:
            await go_on.wait()
            await generate(*arguments, **more)

        monkeypatch.setattr(agent.engine, "generate", slow)
        answer = asyncio.create_task(agent.ask(url, USER))
        clients = [await asyncio.to_thread(connect, port_of(agent)) for _ in range(12)]
        assert await asyncio.to_thread(ended, clients[0])
        go_on.set()
        assert (await answer)[0] == 200
        for client in clients:
            client.close()


def test_half_of_the_descriptors_stay_free() -> None:
    async def limit() -> int:
        async with connected_agent("2") as agent:
            assert agent.endpoint._connections is not None
            return agent.endpoint._connections.limit

    assert asyncio.run(limit()) <= max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)


WRONG_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "system is a list of texts": ("messages", {"max_tokens": 9, "messages": [USER], "system": ["x"]}),
    "system is a list of lists": ("messages", {"max_tokens": 9, "messages": [USER], "system": [[[]]]}),
    "an item of the input is a number": ("responses", {"input": [5]}),
    "a tool is a text": ("chat/completions", {"messages": [USER], "tools": ["x"]}),
    "options of the stream are a list": ("chat/completions", {"messages": [USER], "stream_options": [1]}),
    "the choice of a tool is a text": ("messages", {"max_tokens": 9, "messages": [USER], "tool_choice": "none"}),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
async def test_a_request_with_wrong_types_is_refused_and_no_failure_of_the_endpoint(agent: Agent, name: str) -> None:
    path, body = WRONG_TYPES[name]
    status, answer = await agent.post(f"{await session_of(agent)}/{path}", {"stream": True, **body})
    assert (status, answer["type"]) == (400, "error")


async def test_bytes_that_are_no_request_fill_no_log(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    with closing(await asyncio.to_thread(connect, port_of(agent), b"no HTTP [[[\r\n\r\n")) as client:
        assert (await asyncio.to_thread(client.recv, 12)).endswith(b" 400")
    assert caplog.records == []


async def test_a_key_of_any_bytes_is_refused(agent: Agent) -> None:
    head = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nAuthorization: Bearer \xff\r\n\r\n"
    with closing(await asyncio.to_thread(connect, port_of(agent), head)) as client:
        assert (await asyncio.to_thread(client.recv, 12)) == b"HTTP/1.1 401"


async def test_what_is_not_http_leaves_no_traceback_in_the_log(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    for request in (b"\xff\xfe\r\n\r\n", b"POST / HTTP/1.1\r\nno header\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n"):
        with closing(await asyncio.to_thread(connect, port_of(agent), request)) as client:
            assert (await asyncio.to_thread(client.recv, 12)) in (b"HTTP/1.0 400", b"HTTP/1.1 400")
    assert [record for record in caplog.records if record.exc_info] == []


def levels(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


MALFORMED: dict[str, tuple[str, bytes]] = {
    "a part of the system prompt that is text": ("messages", b'{"max_tokens": 9, "system": ["x"], "messages": []}'),
    "a role that is an object": ("chat/completions", b'{"messages": [{"role": {"a": 1}, "content": "x"}]}'),
    "a role that is a number": ("messages", b'{"max_tokens": 9, "messages": [{"role": 5, "content": "x"}]}'),
    "a role that is a list": ("responses", b'{"input": [{"role": ["user"], "content": "x"}]}'),
    "a call without a function": ("chat/completions", b'{"messages": [{"role": "x", "tool_calls": [{"id": "1"}]}]}'),
    "a name that is an object": (
        "chat/completions",
        b'{"messages": [{"role": "x", "tool_calls": [{"id": "1", "function": {"name": {}, "arguments": "{}"}}]}]}',
    ),
    "an item of a type that is a list": ("responses", b'{"input": [{"type": ["message"]}]}'),
    "a part with a number as text": (
        "responses",
        b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}',
    ),
    "a block that is a number": ("messages", b'{"max_tokens": 9, "messages": [{"role": "user", "content": [5]}]}'),
    "a description that is a list": (
        "messages",
        b'{"max_tokens": 9, "messages": [], "tools": [{"name": "f", "description": [1]}]}',
    ),
    "tool_choice that is text": ("messages", b'{"max_tokens": 9, "messages": [], "tool_choice": "none"}'),
    "stream_options that is a list": ("chat/completions", b'{"messages": [], "stream": true, "stream_options": [1]}'),
    "half of a surrogate pair": ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
    "brackets": ("chat/completions", b'{"messages": [], "a": ' + levels(100_000) + b"}"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_is_refused_with_a_sentence_that_names_no_exception(
    agent: Agent, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = MALFORMED[name]
    async with agent.http.post(f"{await session_of(agent)}/{path}", data=body, headers=agent.headers) as response:
        assert response.status == 400
        sentence = (await response.json())["error"]["message"]
    assert "Error" not in sentence
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("text", [b"\rI", b"\x00", b"\n\n:"], ids=repr)
async def test_the_answer_to_a_request_that_is_not_http_does_not_contain_the_key(agent: Agent, text: bytes) -> None:
    key = agent.endpoint.key.encode()
    head = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + key + text + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(agent.endpoint.url.rsplit(":", 1)[1]))
    writer.write(head)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert key not in answer


@pytest.mark.parametrize("depth", [100, 400, 700, 800, 850, 900, 920, 940, 950, 960, 970, 980])
async def test_no_depth_of_nesting_is_an_error_of_the_endpoint(agent: Agent, depth: int) -> None:
    """A value that is decoded must not be too deep for what follows, such as the answer in another format."""
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"a": ' + levels(depth) + b"}}}"
    call = b'{"type": "tool_use", "id": "1", "name": "f", "input": {"a": ' + levels(depth) + b"}}"
    for path, body in (
        ("chat/completions", b'{"messages": [{"role": "user", "content": "1+1?"}], "tools": [' + tool + b"]}"),
        ("messages", b'{"max_tokens": 9, "messages": [{"role": "assistant", "content": [' + call + b"]}]}"),
    ):
        url = await session_of(agent)
        for _ in range(2):  # the second request is compared with the first one
            async with agent.http.post(f"{url}/{path}", data=body, headers=agent.headers) as response:
                assert response.status in (200, 400)


async def test_calls_whose_arguments_are_nested_too_deep_for_clients_stay_text(checkpoint: Path) -> None:
    deep = question('"f"', '{"a": ' + levels(500).decode() + "}")
    async with AnswerParserProcess(Choice(str(checkpoint), "hermes", "none")) as parser:
        answer = await parser.ask(deep)
        assert answer is not None
        assert (answer.calls, answer.content) == ([], deep.text)


async def test_a_text_that_is_not_valid_unicode_is_parsed(checkpoint: Path) -> None:
    async with AnswerParserProcess(Choice(str(checkpoint), "hermes", "none")) as parser:
        message = await parser.parse("\ud83d" + HONEST.text, end="", context="\ud83d", tools=[TOOL], calls_before=0)
        assert message is not None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_a_parser_that_dies_within_an_answer_costs_one_agent_its_call(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process writes a part of an answer and ends. The second one is the real program."""
    dying = tmp_path / "python"
    first = f"""#!{sys.executable}
import os, sys
if os.path.exists({str(tmp_path / "died")!r}):
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
open({str(tmp_path / "died")!r}, "w").close()
sys.stdin.readline()
print('{{"tool_calls": "hermes"}}', flush=True)
for _ in range(3):
    sys.stdin.readline()
print('{{"content": "Let me', end="", flush=True)
"""
    dying.write_text(first)
    dying.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(dying))
    async with AnswerParserProcess(Choice(str(checkpoint), "hermes", "none")) as parser:
        async with asyncio.timeout(PATIENCE_SECONDS):
            dead, *others = await asyncio.gather(*[parser.ask(HONEST) for _ in range(3)])
        assert dead is None
        assert [answer.calls[0].name for answer in others if answer] == ["f"] * 2


@pytest.mark.parametrize("address", ["http://[/", "http://[::1", "//["])
def test_the_page_answers_a_request_with_an_invalid_address(page: HttpServer, address: str) -> None:
    with closing(connect(page.server_port, f"GET {address} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())) as client:
        assert client.recv(12) in (b"HTTP/1.0 400", b"HTTP/1.0 404")


@pytest.mark.parametrize("host", ["evil.com@127.0.0.1", "evil:80@localhost", "evil\\@127.0.0.1", "127.0.0.1/x"])
def test_a_host_with_more_than_a_name_and_a_port_is_refused(page: HttpServer, host: str) -> None:
    with closing(connect(page.server_port, f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())) as client:
        assert client.recv(12) == b"HTTP/1.0 403"

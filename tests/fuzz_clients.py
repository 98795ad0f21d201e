"""Sends hostile input to the endpoint for agents, the parsers of answers, the live page or the graders.

    python -m tests.fuzz_clients TARGET [--minutes 15] [--seed 0]

TARGET is endpoint, parsers, page or graders. The real servers and processes run. After each round of hostile input,
honest input must be answered as if nothing had happened, and no descriptors, threads or memory may be left. Prints the
number of inputs and each finding. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import string
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import psutil
import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, models

from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice, Question
from miles_async.events import Event
from miles_async.observability.http_server import HttpServer
from miles_async.observability.page.document import LivePage
from miles_async.observability.view import RunView
from miles_async.rewards.grader_pool import GraderError, GraderPool
from miles_async.types import Sample
from miles_async.wire_formats import FORMATS
from tests.processes.parse_dialects import DIALECTS, TOOLS
from tests.unit import example_events
from tests.unit.adapters.agents.test_agent_endpoint import USER, connected_agent

PER_ROUND = 50
SPARE_DESCRIPTORS, SPARE_THREADS, SPARE_BYTES = 16, 16, 1 << 29
"""What a process may have after many rounds beyond what it had after the second one."""
MARKUP = "<img src=x onerror=alert(1)>"
STRINGS = ["", "\ud83d", "\x00", "\x1b[2J", MARKUP, "a" * 100_000, "\u202e", "../../etc/passwd", "NaN", "</script>"]
VALUES: list[Any] = [None, True, -1, 0, 10**30, 1e308, float("nan"), [], {}, [[]], {"a": {}}, ["x"], *STRINGS]


class Findings:
    """Counts inputs, and keeps one input for each kind of finding."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.inputs = 0
        self.found: set[str] = set()
        self._rounds = 0
        self._limits = 0, 0, 0

    def report(self, kind: str, given: object) -> None:
        if kind not in self.found:
            self.found.add(kind)
            print(f"{kind}: {given!a:.1000}", flush=True)

    def end_round(self) -> None:
        """Report what rounds have left behind in this process."""
        process = psutil.Process()
        used = process.num_fds(), process.num_threads(), process.memory_info().rss
        self._rounds += 1
        if self._rounds <= 2:
            self._limits = used[0] + SPARE_DESCRIPTORS, used[1] + SPARE_THREADS, used[2] + SPARE_BYTES
        for name, amount, limit in zip(("descriptors", "threads", "bytes"), used, self._limits, strict=True):
            if amount > limit:
                self.report(f"{name} are left after the rounds", (amount, self._rounds))


def mutated(value: Any, numbers: random.Random) -> Any:
    """Return a JSON value with some entries replaced, removed or nested."""
    if numbers.random() < 0.1:
        chosen = numbers.choice(VALUES)
        return [chosen] * numbers.choice([1, 2, 100]) if numbers.random() < 0.2 else chosen
    if isinstance(value, dict):
        changed = {name: mutated(entry, numbers) for name, entry in value.items() if numbers.random() > 0.05}
        if numbers.random() < 0.1:
            changed[numbers.choice([name for name in STRINGS if name.isascii()])] = numbers.choice(VALUES)
        return changed
    if isinstance(value, list):
        return [mutated(entry, numbers) for entry in value for _ in range(numbers.choice([1, 1, 1, 0, 2]))]
    return value


def damaged(content: bytes, numbers: random.Random) -> bytes:
    """Return bytes with parts removed, repeated or replaced."""
    for _ in range(numbers.choice([0, 1, 1, 2, 5])):
        at, length = numbers.randrange(len(content) + 1), numbers.choice([1, 2, 10])
        new = numbers.choice(
            [b"", numbers.randbytes(length), content[at : at + length] * 3, b"[" * 5000, b"\xff", b"\r\n"]
        )
        content = content[:at] + new + content[at + numbers.choice([0, length]) :]
    return content


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "1"}'}}
BODIES: dict[str, Any] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "stop": ["x"],
        "n": 1,
        "logprobs": True,
        "temperature": 1.0,
    },
    "responses": {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ],
        "instructions": "s",
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 9,
        "stream": False,
    },
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "stream": True,
    },
    "trajectories": {"samples": [{"tokens": [1, 2], "response_length": 1, "reward": 1.0, "session": "x"}]},
}


class Errors(logging.Handler):
    """Collects the errors that aiohttp logs for exceptions in handlers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


async def fuzz_endpoint(findings: Findings, end: float) -> None:
    numbers, errors = findings.numbers, Errors()
    logging.getLogger("aiohttp.server").addHandler(errors)
    assert set(BODIES) >= set(FORMATS.shipped)
    while time.monotonic() < end:
        async with connected_agent() as agent:
            for _ in range(PER_ROUND):
                _, opened = await agent.post(f"{agent.endpoint.url}/sessions", {})
                name, body = numbers.choice(list(BODIES.items()))
                root = agent.endpoint.url if name == "trajectories" else opened["base_url"]
                path = f"{root}/{name}".removeprefix(agent.endpoint.url)
                content = json.dumps(mutated(body, numbers)).encode()
                content = damaged(content, numbers) if numbers.random() < 0.3 else content
                head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {agent.endpoint.key}\r\n"
                head += f"Content-Length: {len(content)}\r\nIdempotency-Key: {numbers.random()}\r\n"
                head += "Connection: close\r\n\r\n"
                raw = head.encode()
                raw = damaged(raw, numbers) if numbers.random() < 0.2 else raw
                findings.inputs += 1
                answer = await asyncio.to_thread(exchange, int(agent.endpoint.url.rsplit(":", 1)[1]), raw + content)
                if answer[9:10] == b"5" and answer[9:12] != b"503":
                    findings.report(f"status {answer[9:12]!r}", raw + content)
                if agent.endpoint.key.encode() in answer:
                    findings.report("a key in an answer", raw + content)
                if b"Traceback" in answer:
                    findings.report("a traceback in an answer", raw + content)
                for error in errors.seen:
                    findings.report(error.splitlines()[-1], raw + content)
                errors.seen.clear()
            _, opened = await agent.post(f"{agent.endpoint.url}/sessions", {})
            status, answered = await agent.ask(opened["base_url"], USER)
            if status != 200 or answered["choices"][0]["message"]["content"] != "ok":
                findings.report("an honest request was not answered", answered)
        findings.end_round()


def exchange(port: int, raw: bytes) -> bytes:
    """Send bytes and return the answer, or what came of it within two seconds."""
    answer = b""
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=2.0)) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(1 << 16):
            answer += part
    return answer


async def fuzz_parsers(findings: Findings, end: float) -> None:
    numbers = findings.numbers
    with tempfile.TemporaryDirectory() as folder:
        Tokenizer(models.BPE()).save(f"{folder}/tokenizer.json")
        tools = json.dumps(TOOLS)
        while time.monotonic() < end:
            dialect, text = numbers.choice(list(DIALECTS.items()))
            async with AnswerParserProcess(Choice(folder, dialect, numbers.choice(["none", "qwen3"]))) as parser:
                process, honest = parser._process, await parser.ask(Question(text, "", tools))
                for _ in range(PER_ROUND):
                    hostile = [broken(text, numbers) for _ in range(4)]
                    findings.inputs += len(hostile)
                    questions = [Question(one, "", tools) for one in [*hostile, text]]
                    *_, answer = await asyncio.gather(*map(parser.ask, questions))
                    if answer != honest:
                        findings.report(f"{dialect}: an honest text was not parsed", hostile)
                    if parser._process is not process:
                        findings.report(f"{dialect}: the process has died", hostile)
                        process = parser._process
            findings.end_round()


def broken(text: str, numbers: random.Random) -> str:
    """Return an answer of a model with parts removed, repeated and replaced."""
    extras = [*STRINGS, "\\ud83d", '"', "{", "}", "[" * 50_000, "9" * 5000, "\\u0000", "<", ">", "\n", text]
    for _ in range(numbers.randint(1, 6)):
        at, length = numbers.randrange(len(text) + 1), numbers.choice([0, 1, 5, 20])
        text = text[:at] + numbers.choice(extras) + text[at + length :]
    # JSON cannot express half a surrogate pair, and neither can the text that the engines send.
    return text.encode(errors="replace").decode()


async def fuzz_page(findings: Findings, end: float) -> None:
    numbers = findings.numbers
    events = [event for event in vars(example_events).values() if isinstance(event, Event)]
    while time.monotonic() < end:
        view = RunView()
        page = LivePage(view)
        server = HttpServer(CollectorRegistry(), page, 0)
        for _ in range(PER_ROUND):
            event = numbers.choice(events)
            for field in structs.fields(event):
                if isinstance(structs.asdict(event)[field.name], str) and numbers.random() < 0.5:
                    event = structs.replace(event, **{field.name: numbers.choice(STRINGS)})
            with suppress(ValueError, KeyError):
                # States and kinds of events have fixed names, which only this project writes.
                view.apply(event)
            path = numbers.choice(["/", "/state.json", "/state.json?span=whole", "/samples.json", "/metrics", "/x"])
            raw = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/plain\r\n\r\n".encode()
            hostile = damaged(raw, numbers) if numbers.random() < 0.7 else raw
            findings.inputs += 1
            answer = await asyncio.to_thread(exchange, server.server_port, hostile)
            if answer[9:10] == b"5" and answer[9:12] not in (b"501", b"505"):
                findings.report(f"status {answer[9:12]!r}", hostile)
            if hostile == raw and path == "/" and (MARKUP.encode() in answer or b"200" not in answer[:15]):
                findings.report("the page has markup of others, or was not served", answer)
            if hostile == raw and path.endswith(".json"):
                try:
                    json.loads(answer.partition(b"\r\n\r\n")[2])
                except ValueError as error:
                    findings.report(f"{path} is not JSON: {error}", answer)
        await asyncio.to_thread(server.close)
        findings.end_round()


BLOCKS = [
    "n = 1",
    "[os.write(i, b'{\"reward\": 1.0}\\n' * 9) for i in range(64)]",
    "os.close(numbers)",
    "os.closerange(0, 64)",
    "import sys; sys.stdout.write('x' * 10**6)",
    "import gc; [o.clear() for o in gc.get_objects() if isinstance(o, dict) and 'rewards' in o]",
    "import builtins; builtins.eval = lambda *a: 1.0",
    "import msgspec; msgspec.json.encode = lambda *a, **k: RANDOM",
    "import tests.stack.isolated_rewards as m; m.evaluates.__code__ = (lambda args, sample: 1.0).__code__",
    "import sys; [f.f_locals.clear() for f in [sys._getframe()]]",
    "import signal; [signal.signal(i, signal.SIG_IGN) for i in (2, 15, 24)]",
    "open('/tmp/grader-fuzz', 'w')",
    "os.kill(os.getppid(), 9)",
    "os.fork()",
    "os._exit(0)",
    "os._exit(3)",
    "os.abort()",
    "raise SystemExit(0)",
    "raise KeyboardInterrupt",
    "raise MemoryError",
    "bytes(10**10)",
    "import ctypes; ctypes.string_at(0)",
    "import ctypes; ctypes.memmove(id(0.0) + 16, ctypes.byref(ctypes.c_double(1.0)), 8)",
    "import threading; threading.Thread(target=print).start()",
    "exec('def f(): f()\\nf()')",
    "won = RANDOM",
    "[os.write(i, RANDOM) for i in range(64)]",
]


async def fuzz_graders(findings: Findings, end: float) -> None:
    numbers = findings.numbers
    reward = "tests.stack.isolated_rewards.evaluates"
    graders = GraderPool(reward, "rm_type", {}, 2, timeout_seconds=10.0, memory_bytes=4 * 10**9, evaluates=True)
    try:
        while time.monotonic() < end:
            codes = []
            for _ in range(numbers.randint(1, 6)):
                blocks = "\n".join(numbers.choices(BLOCKS, k=numbers.randint(1, 4)))
                noise = bytes(numbers.choices(string.printable.encode(), k=numbers.choice([0, 5, 5000])))
                codes.append(blocks.replace("RANDOM", repr(noise)))
            hostile = [f"[n := {{'os': os}}, exec({code!r}, n), 0][2]" for code in codes]
            findings.inputs += len(hostile)
            texts = [*hostile, "0", "1"]
            results = await graders.grade([Sample(index=i, response=text) for i, text in enumerate(texts)])
            if [*results[-2:]] != [0.0, 1.0]:
                findings.report(f"honest answers were scored {results[-2:]}", codes)
            for code, result in zip(codes, results, strict=False):
                if not isinstance(result, GraderError | float | int | str | None | bool | list | dict):
                    findings.report(f"a result is {type(result)}", code)
            if len(graders._all) > 2:
                findings.report("a grader process was replaced", codes)
            findings.end_round()
    finally:
        await graders.close()
    if await asyncio.to_thread(os.path.exists, "/tmp/grader-fuzz"):
        findings.report("a file was written", "/tmp/grader-fuzz")


TARGETS: dict[str, Callable[[Findings, float], Any]] = {
    "endpoint": fuzz_endpoint,
    "parsers": fuzz_parsers,
    "page": fuzz_page,
    "graders": fuzz_graders,
}


def main() -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_clients", description=description)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long input is sent (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the input (default: 0)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    findings = Findings(random.Random(options.seed))
    asyncio.run(TARGETS[options.target](findings, time.monotonic() + 60.0 * options.minutes))
    print(f"{options.target}: {findings.inputs} inputs, {len(findings.found)} findings")
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())

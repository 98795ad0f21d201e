"""Finds tool calls and reasoning in answers with SGLang's own parsers.

The parsers run in a process of their own (`answer_parser_process.py`): a parser that is slow for some text does not
stop the event loop.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec
import structlog

from miles_async.adapters.sglang.answer_parser_process import Call, Choice, Chosen, Parsed, Question
from miles_async.errors import UserError
from miles_async.json_values import plain_text
from miles_async.observability.redacted_log import child_stderr

START_SECONDS = 120.0
MAX_LINE_BYTES = 1 << 26
CLOSING = ("<|call|>", "<|return|>", "<|tools_suffix|>")
"""Tokens that end a turn and without which its last call is incomplete (gpt-oss, Apertus)."""

log = structlog.get_logger(__name__)


class AnswerParserProcess:
    """Implements `agents.messages.AnswerParser`. Use as `async with`. A process that has died is replaced."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._closing = False
        self._waiting: deque[asyncio.Future[Parsed | None]] = deque()
        """Questions without an answer, in the order in which they were sent."""
        self.chosen = Chosen()

    async def __aenter__(self) -> Self:
        """Start the process. Raises UserError if SGLang has no parser of a given name."""
        await self._running()
        log.info("parsers of answers", tool_calls=self.chosen.tool_calls, reasoning=self.chosen.reasoning)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closing = True
        if self._process is not None and self._reader is not None:
            assert self._process.stdin is not None, "started with a pipe"
            self._process.stdin.close()
            await self._reader

    async def parse(
        self, text: str, *, end: str, context: str, tools: Sequence[Mapping[str, Any]] | None, calls_before: int
    ) -> dict[str, Any] | None:
        offered = tools if self.chosen.tool_calls is not None else None
        if not offered and self.chosen.reasoning is None:
            return None
        closing = end if end in CLOSING else ""
        tools_json = msgspec.json.encode(offered).decode() if offered else ""
        parsed = await self.ask(Question(plain_text(text + closing), plain_text(context), tools_json))
        if parsed is None or not (parsed.calls or parsed.reasoning or self._read_harmony(parsed.content)):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning.removesuffix(closing)
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(call, calls_before + index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(parsed.calls)
            ]
        return message

    async def ask(self, question: Question) -> Parsed | None:
        """Return the answer of the process; None if it cannot read the text, or has died of it."""
        line = msgspec.json.encode(question) + b"\n"
        while True:
            process = await self._running()
            assert process.stdin is not None, "started with a pipe"
            answer: asyncio.Future[Parsed | None] = asyncio.get_running_loop().create_future()
            self._waiting.append(answer)
            process.stdin.write(line)
            with suppress(_LostError):
                return await answer

    def _read_harmony(self, content: str) -> bool:
        """Whether a parser has removed the names of channels, which precede every text in Harmony.

        Of an answer that it cannot read, it returns nothing, or a text with these names.
        """
        harmony = "gpt-oss" in (self.chosen.tool_calls, self.chosen.reasoning)
        return harmony and bool(content) and "<|channel|>" not in content

    def _call_id(self, call: Call, position: int) -> str:
        # The chat templates of Kimi show the ID to the model, and that of Mistral demands nine characters.
        match self.chosen.tool_calls:
            case "kimi_k2":
                return f"functions.{call.name}:{position}"
            case "kimi_k3":
                return f"{call.name}:{position}"
        return uuid.uuid4().hex[:9]

    async def _running(self) -> Process:
        async with self._starting:
            if self._process is None:
                self._process = await self._start()
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def _start(self) -> Process:
        with child_stderr() as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "miles_async.adapters.sglang.answer_parser_process",
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                limit=MAX_LINE_BYTES,
            )
        assert process.stdin is not None, "started with a pipe"
        assert process.stdout is not None, "started with a pipe"
        process.stdin.write(msgspec.json.encode(self._choice) + b"\n")
        started = Chosen(error=f"their process has not started within {START_SECONDS:g} s")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    line = await process.stdout.readline()
                started = msgspec.json.decode(line or b'{"error": "their process has died"}', type=Chosen)
            if started.error:
                raise UserError(
                    f"the parsers of tool calls and reasoning cannot start: {started.error}; "
                    "set tool_call_parser and reasoning_parser to none to run without them"
                )
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            raise
        self.chosen = started
        return process

    async def _read(self, process: Process) -> None:
        """Pass on the answers of the process until it ends."""
        assert process.stdout is not None, "started with a pipe"
        try:
            async for line in process.stdout:
                # A process that dies while it writes leaves a part of a line.
                parsed = msgspec.json.decode(line, type=Parsed | None)
                # The question may have been cancelled.
                if not (answer := self._waiting.popleft()).done():
                    answer.set_result(parsed)
        except ValueError:
            # The line has more than `MAX_LINE_BYTES`, or is not an answer.
            with suppress(ProcessLookupError):
                process.kill()
        self._process = None
        # The process was reading the first text, and may have died of it. The other texts are read by the next process.
        for position, answer in enumerate(self._waiting):
            if answer.done():
                continue
            if position == 0 or self._closing:
                answer.set_result(None)
            else:
                answer.set_exception(_LostError())
        self._waiting.clear()
        await process.wait()


class _LostError(Exception):
    """The process has died before it read a text."""

"""Chat messages in one normal form, so that the histories of all clients can be compared.

The form is that of chat completions: `role`, `content` (a string), and where present `name`, `tool_call_id`,
`tool_calls` and `reasoning_content`. The arguments of tool calls are JSON without spaces, because a client may decode
them and encode them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from miles_async.adapters.sglang.multi_turn import TurnTokenizer
from miles_async.parsing import decode_json
from miles_async.types import Sample, SampleStatus

CONTEXT_TOKENS = 32
"""Tokens before an answer that parsers of reasoning read."""
Message = dict[str, Any]


class Part(Struct):
    """A part of the content of a message. The model reads only text."""

    type: str = ""
    text: str | None = None


Content = str | list[Part] | None


class CalledFunction(Struct):
    name: str
    arguments: str | None
    """JSON; empty if there are none."""


class SentCall(Struct):
    id: str
    function: CalledFunction


class SentMessage(Struct):
    """A chat message as agents send it. Other fields are ignored."""

    role: Annotated[str, Meta(min_length=1)]
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[SentCall] | None = None


class AnswerParser(Protocol):
    """Finds reasoning and tool calls in the text of an answer."""

    async def parse(
        self, text: str, *, end: str, context: str, tools: Sequence[Mapping[str, Any]] | None, calls_before: int
    ) -> Message | None:
        """Return the answer as a message, or None if the text contains neither or cannot be read.

        `text`, `end` and `context` include special tokens: `end` is the token after `text` that ended the turn, if any,
        and `context` is the end of the text before the answer. `calls_before` is the number of tool calls in the
        messages before the answer.
        """
        ...


def plain(message: Mapping[str, Any]) -> Message:
    """Normalize a message of an agent: join text parts, and drop empty fields and unknown keys.

    Raises ValueError if the message does not have the format of a chat message.
    """
    sent = msgspec.convert(message, SentMessage)
    # The newer name of OpenAI for the same role; chat templates know only `system`.
    kept: Message = {"role": "system" if sent.role == "developer" else sent.role}
    if sent.name:
        kept["name"] = sent.name
    if sent.tool_call_id:
        kept["tool_call_id"] = sent.tool_call_id
    kept["content"] = text_of_parts(sent.content)
    if sent.reasoning_content:
        kept["reasoning_content"] = sent.reasoning_content
    if sent.tool_calls:
        kept["tool_calls"] = [
            tool_call(call.id, call.function.name, call.function.arguments or "") for call in sent.tool_calls
        ]
    return kept


def text_of_parts(content: Content) -> str:
    """Join the text of a message that is given as a string, as content parts, or not at all.

    Raises ValueError if a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.text is None:
            raise ValueError(f"a content part has the type {part.type!r} and no text, but the model reads only text")
        texts.append(part.text)
    return "".join(texts)


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """Build a tool call. Raises ValueError if the arguments are not JSON; an empty string means none."""
    compact = msgspec.json.encode(decode_json(arguments or "{}", Any)).decode()
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": compact}}


class Arguments(dict[str, Any]):
    """The arguments of a tool call for a chat template: an object, as most templates expect, that is also its JSON.

    The templates of DeepSeek append the arguments to a text, and those of Kimi and Hermes print them.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


def for_template(message: Message) -> Message:
    """Decode the arguments of tool calls. Raises ValueError if they are not an object."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = decode_json(function["arguments"], dict[str, Any])
        calls.append({**call, "function": {**function, "arguments": Arguments(arguments)}})
    return {**message, "tool_calls": calls}


def same(held: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Return whether two histories are the same. Reasoning is not compared: most clients do not send it back."""
    return len(held) == len(sent) and all(map(same_message, held, sent))


def same_message(held: Message, sent: Message) -> bool:
    """Return whether two messages are the same, apart from reasoning."""
    return {**held, "reasoning_content": None} == {**sent, "reasoning_content": None}


async def read_answer(
    sample: Sample,
    first: int,
    tokenizer: TurnTokenizer,
    parser: AnswerParser | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    calls_before: int,
    stop: Sequence[str],
) -> tuple[Message, str | None]:
    """Convert the tokens of `sample` from `first` on to a message. Also return the stop string that ended them, which
    the message lacks.

    Without a parser, every answer is text.
    """
    tokens, context = list(sample.tokens[first:]), list(sample.tokens[max(0, first - CONTEXT_TOKENS) : first])
    ended = sample.status is SampleStatus.COMPLETED
    text, matched = _cut(tokenizer.decode(tokens), stop if ended else ())
    answer = {"role": "assistant", "content": text}
    if parser is None:
        return answer, matched
    # Parsers need the special tokens.
    end = tokens[-1:] if ended and not tokenizer.decode(tokens[-1:]) else []
    marked, _ = _cut(tokenizer.text_of(tokens[: len(tokens) - len(end)]), [matched] if matched else [])
    message = await parser.parse(
        marked,
        end=tokenizer.text_of(end),
        context=tokenizer.text_of(context),
        tools=tools,
        calls_before=calls_before,
    )
    return message or answer, matched


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Cut the text at the first stop string; return it and the stop string."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop

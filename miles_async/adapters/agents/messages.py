"""Chat messages in one normal form, so that the histories of all clients can be compared.

The form is that of chat completions: `role`, `content` (a string), and where present `name`, `tool_call_id`,
`tool_calls` and `reasoning_content`. The arguments of tool calls are JSON without spaces, because a client may decode
them and encode them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from miles_async.sample_schema import decode_json

Message = dict[str, Any]


class Decoder(Protocol):
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def text_of(self, ids: list[int]) -> str: ...


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


class PlainTextParser:
    """Finds nothing: every answer is text."""

    async def parse(
        self, text: str, *, end: str, context: str, tools: Sequence[Mapping[str, Any]] | None, calls_before: int
    ) -> Message | None:
        return None


def plain(message: Mapping[str, Any]) -> Message:
    """Normalize a message of an agent: join text parts, and drop empty fields and unknown keys.

    Raises KeyError, TypeError, AttributeError or ValueError if the message does not have the format of a chat message.
    """
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
    if kept["role"] == "developer":
        # The newer name of OpenAI for the same role; chat templates know only `system`.
        kept["role"] = "system"
    kept["content"] = text_of_parts(message.get("content"))
    if reasoning := message.get("reasoning_content"):
        kept["reasoning_content"] = str(reasoning)
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [tool_call(call["id"], **_function(call["function"])) for call in calls]
    return kept


def text_of_parts(content: Any) -> str:
    """Join the text of a message that is given as a string, as content parts, or not at all.

    Raises ValueError if a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if "text" not in part:
            raise ValueError(f"a content part has the type {part.get('type')!r}, but the model reads only text")
    return "".join(part["text"] for part in content)


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
    tokens: Sequence[int],
    decoder: Decoder,
    parser: AnswerParser,
    *,
    context: Sequence[int],
    ended: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    calls_before: int,
    stop: Sequence[str],
) -> tuple[Message, str | None]:
    """Convert sampled tokens to a message. Also return the stop string that ended them, which the message lacks.

    `context` is the end of the tokens before the answer. `ended` means that the model ended its turn or a stop string
    matched.
    """
    text, matched = _cut(decoder.decode([*tokens]), stop) if ended else (decoder.decode([*tokens]), None)
    # Parsers need the special tokens.
    end = [*tokens[-1:]] if ended and not decoder.decode([*tokens[-1:]]) else []
    marked, _ = _cut(decoder.text_of([*tokens[: len(tokens) - len(end)]]), [matched] if matched else [])
    message = await parser.parse(
        marked,
        end=decoder.text_of(end),
        context=decoder.text_of([*context]),
        tools=tools,
        calls_before=calls_before,
    )
    return message or {"role": "assistant", "content": text}, matched


def _function(function: Mapping[str, Any]) -> dict[str, str]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Cut the text at the first stop string; return it and the stop string."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop

"""Anthropic messages (`/v1/messages`)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from miles_async.adapters.agents.conversation import Completion, InvalidRequestError
from miles_async.adapters.agents.formats.format import (
    MODEL,
    Limit,
    Request,
    StopString,
    checked,
    event,
    function,
    refuse,
    template_kwargs,
)
from miles_async.adapters.agents.messages import Content, Message, text_of_parts
from miles_async.wire_formats import WireFormat

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Text(Struct, tag_field="type", tag="text"):
    text: str


class _Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str


class _RedactedThinking(Struct, tag_field="type", tag="redacted_thinking"):
    pass


class _ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: Content = None


_Block = _Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult


class _Message(Struct):
    role: str
    content: str | list[_Block]


class _ToolChoice(Struct):
    type: str = "auto"


class _Request(Request):
    messages: list[_Message] = []
    max_tokens: Limit = None
    system: Content = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[StopString] | None = None


class Messages(WireFormat):
    """Anthropic messages (`/v1/messages`)."""

    name = "messages"
    ping = event({"type": "ping"})

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        refuse(request, {"mcp_servers": "the endpoint runs no tools", "container": "the endpoint runs no tools"})
        asked = checked(request, _Request)
        if asked.max_tokens is None:
            raise InvalidRequestError("max_tokens is missing: set it to the largest number of tokens of the answer")
        messages: list[Message] = []
        try:
            if system := text_of_parts(asked.system):
                messages.append({"role": "system", "content": system})
        except ValueError as error:
            raise InvalidRequestError(f"system: {error}") from error
        for position, message in enumerate(asked.messages):
            try:
                messages += _messages(message)
            except ValueError as error:
                raise InvalidRequestError(f"messages[{position}]: {error}") from error
        offered = asked.tool_choice is None or asked.tool_choice.type != "none"
        return {
            "messages": messages,
            "tools": [function(tool, "input_schema") for tool in asked.tools or () if offered] or None,
            "template_kwargs": template_kwargs(asked),
            "max_tokens": asked.max_tokens,
            "stop": asked.stop_sequences or [],
        }

    def answer(self, completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
        reason = "stop_sequence" if completion.stop is not None else _STOP_REASONS[completion.finish_reason]
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": _blocks(completion.message),
            "stop_reason": reason,
            "stop_sequence": completion.stop,
            "usage": {"input_tokens": completion.context, "output_tokens": len(completion.tokens)},
        }

    def stream(self, completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
        message = self.answer(completion, request)
        ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**message["usage"], "output_tokens": 0}
        yield event({"type": "message_start", "message": begun})
        for index, block in enumerate(message["content"]):
            empty, deltas = _deltas(block)
            yield event({"type": "content_block_start", "index": index, "content_block": empty})
            for delta in deltas:
                yield event({"type": "content_block_delta", "index": index, "delta": delta})
            yield event({"type": "content_block_stop", "index": index})
        yield event({"type": "message_delta", "delta": ending, "usage": message["usage"]})
        yield event({"type": "message_stop"})


def _messages(message: _Message) -> Iterator[Message]:
    """Convert one message, which may hold several tool results and text of the user."""
    blocks = [_Text(message.content)] if isinstance(message.content, str) else message.content
    results = [block for block in blocks if isinstance(block, _ToolResult)]
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    misplaced = results if message.role == "assistant" else [*thoughts, *calls]
    if misplaced or (message.role != "assistant" and len(texts) + len(results) < len(blocks)):
        raise ValueError(f"a message of the {message.role} has a block of a type that only the other side may send")
    for result in results:
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text_of_parts(result.content)}
    if results and not texts:
        return
    turn: Message = {"role": message.role, "content": "".join(texts)}
    if reasoning := "".join(thoughts):
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [_call(block) for block in calls]
    yield turn


def _call(block: _ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        arguments = msgspec.json.decode(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block as it begins, and the deltas that complete it."""
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": ""}, deltas
    if block["type"] == "tool_use":
        arguments = msgspec.json.encode(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]

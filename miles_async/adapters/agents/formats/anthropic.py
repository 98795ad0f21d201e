"""Anthropic messages (`/v1/messages`)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from miles_async.adapters.agents.conversation import Completion, InvalidRequestError
from miles_async.adapters.agents.formats.format import (
    MODEL,
    event,
    function,
    limit,
    objects,
    refuse,
    strings,
    template_kwargs,
)
from miles_async.adapters.agents.messages import Message, text_of_parts

PING = event({"type": "ping"}, "ping")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(request: Mapping[str, Any]) -> dict[str, Any]:
    if request.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens is missing: set it to the largest number of tokens of the answer")
    tools = objects(request.get("tools"), "tools")
    refuse(request, {"mcp_servers": "the endpoint runs no tools", "container": "the endpoint runs no tools"})
    choice = request.get("tool_choice") or {}
    if not isinstance(choice, dict):
        raise InvalidRequestError("tool_choice must be an object with the entry type")
    messages: list[Message] = []
    try:
        if system := text_of_parts(request.get("system")):
            messages.append({"role": "system", "content": system})
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"system cannot be read: {error!r}") from error
    for position, message in enumerate(objects(request.get("messages"), "messages")):
        try:
            messages += _messages(message)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidRequestError(f"messages[{position}] cannot be read: {error!r}") from error
    return {
        "messages": messages,
        "tools": [function(tool, "input_schema") for tool in tools if choice.get("type") != "none"] or None,
        "template_kwargs": template_kwargs(request),
        "max_tokens": limit(request["max_tokens"], "max_tokens"),
        "stop": strings(request.get("stop_sequences"), "stop_sequences"),
    }


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """Convert one message, which may hold several tool results and text of the user."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for block in blocks:
        kinds.setdefault(block["type"], []).append(block)
    known = {"text", "thinking", "redacted_thinking", "tool_use"} if role == "assistant" else {"text", "tool_result"}
    if unknown := kinds.keys() - known:
        raise ValueError(f"a message of the {role} has a block of the type {min(unknown)!r}, which is not available")
    for block in kinds.get("tool_result", ()):
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of_parts(block.get("content"))}
    if "tool_result" in kinds and "text" not in kinds:
        return
    turn: Message = {"role": role, "content": text_of_parts(kinds.get("text"))}
    if reasoning := "".join(block["thinking"] for block in kinds.get("thinking", ())):
        turn["reasoning_content"] = reasoning
    if calls := kinds.get("tool_use"):
        turn["tool_calls"] = [_call(block) for block in calls]
    yield turn


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def answer(completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
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


def stream(completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
    message = answer(completion, request)
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**message["usage"], "output_tokens": 0}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        start = {"type": "content_block_start", "index": index, "content_block": empty}
        yield event(start, "content_block_start")
        for delta in deltas:
            yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
    yield event({"type": "message_delta", "delta": ending, "usage": message["usage"]}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


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

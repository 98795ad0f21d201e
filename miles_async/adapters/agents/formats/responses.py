"""OpenAI responses (`/v1/responses`).

A turn of the model is a list of items here: reasoning, a message, and function calls. Items that follow each other are
one message of chat completions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from miles_async.adapters.agents.conversation import Completion, InvalidRequestError
from miles_async.adapters.agents.formats.format import (
    MODEL,
    Limit,
    Request,
    checked,
    event,
    function,
    refuse,
    template_kwargs,
)
from miles_async.adapters.agents.messages import Content, Message, text_of_parts
from miles_async.json_values import shown
from miles_async.wire_formats import WireFormat

_REFUSED = {
    **dict.fromkeys(
        ("previous_response_id", "conversation", "prompt"),
        "the endpoint keeps no responses; send the whole history as input",
    ),
    "background": "the endpoint keeps no responses; wait for the answer, or stream it",
}


class _Said(Struct):
    role: str
    content: Content


class _Reasoning(Struct):
    content: Content = None
    summary: Content = None


class _Called(Struct):
    call_id: str
    name: str
    arguments: str


class _Returned(Struct):
    call_id: str
    output: Content


_ITEMS: dict[str, type[Struct]] = {
    "message": _Said,
    "reasoning": _Reasoning,
    "function_call": _Called,
    "function_call_output": _Returned,
}
"""Items by their type; an item without a type is a message."""


class _Request(Request):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Limit = None


class Responses(WireFormat):
    """OpenAI responses (`/v1/responses`)."""

    name = "responses"

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        refuse(request, _REFUSED)
        asked = checked(request, _Request)
        messages: list[Message] = []
        if asked.instructions:
            _append(messages, {"role": "system", "content": asked.instructions}, "instructions")
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input or []
        for position, item in enumerate(items):
            _append(messages, item, f"input[{position}]")
        return {
            "messages": messages,
            "tools": [function(tool, "parameters") for tool in asked.tools or () if asked.tool_choice != "none"]
            or None,
            "template_kwargs": template_kwargs(asked),
            "max_tokens": asked.max_output_tokens,
            "stop": [],
        }

    def answer(self, completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
        return _response(completion, _items(completion.message), uuid.uuid4().hex, int(time.time()))

    def stream(self, completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
        identity, created, items = uuid.uuid4().hex, int(time.time()), _items(completion.message)
        begun = {**_response(completion, [], identity, created), "status": "in_progress", "incomplete_details": None}
        ended = _response(completion, items, identity, created)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(items):
            events += _item_events(index, item)
        events.append({"type": f"response.{ended['status']}", "response": ended})
        for number, described in enumerate(events):
            yield event({**described, "sequence_number": number})


def _append(messages: list[Message], sent: Mapping[str, Any], name: str) -> None:
    kind = sent.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequestError(f"{name}: items of type {shown(kind)} are not available")
    item = checked(sent, _ITEMS[kind], name)
    try:
        _add(messages, item)
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {error}") from error


def _add(messages: list[Message], item: Struct) -> None:
    match item:
        case _Said(role=role) if role != "assistant":
            messages.append({"role": role, "content": text_of_parts(item.content)})
            return
        case _Returned():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of_parts(item.output)})
            return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    match item:
        case _Said():
            turn["content"] += text_of_parts(item.content)
        case _Called():
            called = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": called})
        case _Reasoning():
            text = text_of_parts(item.content) or text_of_parts(item.summary)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def _items(message: Message) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": _identity("rs"), "summary": [], "content": content})
    calls = message.get("tool_calls", ())
    # An empty answer is an item, too: otherwise the history of the client would lack the turn.
    if message["content"] or not calls:
        content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": _identity("msg"), "role": "assistant", "content": content})
    for call in calls:
        items.append({"type": "function_call", "id": _identity("fc"), "call_id": call["id"], **call["function"]})
    return [{**item, "status": "completed"} for item in items]


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    location = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        yield _added(index, {**item, "arguments": ""})
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **location, "delta": arguments}
        yield {"type": f"{kind}.done", **location, "name": item["name"], "arguments": arguments}
    else:
        yield _added(index, {**item, "content": []})
        [part] = item["content"]
        kind, location = f"response.{part['type']}", {**location, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **location, "part": {**part, "text": ""}}
        yield {"type": f"{kind}.delta", **location, "delta": part["text"], **logprobs}
        yield {"type": f"{kind}.done", **location, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **location, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _added(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress"}}


def _response(completion: Completion, items: list[dict[str, Any]], identity: str, created: int) -> dict[str, Any]:
    complete = completion.finish_reason != "length"
    before, new = completion.context, len(completion.tokens)
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": created,
        "model": MODEL,
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": before + new,
        },
    }


def _identity(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

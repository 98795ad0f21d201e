"""Chat messages: a normal form for comparison, and parsing of the tool calls in the text of a model."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""The format of tool calls of Hermes and Qwen models."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


_CALL_DECODER = msgspec.json.Decoder(_Call)


def plain(message: Mapping[str, Any]) -> Message:
    """Normalize a message of an agent: join content parts, and drop empty fields and unknown keys."""
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key)}
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [
        {"id": call["id"], "type": "function", "function": {k: call["function"][k] for k in ("name", "arguments")}}
        for call in message.get("tool_calls") or ()
    ]
    return {**kept, "content": content or "", **({"tool_calls": calls} if calls else {})}


def for_template(message: Message) -> Message:
    """Decode the arguments of tool calls, which chat templates expect as objects.

    Raises msgspec.DecodeError if the arguments are not valid JSON.
    """
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}})
    return {**message, "tool_calls": calls}


def reply(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Message:
    """Convert generated text to a message. If the request offered tools, tool calls are moved out of the text.

    If a tool call is not a JSON object with a name and an object of arguments, the whole text is left unchanged: the
    agent decides what to do about it.
    """
    calls = []
    for match in _CALL.finditer(text) if tools else ():
        try:
            call = _CALL_DECODER.decode(match[1])
        except msgspec.DecodeError:
            return {"role": "assistant", "content": text}
        function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
        calls.append({"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": _CALL.sub("", text).strip(), "tool_calls": calls}

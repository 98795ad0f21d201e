"""Chat messages: one shape to compare them in, and the tool calls that a model writes into its text."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""As Hermes and Qwen models are trained to call."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


_CALL_SHAPE = msgspec.json.Decoder(_Call)


def plain(message: Mapping[str, Any]) -> Message:
    """A message as agents send it, without what does not change its meaning: empty fields, parts, unknown keys."""
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
    """Chat templates want the arguments of calls as objects. Raises DecodeError where they are none."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}})
    return {**message, "tool_calls": calls}


def reply(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Message:
    """What the model said, with its tool calls taken out of the text where the request offered tools.

    A call that is no JSON object with a name and an object of arguments stays text, for the agent to judge.
    """
    calls = []
    for match in _CALL.finditer(text) if tools else ():
        try:
            call = _CALL_SHAPE.decode(match[1])
        except msgspec.DecodeError:
            return {"role": "assistant", "content": text}
        function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
        calls.append({"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": _CALL.sub("", text).strip(), "tool_calls": calls}

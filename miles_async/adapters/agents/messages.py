"""Chat messages: a normal form for comparison, and parsing of the tool calls in the text of a model."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
_CALL_BEGINS = re.compile(r"<tool_call>\s*(?=\{)")
_CALL_ENDS = re.compile(r"(?<=\})\s*</tool_call>")
"""The format of tool calls of Hermes and Qwen models: a JSON object between two tags."""


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
    if not tools:
        return {"role": "assistant", "content": text}
    json_texts, rest = _split_calls(text)
    calls = []
    for json_text in json_texts:
        try:
            call = _CALL_DECODER.decode(json_text)
        except (msgspec.DecodeError, RecursionError):
            return {"role": "assistant", "content": text}
        function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
        calls.append({"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": rest.strip(), "tool_calls": calls}


def _split_calls(text: str) -> tuple[list[str], str]:
    """Return the JSON text of each tool call, and the text around the calls.

    Two patterns instead of one keep the time linear: with one pattern, every opening tag that is never closed makes
    the search read the rest of the text again.
    """
    calls, rest, position = [], [], 0
    while (begin := _CALL_BEGINS.search(text, position)) and (end := _CALL_ENDS.search(text, begin.end() + 1)):
        calls.append(text[begin.end() : end.start()])
        rest.append(text[position : begin.start()])
        position = end.end()
    return calls, "".join(rest) + text[position:]

"""OpenAI chat completions (`/v1/chat/completions`)."""

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
    StopString,
    checked,
    event,
    function,
    refuse,
    template_kwargs,
)
from miles_async.json_values import shown
from miles_async.wire_formats import WireFormat

_REFUSED = {
    "functions": "describe them in tools",
    "function_call": "describe functions in tools",
    "continue_final_message": "every answer is a separate message",
    "web_search_options": "the endpoint runs no tools",
    "audio": "the model answers with text",
}


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Request(Request):
    messages: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    stop: StopString | list[StopString] | None = None
    stream_options: _StreamOptions | None = None


class Chat(WireFormat):
    """OpenAI chat completions (`/v1/chat/completions`)."""

    name = "chat/completions"

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("n") not in (None, 1):
            raise InvalidRequestError(
                "n must be 1: the run itself generates several samples per prompt, each in another session"
            )
        refuse(request, _REFUSED)
        asked = checked(request, _Request)
        return {
            "messages": asked.messages,
            "tools": [_tool(tool) for tool in asked.tools or () if asked.tool_choice != "none"] or None,
            "template_kwargs": template_kwargs(asked),
            "max_tokens": asked.max_completion_tokens or asked.max_tokens,
            "stop": [asked.stop] if isinstance(asked.stop, str) else asked.stop or [],
        }

    def answer(self, completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": completion.message,
            "finish_reason": completion.finish_reason,
            "matched_stop": completion.stop,  # as in SGLang
            "logprobs": {"content": _log_probs(completion)} if request.get("logprobs") else None,
        }
        return {**_head("chat.completion"), "choices": [choice], "usage": _usage(completion)}

    def stream(self, completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
        head, message = _head("chat.completion.chunk"), completion.message
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if "reasoning_content" in message:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for index, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": completion.finish_reason}]})
        if (request.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": _usage(completion)})
        yield b"data: [DONE]\n\n"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = tool.get("function")
    if not isinstance(described, dict):
        raise InvalidRequestError(f"a tool of type {shown(tool.get('type'))} lacks the entry function")
    function(described, "parameters")
    # Chat templates show the tool to the model, so it stays as the client has written it.
    return dict(tool)


def _log_probs(completion: Completion) -> list[dict[str, Any]]:
    # Tokens are given as the decimal text of their ID: an ID identifies a token exactly, its text may not.
    return [
        {"token": str(token), "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(completion.tokens, completion.log_probs, strict=True)
    ]


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(completion: Completion) -> dict[str, int]:
    before, new = completion.context, len(completion.tokens)
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}

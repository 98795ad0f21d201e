"""What the wire formats have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from miles_async.adapters.agents.conversation import Completion, InvalidRequestError
from miles_async.config.schema.data import CHAT_PARAMETERS

MODEL = "policy"
"""Name of the trained model in answers; requests may use any model name."""
_RESERVED = CHAT_PARAMETERS | {"chat_template"}
"""Arguments of the chat template that a request may not set."""


class Format(Protocol):
    """A wire format, implemented by a module. The functions are pure, apart from random IDs and the time of answers."""

    @property
    def PING(self) -> bytes:
        """A part of a stream that clients ignore. It is sent while the model generates."""
        ...

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a request to `messages`, `tools`, `template_kwargs`, `max_tokens` and `stop`.

        Messages and tools have the format of chat completions. `template_kwargs` are arguments of the chat template.
        Raises InvalidRequestError if that is impossible.
        """
        ...

    def answer(self, completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the answer to `request`, as the client sent it."""
        ...

    def stream(self, completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
        """Return the events of the answer as server-sent events. Each text arrives as one delta."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def limit(value: Any, name: str) -> int | None:
    """Check a limit for the tokens of an answer; None means that the request sets none."""
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidRequestError(f"{name} must be a positive integer, not {value!r}")
    return value


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Read `chat_template_kwargs`, the field in which servers of open models take variables of the chat template."""
    value = request.get("chat_template_kwargs")
    if value is not None and not isinstance(value, dict):
        raise InvalidRequestError('chat_template_kwargs must be an object, such as {"enable_thinking": false}')
    if reserved := _RESERVED & (value or {}).keys():
        raise InvalidRequestError(
            f"chat_template_kwargs may not contain {min(reserved)}, which the endpoint sets: remove it"
        )
    return value or {}


def refuse(request: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse fields that would change the answer but that the endpoint does not support."""
    for name, reason in reasons.items():
        if request.get(name):
            raise InvalidRequestError(f"{name} is not available: {reason}")


def objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Check a list of JSON objects; None is an empty one."""
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise InvalidRequestError(f"{name} must be a list of objects")
    return value or []


def strings(value: Any, name: str) -> list[str]:
    """Check a list of strings without empty ones; None is an empty list."""
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) and item for item in value)):
        raise InvalidRequestError(f"{name} must be a list of strings that are not empty")
    return value or []


def function(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Convert a tool to the format of chat completions. The entry `schema` of the tool describes its arguments."""
    name = tool.get("name")
    if not isinstance(name, str) or not name or not isinstance(tool.get(schema) or {}, dict):
        raise InvalidRequestError(
            f"tool {name or tool.get('type')!r} needs a name, and an object as its {schema}: tools without them, which "
            "a provider would run, are not available"
        )
    parameters = tool.get(schema) or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": tool.get("description") or "", "parameters": parameters},
    }

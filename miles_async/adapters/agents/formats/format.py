"""What the wire formats have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.config.schema.data import CHAT_PARAMETERS
from miles_async.errors import TrajectoryError
from miles_async.json_values import shown
from miles_async.parsing import parse

T = TypeVar("T")
Limit = Annotated[int, Meta(ge=1)] | None
"""A limit for the tokens of an answer; None means that the request sets none."""
StopString = Annotated[str, Meta(min_length=1)]

MODEL = "policy"
"""Name of the trained model in answers; requests may use any model name."""
_RESERVED = CHAT_PARAMETERS | {"chat_template"}
"""Arguments of the chat template that a request may not set."""


class Request(Struct):
    """The fields that all formats have. Fields that are not declared are ignored."""

    tools: Sequence[dict[str, Any]] | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def event(data: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event, which is named after the `type` of its data if they have one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return name.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def checked(value: Any, schema: type[T], name: str = "the request") -> T:
    """Convert what a client sent. Raises InvalidRequestError with the path of the first invalid field."""
    try:
        return parse(value, schema, name)
    except TrajectoryError as error:
        raise InvalidRequestError(str(error)) from error


def template_kwargs(request: Request) -> dict[str, Any]:
    """Read `chat_template_kwargs`, the field in which servers of open models take variables of the chat template."""
    value = request.chat_template_kwargs or {}
    if reserved := _RESERVED & value.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs may not contain {min(reserved)}, which the endpoint sets: remove it"
        )
    return value


def refuse(request: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse fields that would change the answer but that the endpoint does not support."""
    for name, reason in reasons.items():
        if request.get(name):
            raise InvalidRequestError(f"{name} is not available: {reason}")


def function(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Convert a tool to the format of chat completions. The entry `schema` of the tool describes its arguments."""
    name, description, parameters = tool.get("name"), tool.get("description") or "", tool.get(schema) or {}
    if not (isinstance(name, str) and name and isinstance(description, str) and isinstance(parameters, dict)):
        raise InvalidRequestError(
            f"tool {shown(name or tool.get('type'))} needs a name, an object as its {schema}, and a text if it has a "
            "description: tools without them, which a provider would run, are not available"
        )
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

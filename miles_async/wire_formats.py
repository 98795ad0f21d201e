"""What a wire format of the endpoint for agents provides: it reads requests, and writes answers.

A format is a subclass of `WireFormat` (see `miles_async/plugins.py`). Its name is its path below the base URL of a
session, such as `chat/completions`:

    [project.entry-points."miles_async.adapters.agents.formats"]
    "api/chat" = "my_package:OllamaChat"

`adapters/agents/formats/format.py` has functions that check requests and encode events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from miles_async.plugins import Kind, Plugin

if TYPE_CHECKING:
    from miles_async.adapters.agents.conversation import Completion


class WireFormat(Plugin):
    """A wire format. Its methods are pure, apart from random IDs and the time of answers."""

    ping: ClassVar[bytes] = b": the model is generating\n\n"
    """A part of a stream that clients ignore. It is sent while the model generates."""

    def read(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a request to `messages`, `tools`, `template_kwargs`, `max_tokens` and `stop`.

        Messages and tools have the format of chat completions. `template_kwargs` are arguments of the chat template.
        Raises InvalidRequestError if that is impossible.
        """
        raise NotImplementedError

    def answer(self, completion: Completion, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the answer to `request`, as the client sent it."""
        raise NotImplementedError

    def stream(self, completion: Completion, request: Mapping[str, Any]) -> Iterator[bytes]:
        """Return the events of the answer as server-sent events. Each text arrives as one delta."""
        raise NotImplementedError


FORMATS = Kind("wire format", WireFormat, "miles_async.adapters.agents.formats", by_path=False)

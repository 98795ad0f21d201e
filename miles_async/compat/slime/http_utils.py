"""slime's requests, for functions that ask the router themselves.

slime's functions send no key, and the router of a run refuses requests without one. A request to the address that a
guest was told (`Guest.use_router`) therefore gets the key of the run; a request to any other address does not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from miles_async.config.redaction import redact_text
from miles_async.errors import InfrastructureError

PAUSE_SECONDS = 1.0
"""Pause before a request is repeated."""
_NO_TIME_LIMIT = aiohttp.ClientTimeout(total=None)
_keys: dict[URL, str] = {}
"""The keys of routers by address."""


def use_router(url: str, key: str) -> None:
    """Send `key` with all requests of this process to the router at `url`."""
    _keys[URL(url).origin()] = key


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send `payload` as JSON, and return the JSON of the answer, or its text. `action` is the method of the request.

    A lost connection and a 5xx status are tried up to `max_retries` times. Raises InfrastructureError after the last
    attempt, and RuntimeError for a 4xx status.
    """
    failure = ""
    for attempt in range(max(1, max_retries)):
        if attempt:
            await asyncio.sleep(PAUSE_SECONDS)
        try:
            status, text = await _request(action, url, headers or {}, payload)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            failure = f"failed: {type(error).__name__}: {error}"
            continue
        if status < 400:
            return _content(text)
        failure = f"answered {status}: {text[:200]}"
        if status < 500:
            raise RuntimeError(redact_text(f"{url} {failure}"))
    raise InfrastructureError(redact_text(f"{url} {failure}"))


async def get(url: str) -> Any:
    """Return the JSON of the answer, or its text. Raises as `post`."""
    return await post(url, None, max_retries=1, action="get")


async def _request(method: str, url: str, headers: Mapping[str, str], payload: Any) -> tuple[int, str]:
    """The status and the text of an answer."""
    key = _keys.get(URL(url).origin(), "")
    sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **headers}
    body = None if method in ("get", "delete") else payload or {}
    # Functions call this from several event loops, and a session belongs to one.
    async with (
        aiohttp.ClientSession(timeout=_NO_TIME_LIMIT) as session,
        session.request(method, url, json=body, headers=sent) as answer,
    ):
        return answer.status, await answer.text()


def _content(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

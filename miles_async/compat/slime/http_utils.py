"""slime's and Miles' requests to the router and to other servers, for functions of users.

Their functions send no key, and the router of a run refuses requests without one. A request to the router therefore
gets the key of the run; a request to any other server does not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from miles_async.adapters.sglang.server_key import authorization

RETRY_SECONDS = 1.0
SHOWN_CHARACTERS = 500
"""Of the answer to a request that fails."""
_keys: dict[str, str] = {}
"""The keys of routers by address."""


def use_router(url: str, key: str) -> None:
    """Send `key` with the requests of this process to the router at `url`."""
    _keys[_origin(url)] = key


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send `payload` as JSON with the HTTP method `action`, and return the answer: decoded JSON, or else its text.

    There is no time limit. If the server does not answer, or answers that it failed, the request is repeated after a
    second, up to `max_retries` requests in all. Raises `aiohttp.ClientError` then, and at once if the server refuses
    the request.
    """
    body = None if action in ("get", "delete") else payload or {}
    for _ in range(max_retries - 1):
        try:
            return await _answer(url, action, body, headers)
        except aiohttp.ClientResponseError as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(RETRY_SECONDS)
    return await _answer(url, action, body, headers)


async def get(url: str) -> Any:
    """Return the answer of a server, as `post` does, without a second request."""
    return await _answer(url, "get", None, None)


async def _answer(url: str, action: str, body: Any, headers: Mapping[str, str] | None) -> Any:
    sent = {**authorization(_keys.get(_origin(url), "")), **(headers or {})}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
        http.request(action, url, json=body, headers=sent) as response,
    ):
        text = await response.text()
        if not response.ok:
            # The answer says what is wrong with the request.
            raise aiohttp.ClientResponseError(
                response.request_info, response.history, status=response.status, message=text[:SHOWN_CHARACTERS]
            )
    try:
        return json.loads(text)
    except ValueError:
        return text


def _origin(url: str) -> str:
    """Scheme, host and port of a URL, without a user's name."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}".lower()

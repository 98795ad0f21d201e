"""Rewards from an HTTP server: one POST request per sample, with bounded concurrency, a deadline and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any

import aiohttp

from miles_async.config.redaction import redact_text
from miles_async.errors import InfrastructureError
from miles_async.time_limit import permit
from miles_async.types import Sample

FIRST_BACKOFF_SECONDS = 0.25
"""Pause before the first retry; the pause doubles before each further retry."""


def _fields(sample: Sample) -> dict[str, Any]:
    return {"prompt": sample.prompt, "response": sample.response, "label": sample.label}


class RemoteReward:
    """A reward function that asks the server at `url`: `body` makes the request, and `reward` reads the answer.

    If they are not given, the request has `prompt`, `response` and `label`, and the answer is the reward. A lost
    connection, a timeout or a 5xx status is retried up to `remote_rm_retries` times, a 4xx status never. At most
    `remote_rm_concurrency` requests run at once, and `reward_timeout_seconds` limits each request. The object may be
    created outside the event loop.
    """

    def __init__(
        self,
        settings: Any,
        *,
        body: Callable[[Sample], Any] = _fields,
        reward: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """`settings` has those of `RemoteRm` as attributes."""
        self._url: str = settings.rm_url
        self._concurrency: int = settings.remote_rm_concurrency
        self._retries: int = settings.remote_rm_retries
        self._timeout = aiohttp.ClientTimeout(total=settings.reward_timeout_seconds)
        self._body = body
        self._reward = reward

    async def __call__(self, args: Any, sample: Sample) -> Any:
        """Raises InfrastructureError if all attempts fail, and RuntimeError if the server refuses the request."""
        body = self._body(sample)
        async with permit(self._permits):
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
                try:
                    async with self._session.post(self._url, json=body) as answer:
                        if answer.status < 400:
                            return self._reward(await answer.json(content_type=None))
                        failure = f"{answer.status}: {(await answer.text())[:200]}"
                        if answer.status < 500:
                            raise RuntimeError(self._sentence(failure))
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                    failure = f"{type(error).__name__}: {error}"
        raise InfrastructureError(self._sentence(failure))

    def _sentence(self, failure: str) -> str:
        return redact_text(f"{self._url} answered {failure} (rm_url)")

    async def close(self) -> None:
        await self._session.close()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=self._concurrency))

    @cached_property
    def _permits(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._concurrency)

"""Rewards from an HTTP server: one POST request per sample, with bounded concurrency, a deadline and retries."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

import aiohttp

from miles_async.config.redaction import redact_text
from miles_async.errors import InfrastructureError
from miles_async.time_limit import permit
from miles_async.types import Sample

FIRST_BACKOFF_SECONDS = 0.25
"""Pause before the first retry; the pause doubles before each further retry."""


class RemoteReward:
    """A reward function that asks the server at `url`: the reward is the JSON value that the server answers.

    The request body has `prompt`, `response` and `label`; the answer is a number or a dictionary. A lost connection, a
    timeout or a 5xx status is retried up to `retries` times, a 4xx status never. At most `concurrency` requests run at
    once, and `timeout_seconds` limits each request. The object may be created outside the event loop.
    """

    def __init__(self, url: str, *, concurrency: int, retries: int, timeout_seconds: float) -> None:
        self._url = url
        self._concurrency = concurrency
        self._retries = retries
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)

    async def __call__(self, args: Any, sample: Sample) -> Any:
        """Raises InfrastructureError if all attempts fail, and RuntimeError if the server refuses the request."""
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        async with permit(self._permits):
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
                try:
                    async with self._session.post(self._url, json=body) as answer:
                        if answer.status < 400:
                            return await answer.json(content_type=None)
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

"""JSON over HTTP to engines and router: one aiohttp session, orjson, and our own errors."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from miles_async.errors import EngineLostError, TrajectoryError

_TRY_ELSEWHERE = {408, 425, 429}
"""4xx answers that speak of the moment and not of the request."""


class JsonClient:
    """Costs a quarter of a millisecond of CPU per request; create it inside the running loop."""

    def __init__(self) -> None:
        # The number of connections is bounded by who asks, not here.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def post(self, url: str, body: Any = None, *, within: float) -> Any:
        """The decoded answer, or its text where it is no JSON. Raises as `request` does."""
        return await self.request("POST", url, body, within=within)

    async def get(self, url: str, *, within: float) -> Any:
        return await self.request("GET", url, within=within)

    async def request(self, method: str, url: str, body: Any = None, *, within: float) -> Any:
        """Raises EngineLostError when nobody answered `within` seconds or the server failed (5xx), TrajectoryError
        when the server refused the request itself (4xx), which a second attempt would not change."""
        try:
            async with self._session.request(
                method,
                url,
                data=orjson.dumps(body if body is not None else {}),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=within),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineLostError(f"{method} {url}: {str(error) or f'no answer within {within:g} s'}") from error
        if response.status >= 500 or response.status in _TRY_ELSEWHERE:
            raise EngineLostError(f"{method} {url} answered {response.status}: {_start(content)}")
        if response.status >= 400:
            raise TrajectoryError(f"{method} {url} answered {response.status}: {_start(content)}")
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content.decode(errors="replace")

    async def close(self) -> None:
        await self._session.close()


def _start(content: bytes) -> str:
    return " ".join(content[:300].decode(errors="replace").split())

"""Agents at the endpoint of a run, for measuring the endpoint.

    python -m benchmarks.fake_agents http://127.0.0.1:8800 2000 60 < agent_key

They hold 2,000 sessions at all times, of which the first ones begin within 60 seconds. A session has 10 turns, in each
of which the model calls a tool, and is posted for training. A third each uses chat completions, responses and Anthropic
messages.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import aiohttp
import orjson
import uvloop

TURNS = 10
RESULT = "Paris. " * 57
SCHEMA = {"type": "object", "properties": {"query": {"type": "string", "description": "what to search for"}}}
SYSTEM = "Answer the question with the tools that you have. " * 10


class Chat:
    """The history of an agent that uses chat completions."""

    path = "chat/completions"

    def __init__(self) -> None:
        tool = {"name": "search", "parameters": SCHEMA}
        self._history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is Paris?"}]
        self._options = {"model": "policy", "tools": [{"type": "function", "function": tool}]}

    def request(self) -> dict[str, Any]:
        return {**self._options, "messages": self._history}

    def extend(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        [call] = message["tool_calls"]
        self._history += [message, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]


class Responses:
    """The history of an agent that uses responses."""

    path = "responses"

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] = [{"role": "user", "content": "Where is Paris?"}]
        tool = {"type": "function", "name": "search", "parameters": SCHEMA}
        self._options = {"model": "policy", "instructions": SYSTEM, "tools": [tool]}

    def request(self) -> dict[str, Any]:
        return {**self._options, "input": self._history}

    def extend(self, answer: dict[str, Any]) -> None:
        [call] = [item for item in answer["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
        self._history += [*answer["output"], result]


class Anthropic:
    """The history of an agent that uses Anthropic's messages."""

    path = "messages"

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] = [{"role": "user", "content": "Where is Paris?"}]
        tool = {"name": "search", "input_schema": SCHEMA}
        self._options = {"model": "policy", "max_tokens": 1000, "system": SYSTEM, "tools": [tool]}

    def request(self) -> dict[str, Any]:
        return {**self._options, "messages": self._history}

    def extend(self, answer: dict[str, Any]) -> None:
        [call] = [block for block in answer["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
        self._history += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


async def play_agents(url: str, key: str, sessions: int, spread_seconds: float) -> None:
    """Hold `sessions` sessions at all times; the first ones begin within `spread_seconds`."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:

        async def post(url: str, body: Any) -> Any:
            async with http.post(url, data=orjson.dumps(body)) as response:
                content = await response.read()
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {content[:300].decode()}")
                return orjson.loads(content)

        async def play(number: int) -> None:
            await asyncio.sleep(random.random() * spread_seconds)
            while True:
                agent = (Chat, Responses, Anthropic)[number % 3]()
                opened = await post(f"{url}/sessions", {})
                for _ in range(TURNS):
                    agent.extend(await post(f"{opened['base_url']}/{agent.path}", agent.request()))
                await post(f"{url}/trajectories", {"samples": [{"session": opened["session"], "reward": 1}]})

        await asyncio.gather(*map(play, range(sessions)))


def main() -> None:
    url, sessions, spread_seconds = sys.argv[1:]
    uvloop.run(play_agents(url, sys.stdin.read(), int(sessions), float(spread_seconds)))


if __name__ == "__main__":
    main()

"""The process of an environment, with an environment for tests in place of a library's.

It stands for the Python interpreter of a library: its arguments are those of that interpreter.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from miles_async.adapters.environments import server
from miles_async.adapters.environments.server import ModelRequestError, TaskFailedError


class FakeEnvironment:
    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        if name == "unknown":
            raise ModuleNotFoundError("taskset 'unknown' not found")
        if name == "without_library":
            raise ModuleNotFoundError("No module named 'verifiers'", name="verifiers")
        self._name, self._settings = name, settings
        print("text that the environment prints")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def tasks(self, limit: int, split: str | None) -> list[dict[str, Any]]:
        await asyncio.sleep(0.01)
        count = 0 if self._name == "empty" else 3
        named = "task" if split is None else split
        return [{"prompt": f"{named} {i}", "label": str(i), "task": {"number": i}} for i in range(count)][:limit]

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        match task.get("does"):
            case "fail":
                raise OSError("the sandbox is down")
            case "lose_model":
                raise ModelRequestError("503: no engine")
            case "have_a_bug":
                raise TaskFailedError("TypeError in the reward")
            case "await_a_task_that_is_cancelled":
                own = asyncio.ensure_future(asyncio.sleep(3600))
                own.cancel()
                await own
            case "crash":
                os._exit(3)
            case "wait":
                try:
                    await asyncio.sleep(3600)
                finally:
                    self._settings["waited"] = True
        key = os.environ[server.KEY_VARIABLE]
        return {"reward": task["number"], "metrics": self._settings, "model": [url, key]}


if __name__ == "__main__":
    _, _, _, name = sys.argv[1:]
    server.LIBRARIES = {"verifiers": FakeEnvironment}
    asyncio.run(server.main("verifiers", name))

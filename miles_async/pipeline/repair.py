"""Keeps engines and router alive: watched while they serve, fenced when they do not, started anew in the background.

One loop per engine. A routed engine is asked for a sign of life again and again; one that is out of the router, whoever
took it out, is started anew and joins once it holds the current weights (`publish.py`). Requests that it held fail as
its process ends, and their groups go back to the feed.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from miles_async.errors import EngineLostError, FatalError
from miles_async.events import WarningRaised
from miles_async.pipeline.publish import Publisher
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Fleet

ATTEMPTS = 3
"""Starts in a row that may fail while no other engine serves; then the run ends."""
LONGEST_WAIT_SECONDS = 60.0
"""Between two attempts to start an engine; they grow further and further apart."""


class Repair:
    def __init__(
        self,
        *,
        run_state: RunState,
        fleet: Fleet,
        publisher: Publisher,
        tasks: TaskSupervisor,
        interval_seconds: float,
        devices: AbstractAsyncContextManager[None],
    ) -> None:
        """`devices` are entered to start an engine on them."""
        self._run_state = run_state
        self._fleet = fleet
        self._publisher = publisher
        self._tasks = tasks
        self._interval = interval_seconds
        self._devices = devices
        self._kept: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Waits for time and the router's answers; a loop of its own per engine, ended when the engine is removed."""
        trouble = ""
        while True:
            members = self._fleet.members()
            for engine in members:
                if engine not in self._kept:
                    self._kept[engine] = self._tasks.spawn(f"keep-{engine}", self._keep(engine))
            for engine in self._kept.keys() - set(members):
                self._kept.pop(engine).cancel()
            await self._run_state.clock.sleep(self._interval)
            if not members:
                continue
            try:
                await self._fleet.check_router()
                trouble = ""
            except EngineLostError as lost:
                if str(lost) != trouble:
                    trouble = str(lost)
                    self._warn(trouble)

    async def _keep(self, engine: str) -> None:
        """Waits for the engine's signs of life, or for its start; for a learner only on the same devices."""
        while engine in self._fleet.members():
            if engine in self._fleet.routed():
                await self._run_state.clock.sleep(self._interval)
                await self._look_at(engine)
            else:
                await self._replace(engine)

    async def _look_at(self, engine: str) -> None:
        try:
            await self._fleet.check(engine)
        except EngineLostError as lost:
            await self._fleet.fence(engine, str(lost))

    async def _replace(self, engine: str) -> None:
        """Raises Fatal when it fails again and again and no other engine serves."""
        failures = 0
        while engine in self._fleet.members():
            try:
                async with self._devices:
                    await self._fleet.restart(engine)
                    await self._publisher.join(engine)
                return
            except EngineLostError as lost:
                failures += 1
                sentence = f"engine {engine} could not be replaced ({failures} attempts): {lost}"
            if failures >= ATTEMPTS and not self._fleet.routed():
                raise FatalError(f"no engine is left: {sentence}")
            self._warn(sentence)
            await self._run_state.clock.sleep(min(LONGEST_WAIT_SECONDS, 2.0**failures))

    def _warn(self, text: str) -> None:
        self._run_state.events.emit(WarningRaised(time=self._run_state.clock.now(), text=text))

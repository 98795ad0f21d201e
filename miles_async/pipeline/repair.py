"""Keeps engines and router alive: checks them, fences an engine that fails, and restarts it in the background."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from miles_async.errors import EngineLostError, FatalError, RouterLostError
from miles_async.pipeline.publish import Publisher
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Fleet

MAX_FAILED_STARTS = 3
"""Failed starts of an engine in a row that end the run, if no other engine is routed."""
MAX_BACKOFF_SECONDS = 60.0
"""Upper limit of the pause between two attempts to let an engine join, which doubles after each failure."""


class EngineChecks:
    """Checks engines at any time, for callers that depend on their answers."""

    def __init__(self, run_state: RunState, fleet: Fleet) -> None:
        self._run_state = run_state
        self._fleet = fleet
        self._one_round = asyncio.Lock()
        self._rounds = 0
        """Rounds of `check_all` that have begun."""
        self.serving = fleet.serving
        """Returns whether requests reach an engine."""

    async def check(self, engine: str) -> None:
        """Check one engine, and fence it if the check fails."""
        try:
            await self._fleet.check(engine)
        except EngineLostError as lost:
            await self._fleet.fence(engine, str(lost))
            self._run_state.changed.notify()

    async def check_all(self) -> None:
        """Check all routed engines. All calls that wait share the next round of checks."""
        awaited = self._rounds + 1
        async with self._one_round:
            if self._rounds < awaited:
                self._rounds += 1
                await asyncio.gather(*map(self.check, self._fleet.routed()))


@dataclass(kw_only=True, eq=False, repr=False)
class Repair:
    """Runs one loop per engine. A routed engine is checked at a fixed interval and fenced if the check fails.

    An engine that is not routed, for whatever reason, is restarted and joins with the current weights
    (`Publisher.join`). Requests that it held fail when its process ends, and their groups return to the data source.
    """

    run_state: RunState
    fleet: Fleet
    checks: EngineChecks
    publisher: Publisher
    tasks: TaskSupervisor
    interval_seconds: float
    devices: AbstractAsyncContextManager[None]
    """Held while an engine starts: with colocation, the learner must not use the devices meanwhile."""

    def __post_init__(self) -> None:
        self._loops: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check the router at each interval, and keep one loop running per member of the fleet. Never returns."""
        last_failure = ""
        while True:
            members = self.fleet.members()
            for engine in members:
                if engine not in self._loops:
                    self._loops[engine] = self.tasks.spawn(f"keep-{engine}", self._keep_alive(engine))
            for engine in self._loops.keys() - set(members):
                self._loops.pop(engine).cancel()
            await self.run_state.clock.sleep(self.interval_seconds)
            if not members:
                continue
            try:
                await self.fleet.check_router()
                last_failure = ""
            except EngineLostError as lost:
                # Warn once per cause, not once per interval.
                if str(lost) != last_failure:
                    last_failure = str(lost)
                    self.run_state.journal.warn(last_failure)
            # Admission and evaluations wait for a router that serves requests.
            self.run_state.changed.notify()

    async def _keep_alive(self, engine: str) -> None:
        """Check or restart one engine until it leaves the fleet."""
        while engine in self.fleet.members():
            if engine not in self.fleet.routed():
                await self._replace(engine)
                continue
            try:
                async with asyncio.timeout(self.interval_seconds):
                    await self.run_state.changed.until(lambda: engine not in self.fleet.routed())
            except TimeoutError:
                await self.checks.check(engine)

    async def _replace(self, engine: str) -> None:
        """Restart an engine until it joins. An engine that has started and that no router takes is not restarted again.

        Raises FatalError after `MAX_FAILED_STARTS` failures if no other engine is routed.
        """
        failures, outages, has_started = 0, 0, False
        while engine in self.fleet.members():
            try:
                async with self.devices:
                    if not has_started:
                        await self.fleet.restart(engine)
                        has_started = True
                    await self.publisher.join(engine)
                return
            except RouterLostError as lost:
                outages += 1
                # Warn once per start, not once per attempt.
                if outages == 1:
                    self.run_state.journal.warn(f"engine {engine} waits for the router: {lost}")
            except EngineLostError as lost:
                failures, outages, has_started = failures + 1, 0, False
                sentence = f"engine {engine} could not be replaced ({failures} attempts): {lost}"
                if failures >= MAX_FAILED_STARTS and not self.fleet.routed():
                    raise FatalError(f"no engine is left: {sentence}") from lost
                self.run_state.journal.warn(sentence)
            # The exponent has a limit, because the power of a large one is no float.
            await self.run_state.clock.sleep(min(MAX_BACKOFF_SECONDS, 2.0 ** min(failures + outages, 10)))

"""New weights onto the engines, in two phases: stage while generation runs, then pause, write, commit, resume.

A version is announced only on an engine whose every byte was written and verified. An engine that fails is fenced:
the router sends it nothing until it holds the current version, which `join` gives it once it was started anew. `stage`
waits for the publish before it (there is one staging buffer); it is unblocked by that publish ending, and a publish
that finds no engine by one that joins. Nothing here waits for the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from miles_async.errors import EngineLostError
from miles_async.events import PublishEnded, PublishStarted, WriteFailed
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import Lease, TaskSupervisor
from miles_async.ports import Fleet, WeightChannel
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group, WriteOutcome

LEASE_SECONDS = 900.0
"""Longer than any use of the staging buffer takes: each write and each word to an engine has its own, shorter limit."""


class Publisher:
    def __init__(
        self,
        *,
        run_state: RunState,
        tasks: TaskSupervisor,
        channel: WeightChannel,
        fleet: Fleet,
        pause_mode: str,
        queue_depth: Callable[[], int],
        on_live: Callable[[], None],
    ) -> None:
        self._run_state = run_state
        self._tasks = tasks
        self._channel = channel
        self._fleet = fleet
        self._pause_mode = pause_mode
        self._queue_depth = queue_depth
        self._on_live = on_live
        self._running: asyncio.Task[None] | None = None
        self._buffer = Lease("the staging buffer", LEASE_SECONDS)
        """Held by whoever uses it: fills it, publishes from it or brings an engine up to it."""
        self._staged: tuple[int, Sequence[Group], float] | None = None

    async def stage(self, version: int, trained: Sequence[Group]) -> None:
        """Set the learner's present weights aside as `version`; `trained` are the groups that helped make it."""
        await self.idle()
        async with self._buffer.held_by(f"staging version {version}"):
            started = self._run_state.clock.now()
            await self._channel.stage(version)
            self._run_state.trainer_version = version
            self._staged = (version, trained, self._run_state.clock.now() - started)

    def start(self) -> None:
        """Publish what is staged beside whatever else goes on."""
        self._running = self._tasks.spawn("publish", self.publish())

    async def idle(self) -> None:
        """Return when no publish is running. Its failure is the crew's to report."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def publish(self) -> None:
        """Make the staged version live on every routed engine; nothing staged, nothing done.

        Where no engine takes it, it stays staged until one has joined.
        """
        while self._staged is not None:
            await self._run_state.changed.until(lambda: bool(self._fleet.routed()))
            async with self._buffer.held_by(f"the publish of version {self._staged[0]}"):
                await self._publish(*self._staged)

    async def join(self, engine: str) -> None:
        """Write the weights that are staged or live to an engine that was started anew, then let requests reach it.

        Raises EngineLostError where any of it fails; nothing reaches the engine then.
        """
        async with self._buffer.held_by(f"{engine}, which joins"):
            await self._channel.meet([*self._fleet.routed(), engine])
            # Versions are counted as they are staged, and the buffer keeps the last one.
            version = self._run_state.trainer_version
            outcome = await self._send(version, engine)
            if outcome.error is not None:
                raise EngineLostError(outcome.error)
            await self._fleet.commit(engine, version)
            await self._fleet.admit(engine)
        self._run_state.changed.notify()

    async def leave(self, engine: str) -> None:
        """Remove an engine for good, but not in the middle of a publish; the transfer is planned anew without it."""
        async with self._buffer.held_by(f"{engine}, which leaves"):
            await self._fleet.dismiss(engine)
            if routed := self._fleet.routed():
                await self._channel.meet(routed)

    async def _publish(self, version: int, trained: Sequence[Group], staged_seconds: float) -> None:
        run_state = self._run_state
        run_state.events.emit(PublishStarted(time=run_state.clock.now(), version=version, queue=self._queue_depth()))
        paused_at = run_state.clock.now()
        try:
            await self._fleet.pause(self._pause_mode)
            stopped_at = run_state.clock.now()
            outcomes = await self._write(version)
        finally:
            written_at = run_state.clock.now()
            await self._fleet.resume()
        resumed_at = run_state.clock.now()
        live = bool(self._fleet.routed())
        run_state.events.emit(
            PublishEnded(
                time=resumed_at,
                version=version,
                live=live,
                staged_seconds=staged_seconds,
                paused_seconds=resumed_at - paused_at,
                stopping_seconds=stopped_at - paused_at,
                write_seconds=max((outcome.seconds for outcome in outcomes), default=0.0),
                resuming_seconds=resumed_at - written_at,
                bytes=sum(outcome.bytes for outcome in outcomes),
                queue=self._queue_depth(),
                fenced=[outcome.engine for outcome in outcomes if outcome.error],
            )
        )
        if not live:
            return
        self._staged = None
        run_state.live_version = version
        run_state.advance(trained, GroupState.PUBLISHED)
        run_state.mark_progress()
        self._on_live()
        run_state.changed.notify()

    async def _write(self, version: int) -> list[WriteOutcome]:
        """Bring `version` to every routed engine and announce it there; who it did not reach is fenced."""
        return list(await asyncio.gather(*(self._deliver(version, engine) for engine in self._fleet.routed())))

    async def _deliver(self, version: int, engine: str) -> WriteOutcome:
        """Write and announce it, or fence the engine."""
        outcome = await self._send(version, engine)
        if outcome.error is None:
            try:
                await self._fleet.commit(engine, version)
                return outcome
            except EngineLostError as lost:
                outcome = replace(outcome, error=str(lost))
        self._tell(version, outcome, "fence")
        await self._fleet.fence(engine, outcome.error or "")
        return outcome

    async def _send(self, version: int, engine: str) -> WriteOutcome:
        """Write, once more where that failed, then by every other way there is."""
        [outcome] = await self._channel.write(version, [engine])
        if outcome.error is not None and not outcome.final:
            self._tell(version, outcome, "retry")
            [outcome] = await self._channel.write(version, [engine])
        while outcome.error is not None and not outcome.final and (transport := await self._channel.fall_back(engine)):
            self._tell(version, outcome, "fall_back", transport)
            [outcome] = await self._channel.write(version, [engine])
        return outcome

    def _tell(self, version: int, outcome: WriteOutcome, then: str, transport: str | None = None) -> None:
        self._run_state.events.emit(
            WriteFailed(
                time=self._run_state.clock.now(),
                version=version,
                engine=outcome.engine,
                error=outcome.error or "",
                then=then,
                transport=transport,
            )
        )

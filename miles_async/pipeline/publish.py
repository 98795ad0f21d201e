"""Publishes new weights in two phases: stage while engines generate, then pause, send, commit and resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from miles_async.errors import EngineLostError
from miles_async.events import PublishEnded, PublishStarted, WriteFailed
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import Lease, TaskSupervisor
from miles_async.ports import Fleet, WeightChannel
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group, SendOutcome

LEASE_SECONDS = 900.0
"""Time for what a use of the staging buffer does beside requests to engines whose time limit is a setting."""
LEASE_REQUESTS = 20
"""A write that fails, its repetition and all fallbacks take less time than so many of these requests."""


@dataclass(frozen=True, slots=True)
class _StagedVersion:
    """The version in the staging buffer that is not live yet."""

    version: int
    adapter: str
    trained: Sequence[Group]
    """The groups of the steps that made this version."""
    seconds: float
    """Time that staging took."""


@dataclass(kw_only=True, eq=False, repr=False)
class Publisher:
    """Makes the learner's weights live on the engines.

    Example:

        await publisher.stage(version, trained)  # phase 1: copy the weights; engines generate, the learner waits
        publisher.start()                   # phase 2, in the background; the next optimizer step may begin
        ...
        await publisher.idle()                   # optional: wait until phase 2 has ended

    Phase 1, `stage`, copies the weights into the staging buffer. There is one buffer, so `stage` first waits for the
    publish before it. Phase 2, `publish`, pauses all routed engines, sends and verifies the version, commits it (each
    engine drops what it cached under older weights and reports the new version) and resumes.

    A version is committed only on an engine whose bytes were verified. A failed send is repeated once, then tried by
    each other transport; an engine that none of them reaches is fenced. A restarted engine gets the version in the
    staging buffer from `join` before it receives requests. If no engine is routed, the version stays staged and
    `publish` waits until one joins.

    With `adapters`, a version is loaded beside older ones, so no engine pauses. Requests name it once all routed
    engines hold it and were compared with the learner. Engines drop old versions after that, or before the next
    version is loaded if a request still names one. `publish` then waits for the request.

    Engines that share devices with the learner lose the weights in the memory that they release, and restore them when
    they take it back. Adapters are only a part of the weights, so the rest is verified even if no version is due.
    """

    run_state: RunState
    lifecycle: GroupLifecycle
    tasks: TaskSupervisor
    channel: WeightChannel
    fleet: Fleet
    pause_mode: str
    """That of `Fleet.pause`."""
    request_seconds: float
    """The longest of the settings that limit requests to an engine."""
    adapters: AdapterVersions | None = None
    colocated: bool = False
    """Whether engines have released their memory before each publish."""
    queue_depth: Callable[[], int]
    on_live: Callable[[], None]
    """Called after each publish that reached an engine."""

    def __post_init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._buffer_lease = Lease("the staging buffer", LEASE_SECONDS + LEASE_REQUESTS * self.request_seconds)
        """Held while the buffer is filled or sent, so that no engine gets a mixture of two versions."""
        self._staged: _StagedVersion | None = None
        self._in_buffer = 0
        """The version that was staged last."""

    async def stage(self, version: int, trained: Sequence[Group], adapter: str = "") -> None:
        """Copy the learner's current weights of an adapter as `version`.

        `trained` are the groups of the steps that made it.
        """
        await self.idle()
        async with self._buffer_lease.held_by(f"staging version {version}"):
            started = self.run_state.clock.monotonic()
            self.run_state.announce(version, adapter)
            await self.run_state.journal.flush()
            await self.channel.stage(version, adapter, self.run_state.lineages[adapter])
            # A restored run stages versions again, beside tokens of later ones.
            self.run_state.trainer_version = max(self.run_state.trainer_version, version)
            self._in_buffer = version
            if adapter == self.run_state.changed_adapter:
                self.run_state.changed_adapter = None
            self._staged = _StagedVersion(version, adapter, trained, self.run_state.clock.monotonic() - started)

    def start(self) -> None:
        """Run `publish` in the background."""
        self._running = self.tasks.spawn("publish", self.publish())

    async def idle(self) -> None:
        """Return when no publish runs in the background. A failed publish ends the run through its supervisor."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def publish(self) -> None:
        """Make the staged version live on every routed engine.

        If no version is staged, only adapters of `colocated` engines are verified, and loaded again if one is missing.
        """
        if self._staged is None and self.colocated and self.adapters is not None:
            async with self._buffer_lease.held_by("engines that have taken their memory back"):
                await asyncio.gather(*map(self._send_again, self.fleet.routed()))
        # A publish that fences the last engine leaves the version staged: try again once an engine has joined.
        while self._staged is not None:
            await self.run_state.changed.until(lambda: bool(self.fleet.routed()) and self._may_drop())
            async with self._buffer_lease.held_by(f"the publish of version {self._staged.version}"):
                await self._publish(self._staged)

    def _may_drop(self) -> bool:
        """Whether no request names an adapter that engines drop when they load the staged version."""
        if self.adapters is None or self._staged is None:
            return True
        return self.adapters.idle(self._staged.adapter)

    async def join(self, engine: str) -> None:
        """Send the version in the staging buffer to a restarted or new engine, then let requests reach it.

        Raises EngineLostError if any of this fails; the engine receives no requests then.
        """
        async with self._buffer_lease.held_by(f"{engine}, which joins"):
            await self.channel.connect([*self.fleet.routed(), engine])
            # The buffer holds the version that was staged last, whether it is live or waits for its publish.
            version = self._in_buffer
            outcome = await self._send(version, engine)
            if outcome.error is not None:
                raise EngineLostError(outcome.error)
            await self.fleet.commit(engine, version)
            # An engine that ends at its first request never joins, so that its failures are counted (`repair.py`).
            await self.fleet.check(engine)
            await self._compare(engine)
            await self.fleet.admit(engine)
        self.run_state.changed.notify()

    async def leave(self, engine: str) -> None:
        """Remove an engine for good, between two publishes, and disconnect it."""
        async with self._buffer_lease.held_by(f"{engine}, which leaves"):
            await self.fleet.dismiss(engine)
            # Without a routed engine there is nothing to connect to; the next engine that joins connects.
            if routed := self.fleet.routed():
                await self.channel.connect(routed)

    async def _publish(self, staged: _StagedVersion) -> None:
        """Pause, send, commit and resume; advance the state of the run if an engine holds the version afterwards.

        Adapters are sent and committed without a pause.
        """
        run_state, version = self.run_state, staged.version
        run_state.journal.emit(
            PublishStarted(
                time=run_state.clock.time(), version=version, queue=self.queue_depth(), adapter=staged.adapter
            )
        )
        pauses, paused_at = self.adapters is None, run_state.clock.monotonic()
        try:
            if pauses:
                await self._pause()
            stopped_at = run_state.clock.monotonic()
            outcomes = await asyncio.gather(*(self._update(version, engine) for engine in self.fleet.routed()))
        finally:
            # Engines that stayed paused would never answer the requests that they hold.
            written_at = run_state.clock.monotonic()
            if pauses:
                await self.fleet.resume()
        resumed_at = run_state.clock.monotonic()
        live = bool(self.fleet.routed())
        run_state.journal.emit(
            PublishEnded(
                time=run_state.clock.time(),
                version=version,
                live=live,
                staged_seconds=staged.seconds,
                paused_seconds=resumed_at - paused_at if pauses else 0.0,
                stopping_seconds=stopped_at - paused_at,
                write_seconds=max((outcome.seconds for outcome in outcomes), default=0.0),
                resuming_seconds=resumed_at - written_at,
                bytes=sum(outcome.bytes for outcome in outcomes),
                queue=self.queue_depth(),
                fenced=[outcome.engine for outcome in outcomes if outcome.error],
                adapter=staged.adapter,
            )
        )
        if not live:
            return
        # From here on new requests are answered by this version, so the groups that it was trained on free their slots.
        self._staged = None
        run_state.live_version = max(run_state.live_version, version)
        if self.adapters is not None:
            self.adapters.publish(version, staged.adapter)
        self.lifecycle.advance(staged.trained, GroupState.PUBLISHED)
        run_state.mark_progress()
        self.on_live()
        run_state.changed.notify()
        if self.adapters is None:
            await asyncio.gather(*map(self._compare, self.fleet.routed()))
        elif self.adapters.idle():
            await asyncio.gather(*map(self._drop, self.fleet.routed()))

    async def _compare(self, engine: str) -> None:
        """Warn if an engine computes other log-probabilities than the learner. A lost engine is not reported here."""
        with suppress(EngineLostError):
            if (difference := await self.channel.compare(engine)) is not None:
                self.run_state.journal.warn(difference)

    async def _drop(self, engine: str) -> None:
        """Let an engine drop old adapters. If that fails, the next send tries it again."""
        with suppress(EngineLostError):
            await self.channel.drop(engine)

    async def _pause(self) -> None:
        """Pause the engines. Until this returns, they may abort any request, even one that has just arrived."""
        run_state, aborts = self.run_state, self.pause_mode == "abort"
        run_state.publish_is_aborting = aborts
        try:
            await self.fleet.pause(self.pause_mode)
        finally:
            run_state.publish_is_aborting = False
            run_state.publish_aborts += aborts

    async def _update(self, version: int, engine: str) -> SendOutcome:
        """Send and commit the version on one engine; fence the engine if either fails."""
        outcome = await self._send(version, engine)
        if outcome.error is None:
            if self.adapters is not None:
                await self._compare(engine)
            try:
                await self.fleet.commit(engine, version)
                return outcome
            except EngineLostError as lost:
                outcome = replace(outcome, error=str(lost))
        await self._fence(version, outcome)
        return outcome

    async def _send_again(self, engine: str) -> None:
        """Send the version that an engine should hold already; fence the engine if that fails."""
        version = self._in_buffer
        outcome = await self._send(version, engine)
        if outcome.error is not None:
            await self._fence(version, outcome)

    async def _fence(self, version: int, outcome: SendOutcome) -> None:
        """Fence an engine that does not get a version."""
        self._report_failure(version, outcome, "fence")
        await self.fleet.fence(outcome.engine, outcome.error or "")

    async def _send(self, version: int, engine: str) -> SendOutcome:
        """Send, repeat once after a failure, then try every other transport. A final failure is not repeated."""
        outcome = await self.channel.send(version, engine)
        if outcome.error is not None and not outcome.final:
            self._report_failure(version, outcome, "retry")
            outcome = await self.channel.send(version, engine)
        while outcome.error is not None and not outcome.final and (transport := await self.channel.fall_back(engine)):
            self._report_failure(version, outcome, "fall_back", transport)
            outcome = await self.channel.send(version, engine)
        return outcome

    def _report_failure(self, version: int, outcome: SendOutcome, then: str, transport: str | None = None) -> None:
        self.run_state.journal.emit(
            WriteFailed(
                time=self.run_state.clock.time(),
                version=version,
                engine=outcome.engine,
                error=outcome.error or "",
                then=then,
                transport=transport,
            )
        )

"""What the driver does about a run that hangs: asks who is there, reports, dumps stacks, and ends it with the cause.

It needs nobody's help but the operating system's, so it works while learner, engines or rollout worker stand still.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import structlog

from miles_async.config.schema import Observability
from miles_async.errors import FatalError
from miles_async.observability.subscribers import EventSubscribers
from miles_async.scheduling.stall import dumps_stacks

from .heartbeats import Heartbeats
from .stacks import dump_stacks

if TYPE_CHECKING:
    from .cluster import Cluster

SILENCE_SECONDS = 120.0
"""A rollout worker that does not answer for so long is stuck for good."""

log = structlog.get_logger(__name__)


class Watchdog:
    """Call `look` about four times a second."""

    def __init__(self, cluster: Cluster, subscribers: EventSubscribers, settings: Observability) -> None:
        self._cluster = cluster
        self._onlookers = subscribers
        self._settings = settings
        self._heartbeats = Heartbeats(cluster.questions)
        self._dump: asyncio.Task[None] | None = None
        self._dumped_in_stall = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeats.close()
        if self._dump is not None:
            self._dump.cancel()

    def look(self, now: float) -> None:
        """Raises Fatal when the rollout worker, who would end a stalled run itself, hangs for too long."""
        self._onlookers.emit(*self._heartbeats.look(now))
        self._onlookers.found_at(self._heartbeats.addresses)
        self._onlookers.tick(now)
        still = self._onlookers.stalled_for(now)
        if not still:
            self._dumped_in_stall = False
        elif not self._dumped_in_stall and dumps_stacks(still, *self._limits):
            self._dumped_in_stall = True
            self._dump = asyncio.ensure_future(self._dump_stacks())
        silent = self._heartbeats.silence("rollout", now)
        if silent >= SILENCE_SECONDS or (silent and still >= self._settings.no_progress_abort_seconds):
            raise FatalError(
                f"the rollout worker has not answered for {silent:.0f}s, and nothing moved for {still:.0f}s "
                f"(--no-progress-abort-seconds); its stack and its log are in {self._cluster.logs}"
            )

    @property
    def _limits(self) -> tuple[float, float]:
        return self._settings.no_progress_warn_seconds, self._settings.no_progress_abort_seconds

    async def _dump_stacks(self) -> None:
        path = await asyncio.to_thread(dump_stacks, self._cluster.processes, Path(self._cluster.logs))
        log.warning("stacks of every process", file=str(path))

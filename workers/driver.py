"""The process you started: it composes the cluster, looks on, prints, serves /metrics, and ends everything.

It is neither learner nor rollout worker, so what it shows still moves when one of them hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from miles_async.config.derived import bounds_of, engines, table
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.errors import MilesError, UserError
from miles_async.events import RunEnded, RunStarted
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers

from .preflight import SftExamples, preflight

if TYPE_CHECKING:
    from .cluster import Cluster
    from .watchdog import Watchdog

T = TypeVar("T")

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
TICK_SECONDS = 0.25


class RunInterruptedError(Exception):
    """The user asked the run to end."""


def drive(config: RunConfig, argv: Sequence[str], *, entry: str) -> int:
    """Run to the end and return the exit code.

    `config` is what `argv` resolved to; SIGHUP resolves `argv` again, to read changed YAML files.
    """
    configure_logging(config.observability.log_format)
    try:
        sft_examples = preflight(config, entry)
        folder = RunFolder.create(config)
        return asyncio.run(_drive(config, argv, folder, entry, sft_examples))
    except (MilesError, OSError) as error:
        # What a library says may run over several lines.
        print(f"{entry}: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED if isinstance(error, UserError) else FAILED


async def _drive(
    config: RunConfig, argv: Sequence[str], folder: RunFolder, entry: str, sft_examples: SftExamples
) -> int:
    stop = asyncio.Event()
    _on_interrupt(stop)
    log = structlog.get_logger(__name__)
    print(table(config, entry), flush=True)
    with EventSubscribers(config, folder) as subscribers:
        # Ray takes seconds to import: only after everything cheap has been found to be in order.
        from .cluster import Cluster
        from .watchdog import Watchdog

        structlog.contextvars.bind_contextvars(run=folder.path.name)
        log.info("run", folder=str(folder.path), page=subscribers.page_url, metrics=subscribers.metrics_url)
        subscribers.emit(run_started(config, folder, entry))
        reason = "done"
        try:
            async with Cluster(config, folder, entry) as cluster:
                subscribers.emit(await _unless(stop, cluster.start(sft_examples)))
                with Watchdog(cluster, subscribers, config.observability) as watchdog:
                    await _follow(cluster, subscribers, watchdog, stop, partial(load_config, argv, entry=entry))
            if stop.is_set():
                raise RunInterruptedError
        except (RunInterruptedError, asyncio.CancelledError):
            reason = "interrupted"
            return INTERRUPTED
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            subscribers.emit(RunEnded(time=time.time(), reason=reason))
    return DONE


class _Resizing:
    """SIGHUP: the YAML files are read again, and the run gets as many engines as they now ask for."""

    def __init__(self, cluster: Cluster, reload: Callable[[], RunConfig]) -> None:
        self._cluster = cluster
        self._reload = reload
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._resize())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _resize(self) -> None:
        log = structlog.get_logger(__name__)
        try:
            asked = self._reload()
            await self._cluster.resize(engines(asked))
        except MilesError as error:
            log.warning(f"the number of engines stays: {error}")


async def _follow(
    cluster: Cluster,
    subscribers: EventSubscribers,
    watchdog: Watchdog,
    stop: asyncio.Event,
    reload: Callable[[], RunConfig],
) -> None:
    """Pass the service's events on until it ends. Raises what ended it, or Fatal when it does not answer."""
    run: asyncio.Future[Any] = asyncio.ensure_future(cluster.run())
    resizing = _Resizing(cluster, reload)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, resizing.start)
    asked_to_stop = False
    events: asyncio.Future[Any] = asyncio.ensure_future(cluster.events())
    try:
        while True:
            await asyncio.wait([run, events], timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if events.done():
                subscribers.emit(*events.result())
                events = asyncio.ensure_future(cluster.events())
            if run.done():
                # The last events are in the answer that is still to come, or in none yet.
                subscribers.emit(*await events, *await cluster.events())
                return run.result()
            if stop.is_set() and not asked_to_stop:
                asked_to_stop = True
                cluster.stop()
            watchdog.look(time.time())
    finally:
        resizing.cancel()
        run.cancel()
        events.cancel()


async def _unless(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of `work`, or Interrupted as soon as the user asks to stop."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RunInterruptedError
        return task.result()
    finally:
        stopping.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _on_interrupt(stop: asyncio.Event) -> None:
    """The first Ctrl-C (or SIGTERM) ends the run after the step being taken; a second one at once."""
    loop, driving = asyncio.get_running_loop(), asyncio.current_task()
    assert driving is not None, "called from the coroutine that drives"

    def interrupt() -> None:
        if stop.is_set():
            print("\nstopping at once", file=sys.stderr)
            driving.cancel()
            return
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


def run_started(config: RunConfig, folder: RunFolder, entry: str) -> RunStarted:
    bounds = bounds_of(config, entry)
    return RunStarted(
        time=time.time(),
        run=folder.path.name,
        entry=entry,
        rollouts=config.rollout.num_rollout,
        groups_per_rollout=config.rollout.rollout_batch_size,
        samples_per_group=config.rollout.n_samples_per_prompt,
        queue_capacity=config.rollout.queue_capacity,
        window=bounds.window,
        slots=bounds.slots,
        staleness_limit=config.rollout.max_weight_staleness,
    )

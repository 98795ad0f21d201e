"""The driver: the process that the user starts. It starts the cluster, passes events to subscribers, and ends the run.

The driver neither trains nor generates, so console, live page and metrics still work if the learner or the rollout
worker hangs.
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

from miles_async.config.derived import bounds_of, engines, schedule_of, table
from miles_async.config.load import load_config
from miles_async.config.redaction import redact_text
from miles_async.config.schema import RunConfig
from miles_async.errors import MilesError, UserError
from miles_async.events import RunEnded, RunStarted
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.scheduling.bounds import Schedule

from .preflight import SftExamples, preflight

if TYPE_CHECKING:
    from .cluster import Cluster
    from .watchdog import Watchdog

T = TypeVar("T")

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; REFUSED means that the configuration or another input of the user is wrong."""
TICK_SECONDS = 0.25
"""Longest time between two updates of console, metrics and heartbeats."""


class RunInterruptedError(Exception):
    """The user interrupted the run."""


def drive(config: RunConfig, argv: Sequence[str], *, entry: str) -> int:
    """Run a job from preflight to the end, and return the exit code. `entry` is the name of the entry script.

    `config` is what `argv` resolved to; SIGHUP resolves `argv` again, to read changed YAML files.
    """
    configure_logging(config.observability.log_format)
    try:
        sft_examples = preflight(config, entry)
        folder = RunFolder.create(config)
        return asyncio.run(_drive(config, argv, folder, entry, sft_examples))
    except (MilesError, OSError) as error:
        # Messages of libraries may have several lines; the user gets one.
        print(f"{entry}: {redact_text(' '.join(str(error).split()))}", file=sys.stderr)
        return REFUSED if isinstance(error, UserError) else FAILED


async def _drive(
    config: RunConfig, argv: Sequence[str], folder: RunFolder, entry: str, sft_examples: SftExamples
) -> int:
    stop = asyncio.Event()
    _handle_interrupts(stop)
    log = structlog.get_logger(__name__)
    print(table(config, entry), flush=True)
    with EventSubscribers(config, folder) as subscribers:
        # Importing Ray takes seconds, so it is imported after all fast checks have passed.
        from .cluster import Cluster
        from .watchdog import Watchdog

        structlog.contextvars.bind_contextvars(run=folder.path.name)
        log.info("run", folder=str(folder.path), page=subscribers.page_url, metrics=subscribers.metrics_url)
        subscribers.emit(run_started(config, folder, entry))
        reason = "done"
        try:
            async with Cluster(config, folder, entry) as cluster:
                subscribers.emit(await _run_unless_stopped(stop, cluster.start(sft_examples)))
                with Watchdog(cluster, subscribers, config.observability) as watchdog:
                    await _follow(cluster, subscribers, watchdog, stop, partial(load_config, argv, entry=entry))
            if stop.is_set():
                raise RunInterruptedError
        except (RunInterruptedError, asyncio.CancelledError):
            reason = "interrupted"
            return INTERRUPTED
        except BaseException as error:
            reason = redact_text(str(error)) or type(error).__name__
            raise
        finally:
            subscribers.emit(RunEnded(time=time.time(), reason=reason))
    return DONE


class _Resizer:
    """Handles SIGHUP: reads the YAML files again and changes the number of engines to the configured number."""

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
            await self._cluster.resize(engines(self._reload()))
        except MilesError as error:
            log.warning(f"the number of engines is unchanged: {error}")


async def _follow(
    cluster: Cluster,
    subscribers: EventSubscribers,
    watchdog: Watchdog,
    stop: asyncio.Event,
    reload: Callable[[], RunConfig],
) -> None:
    """Pass events of the pipeline to the subscribers until it ends.

    Raises the error that ended the pipeline, or FatalError if the rollout worker hangs.
    """
    run: asyncio.Future[Any] = asyncio.ensure_future(cluster.run())
    resizer = _Resizer(cluster, reload)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, resizer.start)
    stop_was_sent = False
    events: asyncio.Future[Any] = asyncio.ensure_future(cluster.events())
    try:
        while True:
            await asyncio.wait([run, events], timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if events.done():
                subscribers.emit(*events.result())
                events = asyncio.ensure_future(cluster.events())
            if run.done():
                # The last events may be in the call in progress, or not requested yet: one more call gets all of them.
                subscribers.emit(*await events, *await cluster.events())
                return run.result()
            if stop.is_set() and not stop_was_sent:
                stop_was_sent = True
                cluster.stop()
            watchdog.look(time.time())
    finally:
        resizer.cancel()
        run.cancel()
        events.cancel()


async def _run_unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises RunInterruptedError, and cancels `work`, as soon as `stop` is set."""
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


def _handle_interrupts(stop: asyncio.Event) -> None:
    """Let the first Ctrl-C (or SIGTERM) end the run after the current step, and the second one immediately."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a coroutine"

    def interrupt() -> None:
        if stop.is_set():
            print("\nstopping immediately", file=sys.stderr)
            task.cancel()
            return
        print("\nstopping after this step; press Ctrl-C again to stop immediately", file=sys.stderr)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


def run_started(config: RunConfig, folder: RunFolder, entry: str) -> RunStarted:
    """Return the first event of a run."""
    bounds = bounds_of(config, entry)
    return RunStarted(
        time=time.time(),
        run=folder.path.name,
        entry="train.py" if schedule_of(config, entry) is Schedule.SYNCHRONOUS else "train_async.py",
        rollouts=config.rollout.num_rollout,
        groups_per_rollout=config.rollout.rollout_batch_size,
        samples_per_group=config.rollout.n_samples_per_prompt,
        queue_capacity=config.rollout.queue_capacity,
        window=bounds.window,
        slots=bounds.slots,
        staleness_limit=config.rollout.max_weight_staleness,
    )

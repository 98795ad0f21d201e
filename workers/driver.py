"""The driver: the process that the user starts. It starts the cluster, passes events to subscribers, and ends the run.

The driver neither trains nor generates, so console, live page and metrics still work if the learner or the rollout
worker hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import structlog

from miles_async.adapters.environments.process import with_environment_tasks
from miles_async.adapters.storage.gguf import with_converted_checkpoint
from miles_async.adapters.storage.hub import with_downloads
from miles_async.config.checks import problems
from miles_async.config.generation import bounds_of, schedule_of
from miles_async.config.load import load_config
from miles_async.config.redaction import redact_text
from miles_async.config.schema import RunConfig
from miles_async.config.table import table
from miles_async.config.untested import untested_arguments
from miles_async.errors import MilesError, UserError
from miles_async.events import RunEnded, RunStarted
from miles_async.observability.console.logging import configure_logging, details_logger, log_file, report_lost_output
from miles_async.observability.console.terminal import is_interactive
from miles_async.observability.output import protect_output
from miles_async.observability.page.earlier import configuration_id
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.trace.event_log import cut_incomplete_batch
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.scheduling.bounds import Schedule

from .beginning import write_beginning
from .preflight import PreflightResult, lock_checkpoints, preflight

if TYPE_CHECKING:
    from .cluster import Cluster
    from .watchdog import Watchdog

T = TypeVar("T")

DONE, FAILED, REFUSED = 0, 1, 2
"""Exit codes; REFUSED means that the configuration or another input of the user is wrong. A run that a signal ends has
the exit code of `StopRequest`."""
TICK_SECONDS = 0.25
"""Longest time between two updates of console, metrics and heartbeats."""
END_SECONDS = 4.0
"""Time that the rollout worker has after a drain, to write the store and to report how the run ended."""

log = structlog.get_logger(__name__)
details = details_logger(__name__)


class RunInterruptedError(Exception):
    """The user interrupted the run."""


def drive(config: RunConfig, argv: Sequence[str], *, entry: str) -> int:
    """Run a job from preflight to the end, and return the exit code. `entry` is the name of the entry script.

    `config` is what `argv` resolved to; SIGHUP resolves `argv` again, to read changed YAML files.
    """
    protect_output(report_lost_output)
    configure_logging(config.observability.log_format)
    try:
        model = config.model.title
        converted = with_converted_checkpoint(with_downloads(with_environment_tasks(config)))
        # Before its download or its conversion the shape of the model was unknown.
        if converted != config and (found := problems(converted, entry)):
            raise UserError(*found)
        config = converted
        # The lock comes first: until another run has ended, it is not known from where to continue it.
        with lock_checkpoints(config):
            checked = preflight(config)
            if (folder := checked.beginning.folder) is None:
                folder, received = RunFolder.create(config), 0
                if (began_with := checked.beginning.began_with) is not None:
                    write_beginning(folder, began_with)
            else:
                folder.reopen(config)
                received = cut_incomplete_batch(folder.events)
            with log_file(folder.driver_log):
                return asyncio.run(_drive(config, argv, folder, entry, checked, model, received))
    except (MilesError, OSError) as error:
        for sentence in error.args if isinstance(error, UserError) else [error]:
            # Messages of libraries may have several lines; the user gets one.
            print(f"{entry}: {redact_text(' '.join(str(sentence).split()))}", file=sys.stderr)
        return REFUSED if isinstance(error, UserError) else FAILED


def leave(code: int) -> NoReturn:
    """Exit the process with the exit code of `drive`.

    If Ray did not answer at the end of the run, its native code would wait, or crash and change the exit code, at the
    exit of the interpreter.
    """
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


async def _drive(
    config: RunConfig,
    argv: Sequence[str],
    folder: RunFolder,
    entry: str,
    checked: PreflightResult,
    model: str,
    received: int,
) -> int:
    """`received` is the last batch of events that an earlier driver of this run has received."""
    _ignore_hangup()
    if not is_interactive(config):
        print(table(config, entry), flush=True)
    with EventSubscribers(config, folder, continued=checked.beginning.folder is not None) as subscribers:
        stop = StopRequest(subscribers, config.cluster.drain_seconds)
        stop.handle_signals()
        # Importing Ray takes seconds, so it is imported after all fast checks have passed.
        from .cluster import Cluster
        from .watchdog import Watchdog

        structlog.contextvars.bind_contextvars(run=folder.path.name)
        details.info("run", folder=str(folder.path), page=subscribers.page_url, metrics=subscribers.metrics_url)
        started = run_started(config, folder, entry, model)
        if started.untested:
            log.warning(f"this run uses arguments of SGLang that were never tried: {' '.join(started.untested)}")
        subscribers.emit(started)
        reason = "done"
        try:
            async with Cluster(config, folder, entry, subscribers.emit, received) as cluster:
                # The native code of Ray has installed its own handler of SIGTERM.
                stop.handle_signals()
                ready = await _guard(cluster.start(checked), stop.wait(), cluster.watch_ray(), _tick(subscribers))
                subscribers.emit(ready)
                with Watchdog(cluster, subscribers, config.observability) as watchdog:
                    run = _follow(cluster, subscribers, watchdog, stop, partial(load_config, argv, entry=entry))
                    await _guard(run, stop.wait_until_overdue(), cluster.watch_ray())
            if stop.requested:
                raise RunInterruptedError
        except (RunInterruptedError, asyncio.CancelledError):
            reason = "interrupted"
            return stop.exit_code
        except BaseException as error:
            reason = redact_text(str(error)) or type(error).__name__
            raise
        finally:
            folder.remove_weights()
            subscribers.emit(RunEnded(time=time.time(), reason=reason))
    return DONE


class StopRequest:
    """The user's request to end the run: Ctrl-C (SIGINT) or SIGTERM.

    The first signal drains the run (`miles_async/pipeline/service.py`), the second one ends it immediately. Batch
    systems send SIGKILL some time after SIGTERM, so the time of a drain is limited.
    """

    def __init__(self, subscribers: EventSubscribers, drain_seconds: float) -> None:
        """Create it in the task that the second signal cancels."""
        task = asyncio.current_task()
        assert task is not None, "created in a coroutine"
        self._task = task
        self._subscribers = subscribers
        self._drain_seconds = drain_seconds
        self._arrived = asyncio.Event()
        self._signal = signal.SIGINT

    @property
    def requested(self) -> bool:
        return self._arrived.is_set()

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, as shells report it."""
        return 128 + self._signal

    def handle_signals(self) -> None:
        """Install the signal handlers, or install them again after a library has replaced them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.request, number)

    def request(self, number: signal.Signals) -> None:
        """Handle one signal."""
        self._signal = number
        if self.requested:
            print("\nstopping immediately", file=sys.stderr)
            self._task.cancel()
            return
        again = "press Ctrl-C" if number == signal.SIGINT else "send SIGTERM"
        print(
            f"\nstopping: groups in flight, the current step and its checkpoint have {self._drain_seconds:g} s; "
            f"{again} again to stop immediately",
            file=sys.stderr,
        )
        self._arrived.set()
        # `ray job stop` sends SIGKILL three seconds after SIGTERM, perhaps before the run has ended.
        self._subscribers.write_summary(RunEnded(time=time.time(), reason="interrupted"))

    async def wait(self) -> NoReturn:
        """Raise RunInterruptedError as soon as a signal arrives."""
        await self._arrived.wait()
        raise RunInterruptedError

    async def wait_until_overdue(self) -> NoReturn:
        """Raise RunInterruptedError when the rollout worker should have ended the run, but has not."""
        await self._arrived.wait()
        await asyncio.sleep(self._drain_seconds + END_SECONDS)
        log.warning("the rollout worker did not end the run in time; a resumed run continues from the store")
        raise RunInterruptedError


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
        try:
            await self._cluster.resize(self._reload().engine.count)
        except MilesError as error:
            log.warning(f"the number of engines is unchanged: {error}")


async def _follow(
    cluster: Cluster,
    subscribers: EventSubscribers,
    watchdog: Watchdog,
    stop: StopRequest,
    reload: Callable[[], RunConfig],
) -> None:
    """Pass events of the pipeline to the subscribers until it ends.

    Raises the error that ended the pipeline, or FatalError if the rollout worker hangs.
    """
    run: asyncio.Future[Any] = asyncio.ensure_future(cluster.run())
    resizer = _Resizer(cluster, reload)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, resizer.start)
    stop_was_sent = False
    events: asyncio.Future[Any] = asyncio.ensure_future(cluster.rollout.events())
    try:
        while True:
            await asyncio.wait([run, events], timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if events.done():
                subscribers.emit(*events.result())
                # The next call confirms these events, and the rollout worker forgets them.
                subscribers.flush()
                events = asyncio.ensure_future(cluster.rollout.events())
            if run.done():
                # The last events may be in the call in progress, or not requested yet: one more call gets all of them.
                subscribers.emit(*await events, *await cluster.rollout.events())
                return run.result()
            if stop.requested and not stop_was_sent:
                stop_was_sent = True
                cluster.rollout.stop()
            watchdog.look(time.monotonic())
    finally:
        _ignore_hangup()
        resizer.cancel()
        run.cancel()
        events.cancel()


async def _tick(subscribers: EventSubscribers) -> NoReturn:
    """Update the subscribers several times a second, until it is cancelled. During training, the watchdog does that."""
    while True:
        subscribers.tick(time.monotonic())
        await asyncio.sleep(TICK_SECONDS)


async def _guard(work: Awaitable[T], *watchers: Coroutine[Any, Any, NoReturn]) -> T:
    """Return the result of `work`. If a watcher raises before, cancel `work` and raise the error of the watcher."""
    async with TaskSupervisor() as tasks:
        for watcher in watchers:
            tasks.spawn("watcher", watcher)
        return await work


def _ignore_hangup() -> None:
    """Ignore SIGHUP, which would otherwise end this process: the number of engines can change only during training."""

    def ignore() -> None:
        log.info("SIGHUP was ignored: the number of engines can change only while the run trains")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, ignore)


def run_started(config: RunConfig, folder: RunFolder, entry: str, model: str) -> RunStarted:
    """Return the first event of a run. `model` is the name of the model for people."""
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
        in_flight=bounds.in_flight,
        staleness_limit=config.rollout.max_weight_staleness,
        max_kv_staleness=config.weights.max_kv_staleness,
        longest_response=config.rollout.rollout_max_response_len,
        model=model,
        configuration=configuration_id(config, entry),
        save_interval=config.learner.save_interval if config.learner.save is not None else None,
        untested=tuple(flag for flags in untested_arguments(config).values() for flag in flags),
    )

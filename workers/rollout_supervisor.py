"""The rollout workers of a run, one after the other: each one that is lost is replaced by another one.

Learner and engines belong to the driver, so they outlive a rollout worker. The next one restores the run from the store
(`miles_async/pipeline/restore.py`). If the learner is lost, the rollout worker is replaced together with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from miles_async.adapters.ray.actor_errors import actor_result, describe_death
from miles_async.errors import FatalError
from miles_async.events import Event, EventsReceived, StepEnded, WarningRaised

from .specs import ClusterHandles

MAX_BACKOFF_SECONDS = 30.0
"""Longest pause before another rollout worker is started. The pause grows with each one that is lost."""

RAY_POLL_SECONDS = 1.0
"""Time between two questions whether a lost head node of Ray answers again."""


@dataclass(eq=False, repr=False)
class RolloutSupervisor:
    """Starts a rollout worker, runs the pipeline in it, and starts another one if it is lost."""

    create: Callable[[str], ActorHandle[Any]]
    """Starts an actor with a given name."""
    wait_for_answer: Callable[[], Awaitable[None]]
    """Waits until the current rollout worker answers. Raises RayActorError if it is lost."""
    ray_answers: Callable[[], bool]
    """Whether Ray's head node answers."""
    emit: Callable[[Event], None]
    max_restarts: int
    """Restarts without a batch between them."""
    received: int = 0
    """Number of the last batch of events that this driver, or an earlier one of the run, has received."""

    def __post_init__(self) -> None:
        self.current: ActorHandle[Any]
        """The rollout worker that was started last."""
        self._started = 0
        self._restarts = 0
        """Restarts since a batch was trained."""
        self._changed = asyncio.Event()
        """Set when a lost rollout worker was replaced, or when the run has ended without it."""
        self._has_ended = False
        self._asked_to_stop = False
        self._hung: ActorHandle[Any] | None = None
        """The rollout worker that was killed last because it did not answer."""

    def start(self) -> None:
        """Start the first or another rollout worker."""
        self._started += 1
        self.current = self.create("rollout" if self._started == 1 else f"rollout-{self._started}")
        # Calls that wait see the new worker; the next ones wait for its successor.
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(
        self,
        handles: Callable[[], Awaitable[ClusterHandles]],
        learner_death: Callable[[], Awaitable[str | None]],
        replace_learner: Callable[[], Awaitable[None]],
    ) -> None:
        """Run the pipeline to its end. `handles` is called for each rollout worker.

        `learner_death` returns how a rank of the learner died, or None if all ranks live. Then `replace_learner` is
        called, and another rollout worker continues with the weights of the last checkpoint. Nothing is replaced after
        `stop`: what was in progress is in the store.

        Raises the error that ended the pipeline, and FatalError if processes are lost after `max_restarts` restarts
        without a batch between them, or if the run cannot continue with another learner.
        """
        try:
            while death := await self._run(await handles(), learner_death):
                if self._asked_to_stop:
                    self._warn(f"{death}; it is not replaced, because the run ends")
                    return
                if self._restarts == self.max_restarts:
                    raise FatalError(death)
                await self._restart(death, learner_death, replace_learner)
        finally:
            self._has_ended = True
            self._changed.set()

    async def _run(self, handles: ClusterHandles, learner_death: Callable[[], Awaitable[str | None]]) -> str | None:
        """Run the pipeline in the current rollout worker. Returns how a process died; None at the end of the run."""
        try:
            # Ray cannot end a process that is stopped (SIGSTOP), so it must be known before it works.
            await self.wait_for_answer()
            running: Any = self.current.run.remote(handles, self.received)
            if self._asked_to_stop:
                self.current.stop.remote()
            await running
        except RayTaskError:
            try:
                await actor_result(running)  # raises the error of the pipeline
            except FatalError:
                # Another rank may have reported the loss first, as an error of its connection.
                if death := await learner_death():
                    return death
                raise
        except RayActorError as error:
            return describe_death(error)
        return None

    async def _restart(
        self,
        death: str,
        learner_death: Callable[[], Awaitable[str | None]],
        replace_learner: Callable[[], Awaitable[None]],
    ) -> None:
        """Start another rollout worker, and another learner if it was lost."""
        began = time.monotonic()
        # Ray blocks its caller while its head node is lost, and the driver must find out meanwhile.
        while not await asyncio.to_thread(self.ray_answers):  # noqa: ASYNC110 (nobody sets an event)
            await asyncio.sleep(RAY_POLL_SECONDS)
        ray.kill(self.current)
        learner_is_lost = await learner_death() is not None
        self._warn(
            f"{death}; a new learner and a new rollout worker continue from the last checkpoint"
            if learner_is_lost
            else f"{death}; a new rollout worker continues the run"
        )
        await asyncio.sleep(min(MAX_BACKOFF_SECONDS, 2.0**self._restarts - 1))
        self._restarts += 1
        self.start()
        if learner_is_lost:
            await replace_learner()
        with suppress(RayActorError):  # `run` finds out that this one is lost as well
            await self.wait_for_answer()
            self._warn(f"a new rollout worker was ready after {time.monotonic() - began:.0f} s")

    async def events(self) -> list[Event]:
        """Return the events since the last call. Waits up to half a second for the first event.

        While no rollout worker lives, this waits for another one. Returns no events if the run has ended without one.
        """
        while True:
            changed = self._changed
            try:
                batches = await self.current.events.remote(self.received)
            except RayActorError:
                if self._has_ended:
                    return []
                await changed.wait()
                continue
            found: list[Event] = []
            for number, events in batches:
                # A new rollout worker also returns batches that its predecessor has delivered.
                if number > self.received:
                    self.received = number
                    found += [*events, EventsReceived(time=time.time(), number=number)]
            if any(isinstance(event, StepEnded) for event in found):
                self._restarts = 0
            return found

    def stop(self) -> None:
        """Ask the rollout worker to drain the run. Does not wait, because the worker may hang."""
        self._asked_to_stop = True
        self.current.stop.remote()

    def end_hung(self, seconds: float) -> None:
        """Kill the rollout worker, which has not answered for `seconds`: it will be replaced."""
        if self._hung is not self.current:
            self._hung = self.current
            self._warn(f"the rollout worker has not answered for {seconds:.0f} s and is killed")
            ray.kill(self.current)

    def _warn(self, text: str) -> None:
        self.emit(WarningRaised(time=time.time(), text=text))

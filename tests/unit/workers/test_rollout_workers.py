"""A rollout worker that is lost is replaced, unless the run ends, and its successor continues the stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from miles_async.errors import FatalError
from miles_async.events import Event, StepEnded, WarningRaised
from workers import rollout_supervisor as module
from workers.rollout_supervisor import RolloutSupervisor


class Method:
    """A method of an actor, which is called through `remote`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


async def wait_for_answer() -> None: ...


NOT_STORED = WarningRaised(time=0.0, text="an event that is not stored")
TRAINED = StepEnded(
    time=0.0, rollout=0, seconds=1.0, tokens=1, finite=True, reward=0.0, response_length=1.0, metrics={}
)


class Worker:
    """An actor. The first ones die when they have delivered a batch of events that is not in the store."""

    def __init__(self, lives: list[Worker], *, losses: int = 1, event: Event = NOT_STORED) -> None:
        self._dies = len(lives) < losses
        self._event = event
        self.received: list[int] = []
        self.run, self.events = Method(self._run), Method(self._events)
        lives.append(self)

    def _run(self, handles: Any, received: int) -> None:
        self.received.append(received)
        if self._dies:
            raise RayActorError

    def _events(self, received: int) -> Sequence[Any]:
        return [(20, [self._event])]


async def test_the_next_rollout_worker_receives_the_number_of_the_last_batch_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    lives: list[Worker] = []

    def create(name: str) -> Any:
        return Worker(lives)

    workers = RolloutSupervisor(create, wait_for_answer, lambda: True, emit=lambda event: None, max_restarts=1)

    async def handles() -> Any:
        if len(lives) == 2:
            await workers.events()

    async def learner_death() -> None: ...

    async def replace_learner() -> None: ...

    workers.start()
    await workers.run(handles, learner_death, replace_learner)
    first, second = lives
    assert (first.received, second.received) == ([0], [20])


@pytest.mark.parametrize("event, started", [(NOT_STORED, 2), (TRAINED, 3)], ids=["no batch", "a batch"])
async def test_a_run_ends_when_it_loses_two_rollout_workers_without_a_batch_between_them(
    event: Event, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    lives: list[Worker] = []

    def create(name: str) -> Any:
        return Worker(lives, losses=2, event=event)

    workers = RolloutSupervisor(create, wait_for_answer, lambda: True, emit=lambda event: None, max_restarts=1)

    async def handles() -> Any:
        if len(lives) == 2:
            await workers.events()

    async def learner_death() -> None: ...

    async def replace_learner() -> None: ...

    workers.start()
    with nullcontext() if event is TRAINED else pytest.raises(FatalError, match="died"):
        await workers.run(handles, learner_death, replace_learner)
    assert len(lives) == started


class Call:
    """A method of an actor: returns `result`, or raises it, once `ready` is set."""

    def __init__(self, result: Any, ready: asyncio.Event) -> None:
        self._result = result
        self._ready = ready

    async def remote(self, *arguments: Any) -> Any:
        await self._ready.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Actor:
    """A rollout worker that dies when `killed` is set."""

    def __init__(self, killed: asyncio.Event) -> None:
        alive = asyncio.Event()
        alive.set()
        self.run, self.pid = Call(RayActorError(), killed), Call(1, alive)
        self.asked_to_stop = False
        self.stop = self

    def remote(self) -> None:
        self.asked_to_stop = True


async def test_a_rollout_worker_that_is_lost_after_the_request_to_stop_is_not_replaced() -> None:
    killed, started, events = asyncio.Event(), list[str](), list[Event]()

    def create(name: str) -> Any:
        started.append(name)
        return Actor(killed)

    async def handles() -> Any:
        return None

    async def no_death() -> None:
        return None

    async def replace_learner() -> None:
        raise AssertionError("the learner lives")

    workers = RolloutSupervisor(create, wait_for_answer, lambda: True, events.append, max_restarts=3)
    workers.start()
    run = asyncio.ensure_future(workers.run(handles, no_death, replace_learner))
    await asyncio.sleep(0)
    workers.stop()
    killed.set()
    await run
    assert started == ["rollout"]
    [warning] = events
    assert isinstance(warning, WarningRaised)
    assert warning.text.endswith("it is not replaced, because the run ends")


async def test_nothing_is_replaced_while_the_head_node_of_ray_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would block the driver, which could not find out that the head node is lost."""
    monkeypatch.setattr(module, "RAY_POLL_SECONDS", 0.001)
    killed, asked, lives = list[Any](), list[int](), list[Worker]()
    monkeypatch.setattr(ray, "kill", killed.append)

    def ray_answers() -> bool:
        asked.append(len(killed) + len(lives))
        return len(asked) == 3

    def create(name: str) -> Any:
        return Worker(lives)

    workers = RolloutSupervisor(create, wait_for_answer, ray_answers, emit=lambda event: None, max_restarts=1)

    async def nothing() -> Any:
        return None

    workers.start()
    await workers.run(nothing, nothing, nothing)
    assert asked == [1, 1, 1], "only the first rollout worker has been started until Ray answers"
    assert len(lives) == 2


def test_a_rollout_worker_that_hangs_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, events = list[str](), list[Event]()
    monkeypatch.setattr(ray, "kill", killed.append)
    workers = RolloutSupervisor(lambda name: name, wait_for_answer, lambda: True, events.append, max_restarts=3)  # type: ignore[arg-type, return-value]
    workers.start()
    workers.end_hung(120.0)
    workers.end_hung(120.25)
    workers.start()
    workers.end_hung(121.0)
    assert killed == ["rollout", "rollout-2"]
    assert isinstance(events[0], WarningRaised)
    assert events[0].text == "the rollout worker has not answered for 120 s and is killed"

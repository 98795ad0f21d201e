"""The contract of `pipeline.journal.EventOutbox`, for that of the rollout worker and those of simulator and tests.

The journal keeps events in the store until the driver has received them, so `received` must never be ahead of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from miles_async.events import Event, WarningRaised
from miles_async.pipeline.journal import EventOutbox
from tests.sim.world import DirectOutbox
from tests.unit.pipeline.test_journal import Driver
from workers.rollout import Outbox


@dataclass
class Case:
    outbox: EventOutbox
    receive: Callable[[], list[Event]]
    """Let the driver receive what it has not received, and return all that it has."""


@dataclass
class Sink:
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


def of_the_worker() -> Case:
    outbox, events = Outbox(), list[Event]()

    def receive() -> list[Event]:
        """The driver confirms with its next call what the last one returned."""
        for number, batch in asyncio.run(outbox.take(outbox.received, 0.0)):
            events.extend(batch)
            asyncio.run(outbox.take(number, 0.0))
        return events

    return Case(outbox, receive)


def of_the_simulator() -> Case:
    sink = Sink()
    return Case(DirectOutbox(sink), lambda: sink.events)


def of_the_tests() -> Case:
    driver = Driver()
    return Case(driver, lambda: driver.events)


CASES = pytest.mark.parametrize("create", [of_the_worker, of_the_simulator, of_the_tests])


def said(text: str) -> WarningRaised:
    return WarningRaised(time=1.0, text=text)


@CASES
def test_events_arrive_once_and_in_their_order(create: Callable[[], Case]) -> None:
    case = create()
    case.outbox.put(1, [said("a"), said("b")])
    assert case.receive() == [said("a"), said("b")]
    case.outbox.put(2, [said("c")])
    case.outbox.put(5, [])
    case.outbox.put(7, [said("d")])
    assert case.receive() == [said("a"), said("b"), said("c"), said("d")]


@CASES
def test_the_number_of_a_batch_is_received_when_the_driver_has_its_events(create: Callable[[], Case]) -> None:
    case = create()
    assert case.outbox.received == 0
    case.outbox.put(3, [said("a")])
    assert case.outbox.received in (0, 3)
    case.receive()
    assert case.outbox.received == 3


def test_a_batch_whose_answer_is_lost_is_returned_again() -> None:
    outbox = Outbox()
    outbox.put(1, [said("a")])
    assert asyncio.run(outbox.take(0, 0.0)) == asyncio.run(outbox.take(0, 0.0)) == [(1, [said("a")])]
    assert outbox.received == 0

"""The journal stores changes before their events leave the process, and survives a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from miles_async.errors import StoreError
from miles_async.events import Event, GroupMoved, WarningRaised
from miles_async.pipeline.journal import RETRY_SECONDS, Journal
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.run_state import RunState
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, StoredRun
from miles_async.types import DropReason, Group, Sample
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import lifecycle_of

pytestmark = pytest.mark.virtual_time


class Store:
    """Keeps the batches, each of which takes `seconds`; fails while `full`, and with `bug` if it is set."""

    def __init__(self) -> None:
        self.batches: list[Changes] = []
        self.full = False
        self.seconds = 0.0
        self.bug: Exception | None = None

    async def write(self, changes: Changes) -> None:
        await asyncio.sleep(self.seconds)
        if self.full:
            raise StoreError("the disk is full")
        if self.bug is not None:
            raise self.bug
        self.batches.append(changes)

    async def read(self) -> StoredRun | None:
        raise AssertionError("only a new rollout worker reads")

    async def load(self, sequence: int) -> list[Sample]:
        raise AssertionError("only a new rollout worker reads")

    async def load_posted(self, feed_index: str) -> list[Sample]:
        raise AssertionError("only a new rollout worker reads")


class Driver:
    received = 0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.received = number
        self.events += events

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, WarningRaised)]


def group(number: int) -> Group:
    return Group([Sample(index=number, prompt="1+1=", tokens=[1, 2])], feed_index=f"sample_0_{number}")


def run_with(store: Store, driver: Driver, clock: VirtualClock, *, number: int = 0) -> tuple[Journal, GroupLifecycle]:
    journal = Journal(store, driver, clock, number=number)
    return journal, lifecycle_of(RunState(clock, journal))


def state_of(batch: Changes, sequence: int) -> GroupState:
    change = batch.groups[sequence]
    assert change is not None
    return change.state


def content_of(batch: Changes, sequence: int) -> Group | None:
    change = batch.groups[sequence]
    assert change is not None
    return change.content


def tracked(batch: Changes) -> list[str]:
    return [name for name, prompt in batch.prompts.items() if prompt is not None]


def forgotten(batch: Changes) -> list[str]:
    return [name for name, prompt in batch.prompts.items() if prompt is None]


async def test_events_leave_only_with_what_was_stored() -> None:
    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    lifecycle.feed(group(0))
    assert driver.events == []
    await journal.flush()
    [batch] = store.batches
    assert batch.events == driver.events
    assert (state_of(batch, 0), tracked(batch), forgotten(batch)) == (GroupState.FED, ["sample_0_0"], [])


async def test_nothing_is_written_at_intervals_unless_something_has_changed() -> None:
    store, clock = Store(), VirtualClock()
    journal, lifecycle = run_with(store, Driver(), clock)
    writing = asyncio.create_task(journal.run())
    lifecycle.feed(group(0))
    await journal.flush()
    await clock.sleep(10.0)
    assert len(store.batches) == 1, "nothing has changed since"
    lifecycle.feed(group(1))
    await clock.sleep(10.0)
    assert len(store.batches) == 2
    writing.cancel()


async def test_a_flush_stores_progress_that_no_event_reports() -> None:
    """The number of a weight version must be stored before the learner uses it, although nothing else happened."""
    store = Store()
    journal, _ = run_with(store, Driver(), VirtualClock())
    announced = [4, 5]
    journal.progress = lambda: {"announced_version": announced[0]}
    await journal.flush()
    announced.pop(0)
    assert await journal.flush()
    assert [batch.progress["announced_version"] for batch in store.batches] == [4, 5]


async def test_a_group_is_stored_as_a_whole_when_it_has_finished_and_removed_when_it_has_ended() -> None:
    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    finished, filtered = group(0), group(1)
    for one in (finished, filtered):
        lifecycle.feed(one)
        lifecycle.advance([one], GroupState.IN_FLIGHT)
    lifecycle.advance([finished], GroupState.FINISHED)
    lifecycle.advance([finished], GroupState.QUEUED)
    lifecycle.drop(filtered, DropReason.FILTERED)
    await journal.flush()
    lifecycle.advance([finished], GroupState.LEASED)
    await journal.flush()
    first, second = store.batches
    assert content_of(first, 0) is finished
    assert (list(first.groups), first.groups[1], forgotten(first)) == ([0, 1], None, ["sample_0_1"])
    assert (state_of(second, 0), content_of(second, 0)) == (GroupState.LEASED, None), "it is stored already"


async def test_a_drop_reports_the_tokens_that_no_other_attempt_continues() -> None:
    driver, clock = Driver(), VirtualClock()
    journal, lifecycle = run_with(Store(), driver, clock)
    groups = [group(number) for number in range(3)]
    for one in groups:
        lifecycle.feed(one)
        one[0].response_length = 7
    lifecycle.leave_in_store(groups[2], partial(journal.load, 2), response_tokens=9)
    lifecycle.drop(groups[0], DropReason.STALE)
    lifecycle.drop(groups[1], DropReason.PARTIAL, kept_tokens=groups[1].response_tokens)
    lifecycle.drop(groups[2], DropReason.STALE)
    await journal.flush()
    drops = [event for event in driver.events if isinstance(event, GroupMoved) and event.after == "dropped"]
    assert [event.discarded_tokens for event in drops] == [7, 0, 9]


async def test_a_prompt_that_is_requeued_is_still_tracked() -> None:
    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    failed = group(0)
    lifecycle.feed(failed)
    lifecycle.drop(failed, DropReason.FAILED)
    journal.track_prompt(failed)
    await journal.flush()
    assert (tracked(store.batches[0]), forgotten(store.batches[0])) == (["sample_0_0"], [])


async def test_the_order_of_transitions_continues_from_one_rollout_worker_to_the_next() -> None:
    orders = []
    for number in (0, 1):
        store, clock = Store(), VirtualClock()
        journal, lifecycle = run_with(store, Driver(), clock, number=number)
        for one in (group(0), group(1)):
            lifecycle.feed(one)
        await journal.flush()
        orders += [change.order for change in store.batches[0].groups.values() if change is not None]
    assert orders == sorted(set(orders))


async def test_a_store_that_fails_stops_nothing_and_gets_everything_later() -> None:
    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    kept, ended = group(0), group(1)
    store.full = True
    for one in (kept, ended):
        lifecycle.feed(one)
        lifecycle.advance([one], GroupState.IN_FLIGHT)
        lifecycle.advance([one], GroupState.FINISHED)
    await journal.flush()
    assert len(driver.events) == 6, "the driver is not kept waiting"
    lifecycle.advance([kept], GroupState.QUEUED)
    lifecycle.drop(ended, DropReason.STALE)
    await journal.flush()
    assert store.batches == []
    assert driver.warnings == [
        "the disk is full; the run continues, but it cannot be restored until the store is written again"
    ]
    store.full = False
    await clock.sleep(RETRY_SECONDS)
    lifecycle.advance([kept], GroupState.LEASED)
    await journal.flush()
    [batch] = store.batches
    assert (list(batch.groups), batch.groups[1]) == ([0, 1], None)
    assert (state_of(batch, 0), content_of(batch, 0)) == (GroupState.LEASED, kept)
    assert (tracked(batch), forgotten(batch)) == (["sample_0_0"], ["sample_0_1"])
    journal.emit(WarningRaised(time=0.0, text="later"))
    await journal.flush()
    assert "the store is written again" in driver.warnings


async def test_an_error_of_the_store_of_any_class_loses_nothing_that_was_taken() -> None:
    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    owed = group(0)
    store.bug = ValueError("a value that cannot be written")
    lifecycle.feed(owed)
    journal.post(Group([Sample(index=1)], feed_index="external_0"), 1, "key")
    assert not await journal.flush()
    assert not await journal.flush(), "the group is still not stored"
    assert len(driver.events) >= 1
    assert "the run store failed with ValueError: a value that cannot be written" in driver.warnings[0]
    store.bug = None
    await clock.sleep(RETRY_SECONDS)
    assert await journal.flush(), "what waits is written without a further change"
    [batch] = store.batches
    assert (list(batch.groups), tracked(batch)) == ([0], ["sample_0_0"])
    assert (list(batch.posted), dict(batch.keys)) == (["external_0"], {"key": "external_0"})


async def test_an_error_of_the_progress_leaves_everything_pending() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("broken")

    store, driver, clock = Store(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    lifecycle.feed(group(0))
    journal.progress = broken
    with pytest.raises(RuntimeError):
        await journal.flush()
    journal.progress = dict
    assert await journal.flush()
    assert tracked(store.batches[0]) == ["sample_0_0"]
    assert [event.after for event in driver.events if isinstance(event, GroupMoved)] == ["fed"]


async def test_a_write_that_is_cut_off_delivers_its_events_later() -> None:
    class CutOffError(BaseException):
        pass

    class CutOff(Store):
        async def write(self, changes: Changes) -> None:
            if not self.batches:
                self.batches.append(changes)
                raise CutOffError
            await super().write(changes)

    store, driver, clock = CutOff(), Driver(), VirtualClock()
    journal, lifecycle = run_with(store, driver, clock)
    lifecycle.feed(group(0))
    with pytest.raises(CutOffError):
        await journal._flush()
    assert driver.events == [], "they are not known to be stored"
    assert await journal.flush()
    assert tracked(store.batches[1]) == ["sample_0_0"]
    assert len(driver.events) == 1


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_write_that_is_interrupted_by_the_end_of_the_run_delivers_its_events_in_order(
    cancellations: int,
) -> None:
    class SlowStore(Store):
        async def write(self, changes: Changes) -> None:
            await clock.sleep(1.0)
            await super().write(changes)

    store, driver, clock = SlowStore(), Driver(), VirtualClock()
    journal = Journal(store, driver, clock)
    journal.emit(WarningRaised(time=0.0, text="first"))
    running = asyncio.ensure_future(journal.run())
    await clock.sleep(0.5)
    for _ in range(cancellations):
        running.cancel()
        await clock.sleep(0.1)
    journal.emit(WarningRaised(time=0.0, text="second"))
    await journal.flush()
    assert driver.warnings == ["first", "second"]
    assert [batch.number for batch in store.batches] == [1, 2]

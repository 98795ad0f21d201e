"""Stores what changes in a run, so that another rollout worker can continue it.

Changes and events are collected in memory and written together, several times a second, in one transaction. Events
leave this process only after their transaction (the transactional outbox pattern). So whatever another process knows
of a group is stored, and a restored run never contradicts it.

`flush` writes at once. It is awaited before an effect that a restored run must not repeat: before a batch goes to the
learner and before a weight version is staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

from miles_async.errors import StoreError
from miles_async.events import Event, WarningRaised
from miles_async.ports import Clock, RunStore
from miles_async.scheduling.ledger import LIVE, GroupState, Transition
from miles_async.stored_run import Changes, GroupChange
from miles_async.types import Group

WRITE_SECONDS = 0.1
"""Interval between two writes. It is also the time that events wait, so that the driver receives them in batches."""
RETRY_SECONDS = 5.0
"""Interval between two attempts to write to a store that failed."""
ORDER_BITS = 24
"""A batch has fewer than 2^24 transitions."""


class EventOutbox(Protocol):
    """Passes stored events on to the driver."""

    def put(self, number: int, events: Sequence[Event]) -> None:
        """Take the events of one batch."""
        ...

    @property
    def received(self) -> int:
        """Number of the last batch that the driver has received; its events need not be stored any more."""
        ...


class Journal:
    """Collects changes and events, and writes them to the store. Implements `EventSink`. There is one per run.

    A store that fails (a full disk) does not stop the run: events are delivered without being stored, changes wait in
    memory, and the write is repeated. A warning reports the failure and its end.
    """

    def __init__(self, store: RunStore, outbox: EventOutbox, clock: Clock, *, number: int = 0) -> None:
        """`number` is that of the last batch in the store."""
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._number = number
        self._writing = asyncio.Lock()
        self._pending = asyncio.Event()
        self._order = 0
        self._groups: dict[int, GroupChange] = {}
        self._ended: dict[int, None] = {}
        self._owed: dict[str, Mapping[str, Any]] = {}
        self._settled: dict[str, None] = {}
        self._events: list[Event] = []
        self._failed_at: float | None = None
        """When the last write failed; None if it did not fail."""
        self.data_lock = Lock()
        """Held while a rollout function takes prompts from the data source or returns them."""
        self.progress: Callable[[], dict[str, Any]] = dict
        """Returns the values that replace the stored ones of the same names. It is called with each write."""

    def emit(self, event: Event) -> None:
        """Pass an event on after the next write."""
        self._events.append(event)
        self._pending.set()

    def move(self, group: Group, transition: Transition, *, adopted: bool) -> None:
        """Record a transition of the ledger. A group that has just finished is stored as a whole."""
        sequence, state = transition.sequence, transition.after
        if state not in LIVE:
            self._groups.pop(sequence, None)
            self._ended[sequence] = None
            self.settle(group.feed_index)
            return
        # Numbers of batches only rise, also from one rollout worker to the next.
        self._order = max(self._order + 1, self._number << ORDER_BITS)
        before = self._groups.get(sequence)
        if state is GroupState.FINISHED and not adopted:
            content: Group | None = group
        else:
            content = before.content if before is not None else None
        self._groups[sequence] = GroupChange(
            feed_index=group.feed_index,
            attempt=group.attempt,
            state=state,
            order=self._order,
            adopted=adopted,
            content=content,
        )
        if state is GroupState.FED:
            self.owe(group)

    def owe(self, group: Group) -> None:
        """Record that the prompt was taken from the data and has to be generated. Callable with `data_lock` held."""
        if group.feed_index:
            self._settled.pop(group.feed_index, None)
            self._owed[group.feed_index] = group.prompt_dict()

    def settle(self, feed_index: str) -> None:
        """Record that the prompt is trained and live, or given up."""
        self._owed.pop(feed_index, None)
        self._settled[feed_index] = None

    async def run(self) -> None:
        """Write at intervals. Never returns."""
        while True:
            await self._pending.wait()
            await self._clock.sleep(WRITE_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Store everything that has happened until now, and deliver its events."""
        async with self._writing:
            if not self._pending.is_set():
                return
            changes = self._take()
            now = self._clock.monotonic()
            if self._failed_at is None or now - self._failed_at >= RETRY_SECONDS:
                await self._write(changes, now)
            if self._failed_at is not None:
                self._keep(changes)
            self._outbox.put(changes.number, changes.events)

    def _take(self) -> Changes:
        """Everything that is pending. A rollout function must not take prompts in another thread meanwhile."""
        with self.data_lock:
            self._pending.clear()
            self._number += 1
            changes = Changes(
                number=self._number,
                groups=self._groups,
                ended=list(self._ended),
                owed=self._owed,
                settled=list(self._settled),
                progress=self.progress(),
                events=self._events,
                delivered=self._outbox.received,
            )
            self._groups, self._ended, self._owed, self._settled, self._events = {}, {}, {}, {}, []
        return changes

    def _keep(self, changes: Changes) -> None:
        """Merge changes that were not stored into the pending ones, which are newer."""
        for sequence, change in changes.groups.items():
            newer = self._groups.setdefault(sequence, change)
            if newer.content is None:
                newer.content = change.content
        self._groups = {sequence: change for sequence, change in self._groups.items() if sequence not in self._ended}
        self._ended |= dict.fromkeys(changes.ended)
        owed = {name: prompt for name, prompt in changes.owed.items() if name not in self._settled}
        settled = dict.fromkeys(name for name in changes.settled if name not in self._owed)
        self._owed, self._settled = owed | self._owed, settled | self._settled

    async def _write(self, changes: Changes, now: float) -> None:
        """Write one batch. Warn when the store begins to fail, and when it works again."""
        try:
            await self._store.write(changes)
        except StoreError as error:
            if self._failed_at is None:
                self._warn(f"{error}; the run continues, but it cannot be restored until the store is written again")
            self._failed_at = now
        else:
            if self._failed_at is not None:
                self._warn("the store is written again")
            self._failed_at = None

    def _warn(self, text: str) -> None:
        self.emit(WarningRaised(time=self._clock.time(), text=text))

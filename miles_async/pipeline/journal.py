"""Stores what changes in a run, so that another rollout worker can continue it.

Changes and events are collected in memory and written together, several times a second, in one transaction. Events
leave this process only after their transaction (the transactional outbox pattern). So whatever another process knows
of a group is stored, and a restored run never contradicts it.

`flush` writes at once. It is awaited before an effect that a restored run must not repeat: before a batch goes to the
learner and before a weight version is staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, Protocol

from miles_async.errors import StoreError
from miles_async.events import Event, SampleDiscarded, WarningRaised
from miles_async.json_values import shown_error
from miles_async.ports import Clock, RunStore
from miles_async.scheduling.ledger import LIVE, GroupState, Transition
from miles_async.stored_run import Changes, GroupChange, StoredGroup
from miles_async.types import Group, Sample

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

    A store that fails, for example because the disk is full, does not stop the run: events are delivered without being
    stored, changes wait in memory, and the write is repeated. A warning reports the failure and its end. Whatever ends
    a write, the changes of the batch are pending again unless the store has them.
    """

    def __init__(
        self, store: RunStore, outbox: EventOutbox, clock: Clock, *, number: int = 0, retains_trained: bool = False
    ) -> None:
        """`number` is that of the last batch, in the store or at the driver: the driver ignores lower numbers.

        With `retains_trained`, trained groups stay in the store until a checkpoint contains what was learned from them.
        """
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._number = number
        self._writing = asyncio.Lock()
        self._pending = asyncio.Event()
        self._order = 0
        self._changes = Changes()
        """What is not stored yet."""
        self._values: dict[str, Any] = {}
        """Values that are stored beside those of `progress`."""
        self._failed_at: float | None = None
        """When the last write failed; None if it did not fail."""
        self._retains_trained = retains_trained
        self._saved = -1
        """The rollout of the newest complete checkpoint; -1 before the first one."""
        self._trained: dict[int, int] = {}
        """The rollout of each group that is trained and not published, by sequence number."""
        self._retained: dict[int, tuple[int, str]] = {}
        """The rollout and the prompt of each published group that no checkpoint covers, by sequence number."""
        self.data_lock = RLock()
        """Held while a rollout function takes prompts from the data source or returns them."""
        self.progress: Callable[[], dict[str, Any]] = dict
        """Returns the values that replace the stored ones of the same names. It is called with each write."""

    @property
    def posted(self) -> int:
        """Number of the last group that an external generator has posted to this rollout worker; 0 before."""
        return int(self._values.get("posted", 0))

    def emit(self, event: Event) -> None:
        """Pass an event on after the next write."""
        self._changes.events.append(event)
        self._pending.set()

    def move(self, group: Group, transition: Transition, *, adopted: bool, rollout: int | None = None) -> None:
        """Record a transition of the ledger. A group that has just finished is stored as a whole.

        `rollout` is that of the batch of a group that was just trained.
        """
        sequence, state = transition.sequence, transition.after
        if state is GroupState.TRAINED:
            assert rollout is not None, "a trained group belongs to a batch"
            self._trained[sequence] = rollout
        elif state is GroupState.PUBLISHED and self._retains_trained and self._trained[sequence] > self._saved:
            rollout = self._trained.pop(sequence)
            self._retained[sequence] = rollout, group.feed_index
        else:
            # A group that was rolled back is not trained any more.
            self._trained.pop(sequence, None)
            self._retained.pop(sequence, None)
            if state not in LIVE:
                self._end(sequence, group.feed_index)
                return
        # Numbers of batches only rise, also from one rollout worker to the next.
        self._order = max(self._order + 1, self._number << ORDER_BITS)
        before = self._changes.groups.get(sequence)
        if state is GroupState.FINISHED and not adopted:
            content: Group | None = group
        else:
            content = before.content if before is not None else None
        self._changes.groups[sequence] = GroupChange(
            feed_index=group.feed_index,
            attempt=group.attempt,
            state=state,
            order=self._order,
            adopted=adopted,
            rollout=rollout,
            content=content,
        )
        if state is GroupState.FED:
            self.track_prompt(group)

    def save(self, rollout: int) -> None:
        """Record that a checkpoint contains the weights after `rollout`. Its groups and older ones are removed."""
        self._saved = rollout
        self._pending.set()
        for sequence, (trained_in, feed_index) in list(self._retained.items()):
            if trained_in <= rollout:
                del self._retained[sequence]
                self._end(sequence, feed_index)

    def restore(self, groups: Iterable[StoredGroup], saved: int | None) -> None:
        """Continue a stored run, whose newest complete checkpoint is that of rollout `saved`."""
        self._saved = -1 if saved is None else saved
        for group in groups:
            if group.rollout is None:
                continue
            if group.state is GroupState.TRAINED:
                self._trained[group.sequence] = group.rollout
            else:
                self._retained[group.sequence] = group.rollout, group.feed_index

    def _end(self, sequence: int, feed_index: str) -> None:
        """Remove an attempt from the store."""
        self._changes.groups[sequence] = None
        self.forget_prompt(feed_index)

    def track_prompt(self, group: Group) -> None:
        """Record that the prompt was taken from the data and has to be generated. Callable with `data_lock` held."""
        if group.feed_index:
            self.keep_posted(group.feed_index)
            self._changes.prompts[group.feed_index] = group.track_prompt()

    def forget_prompt(self, feed_index: str) -> None:
        """Record that the prompt is trained for good, or given up."""
        self._changes.posted.pop(feed_index, None)
        self._changes.prompts[feed_index] = None

    def post(self, group: Group, number: int, key: str | None) -> None:
        """Record the `number`-th group that an external generator has posted, with its idempotency key."""
        self.keep_posted(group.feed_index)
        self._changes.posted[group.feed_index] = group
        if key is not None:
            self._changes.keys[key] = group.feed_index
        self._values["posted"] = number
        self._pending.set()

    def keep_posted(self, feed_index: str) -> None:
        """Record that a posted group whose attempt has just ended will be trained in another attempt."""
        if self._changes.removes(feed_index):
            del self._changes.prompts[feed_index]

    def forget_key(self, key: str) -> None:
        """Remove an idempotency key from the store."""
        self._changes.keys[key] = None

    async def load(self, sequence: int) -> list[Sample]:
        """The samples of a finished group of a restored run; see `RunStore.load`."""
        return await self._store.load(sequence)

    async def load_posted(self, feed_index: str) -> list[Sample]:
        """The samples of a posted group of a restored run; see `RunStore.load_posted`."""
        return await self._store.load_posted(feed_index)

    async def run(self) -> None:
        """Write at intervals. Never returns."""
        while True:
            await self._pending.wait()
            await self._clock.sleep(WRITE_SECONDS)
            if self._pending.is_set():  # unless another flush has written everything meanwhile
                await self.flush()

    async def flush(self) -> bool:
        """Store everything that has happened until now, and deliver its events. Returns whether all of it is stored.

        A caller that is cancelled meanwhile, even several times, waits until that is done: what was taken must not be
        lost.
        """
        flushing = asyncio.ensure_future(self._flush())
        try:
            return await asyncio.shield(flushing)
        except asyncio.CancelledError:
            # Awaiting the task itself would pass a second cancellation on to it.
            while not flushing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([flushing])
            flushing.result()
            raise

    async def _flush(self) -> bool:
        async with self._writing:
            # The values of `progress` may have changed even if nothing is pending.
            await self._write(self._take())
            return self._failed_at is None

    def _take(self) -> Changes:
        """Everything that is pending. A rollout function must not take prompts in another thread meanwhile."""
        with self.data_lock:
            # Calls code that may raise, so it is called before anything is taken.
            progress = {**self.progress(), **self._values}
            self._pending.clear()
            self._number += 1
            changes, self._changes = self._changes, Changes()
            changes.number, changes.progress, changes.delivered = self._number, progress, self._outbox.received
        return changes

    def _keep(self, changes: Changes) -> None:
        """Merge changes that were not stored into the pending ones, which are newer."""
        self._pending.set()
        self._changes.merge_older(changes)

    async def _write(self, changes: Changes) -> None:
        """Write one batch and deliver its events. Keeps the changes of a batch that is not stored.

        Warns when the store begins to fail, and when it works again.
        """
        now, stored = self._clock.monotonic(), False
        try:
            if self._failed_at is None or now - self._failed_at >= RETRY_SECONDS:
                await self._store.write(changes)
                stored = True
        except Exception as error:
            # An error of another class is a bug of the store, which must not cost a group either.
            cause = str(error) if isinstance(error, StoreError) else f"the run store failed with {shown_error(error)}"
            if self._failed_at is None:
                self.warn(f"{cause}; the run continues, but it cannot be restored until the store is written again")
            self._failed_at = now
        except BaseException:
            self._keep(changes)
            self._changes.events = [*changes.events, *self._changes.events]
            raise
        if not stored:
            self._keep(changes)
        self._outbox.put(changes.number, changes.events)
        if stored and self._failed_at is not None:
            self._failed_at = None
            self.warn("the store is written again")

    def report_discarded(self, group: Group, sample: Sample, reason: str, tokens: int, error: str) -> None:
        """Report that a response of `tokens` tokens will not be trained, while its group goes on."""
        self.emit(
            SampleDiscarded(
                time=self._clock.time(),
                sequence=group.sequence,
                sample=sample.index,
                reason=reason,
                tokens=tokens,
                error=error,
            )
        )

    def warn(self, text: str) -> None:
        """Warn the user of a problem; the run continues."""
        self.emit(WarningRaised(time=self._clock.time(), text=text))

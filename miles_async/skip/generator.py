"""A generator that replays recorded groups and generates the others.

Everything but generation runs as in a live run: admission, rewards, filters, window, queue and the staleness gate. With
`skip.replay_timing` recorded, a replayed group takes as long as its generation took. Its staleness relative to the
current weight version equals the staleness at the time of the recording. When a stream of groups ends, groups that are
being recorded may finish first (`skip.drain_seconds`), so that the next run can replay every group that this run
started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from miles_async.events import EventSink, GroupReplayed
from miles_async.identity import IdentityMap
from miles_async.ports import Clock, Generator
from miles_async.recording import GroupRecord, Recording, SkipAction, is_first_attempt, is_generated
from miles_async.skip.base import CannotSkipError
from miles_async.skip.identity import prompt_hash
from miles_async.skip.manager import SkipManager
from miles_async.skip.rollout_skip import RolloutSkip
from miles_async.types import Group, SampleStatus

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long after the end of its recorded batch an unrecorded group waits before it is generated."""


class SkippingGenerator:
    """Implements the `Generator` port on top of the generator `live`.

    With `stream=True` groups are skipped one at a time (role `async_rollout`); otherwise all groups that are generated
    within one call of `batch` are skipped together (role `rollout`). `live_version` returns the weight version that the
    engines hold. Create the object inside the running event loop, after `SkipManager.init`.
    """

    def __init__(
        self,
        live: Generator,
        manager: SkipManager,
        *,
        stream: bool,
        clock: Clock,
        events: EventSink,
        live_version: Callable[[], int],
    ) -> None:
        self._live = live
        self._clock = clock
        self._events = events
        self._live_version = live_version
        self._stream = stream
        role = manager.skip_instances["async_rollout" if stream else "rollout"]
        assert isinstance(role, RolloutSkip), "built-in roles have built-in classes"
        self._role = role
        if role.is_enabled():
            role.warn_of_other_sizes()
        self._replays_timing = manager.config.replay_timing == "recorded"
        self._drain_seconds = manager.config.drain_seconds
        self._generated: list[GroupRecord] = []
        """Groups that were generated since the batch began."""
        self._recorded_batch: dict[str, GroupRecord] | None = None
        """Remaining groups of the batch that is being replayed, by feed index; None if no batch is being replayed."""
        self._grace_ends = 0.0
        """Time at which groups that are not in the recorded batch are generated."""
        self._abort_signals: IdentityMap[Group, asyncio.Future[None]] = IdentityMap()
        """One future per group that the live generator does not hold; an abort resolves the future."""
        self._recording: set[asyncio.Future[None]] = set()
        """One future per group that is being generated and will be recorded; resolved when its generation ends."""
        self._interrupted: set[str] = set()
        """Feed indices of groups that were aborted individually during a replay; they are generated next time."""

    @property
    def in_flight(self) -> int:
        return self._live.in_flight

    @property
    def busy_seconds(self) -> float:
        return self._live.busy_seconds

    async def generate(self, group: Group) -> None:
        """Generate or replay the group.

        Raises UserError if the recording was made under other settings and `skip.mismatch` is `refuse`.
        """
        if not is_first_attempt(group) or group.feed_index in self._interrupted:
            await self._live.generate(group)
            return
        began = self._clock.monotonic()
        self._abort_signals[group] = asyncio.get_running_loop().create_future()
        try:
            record = await self._recorded_or_generated(group)
            if record is not None:
                await self._replay(group, record, began)
        finally:
            self._abort_signals.pop(group, None)

    async def abort(self, group: Group | None = None) -> None:
        if group is None:
            for aborted in self._abort_signals.values():
                _resolve(aborted)
            if self._recording:
                await asyncio.wait(self._recording, timeout=self._drain_seconds)
            await self._live.abort()
        elif (signal := self._abort_signals.get(group)) is not None:
            self._interrupted.add(group.feed_index)
            _resolve(signal)
        else:
            await self._live.abort(group)

    async def batch(self, collect: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `collect`, whose groups are recorded as the manager's step, or replayed."""
        results: list[T] = []
        recording = await self._run_batch(collect, results)
        # If the batch was recorded, the role returned the recording and `collect` has not run yet: it runs now, and
        # each group that it submits is looked up in the recording.
        if recording.replayed_from is not None:
            self._recorded_batch = {record.feed_index: record for record in recording.groups}
            self._grace_ends = (
                self._clock.monotonic() + GRACE_SECONDS + (recording.seconds if self._replays_timing else 0.0)
            )
            try:
                results.append(await collect())
            finally:
                self._recorded_batch = None
        return results[0]

    @SkipManager.annotate(role="rollout")
    async def _run_batch(self, collect: Callable[[], Awaitable[T]], results: list[T]) -> Recording:
        began, self._generated = self._clock.monotonic(), []
        results.append(await collect())
        return Recording(groups=self._generated, seconds=self._clock.monotonic() - began)

    @SkipManager.annotate(role="async_rollout")
    async def _run_group(self, group: Group) -> Recording:
        groups = await self._generate(group)
        return Recording(groups=groups, seconds=sum(record.seconds for record in groups))

    async def _recorded_or_generated(self, group: Group) -> GroupRecord | None:
        """Return the record to replay, or None if the group was generated or aborted instead."""
        if self._stream:
            recording = await self._run_group(group)
            return recording.groups[0] if recording.replayed_from is not None else None
        if self._recorded_batch is None:
            self._generated += await self._generate(group)
            return None
        if (record := self._take_recorded(group, self._recorded_batch)) is not None:
            return record
        # The group was not finished when the recorded batch was complete, so it is expected to be aborted again when
        # this batch is complete. It is generated only if that does not happen.
        if not await self._aborted_within(group, self._grace_ends - self._clock.monotonic()):
            await self._generate(group)
        return None

    def _take_recorded(self, group: Group, recorded_batch: dict[str, GroupRecord]) -> GroupRecord | None:
        if group.feed_index in recorded_batch:
            return recorded_batch.pop(group.feed_index)
        if self._role.action is SkipAction.REPEAT and recorded_batch:
            return recorded_batch.pop(next(iter(recorded_batch)))
        return None

    async def _generate(self, group: Group) -> list[GroupRecord]:
        """Generate the group. Returns its record, or an empty list if the group did not finish."""
        if self._abort_signals.pop(group).done():
            _mark_aborted(group)
            return []
        began, prompt = self._clock.monotonic(), prompt_hash(group)
        ended = asyncio.get_running_loop().create_future()
        if self._stream and self._role.records(group):
            self._recording.add(ended)
        try:
            await self._live.generate(group)
        finally:
            self._recording.discard(ended)
            _resolve(ended)
        if not is_generated(group):
            return []
        seconds = self._clock.monotonic() - began
        return [GroupRecord.of(group, prompt=prompt, live_version=self._live_version(), seconds=seconds)]

    async def _replay(self, group: Group, record: GroupRecord, began: float) -> None:
        try:
            self._role.compare_prompt(record.prompt, prompt_hash(group), group.feed_index)
        except CannotSkipError:
            await self._generate(group)
            return
        remaining = record.seconds - (self._clock.monotonic() - began) if self._replays_timing else 0.0
        if not await self._aborted_within(group, remaining):
            record.replay_into(group, self._live_version())
            assert group.sequence is not None, "admission has numbered the group"
            self._events.emit(
                GroupReplayed(time=self._clock.time(), sequence=group.sequence, recorded=record.feed_index)
            )

    async def _aborted_within(self, group: Group, seconds: float) -> bool:
        """Wait `seconds`, or until the group is aborted. Returns whether the group was aborted, and marks it if so."""
        aborted = self._abort_signals[group]
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, seconds)))
        try:
            await asyncio.wait([aborted, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        if aborted.done():
            _mark_aborted(group)
        return aborted.done()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _mark_aborted(group: Group) -> None:
    for sample in group:
        sample.status = SampleStatus.ABORTED

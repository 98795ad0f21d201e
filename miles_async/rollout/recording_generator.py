"""A generator that replays recorded groups, and generates and records the others (docs/how-to/replay.md).

Everything but generation runs as in a live run: admission, rewards, filters, window, queue and the staleness gate. With
`skip.replay_timing` recorded, a replayed group takes as long as its generation took. Its staleness relative to the
current weight version equals the staleness at the time of the recording. When a stream of groups ends, groups that are
being recorded may finish first (`skip.drain_seconds`), so that the next run can replay every group that this run
started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from miles_async.config.schema import RunConfig
from miles_async.events import EventSink, GroupReplayed
from miles_async.identity import IdentityMap
from miles_async.ports import Clock, Generator
from miles_async.recording import GroupRecord, Recording, SkipAction, feed_step, is_first_attempt, is_generated
from miles_async.rollout.recordings import RecordingContext, prompt_hash, recordings_of
from miles_async.types import Group, SampleStatus

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long after the end of its recorded batch an unrecorded group waits before it is generated."""


class RecordingGenerator:
    """Implements the `Generator` port on top of the generator `live`.

    With `stream=True` groups are recorded one at a time (`skip.async_rollout`); otherwise all groups that are generated
    within one call of `batch` are recorded together (`skip.rollout`). `live_version` returns the weight version that
    the engines hold. Create the object inside the running event loop.
    """

    def __init__(
        self,
        live: Generator,
        config: RunConfig,
        context: RecordingContext,
        *,
        stream: bool,
        clock: Clock,
        events: EventSink,
        live_version: Callable[[], int],
    ) -> None:
        self._live = live
        self.requests = live.requests
        self._clock = clock
        self._events = events
        self._live_version = live_version
        self._stream = stream
        self._recordings = recordings_of(config, context, stream=stream)
        self._recordings.warn_of_other_sizes()
        self._replays_timing = config.skip.replay_timing == "recorded"
        self._drain_seconds = config.skip.drain_seconds
        self._generated: list[GroupRecord] = []
        """Groups that were generated since the batch began."""
        self._recorded_batch: dict[str, GroupRecord] | None = None
        """Remaining groups of the batch that is being replayed, by feed index; None if no batch is being replayed."""
        self._grace_ends = 0.0
        """Time at which groups that are not in the recorded batch are generated."""
        self._abort_signals: IdentityMap[Group, asyncio.Future[None]] = IdentityMap()
        """One future per group that the live generator does not hold; an abort resolves the future."""
        self._being_recorded: set[asyncio.Future[None]] = set()
        """One future per group that is being generated and will be recorded; resolved when its generation ends."""
        self._interrupted: set[str] = set()
        """Feed indices of groups that were aborted individually during a replay; they are generated next time."""

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
            if self._being_recorded:
                await asyncio.wait(self._being_recorded, timeout=self._drain_seconds)
            await self._live.abort()
        elif (signal := self._abort_signals.get(group)) is not None:
            self._interrupted.add(group.feed_index)
            _resolve(signal)
        else:
            await self._live.abort(group)

    async def batch(self, rollout_id: int, collect: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `collect`, whose groups are recorded as the step `rollout_id`, or replayed."""
        if self._stream:
            return await collect()
        results: list[T] = []

        async def generate() -> Recording:
            began, self._generated = self._clock.monotonic(), []
            results.append(await collect())
            return Recording(groups=self._generated, seconds=self._clock.monotonic() - began)

        recording = await self._recorded(rollout_id, generate)
        if recording.replayed_from is None:
            return results[0]
        # `collect` has not run yet. Each group that it submits is looked up in the recording.
        self._recorded_batch = {record.feed_index: record for record in recording.groups}
        self._grace_ends = (
            self._clock.monotonic() + GRACE_SECONDS + (recording.seconds if self._replays_timing else 0.0)
        )
        try:
            return await collect()
        finally:
            self._recorded_batch = None

    async def _recorded(self, step: int | None, generate: Callable[[], Awaitable[Recording]]) -> Recording:
        """Return the recording that replaces the step, or else what `generate` returns, which is then recorded."""
        recordings = self._recordings
        if step is None or step not in recordings.steps:
            return await generate()
        offload = recordings.context.offload
        recorded: Recording | None = await offload(partial(recordings.load, step))
        if recorded is not None:
            return recorded
        generated = await generate()
        await offload(partial(recordings.save, step, generated))
        return generated

    async def _recorded_or_generated(self, group: Group) -> GroupRecord | None:
        """Return the record to replay, or None if the group was generated or aborted instead."""
        if self._stream:
            recording = await self._recorded(feed_step(group.feed_index), partial(self._generate_alone, group))
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

    async def _generate_alone(self, group: Group) -> Recording:
        groups = await self._generate(group)
        return Recording(groups=groups, seconds=sum(record.seconds for record in groups))

    def _take_recorded(self, group: Group, recorded_batch: dict[str, GroupRecord]) -> GroupRecord | None:
        if group.feed_index in recorded_batch:
            return recorded_batch.pop(group.feed_index)
        if self._recordings.action is SkipAction.REPEAT and recorded_batch:
            return recorded_batch.pop(next(iter(recorded_batch)))
        return None

    async def _generate(self, group: Group) -> list[GroupRecord]:
        """Generate the group. Returns its record, or an empty list if the group did not finish."""
        if self._abort_signals.pop(group).done():
            _mark_aborted(group)
            return []
        began, prompt = self._clock.monotonic(), prompt_hash(group)
        ended = asyncio.get_running_loop().create_future()
        if self._stream and feed_step(group.feed_index) in self._recordings.steps:
            self._being_recorded.add(ended)
        try:
            await self._live.generate(group)
        finally:
            self._being_recorded.discard(ended)
            _resolve(ended)
        if not is_generated(group):
            return []
        seconds = self._clock.monotonic() - began
        return [GroupRecord.of(group, prompt=prompt, live_version=self._live_version(), seconds=seconds)]

    async def _replay(self, group: Group, record: GroupRecord, began: float) -> None:
        prompt = prompt_hash(group)
        if not self._recordings.matches_prompt(record.prompt, prompt, group.feed_index):
            await self._generate(group)
            return
        remaining = record.seconds - (self._clock.monotonic() - began) if self._replays_timing else 0.0
        if not await self._aborted_within(group, remaining):
            record.replay_into(group, self._live_version(), same_prompt=prompt == record.prompt)
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

"""The generator of a run in which generation may be skipped: recorded groups are replayed, the others go live.

Everything around generation runs as in a live run: admission, rewards, filter, window, queue and staleness. A replayed
group takes as long as its generation took (`skip.replay_timing`) and is as old, against the weights that are live when
it ends, as the recorded one was. When the stream ends, groups that are being recorded are finished first
(`skip.drain_seconds`), so that the next run finds every group that this one began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from miles_async.events import EventSink, GroupReplayed
from miles_async.ports import Clock, Generator
from miles_async.recording import GroupRecord, Recording, SkipAction, is_first_attempt
from miles_async.skip.base import CannotSkipError
from miles_async.skip.identity import prompt_hash
from miles_async.skip.manager import SkipManager
from miles_async.skip.rollout_skip import RolloutSkip
from miles_async.types import Group, SampleStatus

T = TypeVar("T")

HELD_SECONDS = 1.0
"""How much later than its recorded batch ended a group goes live that had not finished in it."""


class SkippingGenerator:
    """Implements `ports.Generator` over a live one. Create it inside the running loop, after `SkipManager.init`.

    With `stream` groups are skipped one by one (role `async_rollout`); without, all those generated within one `batch`
    (role `rollout`). `live_version` tells the weight version that the engines hold.
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
        role = manager.roles["async_rollout" if stream else "rollout"]
        assert isinstance(role, RolloutSkip), "the shipped roles are served by the shipped classes"
        self._role = role
        if role.is_enabled:
            role.note_other_sizes()
        self._timed = manager.context.config.skip.replay_timing == "recorded"
        self._drain_seconds = manager.context.config.skip.drain_seconds
        self._taken: list[GroupRecord] = []
        """What was generated since the batch began."""
        self._tape: dict[str, GroupRecord] | None = None
        """What is left of the batch that is being replayed, by feed index."""
        self._held_until = 0.0
        """When groups that are not on the tape go live."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """Resolved by an abort, for each group that is not at the live generator, by identity."""
        self._recording: set[asyncio.Future[None]] = set()
        """Resolved at the end of each group of the stream that is generated now, to be recorded."""
        self._interrupted: set[str] = set()
        """Groups whose replay was cut short for them alone: another replay would be cut short likewise."""

    @property
    def in_flight(self) -> int:
        return self._live.in_flight

    @property
    def busy_seconds(self) -> float:
        return self._live.busy_seconds

    async def generate(self, group: Group) -> None:
        """As the port says. Raises UserError for a recording that does not fit, if `skip.mismatch` says so."""
        if not is_first_attempt(group) or group.feed_index in self._interrupted:
            await self._live.generate(group)
            return
        began = self._clock.now()
        self._waiting[id(group)] = asyncio.get_running_loop().create_future()
        try:
            record = await self._recorded(group)
            if record is not None:
                await self._replay(group, record, began)
        finally:
            self._waiting.pop(id(group), None)

    async def abort(self, group: Group | None = None) -> None:
        if group is None:
            for aborted in self._waiting.values():
                _resolve(aborted)
            if self._recording:
                await asyncio.wait(self._recording, timeout=self._drain_seconds)
            await self._live.abort()
        elif (aborted_now := self._waiting.get(id(group))) is not None:
            self._interrupted.add(group.feed_index)
            _resolve(aborted_now)
        else:
            await self._live.abort(group)

    async def batch(self, step: int, collect: Callable[[], Awaitable[T]]) -> T:
        """What `collect` returns, with the groups that it generates recorded as `step`, or replayed."""
        SkipManager.set_step(step)
        results: list[T] = []
        recording = await self._whole(collect, results)
        if recording.replayed_from is not None:
            self._tape = {record.feed_index: record for record in recording.groups}
            self._held_until = self._clock.now() + HELD_SECONDS + (recording.seconds if self._timed else 0.0)
            try:
                results.append(await collect())
            finally:
                self._tape = None
        return results[0]

    @SkipManager.annotate(role="rollout")
    async def _whole(self, collect: Callable[[], Awaitable[T]], results: list[T]) -> Recording:
        began, self._taken = self._clock.now(), []
        results.append(await collect())
        return Recording(groups=self._taken, seconds=self._clock.now() - began)

    @SkipManager.annotate(role="async_rollout")
    async def _one(self, group: Group) -> Recording:
        groups = await self._generate(group)
        return Recording(groups=groups, seconds=sum(record.seconds for record in groups))

    async def _recorded(self, group: Group) -> GroupRecord | None:
        """What to replay; None when the group was generated (or aborted) instead."""
        if self._stream:
            recording = await self._one(group)
            return recording.groups[0] if recording.replayed_from is not None else None
        if self._tape is None:
            self._taken += await self._generate(group)
            return None
        if (record := self._from_tape(group, self._tape)) is not None:
            return record
        # It was under way when the recorded batch was complete, so it should be aborted when this one is.
        if not await self._aborted_within(group, self._held_until - self._clock.now()):
            await self._generate(group)
        return None

    def _from_tape(self, group: Group, tape: dict[str, GroupRecord]) -> GroupRecord | None:
        if group.feed_index in tape:
            return tape.pop(group.feed_index)
        if self._role.action is SkipAction.REPEAT and tape:
            return tape.pop(next(iter(tape)))
        return None

    async def _generate(self, group: Group) -> list[GroupRecord]:
        """Live. One record, or none where the group did not finish."""
        if self._waiting.pop(id(group)).done():
            _mark_aborted(group)
            return []
        began, prompt = self._clock.now(), prompt_hash(group)
        ended = asyncio.get_running_loop().create_future()
        if self._stream and self._role.records(group):
            self._recording.add(ended)
        try:
            await self._live.generate(group)
        finally:
            self._recording.discard(ended)
            _resolve(ended)
        if any(sample.status not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) for sample in group):
            return []
        seconds = self._clock.now() - began
        return [GroupRecord.of(group, prompt=prompt, live_version=self._live_version(), seconds=seconds)]

    async def _replay(self, group: Group, record: GroupRecord, began: float) -> None:
        try:
            self._role.compare_prompt(record.prompt, prompt_hash(group), group.feed_index)
        except CannotSkipError:
            await self._generate(group)
            return
        remaining = record.seconds - (self._clock.now() - began) if self._timed else 0.0
        if not await self._aborted_within(group, remaining):
            record.replay_into(group, self._live_version())
            assert group.sequence is not None, "admission gave the group its number"
            self._events.emit(
                GroupReplayed(time=self._clock.now(), sequence=group.sequence, recorded=record.feed_index)
            )

    async def _aborted_within(self, group: Group, seconds: float) -> bool:
        """Wait; True, with the group marked, as soon as somebody aborts it meanwhile."""
        aborted = self._waiting[id(group)]
        nap = asyncio.ensure_future(self._clock.sleep(max(0.0, seconds)))
        try:
            await asyncio.wait([aborted, nap], return_when=asyncio.FIRST_COMPLETED)
        finally:
            nap.cancel()
        if aborted.done():
            _mark_aborted(group)
        return aborted.done()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _mark_aborted(group: Group) -> None:
    for sample in group:
        sample.status = SampleStatus.ABORTED

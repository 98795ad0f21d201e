"""From queue to batch: takes groups out of the queue for the trainer and recycles those that are too stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from miles_async.errors import UserError
from miles_async.events import BatchDrained, QueueChanged
from miles_async.identity import IdentityMap
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.produce import Line, Producer
from miles_async.pipeline.run_state import RunState
from miles_async.sample_schema import user_function
from miles_async.scheduling.admission import Admission, Candidates
from miles_async.scheduling.bounds import StalenessGate
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.shares import Shares
from miles_async.types import DropReason, Group

Choose = Callable[[list[Group]], Iterable[Group]]
"""An over-sampling filter: returns its groups, best first."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchCollector:
    """Takes batches of fresh groups out of the producer's queue; stale groups are recycled and replaced."""

    run_state: RunState
    lifecycle: GroupLifecycle
    producer: Producer
    gate: StalenessGate
    admission: Admission
    """The limits of the persistent producer."""

    def __post_init__(self) -> None:
        self._shares = Shares(self.producer.weights)
        self._recycled_before = 0
        """Value of `lifecycle.recycled` at the previous batch."""
        self.wanted = 0
        """Groups that the trainer waits for; 0 while it does not wait."""
        self.collected = 0
        """Groups of the current batch that are collected."""

    async def collect(self, rollout_id: int, size: int, adapter: str | None = None) -> list[Group]:
        """Take `size` fresh groups of one adapter out of its queue, ordered by sample index.

        The producer must be running. If `adapter` is None, it is the one whose turn it is among those with a full
        batch. Waits until the window has released enough groups. Raises UserError if the data is exhausted before.
        """
        run_state, lifecycle = self.run_state, self.lifecycle
        waiting_since = run_state.clock.monotonic()
        groups: list[Group] = []
        self.wanted, self.collected = size, 0
        queue = self.producer.lines[await self._next_adapter(size) if adapter is None else adapter].queue
        while len(groups) < size:
            await run_state.changed.until(lambda: bool(queue) or self.producer.exhausted)
            if not queue:
                raise UserError(
                    f"the data ended after {lifecycle.ledger.fed} groups with {len(groups)} of {size} for rollout "
                    f"{rollout_id}; lower --num-rollout or provide more prompts"
                )
            group = queue.get()
            lifecycle.advance([group], GroupState.LEASED)
            if self.recycle_stale([group]):
                await lifecycle.load(group)
                groups.append(group)
            self.collected = len(groups)
        self.wanted, self.collected = 0, 0
        waited = run_state.clock.monotonic() - waiting_since
        now = run_state.clock.time()
        recycled = lifecycle.recycled
        depth = self.producer.queued
        run_state.journal.emit(QueueChanged(time=now, depth=depth, blocked=self.producer.blocked))
        run_state.journal.emit(
            BatchDrained(
                time=now,
                rollout=rollout_id,
                depth=depth,
                waited=waited,
                recycled=recycled - self._recycled_before,
            )
        )
        self._recycled_before = recycled
        return _ordered(groups)

    async def _next_adapter(self, size: int) -> str:
        """Wait until an adapter has a full batch, and return the one whose turn it is."""
        lines = self.producer.lines
        if len(lines) == 1:
            return next(iter(lines))

        def ready() -> list[str]:
            return [name for name, line in lines.items() if self._fresh(line) >= size]

        await self.run_state.changed.until(lambda: bool(ready()))
        return self._shares.take(ready())

    def _fresh(self, line: Line) -> int:
        """Number of groups in a queue that may be trained now."""
        return sum(not self._must_be_recycled(group) for group in line.queue)

    async def upcoming(self, size: int) -> list[Group]:
        """Return the groups that the next call of `collect` takes unless some become too stale; they stay in the queue.

        Waits until the queue has `size` groups that are fresh at the next weight version. Only a run that does not
        train several adapters knows its next batch.
        """
        [line] = self.producer.lines.values()
        groups: list[Group] = []

        def found() -> bool:
            fresh = (group for group in line.queue if not self._must_be_recycled(group, later=1))
            groups[:] = islice(fresh, size)
            return len(groups) == size

        await self.run_state.changed.until(found)
        for group in groups:
            await self.lifecycle.load(group)
        return _ordered(groups)

    async def drain_stream(self, rollout_id: int, size: int) -> list[Group]:
        """Take `size` fresh groups from the persistent producer, as `collect` does. Starts the producer first."""
        self.producer.keep_running(self.admission)
        return await self.collect(rollout_id, size)

    async def generate(
        self,
        rollout_id: int,
        size: int,
        over_sampling: int,
        choose: Choose | None = None,
        rejected: list[Group] | None = None,
    ) -> list[Group]:
        """Run the producer for one batch of `size` groups; at the end, groups in flight are aborted and requeued.

        At most `over_sampling` groups are in progress. Finished surplus groups stay in the queue for the next batch,
        subject to the staleness gate. With `choose`, `over_sampling` groups are finished, and the first `size` groups
        that `choose` returns form the batch. `rejected` receives those that the dynamic filter or `choose` rejects.
        Raises UserError if the data is exhausted, or if `choose` returns too few.
        """
        counts = self.lifecycle.ledger.counts
        # The slots that the trainer's groups hold must not reduce the batch that is generated next to them.
        held_by_trainer = counts[GroupState.LEASED] + counts[GroupState.TRAINED]
        wanted = size if choose is None else over_sampling
        self.producer.attempts.grading.rejected = rejected
        self.producer.start(
            Admission(
                max_in_flight=over_sampling,
                room=self.producer.queue_capacity,
                slots=held_by_trainer + over_sampling,
                adaptive=self.admission.adaptive,
                candidates=Candidates(wanted, over_sampling),
            )
        )
        try:
            groups = await self.collect(rollout_id, wanted)
        finally:
            await self.producer.stop()
            self.producer.attempts.grading.rejected = None
        return groups if choose is None else self._choose(choose, groups, size, rejected)

    def sweep_queue(self) -> None:
        """Recycle queued groups that are too stale already, so that they are regenerated at once."""
        for line in self.producer.lines.values():
            for group in line.queue.sweep(self._must_be_recycled):
                self._recycle(group)

    def recycle_stale(self, groups: list[Group]) -> list[Group]:
        """Recycle the groups that exceed the staleness limit now; return the others."""
        fresh: list[Group] = []
        for group in groups:
            if self._must_be_recycled(group):
                self._recycle(group)
            else:
                fresh.append(group)
        return fresh

    def _choose(
        self, choose: Choose, groups: list[Group], size: int, rejected: list[Group] | None = None
    ) -> list[Group]:
        """Keep the first `size` groups in the order of the over-sampling filter, and drop the others."""
        # By identity: a filter may return the groups in another order, several times, or leave some out.
        positions = IdentityMap((group, position) for position, group in enumerate(groups))
        setting, advice = "over_sampling_filter_path", "return the groups it was given, best first"
        with user_function(setting, chain.from_iterable(groups), advice):
            # What it returns may be something else than a list of groups.
            order = [positions[group] for group in choose(list(groups)) if group in positions]
        kept = sorted(dict.fromkeys(order[:size]))
        if len(kept) < size:
            raise UserError(
                f"{setting} returned {len(kept)} of the {len(groups)} groups it was given: return at least "
                f"rollout_batch_size={size} of them, best first, each once"
            )
        for position in set(positions.values()).difference(kept):
            self.lifecycle.reject(groups[position], "over_sampling")
            if rejected is not None:
                rejected.append(groups[position])
        return [groups[position] for position in kept]

    def _must_be_recycled(self, group: Group, later: int = 0) -> bool:
        """Whether a group is too old now, or so many versions later."""
        return self.gate.too_old(self.run_state.age_of(group) + later)

    def _recycle(self, group: Group) -> None:
        self.lifecycle.retry(
            group,
            DropReason.STALE,
            f"its oldest token, of version {group.oldest_version}, is {self.run_state.age_of(group)} weight versions "
            f"old, and --max-weight-staleness is {self.gate.limit}",
        )


def _ordered(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: [sample.index or 0 for sample in group])

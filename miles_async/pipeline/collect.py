"""From queue to batch: the trainer's side of the queue, with the staleness gate at its door."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from miles_async.errors import UserError
from miles_async.events import BatchDrained, QueueChanged
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.recycle import Recycler
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.scheduling.admission import Admission
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.staleness import StalenessGate
from miles_async.types import DropReason, Group

Choose = Callable[[list[Group]], Iterable[Group]]
"""An over-sampling filter: its groups, best first."""


class BatchCollector:
    """Takes batches of fresh groups out of the queue; what is too old is recycled and the batch topped up."""

    def __init__(
        self,
        *,
        run_state: RunState,
        producer: Producer,
        recycler: Recycler,
        gate: StalenessGate,
        stream_admission: Admission,
        tasks: Callable[[], TaskSupervisor],
    ) -> None:
        self._run_state = run_state
        self._producer = producer
        self._recycler = recycler
        self._gate = gate
        self._stream_admission = stream_admission
        self._tasks = tasks
        self._recycled_before = 0
        self.wanted = 0
        """Groups the trainer waits for now; 0 while it does not wait."""
        self.collected = 0
        """How many of them it has."""

    async def stream(self, rollout_id: int, size: int) -> list[Group]:
        """One batch from the persistent producer, which the first call starts (seed `fully-async`)."""
        if not self._producer.is_open:
            self._producer.open(self._tasks(), self._stream_admission)
        return await self._take(rollout_id, size)

    async def batch(self, rollout_id: int, size: int, over_sampling: int, choose: Choose | None = None) -> list[Group]:
        """One batch from a producer that runs for this call only; at its end what is in flight is aborted.

        At most `over_sampling` groups are under way for the call. Finished surplus stays in the queue and is taken
        first by the next call, subject to the gate; with `choose` all of them are finished, and it says which to train.
        """
        counts = self._run_state.ledger.counts
        held_by_trainer = counts[GroupState.LEASED] + counts[GroupState.TRAINED]
        admission = Admission(
            max_in_flight=over_sampling,
            room=self._producer.queue.capacity,
            slots=held_by_trainer + over_sampling,
            adaptive=self._stream_admission.adaptive,
        )
        self._producer.open(self._tasks(), admission)
        try:
            groups = await self._take(rollout_id, size if choose is None else over_sampling)
        finally:
            await self._producer.close()
        return groups if choose is None else self._chosen(choose, groups, size)

    def _chosen(self, choose: Choose, groups: list[Group], size: int) -> list[Group]:
        """The first `size` in the order of the over-sampling filter; the others are dropped, as it decided."""
        places = {id(group): place for place, group in enumerate(groups)}
        order = [places[id(group)] for group in choose(groups) if id(group) in places]
        best = sorted(dict.fromkeys(order[:size]))
        if len(best) < size:
            raise UserError(
                f"over_sampling_filter_path returned {len(best)} of the {len(groups)} groups it was given: return at "
                f"least rollout_batch_size={size} of them, best first, each once"
            )
        for place in set(places.values()).difference(best):
            self._run_state.filtered(groups[place], "over_sampling")
        return [groups[place] for place in best]

    def sweep(self) -> None:
        """Recycle queued groups that are too old already, so that they are regenerated at once."""
        version = self._run_state.trainer_version
        for group in self._producer.queue.sweep(lambda group: self._gate.too_old(group.oldest_version, version)):
            self._recycle(group)

    def refuse_stale(self, groups: list[Group]) -> list[Group]:
        """The groups that may enter a step now; the others are recycled."""
        fresh: list[Group] = []
        for group in groups:
            if self._gate.too_old(group.oldest_version, self._run_state.trainer_version):
                self._recycle(group)
            else:
                fresh.append(group)
        return fresh

    async def _take(self, rollout_id: int, size: int) -> list[Group]:
        """Waits for queued groups; unblocked by the window releasing one."""
        run_state, queue = self._run_state, self._producer.queue
        waiting_since = run_state.clock.now()
        groups: list[Group] = []
        self.wanted, self.collected = size, 0
        while len(groups) < size:
            await run_state.changed.until(lambda: bool(queue) or self._producer.starved)
            if not queue:
                raise UserError(
                    f"the data ended after {run_state.ledger.fed} groups with {len(groups)} of {size} for rollout "
                    f"{rollout_id}; lower --num-rollout or give more prompts"
                )
            group = queue.get()
            run_state.advance([group], GroupState.LEASED)
            groups += self.refuse_stale([group])
            self.collected = len(groups)
        self.wanted, self.collected = 0, 0
        now = run_state.clock.now()
        recycled = self._recycler.recycled
        run_state.events.emit(QueueChanged(time=now, depth=len(queue), blocked=self._producer.window.blocked))
        run_state.events.emit(
            BatchDrained(
                time=now,
                rollout=rollout_id,
                depth=len(queue),
                waited=now - waiting_since,
                recycled=recycled - self._recycled_before,
            )
        )
        self._recycled_before = recycled
        return sorted(groups, key=lambda group: [sample.index or 0 for sample in group])

    def _recycle(self, group: Group) -> None:
        version = self._run_state.trainer_version
        self._recycler.retry(
            group,
            DropReason.STALE,
            f"its oldest token is of version {group.oldest_version}, the trainer is at {version}, "
            f"and --max-weight-staleness is {self._gate.limit}",
        )

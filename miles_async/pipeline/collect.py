"""From queue to batch: takes groups out of the queue for the trainer and recycles those that are too stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from miles_async.errors import UserError
from miles_async.events import BatchDrained, GroupGenerated, QueueChanged
from miles_async.identity import IdentityMap
from miles_async.json_values import shown
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.recycle import Recycler
from miles_async.pipeline.run_state import RunState, TakenGroup, sequence_of
from miles_async.pipeline.training import mean_reward
from miles_async.scheduling.admission import Admission, Candidates
from miles_async.scheduling.bounds import StalenessGate
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason, Group, Sample, trajectories_of
from miles_async.user_code import USER_CODE_ERRORS

Choose = Callable[[list[Group]], Iterable[Group]]
"""An over-sampling filter: returns its groups, best first."""


class BatchCollector:
    """Takes batches of fresh groups out of the producer's queue; stale groups are recycled and replaced."""

    def __init__(
        self,
        *,
        run_state: RunState,
        producer: Producer,
        recycler: Recycler,
        gate: StalenessGate,
        adaptive: AdaptiveConcurrency | None,
        samples_per_group: int,
    ) -> None:
        self._run_state = run_state
        self._producer = producer
        self._recycler = recycler
        self._gate = gate
        self._adaptive = adaptive
        self._samples_per_group = samples_per_group
        self._recycled_before = 0
        """Value of `recycler.recycled` at the previous batch."""
        self.wanted = 0
        """Groups that the trainer waits for; 0 while it does not wait."""
        self.collected = 0
        """Groups of the current batch that are collected."""

    async def collect(self, rollout_id: int, size: int) -> list[Group]:
        """Take `size` fresh groups out of the queue, ordered by sample index. The producer must be running.

        Waits until the window has released enough groups. Raises UserError if the data is exhausted before.
        """
        run_state, queue = self._run_state, self._producer.queue
        waiting_since = run_state.clock.monotonic()
        groups: list[Group] = []
        self.wanted, self.collected = size, 0
        while len(groups) < size:
            await run_state.changed.until(lambda: bool(queue) or self._producer.exhausted)
            if not queue:
                raise UserError(
                    f"the data ended after {run_state.ledger.fed} groups with {len(groups)} of {size} for rollout "
                    f"{rollout_id}; lower --num-rollout or provide more prompts"
                )
            group = queue.get()
            run_state.advance([group], GroupState.LEASED)
            if self.recycle_stale([group]):
                await run_state.load(group)
                groups.append(group)
            self.collected = len(groups)
        self.wanted, self.collected = 0, 0
        waited = run_state.clock.monotonic() - waiting_since
        now = run_state.clock.time()
        recycled = self._recycler.recycled
        run_state.journal.emit(QueueChanged(time=now, depth=len(queue), blocked=self._producer.window.blocked))
        run_state.journal.emit(
            BatchDrained(
                time=now,
                rollout=rollout_id,
                depth=len(queue),
                waited=waited,
                recycled=recycled - self._recycled_before,
            )
        )
        self._recycled_before = recycled
        return sorted(groups, key=lambda group: [sample.index or 0 for sample in group])

    async def generate(
        self, rollout_id: int, size: int, over_sampling: int, choose: Choose | None = None
    ) -> list[Group]:
        """Run the producer for one batch of `size` groups; at the end, groups in flight are aborted and fed again.

        At most `over_sampling` groups are in progress. Finished surplus groups stay in the queue for the next batch,
        subject to the staleness gate. With `choose`, `over_sampling` groups are finished, and the first `size` groups
        that `choose` returns form the batch. Raises UserError if the data is exhausted, or if `choose` returns too few.
        """
        counts = self._run_state.ledger.counts
        # The slots that the trainer's groups hold must not reduce the batch that is generated next to them.
        held_by_trainer = counts[GroupState.LEASED] + counts[GroupState.TRAINED]
        wanted = size if choose is None else over_sampling
        self._producer.start(
            Admission(
                max_in_flight=over_sampling,
                room=self._producer.queue.capacity,
                slots=held_by_trainer + over_sampling,
                adaptive=self._adaptive,
                candidates=Candidates(wanted, over_sampling),
            )
        )
        try:
            groups = await self.collect(rollout_id, wanted)
        finally:
            await self._producer.stop()
        return groups if choose is None else self._choose(choose, groups, size)

    def reconcile(self, returned: Sequence[Group], leased_before: Sequence[Group]) -> None:
        """Enter the result of a rollout function into the ledger.

        `leased_before` are the groups that were leased before the call. A new list of the samples of a collected group
        (functions written for slime often return such lists) takes the place of that group. Groups that the function
        generated itself are adopted. Groups that it collected but did not return are dropped. Prompts that it took from
        the data source and neither returned nor holds are forgotten. Raises UserError for a group that was returned
        before.
        """
        run_state = self._run_state
        run_state.close_collected()
        collected = GroupsBySample(run_state.leased_groups)
        kept = {sequence_of(group) for group in leased_before}
        for group in returned:
            if group.sequence is None and (original := collected.find(group)) is not None:
                run_state.replace(original, group)
            if group.sequence is None:
                if self._identify(group) is None and run_state.is_handed_on(group):
                    raise _returned_twice(group)
                self.adopt(group)
            elif group.sequence in kept or run_state.state_of(group) is not GroupState.LEASED:
                raise _returned_twice(group)
            kept.add(sequence_of(group))
        for group in run_state.leased_groups:
            if group.sequence not in kept:
                run_state.drop_filtered(group, "rollout_function")
        self._release(returned)
        for group in run_state.take_unused():
            run_state.journal.settle(group.feed_index)

    def reconcile_worker(self, returned: Sequence[Group]) -> None:
        """Enter groups that a worker has generated into the ledger.

        A worker keeps groups between calls, so the prompts that it has not returned stay with it. Prompts that nothing
        refers to any more were lost by the worker, and are fed again. Raises UserError for a group that the worker does
        not hold, because it would be trained twice.
        """
        run_state = self._run_state
        for group in returned:
            # Groups without a name are not from the data source, and bring their own weight versions.
            taken = self._identify(group)
            if taken is None and group.feed_index:
                raise _returned_twice(group)
            self._release([group])
            self.adopt(group)
            run_state.journal.emit(self._generated(group, taken))
        run_state.mark_progress()
        for group in run_state.take_unused():
            run_state.feed(group)
            self._producer.skip(sequence_of(group))
            self._recycler.fail(
                group,
                "the worker of the rollout function took it and lost it: return it, give it back with "
                "data_source.add_samples, or drop it with data_source.discard",
            )

    def _identify(self, group: Group) -> TakenGroup | None:
        with self._run_state.journal.data_lock:
            return self._run_state.identify(group)

    def _release(self, groups: Sequence[Group]) -> None:
        """Remove groups from those that the rollout function holds."""
        with self._run_state.journal.data_lock:
            self._run_state.record_returned(groups)

    def _generated(self, group: Group, taken: TakenGroup | None) -> GroupGenerated:
        clock = self._run_state.clock
        return GroupGenerated(
            time=clock.time(),
            sequence=sequence_of(group),
            generation_seconds=0.0 if taken is None else clock.monotonic() - taken.time,
            reward_seconds=0.0,
            versions=(group.oldest_version, max(group.versions)),
            response_tokens=group.response_tokens,
            reward=mean_reward([group]),
            truncated=sum(group.truncated),
            missing=len(trajectories_of(group.missing)),
            unfinished_rewards=len(group.unfinished_rewards),
            by_worker=True,
        )

    def refuse(self, group: Group, error: str) -> None:
        """Dead-letter a group of a rollout function that cannot be trained."""
        self._enter(group)
        self._recycler.dead_letter(group, DropReason.FAILED, error)

    def fail(self, group: Group, error: str) -> None:
        """End the attempt of a group whose generation failed in a rollout function."""
        self._enter(group)
        self._recycler.fail(group, error)

    def discard(self, group: Group, reason: str) -> None:
        """Drop a finished group that a rollout function rejected for `reason`."""
        self._enter(group)
        self._run_state.drop_filtered(group, reason)

    def _enter(self, group: Group) -> None:
        """Enter a group that a rollout function collected or generated, and that it does not return.

        Raises UserError for a group that was returned or given back before.
        """
        run_state = self._run_state
        with run_state.journal.data_lock:
            run_state.end_given_back()
            if group.sequence is None and (original := GroupsBySample(run_state.leased_groups).find(group)) is not None:
                run_state.replace(original, group)
            if group.sequence is None:
                held = run_state.identify(group) is not None or not run_state.is_handed_on(group)
            else:
                held = run_state.is_collected(group)
            if not held:
                raise UserError(
                    f"the rollout function dropped group {group.feed_index}, which it had returned or given back: drop "
                    "only groups that it holds"
                )
            run_state.record_returned([group])
        if group.sequence is None:
            self.adopt(group)

    def adopt(self, group: Group) -> None:
        """Enter a finished group that was generated outside the pipeline; it is leased at once.

        If a rollout function made up its prompt, nothing else knows what a complete group is.
        """
        group.complete(group[:1] * self._samples_per_group)
        self._run_state.adopt(group)
        self._producer.skip(sequence_of(group))

    def sweep_queue(self) -> None:
        """Recycle queued groups that are too stale already, so that they are regenerated at once."""
        for group in self._producer.queue.sweep(self._must_be_recycled):
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

    def _choose(self, choose: Choose, groups: list[Group], size: int) -> list[Group]:
        """Keep the first `size` groups in the order of the over-sampling filter, and drop the others."""
        # By identity: a filter may return the groups in another order, several times, or leave some out.
        positions = IdentityMap((group, position) for position, group in enumerate(groups))
        try:
            order = [positions[group] for group in choose(list(groups)) if group in positions]
        except USER_CODE_ERRORS as error:
            # A user's code may raise anything, and may return something that is not a list of groups.
            raise UserError(
                f"over_sampling_filter_path raised {shown(error)}, or returned no list: return the groups it was "
                "given, best first"
            ) from error
        kept = sorted(dict.fromkeys(order[:size]))
        if len(kept) < size:
            raise UserError(
                f"over_sampling_filter_path returned {len(kept)} of the {len(groups)} groups it was given: return at "
                f"least rollout_batch_size={size} of them, best first, each once"
            )
        for position in set(positions.values()).difference(kept):
            self._run_state.drop_filtered(groups[position], "over_sampling")
        return [groups[position] for position in kept]

    def _must_be_recycled(self, group: Group) -> bool:
        return self._gate.too_old(self._run_state.age_of(group))

    def _recycle(self, group: Group) -> None:
        self._recycler.retry(
            group,
            DropReason.STALE,
            f"its oldest token, of version {group.oldest_version}, is {self._run_state.age_of(group)} weight versions "
            f"old, and --max-weight-staleness is {self._gate.limit}",
        )


def _returned_twice(group: Group) -> UserError:
    return UserError(
        f"the rollout function returned group {group.feed_index} a second time: return each group once, and return no "
        "group that was given back with data_source.add_samples"
    )


class GroupsBySample:
    """Finds the group to which given samples belong: the same objects, or copies with the same indices."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._by_object: IdentityMap[Sample, Group] = IdentityMap()
        self._by_index: dict[int, Group] = {}
        for group in groups:
            self._by_object.update((sample, group) for sample in group)
            self._by_index |= {sample.index: group for sample in group if sample.index is not None}

    def find(self, samples: Group) -> Group | None:
        """The group that all `samples` come from; None if there is no such group."""
        first, *others = map(self._group_of, samples)
        return first if all(other is first for other in others) else None

    def _group_of(self, sample: Sample) -> Group | None:
        group = self._by_object.get(sample)
        return group if group is not None or sample.index is None else self._by_index.get(sample.index)

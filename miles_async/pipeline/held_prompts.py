"""The prompts that a rollout function holds: it takes them, generates by itself, and returns them whenever it likes.

Functions written for slime return new lists of the samples, copies of samples, groups of a later call, or nothing at
all. This file finds out which prompt each returned sample belongs to, and enters the groups into the lifecycle. Shipped
functions need it as well: supervised examples are taken and adopted, and posted groups are adopted. The rest of the
pipeline does not know about it, and without such a function nothing here has an effect.

    take                 the function gets prompts from the data source
    collect              it gets groups that the pipeline has generated
    give_back            it returns prompts or groups to the data source
    refuse, fail, drop   it ends attempts
    reconcile            its result is the batch: taken groups are adopted, collected ones that are missing are dropped
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import structlog

from miles_async.errors import UserError
from miles_async.identity import IdentityMap, WeakIdentityMap
from miles_async.pipeline.grading import generated_event
from miles_async.pipeline.lifecycle import GroupLifecycle, sequence_of
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason, Group, Sample

log = structlog.get_logger(__name__)

GARBAGE_COLLECTION_SECONDS = 10.0
"""Time between two garbage collections for a worker that gets no more prompts."""
LOST_BY_WORKER = (
    "the worker of the rollout function took it and lost it: return it, give it back with data_source.add_samples, or "
    "drop it with data_source.discard"
)


class TakenGroup(NamedTuple):
    """A group that a rollout function took from the data source."""

    copy: Group
    """The group as it was when it was taken."""
    samples: list[ref[Sample]]
    """The samples that the function received."""
    version: int
    """The live weight version when it was taken."""
    time: float
    """When it was taken (`Clock.monotonic`)."""

    @property
    def in_use(self) -> bool:
        """Whether anything still refers to one of the samples."""
        return any(sample() is not None for sample in self.samples)


class TakenGroups:
    """Finds taken groups by their samples, which it does not keep alive: the function decides how long they live."""

    def __init__(self) -> None:
        self._groups: dict[str, TakenGroup] = {}
        """By feed index."""
        self._names: WeakIdentityMap[Sample, str] = WeakIdentityMap()
        """The feed index of the group of each sample."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def copies(self) -> list[Group]:
        """The groups as they were when they were taken."""
        return [taken.copy for taken in self._groups.values()]

    @property
    def in_use(self) -> int:
        """Number of groups to whose samples anything still refers."""
        return sum(taken.in_use for taken in self._groups.values())

    def add(self, group: Group, version: int, now: float) -> Group:
        """Remember a copy of the group, because the function may change it at any time. Returns the copy."""
        samples = [replace(sample, metadata=dict(sample.metadata), tokens=copy(sample.tokens)) for sample in group]
        kept = Group(samples, feed_index=group.feed_index, attempt=group.attempt)
        self.pop(group.feed_index)
        self._groups[group.feed_index] = TakenGroup(kept, [ref(sample) for sample in group], version, now)
        for sample in group:
            self._names[sample] = group.feed_index
        return kept

    def named(self, feed_index: str) -> TakenGroup | None:
        """The taken group of this name; None if there is none."""
        return self._groups.get(feed_index)

    def find(self, sample: Sample) -> TakenGroup | None:
        """The taken group that `sample`, or the original of a copied sample, belongs to; None if it was not taken."""
        return self.named(sample.metadata.get("feed_index", "")) or self._containing(sample)

    def _containing(self, sample: Sample) -> TakenGroup | None:
        """The taken group that contains `sample` itself, and not a copy of it."""
        return self.named(self._names.get(sample) or "")

    def remove(self, group: Group) -> None:
        """Forget the group of this name, and the groups that contain one of its samples."""
        self.pop(Group.of(group).feed_index)
        # A function may return new lists of the samples, which have no feed index.
        for sample in group:
            if (taken := self._containing(sample)) is not None:
                self.pop(taken.copy.feed_index)

    def pop(self, feed_index: str) -> TakenGroup | None:
        """Remove and return the group of this name; None if there is none."""
        taken = self._groups.pop(feed_index, None)
        for sample in () if taken is None else filter(None, (taken_sample() for taken_sample in taken.samples)):
            # The function may have put the sample into another group that it took.
            if self._names.get(sample) == feed_index:
                self._names.pop(sample)
        return taken

    def pop_unused(self) -> list[Group]:
        """Remove the groups to whose samples nothing refers any more. Returns them as they were when taken.

        A worker thread of the user may still hold other groups, which a later call of the function returns.
        """
        unused = [name for name, taken in self._groups.items() if not taken.in_use]
        return [taken.copy for taken in map(self.pop, unused) if taken is not None]


@dataclass(eq=False, repr=False)
class HeldPrompts:
    """What a rollout function holds, and how it comes back.

    The function may run in another thread: `take`, `give_back`, `version_when_taken` and what they call hold
    `journal.data_lock`. Everything else is called from the event loop.
    """

    run_state: RunState
    lifecycle: GroupLifecycle
    data: DataSource
    skip: Callable[[int], None]
    """Lets the window pass a sequence number."""
    samples_per_group: int
    limit: int
    """The most groups that a function that keeps groups may hold and have in batches."""
    keeps_groups: bool | None
    """What the function declares. Without a declaration, it keeps groups if it holds prompts after its last call."""

    def __post_init__(self) -> None:
        self._journal = self.run_state.journal
        self._keeps_groups_now = bool(self.keeps_groups)
        self._garbage_collected_at = -GARBAGE_COLLECTION_SECONDS
        self._loop: asyncio.AbstractEventLoop
        """The loop in which the function collected groups."""
        self.taken = TakenGroups()
        self._collected: dict[int, Group] = {}
        """Groups that the function collected and has neither returned nor given back, by sequence number."""
        self._given_back: list[tuple[Group, Group]] = []
        """Groups that the function collected and gave back, and the groups that the data source has instead."""
        self._handed_on: set[str] = set()
        """Feed indices of groups that the function held, and that it returned or gave back. There is one for each
        prompt, so that a group that comes a second time, however late, is recognised."""

    def take(self, count: int) -> list[Group]:
        """Take up to `count` groups from the data source. Callable from any thread."""
        with self._journal.data_lock:
            groups = self.data.get_samples(min(count, self._room(count)))
            self.record_taken(groups)
        for sample in chain.from_iterable(groups):
            sample.use_lists()
        return groups

    def record_taken(self, groups: Iterable[Group]) -> None:
        """Remember groups that the function takes, with `data_lock` held."""
        for group in groups:
            copy = self.taken.add(group, self.run_state.live_version, self.run_state.clock.monotonic())
            self._handed_on.discard(group.feed_index)
            self._journal.track_prompt(copy)

    def _room(self, wanted: int) -> int:
        """Number of groups that may be taken now, out of `wanted`."""
        if not self._keeps_groups_now:
            return wanted
        room = self.limit - self._held_groups
        now = self.run_state.clock.monotonic()
        if room <= 0 and now - self._garbage_collected_at >= GARBAGE_COLLECTION_SECONDS:
            # The traceback of an error can keep the samples of a group alive that the worker has lost.
            self._garbage_collected_at = now
            gc.collect()
            room = self.limit - self._held_groups
        return max(0, room)

    @property
    def _held_groups(self) -> int:
        """Number of groups that count against the limit: those that the worker holds, and those that are trained.

        A group is held while anything refers to its samples.
        """
        counts = self.lifecycle.ledger.counts
        in_batches = counts[GroupState.QUEUED] + counts[GroupState.LEASED] + counts[GroupState.TRAINED]
        return in_batches + self.taken.in_use

    def version_when_taken(self, sample: Sample) -> int | None:
        """The live weight version when the sample's prompt was taken; None if it was not. Callable from any thread."""
        with self._journal.data_lock:
            taken = self.taken.find(sample)
        return None if taken is None else taken.version

    def collect(self, groups: Sequence[Group], offered: Sequence[Group] = ()) -> None:
        """Remember groups that the function collects, because it may give some of them back.

        `offered` are the groups from which an over-sampling filter chose. Nothing needs the prompts of the others any
        more, so a function that still holds them may give them back.
        """
        self._loop = asyncio.get_running_loop()
        self.lifecycle.before_attempt = self.end_given_back
        with self._journal.data_lock:
            for group in groups:
                self._collected[sequence_of(group)] = group
            self._handed_on.difference_update(group.feed_index for group in (*groups, *offered))

    def give_back(self, groups: Iterable[Group]) -> None:
        """Return groups to the data source, with the tokens that they have. Callable from any thread.

        A group that the function no longer holds is not added a second time. A taken or collected group gets the
        samples back that it lacks. Raises UserError if any other group is incomplete.
        """
        with self._journal.data_lock:
            for group in groups:
                self._give_back(group)

    def _give_back(self, group: Group) -> None:
        collected = self._collected_as(group)
        if collected is None and self._identify(group) is None and self._is_elsewhere(group):
            log.warning("a group was given back that the rollout function no longer holds", group=group.feed_index)
            return
        # The function keeps its own list, whose sequence number is that of the attempt that ends here.
        again = Group(group, feed_index=group.feed_index, attempt=group.attempt)
        # The data source returns the samples without which the group would have been trained.
        again.missing += group.missing
        if collected is not None:
            again.feed_index, again.attempt = collected.feed_index, collected.attempt
            again.complete(collected.prompts)
        self.data.add_samples([again])
        if collected is None:
            self.record_returned([group])
            self._journal.track_prompt(again)
            return
        self._hand_on([collected])
        self._given_back.append((collected, again))
        with suppress(RuntimeError):  # the run has ended
            self._loop.call_soon_threadsafe(self.end_given_back)

    def _collected_as(self, group: Group) -> Group | None:
        """The collected group that the function gives back, itself or as a new list or a copy; None if it is none."""
        groups = self._collected.values()
        if group.sequence is not None:
            return self._collected.get(group.sequence)
        if group.feed_index:
            return next((one for one in groups if one.feed_index == group.feed_index), None)
        return GroupsBySample(groups).find(group) if groups else None

    def _is_elsewhere(self, group: Group) -> bool:
        """Whether the run has a group that the function does not hold: it waits, is in progress, or is trained."""
        if group.sequence is not None and self.lifecycle.state_of(group) is not None:
            return True
        if not group.feed_index or group.feed_index in self._handed_on:
            return bool(group.feed_index)
        # A function may have kept its groups in a file while the rollout worker was replaced.
        groups = (*self.data.returned(), *self.lifecycle.live_groups)
        return any(one.feed_index == group.feed_index for one in groups)

    def end_given_back(self) -> None:
        """End the attempts at groups that were given back: the slots are free, and the prompts wait in the data."""
        with self._journal.data_lock:
            for group, again in self._given_back:
                tokens = min(group.response_tokens, again.response_tokens)
                self.lifecycle.drop(group, DropReason.GIVEN_BACK, kept_tokens=tokens)
                # The function may have taken the prompt from the data source again.
                taken = self.taken.named(again.feed_index)
                self._journal.track_prompt(again if taken is None else taken.copy)
            self._given_back.clear()

    def snapshot(self) -> tuple[dict[str, Any], list[Group]]:
        """The position in the data, and the groups before it that the data source or the function has.

        No prompt is in both of them, and none is in neither.
        """
        with self._journal.data_lock:
            self.end_given_back()
            return self.data.position(), [*self.data.returned(), *self.taken.copies]

    def refuse(self, group: Group, error: str) -> None:
        """Dead-letter a group that the function returned and that cannot be trained."""
        self._enter(group)
        self.lifecycle.dead_letter(group, DropReason.FAILED, error)

    def fail(self, group: Group, error: str) -> None:
        """Requeue the prompt of a group whose generation failed, or dead-letter it after its last attempt."""
        self._enter(group)
        self.lifecycle.fail(group, error)

    def drop(self, group: Group, reason: str) -> None:
        """Drop a finished group that the function rejected for `reason`."""
        self._enter(group)
        self._reject(group, reason)

    def _enter(self, group: Group) -> None:
        """Enter a group that the function collected or generated, and that it does not return.

        Raises UserError for a group that was returned or given back before.
        """
        with self._journal.data_lock:
            self.end_given_back()
            if group.sequence is None and (original := self._leased().find(group)) is not None:
                self._replace(original, group)
            if group.sequence is None:
                held = self._identify(group) is not None or group.feed_index not in self._handed_on
            else:
                held = group.sequence in self._collected
            if not held:
                raise UserError(
                    f"the rollout function dropped group {group.feed_index}, which it had returned or given back: drop "
                    "only groups that it holds"
                )
            self.record_returned([group])
        if group.sequence is None:
            self._adopt(group)

    def reconcile(self, returned: Sequence[Group], leased_before: Sequence[Group]) -> None:
        """Enter the result of the function.

        `leased_before` are the groups that were leased before the call. A new list of the samples of a collected group
        (functions written for slime often return such lists) takes the place of that group. Groups that the function
        generated itself are adopted. Groups that it collected but did not return are dropped. Raises UserError for a
        group that was returned before.
        """
        lifecycle = self.lifecycle
        with self._journal.data_lock:
            # From now on the function cannot give back what it collected before.
            self.end_given_back()
            self._hand_on(list(self._collected.values()))
        leased = self._leased()
        kept = {sequence_of(group) for group in leased_before}
        for group in returned:
            if group.sequence is None and (original := leased.find(group)) is not None:
                self._replace(original, group)
            if group.sequence is None:
                self._enter_generated(group)
            elif group.sequence in kept or lifecycle.state_of(group) is not GroupState.LEASED:
                raise _returned_twice(group)
            kept.add(sequence_of(group))
        for group in lifecycle.groups_in(GroupState.LEASED):
            if group.sequence not in kept:
                self._reject(group, "rollout_function")
        with self._journal.data_lock:
            self.record_returned(returned)
        self._release_unused()

    def _enter_generated(self, group: Group) -> None:
        with self._journal.data_lock:
            taken = self._identify(group)
            # Groups without a name are not from the data source. A declared worker makes up no names.
            named = bool(group.feed_index) and self.keeps_groups is True
            if taken is None and (named or group.feed_index in self._handed_on):
                raise _returned_twice(group)
            self.record_returned([group])
        self._adopt(group)
        if self.keeps_groups is not False:
            clock = self.run_state.clock
            seconds = 0.0 if taken is None else clock.monotonic() - taken.time
            self._journal.emit(generated_event(group, clock.time(), seconds, 0.0, by_worker=True))
            self.run_state.durations.record(seconds)
            self.run_state.mark_progress()

    def _release_unused(self) -> None:
        """Release the prompts to which nothing refers any more.

        A function that generates in its calls holds nothing afterwards. It has dropped these prompts, as a dynamic
        filter does, and they are forgotten. A worker has lost them, and they are requeued.
        """
        with self._journal.data_lock:
            unused, kept_before = self.taken.pop_unused(), self._keeps_groups_now
            if self.keeps_groups is None:
                self._keeps_groups_now = bool(self.taken)
        for group in unused:
            # A worker may hold nothing at the moment, because garbage was collected that held all prompts it has lost.
            if not (self._keeps_groups_now or kept_before):
                self._journal.forget_prompt(group.feed_index)
                continue
            self.lifecycle.feed(group)
            self.skip(sequence_of(group))
            self.lifecycle.fail(group, LOST_BY_WORKER)

    def _adopt(self, group: Group) -> None:
        """Enter a finished group that the function generated.

        If the function made up its prompt, nothing else knows what a complete group is.
        """
        group.complete(group[:1] * self.samples_per_group)
        self.lifecycle.adopt(group)
        self.skip(sequence_of(group))

    def _reject(self, group: Group, reason: str) -> None:
        self.lifecycle.reject(group, reason)
        # Nothing needs the prompt any more, so a function that still holds the group may give it back.
        self._handed_on.discard(group.feed_index)

    def _leased(self) -> GroupsBySample:
        """Finds a leased group by its samples, which a function may return in a new list."""
        return GroupsBySample(self.lifecycle.groups_in(GroupState.LEASED))

    def _replace(self, group: Group, rebuilt: Group) -> None:
        """Let `rebuilt`, a new list of the samples of the live `group`, take the place of `group`."""
        rebuilt.sequence, rebuilt.feed_index, rebuilt.attempt = group.sequence, group.feed_index, group.attempt
        rebuilt.complete(group.prompts)
        self.lifecycle.register(rebuilt)

    def _identify(self, group: Group) -> TakenGroup | None:
        """Restore the name and the attempt of a taken group, because functions return new lists of its samples.

        Samples that the function left out become `missing`. Returns the group as it was taken, or None if it was not
        taken.
        """
        taken = self.taken.find(group[0]) if group else None
        if taken is not None:
            group.feed_index, group.attempt = taken.copy.feed_index, taken.copy.attempt
            group.complete(taken.copy.prompts)
        return taken

    def record_returned(self, groups: Sequence[Group]) -> None:
        """Forget groups that the function returned, to the data source or as its result, with `data_lock` held."""
        self._hand_on(groups)
        for group in groups:
            self.taken.remove(group)

    def _hand_on(self, groups: Iterable[Group]) -> None:
        """Remember the names of those groups that the function held."""
        for group in groups:
            collected = None if group.sequence is None else self._collected.pop(group.sequence, None)
            if group.feed_index and (collected is not None or self.taken.named(group.feed_index) is not None):
                self._handed_on.add(group.feed_index)


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

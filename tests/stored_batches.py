"""Numbered batches for the tests of the run store, and the state that follows from each."""

from __future__ import annotations

from miles_async.events import QueueChanged
from miles_async.ports import RunStore
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, GroupChange, StoredContent
from miles_async.types import Group, Sample, SampleStatus, VersionSpan

LIVE = 3
"""Groups that are live after a batch."""


def finished_group(number: int, tokens: int = 20) -> Group:
    samples = [
        Sample(
            index=2 * number + index,
            prompt=f"{number} + 1 =",
            label=str(number + 1),
            metadata={"number": number},
            tokens=[number % 100_000, *range(tokens)],
            response=f"{number + 1}",
            response_length=tokens,
            rollout_log_probs=[-1 / (number + position) for position in range(1, tokens + 1)],
            spans=[VersionSpan(number, 0, tokens)],
            reward=float(number),
            status=SampleStatus.COMPLETED,
        )
        for index in range(2)
    ]
    return Group(samples, feed_index=f"sample_0_{number}", sequence=number)


def batch(number: int, tokens: int = 20) -> Changes:
    """Group `number` finishes, the previous one is queued, and the oldest one is trained."""
    group = finished_group(number, tokens)
    groups = {
        number: GroupChange(
            feed_index=group.feed_index, attempt=0, state=GroupState.FINISHED, order=2 * number, content=group
        )
    }
    if number > 1:
        groups[number - 1] = GroupChange(
            feed_index=f"sample_0_{number - 1}", attempt=0, state=GroupState.QUEUED, order=2 * number - 1
        )
    return Changes(
        number=number,
        groups={**groups, number - LIVE: None},
        prompts={group.feed_index: group.prompt_dict(), f"sample_0_{number - LIVE}": None},
        progress={"batch": number, "state": {"window": [number, None, 0.1]}},
        events=[QueueChanged(time=0.1 * number, depth=number, blocked=0)] * 2,
        delivered=number - 2,
    )


async def check_state(store: RunStore, tokens: int = 20) -> int:
    """Return the number of the batch that led to the state of `store`; 0 for no batch. Fails for any other state."""
    stored = await store.read()
    if stored is None:
        return 0
    number = stored.number
    live = list(range(max(1, number - LIVE + 1), number + 1))
    assert [group.sequence for group in stored.groups] == live
    states = [GroupState.QUEUED] * (len(live) - 1) + [GroupState.FINISHED]
    assert [group.state for group in stored.groups] == states
    for group in stored.groups:
        assert group.feed_index == f"sample_0_{group.sequence}"
        assert group.content == StoredContent([group.sequence], 2 * tokens)
        assert await store.load(group.sequence) == finished_group(group.sequence, tokens)
    assert [prompt.feed_index for prompt in stored.prompts] == [f"sample_0_{sequence}" for sequence in live]
    assert stored.progress == batch(number).progress
    undelivered = range(max(1, number - 1), number + 1)
    assert list(stored.events) == [(earlier, list(batch(earlier).events)) for earlier in undelivered]
    return number

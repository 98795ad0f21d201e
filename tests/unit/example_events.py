"""Events that several tests start with."""

from __future__ import annotations

from miles_async.events import GroupMoved, PublishEnded, RunStarted

RUN = RunStarted(
    time=100.0,
    run="r",
    entry="train_async.py",
    rollouts=10,
    groups_per_rollout=4,
    samples_per_group=2,
    queue_capacity=1000,
    window=3,
    slots=8,
    in_flight=8,
    longest_response=16,
    model="tiny",
    configuration="one",
)
PUBLISHED = PublishEnded(
    time=101.0,
    version=5,
    live=True,
    staged_seconds=0.1,
    paused_seconds=0.1,
    stopping_seconds=0.0,
    write_seconds=0.1,
    resuming_seconds=0.0,
    bytes=1,
    queue=0,
    fenced=[],
)


def moved(
    sequence: int, before: str | None, after: str, reason: str | None = None, *, time: float = 101.0, tokens: int = 0
) -> GroupMoved:
    """A group changes its state; `tokens` of it are discarded."""
    return GroupMoved(
        time=time,
        sequence=sequence,
        feed_index=f"sample_0_{sequence}",
        attempt=0,
        before=before,
        after=after,
        reason=reason,
        counts=dict.fromkeys(("fed", "in_flight", "finished", "queued", "leased", "trained"), 0),
        discarded_tokens=tokens,
    )

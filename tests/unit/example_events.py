"""Events that several tests start with."""

from __future__ import annotations

from miles_async.events import RunStarted

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
)

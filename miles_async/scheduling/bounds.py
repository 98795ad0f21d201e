"""What a run's settings imply: window, slots, room, and how stale a trained group can get.

With B slots between admission and live weights and a window of W, at most B - 1 groups are ahead of a fresh group when
it is admitted and at most W - 1 younger ones pass it. So at most B + W - 2 groups are trained before it, P of them per
version, and it is trained at most `(B + W - 2) // P` versions after the one that sampled it. Solved for a limit S, this
gives `B = (S + 1) * P - (W - 1)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from miles_async.errors import WindowError


class Schedule(StrEnum):
    """Who waits for whom."""

    FULLY_ASYNC = "fully_async"
    """A producer and a trainer, coupled by the queue and the slots alone."""
    ONE_STEP_OFF = "one_step_off"
    """The next batch is generated while this one trains."""
    SYNCHRONOUS = "synchronous"
    """Generate, train, publish, and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """All counts are groups, but for `staleness`, which is in weight versions."""

    schedule: Schedule
    generation_batch: int
    """N: groups in flight at most."""
    window: int
    """W: `1` is strict FIFO, N is greedy."""
    window_asked: int
    """W before it was cut to leave slots for one publish (`B >= P`)."""
    publish_groups: int
    """P: groups trained per publish."""
    slots: int | None
    """B; None where nothing limits the groups between admission and live weights."""
    staleness: int | None
    """The oldest a freshly sampled group can be when trained; None where only room bounds it."""
    room: int
    """Groups in flight, held back by the window and queued at most: the effective queue cap."""

    @classmethod
    def derive(
        cls,
        *,
        rollout_batch_size: int,
        over_sampling_batch_size: int | None = None,
        windowed_fifo_ratio: float | None = None,
        max_weight_staleness: int | None = None,
        update_weights_interval: int = 1,
        queue_capacity: int = 1000,
        schedule: Schedule = Schedule.FULLY_ASYNC,
    ) -> Bounds:
        """The bounds of the given settings, which may still contradict each other: `config/checks` judges them.

        Without a ratio collection is as greedy as the limit allows: W = N, cut where N would leave fewer slots than P.
        """
        generation_batch = over_sampling_batch_size or rollout_batch_size
        window = asked = window_size(windowed_fifo_ratio, generation_batch)
        publish_groups = rollout_batch_size * update_weights_interval
        slots = None
        staleness = {Schedule.FULLY_ASYNC: None, Schedule.ONE_STEP_OFF: 1, Schedule.SYNCHRONOUS: 0}[schedule]
        if schedule is Schedule.FULLY_ASYNC and max_weight_staleness is not None:
            window = min(asked, max_weight_staleness * publish_groups + 1)
            slots = (max_weight_staleness + 1) * publish_groups - (window - 1)
            staleness = (slots + window - 2) // publish_groups
        return cls(
            schedule=schedule,
            generation_batch=generation_batch,
            window=window,
            window_asked=asked,
            publish_groups=publish_groups,
            slots=slots,
            staleness=staleness,
            room=queue_capacity if slots is None else min(queue_capacity, slots),
        )


def window_size(ratio: float | None, generation_batch: int) -> int:
    """`W = max(1, floor(ratio * N))`; None is greedy, W = N (seed `windowed-fifo`).

    In decimals, because 0.29 * 100 is 28.999… in binary and nobody who writes 0.29 means 28. Raises WindowError for a
    ratio outside [0, 1].
    """
    if ratio is None:
        return generation_batch
    if not 0 <= ratio <= 1:
        raise WindowError(f"windowed_fifo_ratio must lie in [0, 1], got {ratio}: 0 is strict FIFO, 1 is greedy")
    return max(1, int(Decimal(str(ratio)) * generation_batch))

"""How stale a trained group can get: the bound that admission guarantees, and the gate that enforces the limit.

Let B be the number of slots between admission and live weights, W the window and P the groups trained per publish. When
a fresh group is admitted, at most B - 1 groups are ahead of it, and at most W - 1 younger groups pass it later. So at
most B + W - 2 groups are trained before it, P of them per weight version. The group is trained at most
`(B + W - 2) // P` versions after the version that sampled it. Solving for a staleness limit S gives
`B = (S + 1) * P - (W - 1)`.

Staleness is measured when a group's batch enters the optimizer step: the number of weight updates between the oldest
version that sampled any of the group's tokens and the trainer's version (`scheduling/lineage.py`). Admission makes a
group past the limit rare (recycled and continued groups can exceed it); `StalenessGate` makes training on one
impossible.

With `--max-kv-staleness` K, a token may be sampled with keys and values of a version that is up to K older than the
weights (`adapters/sglang/key_versions.py` proves it), so the oldest version of a group is that of its oldest keys.
`B = (S - K + 1) * P - (W - 1)` keeps the weights within S - K versions, and therefore the keys within S. Without a
limit for keys, only the gate enforces S.

An adapter (`--lora-rank`) has a name per version, and a request keeps the version that it began with. An engine holds
at most S + 2 of them (`AdapterVersions.resident`):

1. Let a group be admitted while version a is live. While it is in flight it is not trained, so by the bound above at
   most S versions become live before it ends: the live version is at most a + S. It names a version that was live when
   its first request began, a or later. So while v is live, no group in flight names a version below v - S.
2. Before v + 1 is loaded, an engine drops all versions below v - S. It then holds S + 1 versions, v - S to v, and v + 1
   is one more. By step 1 none of the dropped versions is in use, so nothing has to be aborted or waited for.
3. Groups that step 1 does not cover (evaluations, continued groups, and groups that were in flight when the learner was
   rolled back) may name an older version. A publish waits until their requests have ended (`AdapterVersions`), which
   needs no publish. So the bound holds for them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from miles_async.errors import WindowError


class Schedule(StrEnum):
    """How generation and training overlap (`--schedule`)."""

    FULLY_ASYNC = "fully_async"
    """A producer generates all the time; only the queue and the slots couple it to the trainer."""
    ONE_STEP_OFF = "one_step_off"
    """The next batch is generated while the current batch trains."""
    SYNCHRONOUS = "synchronous"
    """Generation, training and publishing alternate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The sizes that follow from a run's settings, for each adapter if the run trains several.

    Counts are groups; `staleness` is weight versions.
    """

    generation_batch: int
    """N: the most groups in flight for each adapter. An adapter may have more while others have fewer."""
    window: int
    """W: 1 is strict FIFO; from N on, it is greedy unless groups wait for the learner."""
    requested_window: int
    """W before it was reduced to leave slots for one publish (`B >= P`)."""
    publish_groups: int
    """P: groups trained per publish."""
    slots: int | None
    """B; None if nothing limits the groups between admission and live weights."""
    staleness: int | None
    """The greatest staleness of a freshly sampled group, including that of its keys; None if only `room` bounds it, or
    if nothing bounds the age of the keys."""
    room: int
    """The effective capacity of the queue: groups in flight, blocked by the window and queued together."""
    held: int
    """The most groups that a rollout function which keeps groups may hold and have in batches."""

    adapters: int
    """The adapters that the run trains, each with its own window, slots and queue; 1 without adapters."""

    @property
    def in_flight(self) -> int:
        """The most groups in flight in the whole run."""
        return self.adapters * self.generation_batch

    @classmethod
    def derive(
        cls,
        *,
        rollout_batch_size: int,
        over_sampling_batch_size: int | None = None,
        windowed_fifo_ratio: float | None = None,
        max_weight_staleness: int | None = None,
        max_kv_staleness: int = 0,
        update_weights_interval: int = 1,
        queue_capacity: int = 1000,
        schedule: Schedule = Schedule.FULLY_ASYNC,
        adapters: int = 1,
    ) -> Bounds:
        """Derive the bounds from settings, which may contradict each other: `config/checks` reports contradictions.

        Without a window ratio, collection is as greedy as the staleness limit allows. The slots suffice for N groups
        in flight beside the P groups that are being trained: a larger window would make generation wait for training.
        With a limit of 1 and N = P this is strict FIFO. A higher limit first adds slots for another P groups, which
        wait for the learner, and then widens the window: more slots would only let groups grow old in the queue.
        Raises WindowError for a ratio outside [0, 1].
        """
        generation_batch = over_sampling_batch_size or rollout_batch_size
        publish_groups = rollout_batch_size * update_weights_interval
        held, greedy = queue_capacity, generation_batch
        key_age = max(max_kv_staleness, 0)
        limit = None if max_weight_staleness is None else max(max_weight_staleness - key_age, 0)
        if limit is not None:
            # W <= S * P - N + 1 is the same as B >= N + P.
            widest = max(1, limit * publish_groups - generation_batch + 1)
            held = min(held, (limit + 1) * publish_groups - (min(generation_batch, widest) - 1))
            # W <= widest - P is the same as B >= N + 2 * P.
            greedy = min(max(generation_batch, widest - publish_groups), widest)
        if windowed_fifo_ratio is None and schedule is Schedule.FULLY_ASYNC:
            window = requested = greedy
        else:
            window = requested = window_size(windowed_fifo_ratio, generation_batch)
        slots = None
        staleness = {Schedule.FULLY_ASYNC: None, Schedule.ONE_STEP_OFF: 1, Schedule.SYNCHRONOUS: 0}[schedule]
        if schedule is Schedule.FULLY_ASYNC and limit is not None:
            # W <= S * P + 1 is the same as B >= P: with fewer slots than one publish needs, the run would deadlock.
            window = min(requested, limit * publish_groups + 1)
            slots = (limit + 1) * publish_groups - (window - 1)
            staleness = (slots + window - 2) // publish_groups
        if staleness is not None:
            staleness = None if max_kv_staleness < 0 else staleness + key_age
        return cls(
            generation_batch=generation_batch,
            window=window,
            requested_window=requested,
            publish_groups=publish_groups,
            slots=slots,
            staleness=staleness,
            room=queue_capacity if slots is None else min(queue_capacity, slots),
            # The next batch may be collected before the groups of the last publish have left.
            held=max(held, publish_groups + rollout_batch_size),
            adapters=adapters,
        )


def window_size(ratio: float | None, generation_batch: int) -> int:
    """`W = max(1, floor(ratio * N))` (MiniMax Forge, arXiv 2605.26494, section 6.2.4); None is greedy, W = N.

    Raises WindowError for a ratio outside [0, 1].
    """
    if ratio is None:
        return generation_batch
    if not 0 <= ratio <= 1:
        raise WindowError(f"windowed_fifo_ratio must lie in [0, 1], got {ratio}: 0 is strict FIFO, 1 is greedy")
    # In decimal arithmetic, because 0.29 * 100 is 28.999... in binary and would be rounded down to 28.
    return max(1, int(Decimal(str(ratio)) * generation_batch))


@dataclass(frozen=True, slots=True)
class StalenessGate:
    """Decides whether a group is too stale to be trained."""

    limit: int | None
    """`--max-weight-staleness` in weight versions; None accepts every group."""

    def too_old(self, age: int) -> bool:
        """Whether a group whose oldest token, or its oldest keys, is `age` weight versions old exceeds the limit."""
        return self.limit is not None and age > self.limit

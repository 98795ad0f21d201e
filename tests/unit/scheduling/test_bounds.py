from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.errors import WindowError
from miles_async.scheduling.bounds import Bounds, Schedule, window_size
from miles_async.scheduling.window import FIFOWindow


@pytest.mark.parametrize(
    "ratio, generation_batch, window",
    [(0.0, 64, 1), (0.3, 64, 19), (0.3, 256, 76), (0.5, 1, 1), (1.0, 64, 64), (None, 64, 64), (0.29, 100, 29)],
)
def test_the_window_is_a_fraction_of_the_groups_in_flight(
    ratio: float | None, generation_batch: int, window: int
) -> None:
    assert window_size(ratio, generation_batch) == window


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_outside_zero_and_one_is_refused_by_value(ratio: float) -> None:
    with pytest.raises(WindowError, match=str(ratio)):
        window_size(ratio, 64)


def test_the_over_sampling_batch_size_is_the_number_of_groups_in_flight() -> None:
    assert Bounds.derive(rollout_batch_size=16).generation_batch == 16
    assert Bounds.derive(rollout_batch_size=16, over_sampling_batch_size=32).generation_batch == 32


def test_publishing_every_third_batch_makes_a_version_of_three_batches() -> None:
    bounds = Bounds.derive(rollout_batch_size=16, update_weights_interval=3, max_weight_staleness=1)
    assert bounds.publish_groups == 48
    assert bounds.slots == 2 * 48 - (16 - 1)


def test_a_limit_of_two_gives_three_batches_of_slots_minus_the_window() -> None:
    bounds = Bounds.derive(rollout_batch_size=32, windowed_fifo_ratio=0.3, max_weight_staleness=2)
    assert (bounds.window, bounds.slots, bounds.staleness) == (9, 3 * 32 - 8, 2)


def test_a_window_too_wide_for_the_limit_is_cut_until_a_publish_has_its_slots() -> None:
    bounds = Bounds.derive(
        rollout_batch_size=8, over_sampling_batch_size=64, windowed_fifo_ratio=1, max_weight_staleness=2
    )
    assert (bounds.requested_window, bounds.window, bounds.slots) == (64, 17, 8)


@pytest.mark.parametrize("limit, generated, window", [(1, 8, 1), (2, 8, 8), (2, 12, 5), (1, 12, 1)])
def test_without_a_ratio_generation_need_not_wait_for_training(limit: int, generated: int, window: int) -> None:
    bounds = Bounds.derive(rollout_batch_size=8, over_sampling_batch_size=generated, max_weight_staleness=limit)
    assert bounds.window == window
    assert bounds.slots is not None
    assert bounds.slots >= min(generated, limit * 8) + 8


@pytest.mark.parametrize("limit", [3, 4, 8, 16])
def test_without_a_ratio_a_higher_limit_widens_the_window_and_adds_no_slots(limit: int) -> None:
    bounds = Bounds.derive(rollout_batch_size=8, max_weight_staleness=limit)
    assert (bounds.window, bounds.slots, bounds.staleness) == ((limit - 1) * 8 - 8 + 1, 8 + 2 * 8, limit)


def test_without_a_limit_only_the_queue_bounds_the_groups_in_the_pipeline() -> None:
    bounds = Bounds.derive(rollout_batch_size=32, queue_capacity=100)
    assert (bounds.slots, bounds.staleness, bounds.room) == (None, None, 100)


def test_the_queue_never_needs_more_capacity_than_there_are_slots() -> None:
    assert Bounds.derive(rollout_batch_size=32, max_weight_staleness=1, queue_capacity=1000).room == 64
    assert Bounds.derive(rollout_batch_size=32, max_weight_staleness=1, queue_capacity=20).room == 20


@pytest.mark.parametrize("schedule, staleness", [(Schedule.ONE_STEP_OFF, 1), (Schedule.SYNCHRONOUS, 0)])
def test_batch_schedules_have_a_fixed_staleness_and_need_no_slots(schedule: Schedule, staleness: int) -> None:
    bounds = Bounds.derive(
        rollout_batch_size=8,
        over_sampling_batch_size=64,
        windowed_fifo_ratio=1,
        max_weight_staleness=1,
        schedule=schedule,
    )
    assert (bounds.staleness, bounds.slots, bounds.window) == (staleness, None, 64)


sizes: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    rollout_batch_size=st.integers(1, 6),
    over_sampling_batch_size=st.none() | st.integers(1, 20),
    windowed_fifo_ratio=st.none() | st.floats(0, 1),
    max_weight_staleness=st.integers(0, 4),
    update_weights_interval=st.integers(1, 3),
)


@given(sizes)
def test_the_bound_never_exceeds_the_limit_and_a_publish_always_has_its_slots(settings: dict[str, Any]) -> None:
    bounds = Bounds.derive(**settings)
    assert bounds.staleness is not None
    assert bounds.slots is not None
    assert bounds.staleness <= settings["max_weight_staleness"]
    assert bounds.slots >= bounds.publish_groups
    wider = bounds.slots - 1
    assert bounds.window == bounds.requested_window or wider < bounds.publish_groups


@given(sizes, st.integers(1, 4))
def test_keys_of_older_versions_take_part_of_the_limit(settings: dict[str, Any], keys: int) -> None:
    limit = settings["max_weight_staleness"] + keys
    bounds = Bounds.derive(**settings | {"max_weight_staleness": limit, "max_kv_staleness": keys})
    of_weights = Bounds.derive(**settings)
    assert of_weights.staleness is not None
    assert bounds.staleness == of_weights.staleness + keys <= limit
    assert (bounds.slots, bounds.window, bounds.held) == (of_weights.slots, of_weights.window, of_weights.held)


def test_keys_without_a_limit_leave_staleness_to_the_gate() -> None:
    bounds = Bounds.derive(rollout_batch_size=32, max_weight_staleness=2, max_kv_staleness=-1)
    assert bounds.staleness is None
    assert bounds.slots == Bounds.derive(rollout_batch_size=32, max_weight_staleness=2).slots


@given(sizes, st.integers(0, 2**32))
def test_no_order_of_finishing_and_publishing_makes_a_group_older_than_the_bound(
    settings: dict[str, Any], seed: int
) -> None:
    bounds = Bounds.derive(**settings)
    oldest = max(ages(bounds, settings["rollout_batch_size"], Random(seed), groups=40 * bounds.publish_groups))
    assert bounds.staleness is not None
    assert oldest <= bounds.staleness


def ages(bounds: Bounds, batch: int, random: Random, groups: int) -> list[int]:
    """Returns the ages of trained groups, in versions. Each next event is drawn at random from the possible ones."""
    window: FIFOWindow[int] = FIFOWindow(bounds.window)
    assert bounds.slots is not None
    in_flight: dict[int, int] = {}
    queue: deque[int] = deque()
    staged: deque[int] = deque()
    trained: list[int] = []
    admitted = held = trainer_version = live_version = since_publish = 0
    while len(trained) < groups:
        can = []
        if held < bounds.slots and len(in_flight) < bounds.generation_batch:
            can.append("admit")
        if in_flight:
            can.append("finish")
        if len(queue) >= batch:
            can.append("train")
        if staged:
            can.append("publish")
        match random.choice(can):
            case "admit":
                in_flight[admitted] = live_version
                admitted, held = admitted + 1, held + 1
            case "finish":
                # The head is slow: every group that can pass it does.
                sequence = random.choice(sorted(in_flight)[-2:])
                window.mark_completed(sequence, in_flight.pop(sequence))
                queue.extend(window.drain())
            case "train":
                trained += [trainer_version - queue.popleft() for _ in range(batch)]
                since_publish += batch
                if since_publish == bounds.publish_groups:
                    trainer_version, since_publish = trainer_version + 1, 0
                    staged.append(trainer_version)
            case "publish":
                live_version = staged.popleft()
                held -= bounds.publish_groups
    return trained


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_some_order_of_events_reaches_the_bound(ratio: float) -> None:
    bounds = Bounds.derive(rollout_batch_size=4, windowed_fifo_ratio=ratio, max_weight_staleness=1)
    assert max(max(ages(bounds, 4, Random(seed), groups=80)) for seed in range(50)) == bounds.staleness

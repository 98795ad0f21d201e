from __future__ import annotations

import pytest

from miles_async.compat.tutorial.windowed_fifo import WindowedFIFOCollector
from miles_async.errors import WindowError


def complete(collector: WindowedFIFOCollector[int], *positions: int) -> list[int]:
    for position in positions:
        collector.mark_completed(position, position)
    return list(collector.drain())


def test_a_window_of_one_is_strict_fifo() -> None:
    collector = WindowedFIFOCollector[int](total=4, window_size=1)
    assert complete(collector, 1, 2, 3) == []
    assert complete(collector, 0) == [0, 1, 2, 3]
    assert collector.exhausted


def test_a_window_of_the_whole_batch_is_greedy() -> None:
    collector = WindowedFIFOCollector[int](total=4, window_size=4)
    assert complete(collector, 3) == [3]
    assert complete(collector, 1, 0) == [0, 1]


def test_a_finished_group_past_the_window_waits_until_the_head_moves() -> None:
    collector = WindowedFIFOCollector[int](total=8, window_size=3)
    assert complete(collector, 2, 3) == [2]
    assert collector.blocked == 1
    assert complete(collector, 0) == [0, 3]
    assert collector.head == 1


def test_collecting_a_younger_group_does_not_slide_the_window() -> None:
    collector = WindowedFIFOCollector[int](None, window_size=3)
    assert complete(collector, 1, 2) == [1, 2]
    assert complete(collector, 3, 4, 5) == [], "position 0 is still the head: only 1 and 2 may pass it"
    assert complete(collector, 0) == [0, 3, 4, 5]


def test_collectable_groups_are_returned_in_queue_order() -> None:
    collector = WindowedFIFOCollector[int](total=5, window_size=5)
    assert complete(collector, 4, 2, 0, 3, 1) == [0, 1, 2, 3, 4]


def test_a_dropped_head_counts_as_consumed() -> None:
    collector = WindowedFIFOCollector[int](total=3, window_size=1)
    complete(collector, 1)
    collector.drop(0)
    assert list(collector.drain()) == [1]


def test_a_dropped_group_is_replaced_by_the_next_group() -> None:
    collector = WindowedFIFOCollector[int](None, window_size=2)
    assert complete(collector, 2) == []
    collector.drop(1)
    assert list(collector.drain()) == [2]
    assert complete(collector, 3) == [], "0 and the collected 2 fill the window"


def test_drops_past_the_window_do_not_widen_it() -> None:
    collector = WindowedFIFOCollector[int](None, window_size=2)
    collector.drop(2)
    collector.drop(3)
    assert complete(collector, 4) == []
    assert complete(collector, 0) == [0, 4], "with 0 gone, 1 and 4 are the first two that count"
    assert complete(collector, 1) == [1]
    assert collector.head == 5


def test_closing_returns_the_groups_that_the_window_held_back() -> None:
    collector = WindowedFIFOCollector[int](total=4, window_size=1)
    complete(collector, 3, 2)
    assert collector.close() == [2, 3]
    assert collector.blocked == 0
    with pytest.raises(WindowError, match="after close"):
        collector.drain()
    with pytest.raises(WindowError, match="position 0 after close"):
        collector.mark_completed(0, 0)


@pytest.mark.parametrize("total, window", [(0, 1), (-1, 1), (4, 0), (4, -2)])
def test_a_total_or_window_below_one_is_refused_by_value(total: int, window: int) -> None:
    with pytest.raises(WindowError, match=str(min(total, window))):
        WindowedFIFOCollector(total, window)


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(WindowError, match=f"position {position} is outside"):
        WindowedFIFOCollector[int](total=4, window_size=2).mark_completed(position, 0)


def test_a_position_can_end_only_once() -> None:
    collector = WindowedFIFOCollector[int](total=4, window_size=2)
    complete(collector, 0, 1)
    collector.drop(2)
    for position in (0, 1, 2):
        with pytest.raises(WindowError, match=f"position {position} was completed"):
            collector.mark_completed(position, position)
        with pytest.raises(WindowError, match=f"position {position} was completed"):
            collector.drop(position)


def test_window_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="window_size"):
        WindowedFIFOCollector(4, 0)

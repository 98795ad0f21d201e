"""How long the groups of a run take, from those that have ended."""

from __future__ import annotations

import random

from miles_async.scheduling.durations import FIRST_GROUPS, GroupDurations


def test_nothing_is_known_before_enough_groups_have_ended() -> None:
    durations = GroupDurations()
    for sequence in range(FIRST_GROUPS):
        assert durations.slow_seconds is None
        durations.record(1.0, sequence)
        durations.pass_head(sequence + 1)
    assert durations.slow_seconds == 2.0


def test_groups_that_overtook_the_head_do_not_count_before_it_has_ended() -> None:
    durations = GroupDurations()
    for sequence in range(1, 10 * FIRST_GROUPS):
        durations.record(1.0, sequence)
    durations.pass_head(0)
    assert durations.slow_seconds is None
    durations.record(300.0, 0)
    durations.pass_head(10 * FIRST_GROUPS)
    assert durations.slow_seconds == 2.0, "one slow group of 500 is not usual"


def test_hardly_any_group_takes_longer_than_the_estimate() -> None:
    rng, durations = random.Random(0), GroupDurations()
    seconds = [rng.lognormvariate(0.0, 0.5) for _ in range(5000)]
    longer = 0
    for sequence, duration in enumerate(seconds):
        longer += durations.slow_seconds is not None and duration > durations.slow_seconds
        durations.record(duration, sequence)
        durations.pass_head(sequence + 1)
    assert longer <= 5


def test_groups_without_an_order_count_at_once_and_old_ones_are_forgotten() -> None:
    durations = GroupDurations()
    for _ in range(1000):
        durations.record(100.0)
    assert durations.slow_seconds == 200.0
    for _ in range(1000):
        durations.record(1.0)
    assert durations.slow_seconds == 2.0

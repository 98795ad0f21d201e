from __future__ import annotations

from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.types import EngineLoad

IDLE = [EngineLoad(source="e0", kv_usage=0.5, queued=0, generated=0, held=0)]
FULL_CACHE = [*IDLE, EngineLoad(source="e1", kv_usage=0.95, queued=0, generated=0, held=0)]
LONG_LINE = [*IDLE, EngineLoad(source="e1", kv_usage=0.2, queued=40, generated=0, held=0)]


def test_one_full_engine_halves_the_limit() -> None:
    for loads in (FULL_CACHE, LONG_LINE):
        limit = AdaptiveConcurrency(64)
        limit.observe(loads, in_flight=64, ended=0)
        assert limit.limit == 32


def test_the_limit_changes_once_per_round() -> None:
    limit = AdaptiveConcurrency(64)
    limit.observe(FULL_CACHE, in_flight=64, ended=10)
    limit.observe(FULL_CACHE, in_flight=50, ended=41)
    assert limit.limit == 32
    limit.observe(FULL_CACHE, in_flight=32, ended=42)
    assert limit.limit == 16


def test_a_limit_that_holds_admission_back_grows_by_a_sixteenth_per_round_up_to_n() -> None:
    limit = AdaptiveConcurrency(64)
    limit.observe(FULL_CACHE, in_flight=64, ended=0)
    sizes: list[int] = []
    for _ in range(10):
        limit.observe(IDLE, in_flight=limit.limit, ended=10_000 * (len(sizes) + 1))
        sizes.append(limit.limit)
    assert sizes == [36, 40, 44, 48, 52, 56, 60, 64, 64, 64]


def test_a_limit_that_is_never_reached_stays_unchanged() -> None:
    limit = AdaptiveConcurrency(64)
    limit.observe(FULL_CACHE, in_flight=64, ended=0)
    limit.observe(IDLE, in_flight=20, ended=10_000)
    assert limit.limit == 32


def test_an_overload_counts_from_what_is_in_flight_and_never_goes_below_one() -> None:
    limit = AdaptiveConcurrency(64)
    limit.observe(FULL_CACHE, in_flight=10, ended=0)
    assert limit.limit == 5
    for ended in (100, 200, 300, 400):
        limit.observe(FULL_CACHE, in_flight=1, ended=ended)
    assert limit.limit == 1


def test_without_answers_the_limit_stays_unchanged() -> None:
    limit = AdaptiveConcurrency(64)
    limit.observe([], in_flight=64, ended=0)
    assert limit.limit == 64

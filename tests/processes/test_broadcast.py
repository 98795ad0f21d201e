"""Weights by broadcast, to engines in other processes: what engines that die, refuse or wait do to the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import Weights
from miles_async.types import SendOutcome
from tests.broadcast_engine import BroadcastEngine, broadcast_engines, held_here
from tests.waiting import PATIENCE_SECONDS, wait_until

MIB = 1 << 20
TENSORS = [(f"layer.{i}", torch.randn(4 * MIB)) for i in range(4)]
"""16 MiB each: a connection cannot take a tensor that the engine does not receive."""


@pytest.fixture
def engines() -> Iterator[list[BroadcastEngine]]:
    with broadcast_engines("a", "b") as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


MakeSource = Callable[..., WeightSource]


@pytest.fixture
def make_source(tmp_path: Path) -> Iterator[MakeSource]:
    made: list[WeightSource] = []

    def make(
        *engines: BroadcastEngine,
        rank: int = 0,
        sources: int = 1,
        timeout: float = PATIENCE_SECONDS,
        bucket: int = 64 * MIB,
    ) -> WeightSource:
        """A source that is connected to the engines and has staged version 1."""
        settings = Weights(
            update_weight_buffer_size=bucket,
            check_weight_update_equal=True,
            update_weight_timeout_seconds=timeout,
        )
        source = WeightSource(describe(TENSORS), tmp_path, settings, rank=rank, sources=sources)
        made.append(source)
        source.connect([engine.info for engine in engines], {engine.info.name: "broadcast" for engine in engines})
        source.stage(1, TENSORS, ["broadcast"])
        return source

    yield make
    for source in made:
        source.close()


def send(source: WeightSource, engine: BroadcastEngine) -> SendOutcome:
    return source.send(1, engine.info.name, "broadcast")


def test_a_hundred_reconnects_leave_nothing_behind(make_source: MakeSource) -> None:
    """In neither process. Every tenth time, the engine dies while it is connected."""
    with broadcast_engines("a") as running:
        [engine] = running
        source = make_source(engine)
        source.connect([], {})
        before, before_there = held_here(), engine.held()
        for number in range(100):
            source.connect([engine.info], {"a": "broadcast"})
            if number % 10 == 9:
                assert send(source, engine).error is None
                engine.kill()
                source.connect([], {})
                engine = running[0] = BroadcastEngine("a")
            else:
                source.connect([], {})
        gc.collect()
        # A thread ends shortly after its result is known.
        wait_until(lambda: held_here() == before, f"{before} are left, and not {held_here()}")
        assert engine.held() == before_there


def test_an_engine_that_dies_in_the_middle_of_a_broadcast_fails_only_its_own_send(
    engines: list[BroadcastEngine], make_source: MakeSource, pool: ThreadPoolExecutor
) -> None:
    dying, other = engines
    source = make_source(other)
    before = held_here()
    source.connect([dying.info, other.info], {"a": "broadcast"})
    dying.may_join.clear()
    sending = pool.submit(send, source, dying)
    assert dying.asked.wait(PATIENCE_SECONDS)
    dying.kill()
    lost = sending.result(PATIENCE_SECONDS)
    assert lost.error is not None
    assert lost.final
    assert send(source, other).error is None
    source.connect([other.info], {})
    pool.shutdown()
    wait_until(lambda: held_here() == before, f"{before} are left, and not {held_here()}")


def test_a_broadcast_that_an_engine_does_not_join_in_time_fails_only_its_own_send(
    engines: list[BroadcastEngine], make_source: MakeSource
) -> None:
    hanging, other = engines
    source = make_source(hanging, other, timeout=5.0)
    hanging.may_join.clear()
    outcome = send(source, hanging)
    assert outcome.error is not None
    assert outcome.final
    assert send(source, other).error is None
    hanging.kill()


def test_a_refused_broadcast_is_repeated_over_a_new_connection(
    engines: list[BroadcastEngine], make_source: MakeSource
) -> None:
    engine, _ = engines
    source = make_source(engine)
    engine.refuse_next()
    refused = send(source, engine)
    assert refused.error is not None
    assert "refused" in refused.error
    assert not refused.final
    assert send(source, engine).error is None


def test_several_sources_connect_and_send_to_several_engines_at_once(
    make_source: MakeSource, pool: ThreadPoolExecutor
) -> None:
    """Engines take the requests of the sources in any order, and sources reach the engines in opposite orders."""
    with broadcast_engines("a", "b", "c") as three:
        orders = (three, three[::-1])

        def connect(rank: int) -> WeightSource:
            return make_source(*orders[rank], rank=rank, sources=2, bucket=16 * MIB)

        sources = list(pool.map(connect, range(2)))
        for _ in range(3):
            sending = [pool.submit(send, sources[rank], engine) for rank in range(2) for engine in orders[rank]]
            assert [one.result(PATIENCE_SECONDS).error for one in sending] == [None] * 6


def test_a_source_asks_the_next_engine_only_when_a_broadcast_has_ended(
    engines: list[BroadcastEngine], make_source: MakeSource, pool: ThreadPoolExecutor
) -> None:
    """Otherwise the kernels of several broadcasts could wait for each other on several GPUs."""
    first, second = engines
    source = make_source(first, second)
    first.may_join.clear()
    sending = pool.submit(send, source, first)
    assert first.asked.wait(PATIENCE_SECONDS)
    sending_next = pool.submit(send, source, second)
    asked_early = second.asked.wait(0.3)
    first.may_join.set()
    assert [one.result(PATIENCE_SECONDS).error for one in (sending, sending_next)] == [None, None]
    assert not asked_early
    assert first.times()["joined"] < second.times()["asked"]


def test_the_next_engine_receives_while_one_loads(
    engines: list[BroadcastEngine], make_source: MakeSource, pool: ThreadPoolExecutor
) -> None:
    loading, other = engines
    source = make_source(loading, other)
    loading.may_load.clear()
    sending = pool.submit(send, source, loading)
    assert loading.asked.wait(PATIENCE_SECONDS)
    assert send(source, other).error is None
    assert not sending.done()
    loading.may_load.set()
    assert sending.result(PATIENCE_SECONDS).error is None

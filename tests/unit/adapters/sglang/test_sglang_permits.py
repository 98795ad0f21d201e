"""Permits for requests at the engines: order, limit and closing."""

from __future__ import annotations

import asyncio

from miles_async.adapters.sglang.permits import Permits


async def visit(permits: Permits, count: int, log: list[str], name: str, leave: asyncio.Event) -> None:
    async with permits.take(count) as entered:
        log.append(f"{name} {'in' if entered else 'refused'}")
        await leave.wait()


async def test_groups_enter_whole_and_in_order_of_arrival() -> None:
    log: list[str] = []
    permits, leave = Permits(lambda: 4), asyncio.Event()
    a = asyncio.create_task(visit(permits, 3, log, "a", leave))
    b = asyncio.create_task(visit(permits, 4, log, "b", asyncio.Event()))
    c = asyncio.create_task(visit(permits, 1, log, "c", asyncio.Event()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # c would fit, and still waits behind b.
    assert log == ["a in"]
    assert permits.in_flight == 3
    leave.set()
    await a
    await asyncio.sleep(0)
    assert log == ["a in", "b in"]
    for task in (b, c):
        task.cancel()
    await asyncio.gather(b, c, return_exceptions=True)
    assert permits.in_flight == 0


async def test_the_number_of_permits_follows_the_number_of_engines() -> None:
    log: list[str] = []
    engines = ["a"]
    permits = Permits(lambda: 2 * len(engines))
    stay = [asyncio.Event() for _ in range(4)]
    visits = [asyncio.create_task(visit(permits, 2, log, str(n), stay[n])) for n in range(2)]
    await asyncio.sleep(0)
    assert permits.in_flight == 2
    engines.append("b")
    visits.append(asyncio.create_task(visit(permits, 2, log, "2", stay[2])))
    await asyncio.sleep(0)
    assert permits.in_flight == 4
    engines.pop()
    stay[0].set()
    await visits[0]
    await asyncio.sleep(0)
    assert permits.in_flight == 2, "nobody enters before there is room among fewer"
    for event in stay:
        event.set()
    await asyncio.gather(*visits)
    assert log == ["0 in", "1 in", "2 in"]


async def test_closing_refuses_current_and_later_waiters() -> None:
    log: list[str] = []
    permits, leave = Permits(lambda: 1), asyncio.Event()
    leave.set()
    stay = asyncio.Event()
    inside = asyncio.create_task(visit(permits, 1, log, "inside", stay))
    waiting = asyncio.create_task(visit(permits, 1, log, "waiting", leave))
    await asyncio.sleep(0)
    assert permits.in_line == 1
    permits.close()
    await waiting
    assert permits.in_line == 0
    await visit(permits, 1, log, "late", leave)
    assert sorted(log) == ["inside in", "late refused", "waiting refused"]
    permits.open()
    stay.set()
    await inside
    await visit(permits, 1, log, "again", leave)
    assert log[-1] == "again in"


async def test_a_cancelled_waiter_takes_no_permit() -> None:
    log: list[str] = []
    permits = Permits(lambda: 1)
    inside = asyncio.create_task(visit(permits, 1, log, "inside", asyncio.Event()))
    waiting = asyncio.create_task(visit(permits, 1, log, "waiting", asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    inside.cancel()
    await asyncio.gather(inside, waiting, return_exceptions=True)
    assert permits.in_flight == 0
    async with permits.take(1) as entered:
        assert entered


async def test_busy_time_counts_only_while_a_permit_is_held() -> None:
    permits = Permits(lambda: 2)
    assert permits.busy_seconds == 0
    async with permits.take(1):
        await asyncio.sleep(0.02)
    busy = permits.busy_seconds
    assert busy >= 0.02
    await asyncio.sleep(0.02)
    assert permits.busy_seconds == busy

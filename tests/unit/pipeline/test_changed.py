from __future__ import annotations

import asyncio

from miles_async.pipeline.tasks import ChangeSignal


async def test_a_waiter_wakes_when_its_condition_holds_and_not_before() -> None:
    changed = ChangeSignal()
    facts: set[str] = set()
    woken: list[str] = []

    async def wait_for(fact: str) -> None:
        await changed.until(lambda: fact in facts)
        woken.append(fact)

    waiting = [asyncio.create_task(wait_for(fact)) for fact in ("a", "b")]
    await asyncio.sleep(0)
    facts.add("b")
    changed.notify()
    await waiting[1]
    assert woken == ["b"]
    facts.add("a")
    changed.notify()
    await waiting[0]


async def test_a_change_between_notification_and_wake_up_counts() -> None:
    changed = ChangeSignal()
    facts: set[str] = set()
    waiting = asyncio.create_task(changed.until(lambda: "late" in facts))
    await asyncio.sleep(0)
    changed.notify()
    facts.add("late")
    await waiting


async def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    changed = ChangeSignal()
    gone, stays = (asyncio.create_task(changed.next_change()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    changed.notify()
    await stays
    assert gone.cancelled()

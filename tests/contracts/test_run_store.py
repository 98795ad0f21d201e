"""What the journal relies on in a run store: the one in SQLite, and the one in the memory of the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.errors import FatalError
from miles_async.ports import RunStore
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, GroupChange, StoredContent, StoredRun
from miles_async.types import Group, Sample, VersionSpan
from tests.sim.lost_workers import MemoryStore
from tests.stored_batches import batch, check_state, finished_group


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with closing(SqliteRunStore(tmp_path, "a")) as opened:
        yield opened


async def stored_in(store: RunStore) -> StoredRun:
    stored = await store.read()
    assert stored is not None
    return stored


def change(state: GroupState, order: int, content: Group | None = None) -> GroupChange:
    return GroupChange(feed_index="sample_0_1", attempt=0, state=state, order=order, content=content)


async def test_nothing_is_stored_before_the_first_batch(store: RunStore) -> None:
    assert await store.read() is None


async def test_the_state_is_that_of_the_last_batch(store: RunStore) -> None:
    for number in range(1, 8):
        await store.write(batch(number))
        assert await check_state(store) == number


async def test_groups_are_in_the_order_of_their_transitions_and_keep_their_samples(store: RunStore) -> None:
    group = finished_group(5)
    await store.write(
        Changes(number=1, groups={5: change(GroupState.FINISHED, 9, group), 6: change(GroupState.FED, 3)})
    )
    await store.write(Changes(number=2, groups={5: change(GroupState.LEASED, 1)}))
    stored = await stored_in(store)
    assert [(one.sequence, one.state) for one in stored.groups] == [(5, GroupState.LEASED), (6, GroupState.FED)]
    assert [one.content for one in stored.groups] == [StoredContent([5], 40), None]
    assert await store.load(5) == group


async def test_the_versions_of_a_group_are_listed_once_in_ascending_order(store: RunStore) -> None:
    group = finished_group(1)
    group[0].spans, group[1].spans = [VersionSpan(7, 0, 1), VersionSpan(2, 1, 2)], [VersionSpan(7, 0, 2)]
    undated = Group([group[0], replace(group[1], spans=[])])
    await store.write(
        Changes(number=1, groups={1: change(GroupState.FINISHED, 1, group), 2: change(GroupState.FINISHED, 2, undated)})
    )
    contents = [one.content for one in (await stored_in(store)).groups]
    assert contents == [StoredContent([2, 7], 40), StoredContent([], 40)]


async def test_what_is_removed_is_gone_whether_it_was_stored_before_or_not(store: RunStore) -> None:
    group = finished_group(1)
    await store.write(
        Changes(
            number=1,
            groups={1: change(GroupState.FINISHED, 1, group)},
            prompts={group.feed_index: group.prompt_dict()},
            posted={"external_0": group},
            keys={"key": "external_0"},
            events=batch(1).events,
        )
    )
    await store.write(
        Changes(
            number=2,
            groups={1: None, 99: None},
            prompts={group.feed_index: None, "external_0": None, "external_1": None, "unknown": None},
            posted={"external_1": group},
            keys={"key": None, "unknown": None},
            events=batch(1).events,
            delivered=2,
        )
    )
    stored = await stored_in(store)
    assert (stored.groups, stored.prompts, stored.posted, stored.keys, stored.events) == ([], [], [], {}, [])
    with pytest.raises(FatalError):
        await store.load(1)
    for posted in ("external_0", "external_1"):
        with pytest.raises(FatalError):
            await store.load_posted(posted)


async def test_a_prompt_that_is_stored_again_keeps_its_place_unless_it_was_removed(store: RunStore) -> None:
    def prompts(*names: str) -> dict[str, dict[str, object]]:
        return {name: Group([Sample(prompt=name)], feed_index=name).prompt_dict() for name in names}

    await store.write(Changes(number=1, prompts={**prompts("a", "b", "c")}))
    await store.write(Changes(number=2, prompts={**prompts("b"), "a": None}))
    await store.write(Changes(number=3, prompts={**prompts("a", "d")}))
    assert [group.feed_index for group in (await stored_in(store)).prompts] == ["b", "c", "a", "d"]


async def test_a_change_of_a_group_after_its_write_has_begun_is_not_stored(store: RunStore) -> None:
    group, posted = finished_group(1), finished_group(2)
    prompt = finished_group(1).prompt_dict()
    await store.write(
        Changes(
            number=1,
            groups={1: change(GroupState.FINISHED, 1, group)},
            posted={"external_0": posted},
            prompts={"sample_0_1": prompt},
        )
    )
    for sample in (*group, *posted):
        sample.reset()
    prompt["samples"].clear()
    assert await store.load(1) == finished_group(1)
    assert await store.load_posted("external_0") == finished_group(2)
    assert len((await stored_in(store)).prompts[0]) == 2


async def test_what_is_read_shares_nothing_with_the_store(store: RunStore) -> None:
    await store.write(batch(1))
    first = await stored_in(store)
    first.prompts[0][0].metadata.clear()
    first.progress["state"].clear()
    (await store.load(1))[0].tokens.clear()
    assert await check_state(store) == 1
    assert (await stored_in(store)).prompts[0][0].metadata == {"number": 1}


async def test_events_stay_until_they_are_delivered_and_values_until_they_are_replaced(store: RunStore) -> None:
    events = batch(1).events
    await store.write(Changes(number=1, events=events, progress={"a": 1, "b": 1}))
    await store.write(Changes(number=2, progress={"b": 2}))
    await store.write(Changes(number=3, events=events))
    stored = await stored_in(store)
    assert [number for number, _ in stored.events] == [1, 3]
    assert list(stored.events[0][1]) == list(events)
    assert stored.progress == {"a": 1, "b": 2}
    await store.write(Changes(number=4, delivered=1))
    assert [number for number, _ in (await stored_in(store)).events] == [3]

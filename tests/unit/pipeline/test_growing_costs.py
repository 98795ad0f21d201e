"""Costs that must not grow with the size of a run: what one action calls is counted for a small and a large run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.buffer import Buffer, pop_first
from miles_async.adapters.storage import encoding
from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.adapters.system.clock import SystemClock
from miles_async.events import GroupGenerated, GroupMoved, encode
from miles_async.pipeline.held_prompts import HeldPrompts
from miles_async.pipeline.run_state import RunState
from miles_async.recording import Recording
from miles_async.stored_run import Changes
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.operations import calls
from tests.sim.world import DirectJournal, Trace, World, held_prompts_of
from tests.unit.gym import open_gym

SIZES = (10, 1000)


def groups(count: int, samples: int = 2) -> list[Group]:
    return [
        Group([Sample(index=n * samples + i) for i in range(samples)], feed_index=f"sample_0_{n}") for n in range(count)
    ]


def holding(count: int) -> tuple[HeldPrompts, list[Group]]:
    held, taken = held_prompts_of(RunState(SystemClock(), DirectJournal(Trace()))), groups(count)
    held.record_taken(taken)
    return held, taken


def test_taking_a_returned_group_does_not_touch_the_others() -> None:
    def cost(size: int) -> int:
        buffer = Buffer(pop_first, None, lambda reason, sentence: None)
        buffer.add(groups(size))
        return calls(lambda: buffer.take(1))

    small, large = map(cost, SIZES)
    assert large == small


@pytest.mark.parametrize("named", [True, False])
def test_returning_a_group_does_not_touch_the_others_that_a_function_holds(named: bool) -> None:
    def cost(size: int) -> int:
        held, taken = holding(size)
        returned = taken[size // 2] if named else Group(taken[size // 2])
        count = calls(lambda: held.record_returned([returned]))
        assert len(held.taken) == size - 1
        return count

    small, large = map(cost, SIZES)
    assert large == small


def test_finding_the_prompt_of_an_unnamed_sample_does_not_touch_the_others() -> None:
    def cost(size: int) -> int:
        held, taken = holding(size)
        found = held.taken.find(taken[-1][1])
        assert found is not None
        assert found.copy.feed_index == taken[-1].feed_index
        return calls(lambda: held.taken.find(taken[-1][1]))

    small, large = map(cost, SIZES)
    assert large == small


def test_a_sample_that_got_the_identity_of_a_lost_one_is_not_taken_for_it() -> None:
    held, taken = holding(1)
    identity = id(taken[0][0])
    del taken
    # CPython gives the memory of the lost sample to one of the next ones.
    new = [Sample(index=n) for n in range(100)]
    assert identity in map(id, new)
    assert all(held.taken.find(sample) is None for sample in new)
    held.record_returned([Group(new, feed_index="other")])
    assert len(held.taken) == 1


def test_unchanged_metadata_of_the_data_source_is_converted_once() -> None:
    def cost(size: int) -> int:
        data = open_gym()
        data.metadata.update({f"sample_0_{n}": [0.5] for n in range(size)})
        data.position()
        return calls(data.position)

    small, large = map(cost, SIZES)
    assert large == small


def test_metadata_that_a_function_reads_is_converted_again() -> None:
    data = open_gym()
    data.position()
    data.metadata["nested"] = {"best": 1}
    assert data.position()["metadata"] == {"nested": {"best": 1}}
    data.metadata["nested"]["best"] = 2
    assert data.position()["metadata"] == {"nested": {"best": 2}}


def test_metadata_that_another_thread_changes_during_its_conversion_is_converted_again() -> None:
    data = open_gym()

    class Changing:
        """A function changes another value while the text of this one is made."""

        def __str__(self) -> str:
            data.metadata["first"] = 2
            return "last"

    data.metadata.update(first=1, last=Changing())
    assert data.position()["metadata"] == {"first": 1, "last": "last"}
    assert data.position()["metadata"] == {"first": 2, "last": "last"}


async def test_the_store_does_not_write_a_value_again_that_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def noting(value: Any) -> bytes:
        encoded.append(value)
        return encode_value(value)

    encode_value = encoding.encode
    monkeypatch.setattr(encoding, "encode", noting)
    store, metadata = SqliteRunStore(tmp_path, "run"), {"a": 1}
    for number in (1, 2):
        await store.write(Changes(number=number, progress={"data": {"next": number}, "metadata": metadata}))
    assert [value for value in encoded if value is metadata] == [metadata]
    assert store.progress() == {"data": {"next": 2}, "metadata": {"a": 1}}
    await store.write(Changes(number=3, progress={"metadata": {"a": 2}}))
    assert store.progress() == {"data": {"next": 2}, "metadata": {"a": 2}}
    store.close()


def test_saving_a_recording_does_not_read_the_other_entries(tmp_path: Path) -> None:
    def cost(size: int) -> int:
        folder = tmp_path / str(size)
        for step in range(size):
            (folder / str(step)).mkdir(parents=True)
        store = RecordingStore(folder)
        store.save(size, Recording(groups=[]), {})
        return calls(lambda: store.save(size + 1, Recording(groups=[]), {}))

    small, large = map(cost, SIZES)
    assert large < small + SIZES[1] // 10


def test_the_events_of_a_group_stay_small() -> None:
    world = World(config=run_config(rollout_batch_size=32, num_rollout=20, n_samples_per_prompt=8)).run()
    of_groups = [event for event in world.trace.events if isinstance(event, GroupMoved | GroupGenerated)]
    generated = len(world.trace.of(GroupGenerated))
    assert sum(len(encode(event)) for event in of_groups) / generated < 1700

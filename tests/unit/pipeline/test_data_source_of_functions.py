"""The `data_source` of rollout functions has the attributes that slime's `RolloutDataSourceWithBuffer` has."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.system.clock import SystemClock
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_state import RunState
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Sample
from tests.configuration import KEYS, run_config
from tests.sim.world import DirectOutbox, NullStore, Trace, held_prompts_of

ROWS = 6


@pytest.fixture
def data(tmp_path: Path) -> BufferedSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{row}", "label": row}) + "\n" for row in range(ROWS)))
    settings = {"prompt_data": str(path), **KEYS, "rollout_shuffle": False, "eval_size": 0, "n_samples_per_prompt": 2}
    return open_data(run_config(**settings))


def source(data: BufferedSource, *, held_limit: int = 1000, keeps_groups: bool = False) -> RolloutSource:
    clock = SystemClock()
    not_used: Any = None
    run_state = RunState(clock, Journal(NullStore(), DirectOutbox(Trace()), clock))
    return RolloutSource(
        data=data,
        run_state=run_state,
        held=held_prompts_of(run_state, data, limit=held_limit, keeps_groups=keeps_groups),
        collector=not_used,
        evaluator=not_used,
        schedule=Schedule.ONE_STEP_OFF,
    )


def test_the_position_in_the_data_can_be_read(data: BufferedSource) -> None:
    mine = source(data)
    mine.get_samples(ROWS + 1)
    assert (mine.epoch_id, mine.sample_offset, mine.sample_index) == (1, 1, 2 * (ROWS + 1))


def test_returned_groups_wait_in_the_buffer_with_their_attempt(data: BufferedSource) -> None:
    mine = source(data)
    [group, _] = mine.get_samples(2)
    group.attempt = 1
    data.add_samples([group])
    [group] = mine.get_samples(1)
    # A plain list of the samples, as functions for slime return it.
    mine.add_samples([list(group)])
    assert [waiting.feed_index for waiting in mine.buffer] == ["sample_0_0"]
    assert [waiting.attempt for waiting in mine.buffer] == [1]
    assert mine.get_buffer_length() == 1
    mine.buffer.clear()
    assert mine.get_samples(1)[0].feed_index == "sample_0_0"


def test_metadata_is_part_of_the_saved_position(data: BufferedSource) -> None:
    mine = source(data)
    mine.metadata["difficulty"] = 3
    mine.update_metadata({"seen": {4, 5}})
    position = json.loads(json.dumps(data.position()))
    mine.metadata.clear()
    data.seek(position)
    assert mine.get_metadata() == {"difficulty": 3, "seen": [4, 5]}


def test_a_worker_gets_prompts_again_when_it_has_returned_some(data: BufferedSource) -> None:
    mine = source(data, held_limit=3, keeps_groups=True)
    held = mine.get_samples(2)
    held += mine.get_samples(2)
    assert [len(held), mine.get_samples(1)] == [3, []]
    mine.add_samples(held[:2])
    assert len(mine.get_samples(4)) == 2


def test_a_group_that_was_given_back_already_waits_once(data: BufferedSource) -> None:
    mine = source(data)
    [group] = mine.get_samples(1)
    mine.add_samples([group, list(group)])
    mine.add_samples([deepcopy(group)])
    assert [waiting.feed_index for waiting in mine.buffer] == ["sample_0_0"]
    assert [taken.feed_index for taken in mine.get_samples(2)] == ["sample_0_0", "sample_0_1"]


def test_a_group_that_a_function_kept_while_its_rollout_worker_was_replaced_waits_once(data: BufferedSource) -> None:
    [group] = data.get_samples(1)
    data.add_samples([group])
    mine = source(data)
    mine.add_samples([deepcopy(list(group))])
    assert [waiting.feed_index for waiting in mine.buffer] == ["sample_0_0"]


def test_a_part_of_a_group_that_is_given_back_waits_as_a_complete_group(data: BufferedSource) -> None:
    mine = source(data)
    [group] = mine.get_samples(1)
    indices = [sample.index for sample in group]
    mine.add_samples([group[:1]])
    [waiting] = mine.buffer
    assert (waiting.feed_index, [sample.index for sample in waiting]) == ("sample_0_0", indices)


def test_groups_that_a_function_made_are_added_each_time(data: BufferedSource) -> None:
    mine = source(data)
    for _ in range(2):
        mine.add_samples([[Sample(prompt="mine"), Sample(prompt="mine")]])
    assert mine.get_buffer_length() == 2

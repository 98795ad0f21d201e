"""What the pipeline relies on in a data source: the one of files, and the feed of the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.adapters.datasets.factory import open_data
from miles_async.errors import UserError
from miles_async.ports import DataSource
from miles_async.types import Group, SampleStatus, VersionSpan
from tests.configuration import KEYS, run_config
from tests.sim.world import Feed
from tests.unit.adapters.datasets.test_datasets_source import write_rows

SIZE = 3
Open = Callable[..., DataSource]


@pytest.fixture(params=["files", "feed"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same data from its beginning, by default with groups of `SIZE` samples."""
    path = write_rows(tmp_path, [{"prompt": f"q{i}", "label": i} for i in range(50)])

    def open_source(size: int = SIZE) -> DataSource:
        if request.param == "feed":
            return Feed(size)
        return open_data(run_config(prompt_data=path, **KEYS, eval_size=0, n_samples_per_prompt=size))

    return open_source


def names(groups: list[Group]) -> list[str]:
    return [group.feed_index for group in groups]


def finish(group: Group) -> None:
    for sample in group:
        sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-0.5]
        sample.spans, sample.status, sample.reward = [VersionSpan(4, 0, 1)], SampleStatus.COMPLETED, 1.0


def test_new_groups_are_numbered_complete_and_pending(opened: Open) -> None:
    source = opened()
    groups = [*source.get_samples(0), *source.get_samples(2), *source.get_samples(1)]
    assert names(groups) == ["sample_0_0", "sample_0_1", "sample_0_2"]
    assert [sample.index for group in groups for sample in group] == list(range(3 * SIZE))
    for group in groups:
        assert (group.attempt, group.sequence, group.missing) == (0, None, [])
        for sample in group:
            assert (sample.status, sample.response_length, sample.spans) == (SampleStatus.PENDING, 0, [])
            assert sample.metadata["feed_index"] == group.feed_index
        assert len(set(map(id, [sample.metadata for sample in group]))) == SIZE


def test_returned_groups_are_first_in_line_in_their_order(opened: Open) -> None:
    source = opened()
    first, second, third = source.get_samples(3)
    source.add_samples([third])
    source.add_samples([first, second])
    assert names(list(source.returned())) == ["sample_0_2", "sample_0_0", "sample_0_1"]
    assert names(source.get_samples(4)) == ["sample_0_2", "sample_0_0", "sample_0_1", "sample_0_3"]
    assert source.returned() == []


def test_a_returned_group_keeps_its_tokens_until_it_is_taken(opened: Open) -> None:
    source = opened()
    [group] = source.get_samples(1)
    finish(group)
    group.attempt = 2
    source.add_samples([group])
    [again] = source.get_samples(1)
    assert (again.attempt, [sample.tokens for sample in again]) == (2, [[1, 2]] * SIZE)


def test_plain_lists_of_samples_may_be_returned(opened: Open) -> None:
    source = opened()
    source.add_samples([list(source.get_samples(1)[0])])  # type: ignore[list-item]
    assert names(source.get_samples(2)) == ["sample_0_0", "sample_0_1"]


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_group_of_another_size_is_refused_and_nothing_is_returned(opened: Open, size: int) -> None:
    source = opened()
    complete, other = source.get_samples(2)
    other[:] = [*other, *map(replace, other)][:size]
    with pytest.raises(UserError, match="sample_0_1"):
        source.add_samples([complete, other])
    assert source.returned() == []


def test_segments_of_a_trajectory_count_once(opened: Open) -> None:
    source = opened()
    [group] = source.get_samples(1)
    group[0].trajectory = 0
    group.append(replace(group[0]))
    source.add_samples([group])
    assert len(source.get_samples(1)[0].trajectories) == SIZE


def test_a_group_that_left_samples_out_is_complete_when_it_is_taken_again(opened: Open) -> None:
    source = opened()
    [group] = source.get_samples(1)
    finish(group)
    group.leave_out(group[:1])
    source.add_samples([group])
    [again] = source.get_samples(1)
    assert [(sample.index, sample.response_length) for sample in again] == [(0, 0), (1, 1), (2, 1)]
    assert again.missing == []


def test_a_position_is_json_and_has_no_returned_groups(opened: Open) -> None:
    source = opened()
    source.add_samples(source.get_samples(2))
    source.metadata["seen"] = 1
    position = json.loads(json.dumps(source.position()))
    later = opened()
    later.add_samples(later.get_samples(1))
    later.seek(position)
    assert (later.returned(), later.metadata) == ([], {"seen": 1})
    assert names(later.get_samples(1)) == ["sample_0_2"]


def test_a_position_of_groups_of_another_size_is_refused(opened: Open) -> None:
    with pytest.raises(UserError):
        opened().seek(opened(SIZE + 1).position())


def test_an_incomplete_position_is_refused(opened: Open) -> None:
    with pytest.raises(KeyError):
        opened().seek({})


def test_the_list_of_returned_groups_is_a_copy(opened: Open) -> None:
    source = opened()
    source.add_samples(source.get_samples(1))
    list(source.returned()).clear()
    source.returned().clear()  # type: ignore[attr-defined]
    assert len(source.returned()) == 1

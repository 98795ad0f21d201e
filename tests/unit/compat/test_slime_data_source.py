"""Functions of users may create slime's data source, which reads the data of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.slime.data_source import RolloutDataSource
from miles_async.errors import UserError
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments, flat_args
from tests.configuration import run_config


@pytest.fixture
def args(tmp_path: Path) -> Arguments:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{row}", "answer": row}) + "\n" for row in range(3)))
    settings: dict[str, Any] = {"input_key": "question", "label_key": "answer", "n_samples_per_prompt": 2}
    folders = {"save": str(tmp_path), "load": str(tmp_path)}
    config = run_config(prompt_data=str(path), reasoning_gym_task=None, rm_type="exact", **settings, **folders)
    return flat_args(config, tokenizer=None)


def test_it_returns_the_rows_of_the_run_epoch_after_epoch(args: Arguments) -> None:
    source = RolloutDataSource(args)
    groups = source.get_samples(4)
    assert [group[0].prompt for group in groups] == ["q0", "q1", "q2", "q0"]
    assert [[sample.index for sample in group] for group in groups[:2]] == [[0, 1], [2, 3]]
    assert (source.epoch_id, source.sample_offset, source.sample_index) == (1, 1, 8)


def test_returned_groups_come_first_and_are_not_those_that_the_run_feeds(args: Arguments) -> None:
    source = RolloutDataSource(args)
    first, _ = source.get_samples(2)
    source.add_samples([first])
    [again] = source.get_samples(1)
    assert again[0].prompt == "q0"
    assert (again.feed_index, again[0].metadata["feed_index"]) == ("own_sample_0_0", "own_sample_0_0")


def test_another_source_continues_from_a_saved_position(args: Arguments) -> None:
    source = RolloutDataSource(args)
    source.get_samples(2)
    source.metadata["seen"] = 2
    source.save(7)
    other = RolloutDataSource(args)
    other.load(8)
    assert other.sample_offset == 0, "nothing was saved after this rollout"
    other.load(7)
    assert (other.get_samples(1)[0][0].prompt, other.metadata) == ("q2", {"seen": 2})


def test_a_saved_position_of_another_version_is_refused(args: Arguments, tmp_path: Path) -> None:
    source = RolloutDataSource(args)
    source.save(7)
    path = tmp_path / "rollout" / "global_dataset_state_dict_7.json"
    position = json.loads(path.read_text())
    del position["prompts"]
    path.write_text(json.dumps(position))
    with pytest.raises(UserError, match=r"state_dict_7\.json has no 'prompts': name in load the folder of a run"):
        source.load(7)


def test_the_source_that_a_rollout_function_receives_counts_as_one() -> None:
    assert issubclass(RolloutSource, RolloutDataSource)

"""Per-token data that a plug-in declares is checked, stored, replayed and packed, or is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.sglang.response import extend
from miles_async.adapters.storage.encoding import pack_samples, sample_values, unpack_samples
from miles_async.adapters.storage.recording_store import RecordingDamagedError, RecordingStore
from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.batching.batch import PackedBatch, policy_steps
from miles_async.columns.column import COLUMNS, NO_LIMITS, Column, append_tokens
from miles_async.errors import TrajectoryError, UserError
from miles_async.recording import GroupRecord, Recording
from miles_async.sample_schema import accept_values, check_sample
from miles_async.token_values import TokenValues
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.plugin_packages import write_plugins
from tests.sim.world import DirectJournal, Trace
from tests.unit.rollout.test_generate_functions import generating_with, one

SOURCE = """
from miles_async.columns.column import Column


class Temperature(Column):
    "The temperature at which each token was sampled."

    default, lowest, highest = 1.0, 0.0, 2.0


class Candidates(Column):
    "The two most probable token ids."

    dtype, shape, default = "int32", (2,), -1


class Role(Column):
    "Who wrote each token of prompt and response."

    dtype, covers, highest = "uint8", "sequence", 3
"""
PLUGINS = (
    (COLUMNS, "temperature", "of_users:Temperature"),
    (COLUMNS, "candidates", "of_users:Candidates"),
    (COLUMNS, "role", "of_users:Role"),
)
ENTRIES: Mapping[str, list[Any]] = {
    "temperature": [0.5, 1.0, 1.5],
    "candidates": [[7, 1], [8, 2], [9, 3]],
    "role": [0, 0, 1, 2, 1],
}
TYPES = {"temperature": "float32", "candidates": "int32", "role": "uint8"}


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of one file with three columns."""
    monkeypatch.syspath_prepend(write_plugins(tmp_path, "of_users", SOURCE, "users", *PLUGINS))
    # A module of the same name may come from an earlier test.
    monkeypatch.delitem(sys.modules, "of_users", raising=False)
    COLUMNS.forget()


def sample(index: int = 3, **columns: Any) -> Sample:
    """Two tokens of a prompt and three of a response, with every column unless some are given."""
    return Sample(
        index=index,
        prompt="Q",
        tokens=[5, 6, 7, 8, 9],
        response_length=3,
        rollout_log_probs=[-0.5, 0.0, -1.5],
        loss_mask=[1, 0, 1],
        spans=[VersionSpan(0, 0, 1), VersionSpan(0, 2, 3)],
        columns={name: copy(entries) for name, entries in (columns or ENTRIES).items()},
        reward=float(index),
        status=SampleStatus.COMPLETED,
    )


def checked(*samples: Sample) -> Group:
    """A group of finished samples that passed the checks of a run."""
    group = Group(samples, feed_index="sample_0_0")
    for one_of_them in group:
        check_sample(one_of_them, NO_LIMITS, 0)
    return group


def check_entries(found: Sample) -> None:
    """Fails unless the sample has the entries of all three columns, in arrays of the declared types."""
    assert {name: list(values) for name, values in found.columns.items()} == ENTRIES
    assert {name: np.asarray(values).dtype.name for name, values in found.columns.items()} == TYPES
    assert {type(values) for values in found.columns.values()} == {TokenValues}


# --- what a sample accepts -------------------------------------------------------------------------------------------


def test_lists_become_values_of_the_declared_type() -> None:
    accepted = sample()
    accept_values(accepted)
    check_entries(accepted)
    assert np.asarray(accepted.columns["candidates"]).shape == (3, 2)


@pytest.mark.parametrize("dtype", ["float64", "float16", "float32"])
def test_arrays_and_tuples_are_accepted_too(dtype: str) -> None:
    temperature = np.array(ENTRIES["temperature"], dtype)
    [found] = checked(
        sample(temperature=temperature, candidates=((7, 1), (8, 2), (9, 3)), role=np.array(ENTRIES["role"], np.int64))
    )
    check_entries(found)
    temperature[0] = 2.0
    assert found.columns["temperature"][0] == 0.5


def test_integers_are_accepted_as_floats_and_values_of_the_type_are_kept() -> None:
    kept, given = TokenValues(ENTRIES["role"], "uint8"), sample(temperature=[0, 1, 2])
    given.columns["role"] = kept
    [found] = checked(given)
    assert list(map(type, found.columns["temperature"])) == [float] * 3
    assert found.columns == {"temperature": [0.0, 1.0, 2.0], "role": kept}
    assert found.columns["role"] is kept


def test_a_column_without_a_value_is_left_out() -> None:
    [found] = checked(sample(temperature=None))
    assert found.columns == {}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": [0.5]}, "temperature has 1 entries; response_length is 3"),
    ({"temperature": [0.5] * 5}, "temperature has 5 entries; response_length is 3"),
    ({"role": [0, 1, 2]}, "role has 3 entries; 5 tokens"),
    ({"temperature": [0.5, 1.0, 2.5]}, "temperature[2]: 2.5 is not between 0 and 2"),
    ({"temperature": [0.5, -0.5, 1.0]}, "temperature[1]: -0.5 is not between 0 and 2"),
    ({"temperature": [0.5, float("nan"), 1.0]}, "temperature[1] is not finite"),
    ({"role": [0, 0, 1, 2, 4]}, "role[4]: 4 is not between 0 and 3"),
    ({"role": [0, -1, 1, 2, 1]}, "role[1]: -1 is not between 0 and 3"),
    (
        {"candidates": [[7, 1], [8, 2**40], [9, 3]]},
        "candidates[1]: [8, 1099511627776] is not between -2147483648 and 2147483647",
    ),
    ({"temperature": [0.5, "hot", 1.0]}, "temperature[1]: expected float, got str"),
    ({"temperature": [0.5, None, 1.0]}, "temperature[1]: expected float, got null"),
    ({"temperature": 0.5}, "temperature: expected array, got float"),
    ({"temperature": {"1": 0.5}}, "temperature: expected array, got object"),
    ({"role": [0, 0, 1, 2, 1.5]}, "role[4]: expected int, got float"),
    ({"temperature": [[0.5], [1.0], [1.5]]}, "temperature: an entry has the shape [1] instead of []"),
    ({"candidates": [[7, 1, 1]] * 3}, "candidates: an entry has the shape [3] instead of [2]"),
    ({"candidates": [7, 8, 9]}, "candidates: an entry has the shape [] instead of [2]"),
    ({"candidates": [[7, 1], [8, 2.5], [9, 3]]}, "candidates[1][1]: expected int, got float"),
    ({"heat": [0.5, 1.0, 1.5]}, "no token column is called 'heat': use one of candidates, "),
]


@pytest.mark.parametrize("columns, complaint", REFUSED)
def test_an_invalid_column_is_refused_with_the_index_of_the_sample_and_the_name(
    columns: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(TrajectoryError) as error:
        checked(sample(**columns))
    assert str(error.value).startswith(f"sample 3: {complaint}")


def test_entries_of_unequal_lengths_are_refused_by_name() -> None:
    with pytest.raises(TrajectoryError, match=r"^sample 3: candidates: "):
        checked(sample(candidates=[[7, 1], [8], [9, 3]]))


def test_columns_that_are_not_a_dictionary_are_refused() -> None:
    invalid = replace(sample(), columns=[0.5])  # type: ignore[arg-type]
    with pytest.raises(TrajectoryError, match=r"^sample 3: its columns are \[0\.5\] and not a dictionary$"):
        accept_values(invalid)


def test_a_column_whose_name_is_unknown_names_the_group_of_entry_points() -> None:
    with pytest.raises(TrajectoryError, match=r"with the entry point 'heat' in the group 'miles_async\.columns'$"):
        checked(sample(heat=[0.5, 1.0, 1.5]))


def test_a_column_that_cannot_be_imported_is_refused_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write_plugins(
        tmp_path, "broken", "import nothing_of_this_name", "others", (COLUMNS, "heat", "broken:Heat")
    )
    monkeypatch.syspath_prepend(broken)
    COLUMNS.forget()
    with pytest.raises(TrajectoryError, match=r"^sample 3: the entry point heat = broken:Heat .* cannot be imported: "):
        checked(sample(heat=[0.5, 1.0, 1.5]))


def test_a_sample_whose_column_was_refused_is_left_without_per_token_data() -> None:
    refused = sample(temperature=["hot"])
    with pytest.raises(TrajectoryError):
        accept_values(refused)
    assert (refused.columns, list(refused.tokens), refused.response_length) == ({}, [], 0)
    accept_values(refused)


# --- tokens that are appended ----------------------------------------------------------------------------------------


def test_tokens_without_entries_get_the_default_in_every_column_that_the_sample_has() -> None:
    extended = sample()
    append_tokens(extended, [10, 11])
    assert list(extended.tokens) == [5, 6, 7, 8, 9, 10, 11]
    assert extended.response_length == 5
    assert {name: list(values) for name, values in extended.columns.items()} == {
        "temperature": [0.5, 1.0, 1.5, 1.0, 1.0],
        "candidates": [[7, 1], [8, 2], [9, 3], [-1, -1], [-1, -1]],
        "role": [0, 0, 1, 2, 1, 0, 0],
    }
    checked(extended)


def test_entries_can_be_appended_with_their_tokens() -> None:
    extended = sample(temperature=[0.5, 1.0, 1.5])
    append_tokens(extended, [10], temperature=[0.25], rollout_log_probs=[-0.5], loss_mask=[1])
    assert extended.columns == {"temperature": [0.5, 1.0, 1.5, 0.25]}
    checked(extended)


def test_entries_that_a_function_set_as_an_array_are_checked_and_extended() -> None:
    extended = sample(temperature=np.array([0.5, 1.0, 1.5]))
    append_tokens(extended, [10], rollout_log_probs=[-0.5], loss_mask=[1])
    assert extended.columns == {"temperature": [0.5, 1.0, 1.5, 1.0]}
    wrong = sample(temperature=np.array([0.5, -1.0, 1.5]))
    with pytest.raises(TrajectoryError, match=r"sample 3: temperature\[1\]: -1.0 is not between 0 and 2"):
        append_tokens(wrong, [10], rollout_log_probs=[-0.5], loss_mask=[1])


def test_a_turn_of_an_engine_extends_the_columns_of_a_sample() -> None:
    continued = sample(temperature=[0.5, 1.0, 1.5])
    answer = {
        "text": "",
        "output_ids": [10, 11],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 10, None], [-0.5, 11, None]],
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        },
    }
    extend(continued, answer, lambda ids: "")
    assert continued.columns == {"temperature": [0.5, 1.0, 1.5, 1.0, 1.0]}
    checked(continued)


def test_a_sample_that_is_generated_again_has_no_entries() -> None:
    again = sample()
    again.reset()
    assert again.columns == {}


# --- storage ---------------------------------------------------------------------------------------------------------


def test_the_run_store_returns_the_entries() -> None:
    group = checked(sample(), sample(4, temperature=[1.0, 1.0, 1.0]), Sample(index=5, tokens=[1]))
    stored = unpack_samples(bytes(pack_samples(list(map(sample_values, group)))))
    assert stored == group
    check_entries(stored[0])


def recording(*samples: Sample) -> Recording:
    group = GroupRecord(feed_index="sample_0_0", prompt="hash", version=0, seconds=1.0, samples=samples)
    return Recording(groups=[group], seconds=1.0)


def test_a_recording_contains_the_entries(tmp_path: Path) -> None:
    group = checked(sample(), sample(4, temperature=[1.0, 1.0, 1.0]), Sample(index=5, tokens=[1]))
    RecordingStore(tmp_path).save(0, recording(*group), {})
    [loaded] = RecordingStore(tmp_path).load(0).recording.groups
    assert loaded.samples == group
    check_entries(loaded.samples[0])


def test_a_replayed_sample_has_the_recorded_entries() -> None:
    [recorded] = checked(sample())
    group = Group([Sample(index=8, prompt="Q")], feed_index="sample_0_0")
    recording(recorded).groups[0].replay_into(group, live_version=0)
    check_entries(group[0])


def test_a_rollout_file_contains_the_entries(tmp_path: Path) -> None:
    groups = [checked(sample(), sample(4, temperature=[1.0, 1.0, 1.0])), checked(Sample(index=5, tokens=[1]))]
    save_groups(tmp_path / "0.safetensors", 0, groups)
    _, loaded = load_groups(tmp_path / "0.safetensors")
    assert loaded == groups
    check_entries(loaded[0][0])


@pytest.mark.parametrize(
    "columns, complaint",
    [
        ({"temperature": TokenValues([0.5], "float32")}, "temperature has 1 entries; response_length is 3"),
        ({"temperature": TokenValues([0.5, 1.0, 2.5], "float32")}, r"temperature\[2\]: 2.5 is not between 0 and 2"),
        ({"candidates": TokenValues([[1]] * 3, "int32")}, r"candidates: an entry has the shape \[1\] instead of \[2\]"),
    ],
)
def test_a_recording_with_an_invalid_column_is_refused(tmp_path: Path, columns: dict[str, Any], complaint: str) -> None:
    store = RecordingStore(tmp_path)
    store.save(0, recording(sample(**columns)), {})
    loaded = store.load(0).recording
    with pytest.raises(RecordingDamagedError, match=f"sample 3: {complaint}"):
        store.check_samples(0, loaded, NO_LIMITS, 1)


def test_files_with_a_column_of_a_package_that_is_not_installed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = checked(sample())
    RecordingStore(tmp_path).save(0, recording(*group), {})
    save_groups(tmp_path / "0.safetensors", 0, [group])
    monkeypatch.setattr(sys, "path", sys.path[1:])
    COLUMNS.forget()
    reason = "sample 3: no token column is called 'temperature'"
    with pytest.raises(RecordingDamagedError, match=reason):
        RecordingStore(tmp_path).load(0)
    with pytest.raises(UserError, match=reason):
        load_groups(tmp_path / "0.safetensors")


# --- batches ---------------------------------------------------------------------------------------------------------


def micro_batches(*samples: Sample, ranks: int = 1, tokens: int = 100) -> list[list[PackedBatch]]:
    """The micro-batches of each rank."""
    config = run_config(max_tokens_per_gpu=tokens, grpo_std_normalization=False)
    return [steps[0].micro_batches for steps in policy_steps([checked(*samples)], config, ranks=ranks)]


def test_trained_tokens_keep_their_entries_in_a_batch() -> None:
    [[batch]] = micro_batches(sample(0), sample(1))
    assert set(batch.of_plugins) == set(ENTRIES)
    assert batch.columns["temperature"].tolist() == [0.5, 1.5] * 2
    assert batch.columns["candidates"].tolist() == [[7, 1], [9, 3]] * 2
    assert batch.columns["role"].tolist() == [1, 1] * 2, "the first two entries are those of the prompt"
    assert {name: entries.dtype.name for name, entries in batch.of_plugins.items()} == TYPES


def test_a_sample_without_the_column_has_its_default_in_a_batch() -> None:
    [[batch]] = micro_batches(sample(0), sample(1, role=[3] * 5))
    found = {name: entries[np.asarray(batch.sequences) == 0].tolist() for name, entries in batch.of_plugins.items()}
    other = {name: entries[np.asarray(batch.sequences) == 1].tolist() for name, entries in batch.of_plugins.items()}
    with_all = {"temperature": [0.5, 1.5], "candidates": [[7, 1], [9, 3]], "role": [1, 1]}
    with_role = {"temperature": [1.0, 1.0], "candidates": [[-1, -1]] * 2, "role": [3, 3]}
    assert [found, other] in ([with_all, with_role], [with_role, with_all])


def test_every_micro_batch_of_every_rank_has_the_columns_that_one_sample_has() -> None:
    samples = sample(0), sample(1, role=[1] * 5), sample(5, role=[1] * 5)
    batches = [batch for rank in micro_batches(*samples, ranks=2, tokens=5) for batch in rank]
    assert sorted(len(batch.targets) for batch in batches) == [0, 2, 2, 2], "ranks have equally many, so one is empty"
    for batch in batches:
        assert {name: (entries.dtype.name, entries.shape) for name, entries in batch.of_plugins.items()} == {
            "temperature": ("float32", (len(batch.targets),)),
            "candidates": ("int32", (len(batch.targets), 2)),
            "role": ("uint8", (len(batch.targets),)),
        }


def test_a_batch_has_no_column_that_no_sample_has() -> None:
    [[batch]] = micro_batches(sample(0, temperature=None), sample(1, temperature=None))
    assert batch.of_plugins == {}


def test_the_learner_gets_no_column_that_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(COLUMNS.find("role")), "trained", False)
    [[batch]] = micro_batches(sample(0), sample(1))
    assert set(batch.of_plugins) == {"temperature", "candidates"}


# --- where columns come from -----------------------------------------------------------------------------------------


async def test_a_generate_function_sets_a_column_that_later_turns_extend() -> None:
    async def generate(args: Any, given: Sample, sampling_params: dict[str, Any]) -> Sample:
        await args.turns.sample(given, sampling_params)
        given.columns["temperature"] = [0.5] * given.response_length
        args.turns.observe(given, "tool")
        return given

    async with generating_with(generate) as (generator, _):
        group = one()
        await generator.generate(group)
    assert group[0].columns == {"temperature": TokenValues([0.5, 0.5, 1.0, 1.0, 1.0, 1.0], "float32")}


@pytest.mark.parametrize("columns, complaint", [REFUSED[0], REFUSED[3], REFUSED[9], REFUSED[-1]])
async def test_an_invalid_column_of_a_generate_function_fails_its_sample(
    columns: dict[str, Any], complaint: str
) -> None:
    async def generate(args: Any, given: Sample, sampling_params: dict[str, Any]) -> Sample:
        return sample(**columns)

    async with generating_with(generate) as (generator, _):
        with pytest.raises(TrajectoryError) as error:
            await generator.generate(one())
    assert f"sample 3: {complaint}" in str(error.value)


def posted(**columns: Any) -> dict[str, Any]:
    return {
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 3,
        "rollout_log_probs": [-0.5, 0.0, -1.5],
        "loss_mask": [1, 0, 1],
        "weight_versions": [{"version": 0, "start": 0, "end": 3}],
        "reward": 1.0,
        "columns": columns,
    }


def buffer_of_two() -> TrajectoryBuffer:
    return TrajectoryBuffer(4, 2, log=DirectJournal(Trace()), newest_version=lambda: 0)


async def test_a_posted_group_has_the_posted_entries() -> None:
    buffer = buffer_of_two()
    await buffer.add([posted(**ENTRIES), posted()], lambda name: [], lambda name: None)
    first, second = await buffer.take()
    check_entries(first)
    assert second.columns == {}


@pytest.mark.parametrize(
    "columns, complaint",
    [(columns, complaint) for columns, complaint in REFUSED if isinstance(next(iter(columns.values())), list)],
)
async def test_an_invalid_column_of_a_post_is_answered_with_its_sample_and_name(
    columns: dict[str, Any], complaint: str
) -> None:
    buffer = buffer_of_two()
    with pytest.raises(InvalidRequestError) as error:
        await buffer.add([posted(), posted(**columns)], lambda name: [], lambda name: None)
    assert str(error.value).startswith(f"sample 1: {complaint}")


async def test_a_post_whose_column_is_not_a_list_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^sample 0: columns.*expected array, got float"):
        await buffer_of_two().add([posted(temperature=0.5), posted()], lambda name: [], lambda name: None)


# --- declarations ----------------------------------------------------------------------------------------------------


def test_a_column_that_declares_nothing_holds_floats_of_the_response() -> None:
    class Plain(Column):
        pass

    declared = Plain()
    assert declared.accept([-1e30, 2], "x") == TokenValues([-1e30, 2.0], "float32")
    assert declared.packed(sample(), None, np.array([0, 2])).tolist() == [0.0, 0.0]
    assert declared.accept(None, "x") is None


def test_a_column_of_booleans_holds_booleans() -> None:
    class Flag(Column):
        dtype = "bool"

    flag = Flag()
    assert list(flag.accept([True, 0, 1], "x")) == [True, False, True]
    with pytest.raises(TrajectoryError, match=r"^x\[1\]: 2 is not between 0 and 1$"):
        flag.accept([1, 2], "x")

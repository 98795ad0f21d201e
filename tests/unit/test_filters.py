"""The groups and samples that the shipped filters keep, and the steps between a batch and the learner."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.storage.rollout_file import load_groups, rollout_path, save_groups
from miles_async.batching.advantages import ScoredSample
from miles_async.batching.batch import pack_samples
from miles_async.columns.column import SampleLimits
from miles_async.config.generation import trains_only
from miles_async.errors import TrajectoryError, UserError
from miles_async.events import SamplesRemoved, WarningRaised
from miles_async.filters import (
    check_no_aborted,
    check_no_truncated,
    check_reward_nonzero_std,
    mask_truncated,
    sort_by_reward_std,
)
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.training import metadata_means
from miles_async.rollout import sglang_rollout
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.types import FROM_DATASET, Group, Sample, SampleStatus, Verdict, VersionSpan
from tests.configuration import run_config
from tests.disks import files_at_most
from tests.sim.world import Trace
from workers.functions import BatchPreparation, SavedBatches, dynamic_filter


def group(*rewards: Any, first: int = 0, status: SampleStatus = SampleStatus.COMPLETED) -> Group:
    samples = [
        Sample(
            index=first + position,
            tokens=[1, 2, 3],
            response_length=2,
            rollout_log_probs=[-0.5, -0.25],
            spans=[VersionSpan(0, 0, 2)],
            reward=reward,
            status=status,
        )
        for position, reward in enumerate(rewards)
    ]
    return Group(samples, feed_index=f"sample_0_{first}")


def of_a_data_set(name: str) -> Group:
    same = group(1.0, 1.0)
    for sample in same:
        sample.metadata = {FROM_DATASET: {"name": name, "epochs": 0.0}, "row": 1}
    return same


def test_a_group_of_equal_rewards_is_dropped_with_the_reward_as_reason() -> None:
    assert check_reward_nonzero_std(None, group(0.0, 1.0))
    assert check_reward_nonzero_std(None, group(1.0, 1.0)) == Verdict(False, "all_1.0")
    assert check_reward_nonzero_std(None, group(0.0, 0.0)) == Verdict(False, "all_0.0")


def test_a_filter_uses_the_configured_entry_of_a_dictionary_reward() -> None:
    scored = group({"acc": 1, "style": 0.1}, {"acc": 1, "style": 0.9})
    for sample in scored:
        sample.reward_key = "acc"
    assert not check_reward_nonzero_std(None, scored)


def test_a_group_with_an_aborted_failed_or_truncated_sample_is_dropped() -> None:
    assert check_no_aborted(None, group(0.0, status=SampleStatus.ABORTED)) == Verdict(False, "aborted")
    assert not check_no_aborted(None, group(0.0, status=SampleStatus.FAILED))
    assert check_no_aborted(None, group(0.0, status=SampleStatus.TRUNCATED))
    assert check_no_truncated(None, group(0.0, status=SampleStatus.TRUNCATED)) == Verdict(False, "truncated")


def test_groups_whose_samples_disagree_most_come_first() -> None:
    same, apart, near = group(1.0, 1.0), group(0.0, 1.0), group(0.5, 1.0)
    assert sort_by_reward_std(None, [same, near, apart]) == [apart, near, same]


USERS_OWN = """
import torch
from statistics import pstdev

def keep_spread(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    return torch.tensor(rewards, dtype=torch.float).std() > 0.0

def keep_spread_light(args, samples, **kwargs):
    return pstdev([sample.get_reward_value(args) for sample in samples]) > 0.0

def batch(args, rollout_id, data_source, evaluation=False):
    assert args.rollout_global_dataset
    return data_source

def keep_and_judge(args, samples, **kwargs):
    for sample in samples:
        sample.metadata = {"judged": True}
    return True

def judge_and_fail(args, samples, **kwargs):
    keep_and_judge(args, samples)
    raise ValueError("no verdict")

def judge(args, groups):
    for group in groups:
        keep_and_judge(args, group)

def judge_all(args, groups, data_source):
    judge(args, groups)

def drop_first(args, samples):
    samples[0][0].remove_sample = True

def broken(args, samples):
    return samples[9]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "users_own.py").write_text(USERS_OWN.replace("import torch\n", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_own"
    sys.modules.pop("users_own", None)


def test_a_dynamic_filter_written_for_slime_reads_the_reward_by_its_key(mine: str) -> None:
    settings = run_config(dynamic_sampling_filter_path=f"{mine}.keep_spread_light", reward_key="acc")
    keep = dynamic_filter(settings, flat_args(settings))
    assert keep(group({"acc": 0.0}, {"acc": 1.0}))
    assert not keep(group({"acc": 1.0}, {"acc": 1.0}))


def test_the_pipeline_receives_the_reason_of_a_filter() -> None:
    settings = run_config(dynamic_sampling_filter_path="miles_async.filters.check_reward_nonzero_std")
    assert dynamic_filter(settings, flat_args(settings))(group(1.0, 1.0)) == Verdict(False, "all_1.0")


def test_a_data_set_has_its_own_filter_and_each_group_is_observed_before(mine: str) -> None:
    nonzero, own = "miles_async.filters.check_reward_nonzero_std", "miles_async.filters.check_no_truncated"
    datasets = {"own": {"prompt_data": "a", "dynamic_sampling_filter_path": own}, "flat": {"prompt_data": "b"}}
    settings = run_config(dynamic_sampling_filter_path=nonzero, datasets=datasets)
    observed: list[str] = []
    keep = dynamic_filter(settings, flat_args(settings), lambda each: observed.append(each.dataset))

    assert keep(of_a_data_set("own"))
    assert not keep(of_a_data_set("flat"))
    assert observed == ["own", "flat"]


@pytest.mark.parametrize(
    "name, verdict", [("keep_and_judge", nullcontext()), ("judge_and_fail", pytest.raises(TrajectoryError))]
)
def test_a_dynamic_filter_that_replaces_the_metadata_leaves_a_group_its_data_set(
    mine: str, name: str, verdict: AbstractContextManager[Any]
) -> None:
    settings = run_config(dynamic_sampling_filter_path=f"{mine}.{name}")
    judged = of_a_data_set("code")
    with verdict:
        dynamic_filter(settings, flat_args(settings))(judged)
    origin = {"name": "code", "epochs": 0.0}
    assert [sample.metadata for sample in judged] == [{"judged": True, FROM_DATASET: origin}] * 2


async def test_a_sample_filter_that_replaces_the_metadata_leaves_each_group_its_data_set(mine: str) -> None:
    settings = run_config(rollout_sample_filter_path=f"{mine}.judge")
    groups = [of_a_data_set(name) for name in ("code", "mathematics")]
    await BatchPreparation(settings, flat_args(settings), Trace())(0, groups)
    assert [one.dataset for one in groups] == ["code", "mathematics"]
    assert all(sample.metadata["judged"] for one in groups for sample in one)


def test_an_over_sampling_filter_that_replaces_the_metadata_leaves_each_group_its_data_set() -> None:
    groups = [of_a_data_set(name) for name in ("code", "mathematics")]

    def best_first(groups: list[Group]) -> list[Group]:
        for sample in chain.from_iterable(groups):
            sample.metadata = {"judged": True}
        return groups

    assert BatchCollector._choose(None, best_first, groups, 2) == groups  # type: ignore[arg-type]
    assert [one.dataset for one in groups] == ["code", "mathematics"]
    assert all(sample.metadata["judged"] for one in groups for sample in one)


def test_an_over_sampling_filter_that_sets_an_invalid_value_is_named() -> None:
    def without_metadata(groups: list[Group]) -> list[Group]:
        groups[0][0].metadata = 5  # type: ignore[assignment]
        return groups

    with pytest.raises(UserError, match="over_sampling_filter_path set an invalid value: sample 0: its metadata is 5"):
        BatchCollector._choose(None, without_metadata, [group(0.0)], 1)  # type: ignore[arg-type]


async def test_a_function_for_all_samples_that_replaces_the_metadata_leaves_each_group_its_data_set(mine: str) -> None:
    class Source:
        async def collect_batch(self, rollout_id: int, *arguments: Any) -> list[Group]:
            return [of_a_data_set("code")]

    args = flat_args(run_config(rollout_all_samples_process_path=f"{mine}.judge_all", rollout_batch_size=1))
    source: Any = Source()
    [judged] = await sglang_rollout.generate_rollout(args, 0, source)
    assert (judged.dataset, judged[0].metadata["judged"]) == ("code", True)


async def batches(mine: str, events: Trace, groups: Any, **settings: Any) -> list[Group]:
    chosen = run_config(**{"n_samples_per_prompt": 2, "rollout_batch_size": 1} | settings)

    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        return groups

    async def rate(sample: Sample) -> None:
        sample.rollout_log_probs = [-1.0] * sample.response_length

    args = flat_args(chosen)
    source = SimpleNamespace(trainer_version=2, live_version=2, version_when_taken=lambda sample: None)
    size = chosen.rollout.rollout_batch_size
    if trains_only(chosen):
        return await SavedBatches(chosen, SampleLimits(vocabulary=10))(4, source, size)  # type: ignore[arg-type]
    prepare = BatchPreparation(chosen, args, events)
    found = await RolloutFunctionAdapter(function, args, chosen, score_tokens=rate)(4, source, size)  # type: ignore[arg-type]
    await prepare(4, found)
    return found


@pytest.mark.parametrize("loss, rated", [("policy_loss", -1.0), ("sft_loss", 0.0)])
async def test_missing_versions_and_log_probabilities_are_added_to_the_samples_of_a_function(
    mine: str, loss: str, rated: float
) -> None:
    plain = [Sample(index=position, tokens=[1, 2, 3], response_length=2, reward=1.0) for position in range(2)]
    [trained] = await batches(mine, Trace(), [plain], loss_type=loss)
    assert [sample.rollout_log_probs for sample in trained] == [[rated, rated]] * 2
    assert [sample.spans for sample in trained] == [[VersionSpan(2, 0, 2)]] * 2


@pytest.mark.parametrize("count", [0, 2])
async def test_a_function_that_returns_a_batch_of_another_size_is_reported(mine: str, count: int) -> None:
    groups = [group(0.0, 1.0) for _ in range(count)]
    with pytest.raises(UserError, match=f"the rollout function returned {count} groups: rollout_batch_size is 1"):
        await batches(mine, Trace(), groups)


async def test_a_sample_filter_takes_samples_out_of_the_loss_but_not_the_batch(mine: str) -> None:
    trace = Trace()
    [trained] = await batches(mine, trace, [group(0.0, 1.0)], rollout_sample_filter_path=f"{mine}.drop_first")
    assert [sample.remove_sample for sample in trained] == [True, False]
    assert [(event.rollout, event.samples) for event in trace.of(SamplesRemoved)] == [(4, 1)]
    packed = pack_samples([ScoredSample(trained[0], 0, 0, -1.0), ScoredSample(trained[1], 0, 1, 1.0)], [])
    assert len(packed.tokens) == 6
    assert packed.advantages.tolist() == [1.0, 1.0]


def test_overlong_answers_can_be_masked() -> None:
    cut = group(0.0, 1.0, status=SampleStatus.TRUNCATED)
    mask_truncated(None, [cut, group(0.0)])
    assert all(sample.remove_sample for sample in cut)


async def test_a_sample_filter_that_raises_stops_the_run_by_name(mine: str) -> None:
    with pytest.raises(UserError, match=r"rollout_sample_filter_path users_own\.broken raised IndexError.* rollout 4"):
        await batches(mine, Trace(), [group(0.0, 1.0)], rollout_sample_filter_path=f"{mine}.broken")


async def test_dictionary_rewards_of_a_user_defined_rollout_function_are_read_by_the_key(mine: str) -> None:
    [trained] = await batches(mine, Trace(), [group({"acc": 0.0}, {"acc": 1.0})], reward_key="acc")
    assert [sample.scalar_reward for sample in trained] == [0.0, 1.0]


async def test_every_batch_is_saved_at_the_configured_path_and_in_the_dump_folder(mine: str, tmp_path: Path) -> None:
    await batches(mine, Trace(), [group(0.0, 1.0)], save_debug_rollout_data=str(tmp_path / "a" / "{rollout_id}.st"))
    await batches(mine, Trace(), [group(0.0, 1.0)], dump_details=str(tmp_path / "dump"))
    for path in (tmp_path / "a" / "4.st", tmp_path / "dump" / "rollout_data" / "4.safetensors"):
        rollout_id, groups = load_groups(path)
        assert (rollout_id, groups) == (4, [group(0.0, 1.0)])


async def test_batches_that_cannot_be_saved_are_trained_and_cause_one_warning(mine: str, tmp_path: Path) -> None:
    events = Trace()
    chosen = run_config(save_debug_rollout_data=str(tmp_path / "{rollout_id}.st"))
    prepare = BatchPreparation(chosen, flat_args(chosen), events)
    with files_at_most(100):
        for rollout_id in range(3):
            await prepare(rollout_id, [group(0.0, 1.0)])
    [warning] = events.of(WarningRaised)
    assert re.search(r"rollout data cannot be written to .*0\.st \(.*File too large", warning.text)


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("tokens", [1, 2, 99], "tokens: token 99 is outside the vocabulary of 10 tokens"),
        ("metadata", [1], "metadata: expected object, got array"),
        ("reward", "high", "reward: expected"),
        ("rollout_log_probs", [-0.5], "rollout_log_probs has 1 entries; response_length is 2"),
    ],
)
async def test_a_saved_batch_with_an_invalid_sample_is_refused_by_name(
    mine: str, tmp_path: Path, field: str, value: Any, reason: str
) -> None:
    template = str(tmp_path / "{rollout_id}.st")
    saved = group(0.0, 1.0)
    setattr(saved[0], field, value)
    save_groups(rollout_path(template, 4), 4, [saved])
    with pytest.raises(UserError, match=rf"4\.st cannot be trained: sample 0: {re.escape(reason)}"):
        await batches(mine, Trace(), None, load_debug_rollout_data=template)


@pytest.mark.parametrize("switch", [{}, {"debug_train_only": True}])
async def test_a_run_that_only_trains_takes_its_batches_from_disk(
    mine: str, tmp_path: Path, switch: dict[str, Any]
) -> None:
    template = str(tmp_path / "{rollout_id}.st")
    saved = [group(0.0, 1.0), group(0.5, 1.0, first=2)]
    await batches(mine, Trace(), saved, save_debug_rollout_data=template, rollout_batch_size=2)
    again = {"load_debug_rollout_data": template, "rollout_batch_size": 2, **switch}
    assert await batches(mine, Trace(), None, **again) == saved
    with pytest.raises(UserError, match="holds 2 groups: set rollout_batch_size to 2"):
        await batches(mine, Trace(), None, **again | {"rollout_batch_size": 3})


async def test_saved_tokens_of_future_versions_are_shifted_back_by_the_same_distance(mine: str, tmp_path: Path) -> None:
    late = group(0.0, 1.0)
    late[0].spans, late[1].spans = [VersionSpan(7, 0, 1), VersionSpan(9, 1, 2)], [VersionSpan(5, 0, 2)]
    template = str(tmp_path / "{rollout_id}.st")
    save_groups(rollout_path(template, 4), 4, [late])
    [found] = await batches(mine, Trace(), None, load_debug_rollout_data=template, rollout_batch_size=1)
    assert found[0].spans == [VersionSpan(0, 0, 1), VersionSpan(2, 1, 2)]
    assert found[1].spans == [VersionSpan(0, 0, 2)]


def test_numbers_that_functions_record_for_every_sample_are_averaged() -> None:
    samples = [Sample(metadata={"raw_reward": value, "round_number": 2}) for value in (1.0, 0.0)]
    assert metadata_means(samples) == {"raw_reward": 0.5, "round_number": 2.0}
    assert metadata_means([*samples, Sample()]) == {}


def test_rewards_of_any_numeric_type_are_compared() -> None:
    assert check_reward_nonzero_std(None, group(float(np.float32(0.5)), 1.0))


def newest_first(args: Any, groups: list[Group]) -> list[Group]:
    """Named by its path in the test below."""
    return groups[::-1]


async def test_the_over_sampling_filter_is_loaded_by_its_path_and_given_the_groups() -> None:
    class Source:
        async def collect_batch(
            self, rollout_id: int, size: int, over_sampling: int, choose: Callable[[list[Group]], list[Group]]
        ) -> list[Group]:
            return choose([group(0.0), group(1.0)])[:size]

    args = flat_args(run_config(over_sampling_filter_path=f"{__name__}.newest_first", rollout_batch_size=1))
    source: Any = Source()
    [chosen] = await sglang_rollout.generate_rollout(args, 0, source)
    assert chosen[0].reward == 1.0

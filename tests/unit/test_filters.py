"""Which groups and samples the shipped filters keep, and what becomes of a batch on its way to the learner."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles_async.adapters.storage.rollout_file import load_groups, rollout_path, save_groups
from miles_async.batching.advantages import ScoredSample
from miles_async.batching.batch import pack_samples
from miles_async.config.derived import trains_only
from miles_async.config.fields import SETTINGS
from miles_async.config.flags import Assignment
from miles_async.config.load import build
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.events import SamplesRemoved
from miles_async.filters import (
    check_no_aborted,
    check_no_truncated,
    check_reward_nonzero_std,
    mask_truncated,
    sort_by_reward_std,
)
from miles_async.pipeline.training import metadata_means
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.types import Group, Sample, SampleStatus, Verdict, VersionSpan
from tests.sim.world import Trace
from workers.batches import BatchPreparation, SavedBatches
from workers.preflight import dynamic_filter


def config(**settings: Any) -> RunConfig:
    return build([Assignment(SETTINGS[name].path, value, name) for name, value in settings.items()])


def group(*rewards: Any, first: int = 0, status: SampleStatus = SampleStatus.COMPLETED) -> Group:
    samples = [
        Sample(
            index=first + place,
            tokens=[1, 2, 3],
            response_length=2,
            rollout_log_probs=[-0.5, -0.25],
            spans=[VersionSpan(0, 0, 2)],
            reward=reward,
            status=status,
        )
        for place, reward in enumerate(rewards)
    ]
    return Group(samples, feed_index=f"sample_0_{first}")


def test_a_group_whose_samples_all_scored_the_same_goes_with_its_score_as_reason() -> None:
    assert check_reward_nonzero_std(None, group(0.0, 1.0))
    assert check_reward_nonzero_std(None, group(1.0, 1.0)) == Verdict(False, "all_1.0")
    assert check_reward_nonzero_std(None, group(0.0, 0.0)) == Verdict(False, "all_0.0")


def test_a_dictionary_reward_is_judged_by_the_entry_that_counts() -> None:
    scored = group({"acc": 1, "style": 0.1}, {"acc": 1, "style": 0.9})
    for sample in scored:
        sample.reward_key = "acc"
    assert not check_reward_nonzero_std(None, scored)


def test_aborted_failed_or_truncated_samples_cost_their_group() -> None:
    assert check_no_aborted(None, group(0.0, status=SampleStatus.ABORTED)) == Verdict(False, "aborted")
    assert not check_no_aborted(None, group(0.0, status=SampleStatus.FAILED))
    assert check_no_aborted(None, group(0.0, status=SampleStatus.TRUNCATED))
    assert check_no_truncated(None, group(0.0, status=SampleStatus.TRUNCATED)) == Verdict(False, "truncated")


def test_groups_whose_samples_disagree_most_come_first() -> None:
    same, apart, near = group(1.0, 1.0), group(0.0, 1.0), group(0.5, 1.0)
    assert sort_by_reward_std(None, [same, near, apart]) == [apart, near, same]


SEED_STYLE = """
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

def drop_first(args, samples):
    samples[0][0].remove_sample = True

def broken(args, samples):
    return samples[9]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "seed_style.py").write_text(SEED_STYLE.replace("import torch\n", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "seed_style"
    sys.modules.pop("seed_style", None)


def test_a_dynamic_filter_in_the_seeds_words_reads_the_reward_by_its_key(mine: str) -> None:
    settings = config(dynamic_sampling_filter_path=f"{mine}.keep_spread_light", reward_key="acc")
    keep = dynamic_filter(settings, flat_args(settings))
    assert keep(group({"acc": 0.0}, {"acc": 1.0}))
    assert not keep(group({"acc": 1.0}, {"acc": 1.0}))


def test_the_reason_of_a_verdict_reaches_the_pipeline() -> None:
    settings = config(dynamic_sampling_filter_path="miles_async.filters.check_reward_nonzero_std")
    assert dynamic_filter(settings, flat_args(settings))(group(1.0, 1.0)) == Verdict(False, "all_1.0")


def batches(mine: str, events: Trace, groups: Any, **settings: Any) -> list[Group]:
    chosen = config(**{"n_samples_per_prompt": 2, "rollout_batch_size": 1} | settings)

    async def function(args: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
        return groups

    async def rate(sample: Sample) -> None:
        sample.rollout_log_probs = [-1.0] * sample.response_length

    args, source = flat_args(chosen), SimpleNamespace(trainer_version=2)

    async def batch() -> list[Group]:
        if trains_only(chosen):
            return await SavedBatches(chosen)(4, source)  # type: ignore[arg-type]
        prepare = BatchPreparation(chosen, args, events)
        found = await RolloutFunctionAdapter(function, args, chosen, score_tokens=rate)(4, source)  # type: ignore[arg-type]
        await prepare(4, found)
        return found

    return asyncio.run(batch())


@pytest.mark.parametrize("loss, rated", [("policy_loss", -1.0), ("sft_loss", 0.0)])
def test_what_a_function_in_slimes_shape_did_not_record_is_added(mine: str, loss: str, rated: float) -> None:
    plain = [Sample(index=place, tokens=[1, 2, 3], response_length=2, reward=1.0) for place in range(2)]
    [trained] = batches(mine, Trace(), [plain], loss_type=loss)
    assert [sample.rollout_log_probs for sample in trained] == [[rated, rated]] * 2
    assert [sample.spans for sample in trained] == [[VersionSpan(2, 0, 2)]] * 2


@pytest.mark.parametrize("count", [0, 2])
def test_a_batch_of_another_size_is_the_functions_error(mine: str, count: int) -> None:
    groups = [group(0.0, 1.0) for _ in range(count)]
    with pytest.raises(UserError, match=f"the rollout function returned {count} groups: rollout_batch_size is 1"):
        batches(mine, Trace(), groups)


def test_a_sample_filter_takes_samples_out_of_the_loss_but_not_the_batch(mine: str) -> None:
    trace = Trace()
    [trained] = batches(mine, trace, [group(0.0, 1.0)], rollout_sample_filter_path=f"{mine}.drop_first")
    assert [sample.remove_sample for sample in trained] == [True, False]
    assert [(event.rollout, event.samples) for event in trace.of(SamplesRemoved)] == [(4, 1)]
    packed = pack_samples([ScoredSample(trained[0], -1.0), ScoredSample(trained[1], 1.0)])
    assert len(packed.tokens) == 6
    assert packed.advantages.tolist() == [1.0, 1.0]


def test_overlong_answers_can_be_masked() -> None:
    cut = group(0.0, 1.0, status=SampleStatus.TRUNCATED)
    mask_truncated(None, [cut, group(0.0)])
    assert all(sample.remove_sample for sample in cut)


def test_a_sample_filter_that_raises_stops_the_run_by_name(mine: str) -> None:
    with pytest.raises(UserError, match=r"rollout_sample_filter_path seed_style\.broken raised IndexError.* rollout 4"):
        batches(mine, Trace(), [group(0.0, 1.0)], rollout_sample_filter_path=f"{mine}.broken")


def test_dictionary_rewards_of_a_users_own_rollout_function_are_read_by_the_key(mine: str) -> None:
    [trained] = batches(mine, Trace(), [group({"acc": 0.0}, {"acc": 1.0})], reward_key="acc")
    assert [sample.scalar_reward for sample in trained] == [0.0, 1.0]


def test_every_batch_is_saved_where_it_is_asked_for_and_under_the_dump_folder(mine: str, tmp_path: Path) -> None:
    batches(mine, Trace(), [group(0.0, 1.0)], save_debug_rollout_data=str(tmp_path / "a" / "{rollout_id}.st"))
    batches(mine, Trace(), [group(0.0, 1.0)], dump_details=str(tmp_path / "dump"))
    for path in (tmp_path / "a" / "4.st", tmp_path / "dump" / "rollout_data" / "4.safetensors"):
        rollout_id, groups = load_groups(path)
        assert (rollout_id, groups) == (4, [group(0.0, 1.0)])


@pytest.mark.parametrize("switch", [{}, {"debug_train_only": True}])
def test_a_run_that_only_trains_takes_its_batches_from_disk(mine: str, tmp_path: Path, switch: dict[str, Any]) -> None:
    template = str(tmp_path / "{rollout_id}.st")
    saved = [group(0.0, 1.0), group(0.5, 1.0, first=2)]
    batches(mine, Trace(), saved, save_debug_rollout_data=template, rollout_batch_size=2)
    again = {"load_debug_rollout_data": template, "rollout_batch_size": 2, **switch}
    assert batches(mine, Trace(), None, **again) == saved
    with pytest.raises(UserError, match="holds 2 groups: set rollout_batch_size to 2"):
        batches(mine, Trace(), None, **again | {"rollout_batch_size": 3})


def test_saved_tokens_of_versions_to_come_are_moved_back_together(mine: str, tmp_path: Path) -> None:
    late = group(0.0, 1.0)
    late[0].spans, late[1].spans = [VersionSpan(7, 0, 1), VersionSpan(9, 1, 2)], [VersionSpan(5, 0, 2)]
    template = str(tmp_path / "{rollout_id}.st")
    save_groups(rollout_path(template, 4), 4, [late])
    [found] = batches(mine, Trace(), None, load_debug_rollout_data=template, rollout_batch_size=1)
    assert found[0].spans == [VersionSpan(0, 0, 1), VersionSpan(2, 1, 2)]
    assert found[1].spans == [VersionSpan(0, 0, 2)]


def test_what_functions_note_of_every_sample_is_averaged() -> None:
    samples = [Sample(metadata={"raw_reward": value, "round_number": 2}) for value in (1.0, 0.0)]
    assert metadata_means(samples) == {"raw_reward": 0.5, "round_number": 2.0}
    assert metadata_means([*samples, Sample()]) == {}


def test_a_rewards_spread_is_seen_whatever_kind_of_number_it_is() -> None:
    assert check_reward_nonzero_std(None, group(float(np.float32(0.5)), 1.0))

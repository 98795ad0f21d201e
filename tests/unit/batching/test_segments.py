"""Trajectories of several segments, from the generate function to the micro-batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.batching.batch import TrainStep, policy_steps
from miles_async.batching.shared_prefixes import prefix_units
from miles_async.errors import TrajectoryError, UserError
from miles_async.pipeline.training import mean_reward, shuffle_rewards
from miles_async.recording import GroupRecord, Recording
from miles_async.rewards.rewarder import Rewarder
from miles_async.rollout.contract import as_groups
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, GroupChange
from miles_async.types import Group, Sample, SampleStatus, VersionSpan, trajectories_of
from tests.configuration import run_config
from tests.unit.rollout.test_generate_functions import generating_with

PROMPT = [1, 2, 3]


def segment(
    index: int,
    trajectory: int | None,
    reward: float | None = 1.0,
    *,
    first: int = 9,
    response: int = 3,
    prompt: Sequence[int] = PROMPT,
    version: int = 4,
) -> Sample:
    """A finished sample; `first` is its first response token."""
    return Sample(
        index=index,
        trajectory=trajectory,
        prompt="Q",
        tokens=[*prompt, first, *range(10, 9 + response)],
        response="answer",
        response_length=response,
        rollout_log_probs=[-0.1] * response,
        spans=[VersionSpan(version, 0, response)],
        reward=reward,
        status=SampleStatus.COMPLETED,
    )


def group_of_two(rewards: tuple[float, float] = (1.0, 0.0)) -> Group:
    """A trajectory of three segments and one of one."""
    first, second = rewards
    return Group(
        [
            segment(0, 0, first, first=20),
            segment(0, 0, first, first=21, prompt=[*PROMPT, 20], response=5),
            segment(0, 0, first, first=22, response=1),
            segment(1, None, second, first=23),
        ],
        feed_index="sample_0_0",
    )


def test_samples_with_the_same_number_are_one_trajectory() -> None:
    group = Group(
        [segment(0, 5), segment(1, None), segment(0, 5), segment(2, None), segment(3, 2)], feed_index="sample_0_0"
    )
    assert [[group.index(one) for one in segments] for segments in group.trajectories] == [[0, 0], [1], [3], [4]]
    assert group_of_two().rewards == [1.0, 0.0]


def test_a_group_that_is_generated_again_has_one_sample_per_trajectory_and_no_tokens_of_another_prompt() -> None:
    prompts = Group.from_prompt_dict(group_of_two().prompt_dict())
    group = group_of_two()
    group.reset()
    for again in (prompts, group):
        assert [(one.index, one.prompt, one.trajectory, one.status) for one in again] == [
            (0, "Q", None, SampleStatus.PENDING),
            (1, "Q", None, SampleStatus.PENDING),
        ]
        # A segment may begin with other messages than the prompt, so the prompt is tokenized again.
        assert [one.tokens for one in again] == [[], PROMPT]


def test_the_oldest_token_of_any_segment_is_the_age_of_the_group() -> None:
    group = group_of_two()
    group[2].spans = [VersionSpan(2, 0, 1)]
    assert (group.oldest_version, group.versions) == (2, {2, 4})


# --- advantages and loss ---------------------------------------------------------------------------------------------


def advantages(groups: Sequence[Group], **settings: Any) -> dict[int, float]:
    """The advantage of each sample of a batch, by its first response token."""
    return {token: advantage for token, (advantage, _) in columns(groups, **settings).items()}


def columns(groups: Sequence[Group], **settings: Any) -> dict[int, tuple[float, float]]:
    """Advantage and loss weight of each sample of a batch, by its first response token."""
    config = run_config(**{"grpo_std_normalization": False} | settings)
    [[step]] = policy_steps(groups, config, ranks=1, computes_all=True)
    return {
        int(batch.tokens[target]): (round(float(advantage), 6), round(float(weight), 6))
        for batch in step.micro_batches
        for target, advantage, weight in zip(batch.targets, batch.advantages, batch.loss_weights, strict=True)
        if batch.tokens[target] >= 20
    }


def test_a_trajectory_counts_once_in_the_baseline_of_its_group_however_many_segments_it_has() -> None:
    assert advantages([group_of_two()]) == {20: 0.5, 21: 0.5, 22: 0.5, 23: -0.5}
    normalized = advantages([group_of_two()], grpo_std_normalization=True)
    spread = 0.5**0.5
    assert normalized == pytest.approx({20: spread, 21: spread, 22: spread, 23: -spread}, abs=1e-5)


def test_a_segment_with_its_own_reward_gets_its_own_advantage() -> None:
    group = group_of_two()
    group[0].reward, group[1].reward, group[2].reward = 0.0, 1.0, 0.5
    assert group.rewards == [0.5, 0.0]
    assert advantages([group]) == {20: -0.25, 21: 0.75, 22: 0.25, 23: -0.25}


@pytest.mark.parametrize(
    "aggregation, weights",
    [
        ("token_mean", {20: 1, 21: 1, 22: 1, 23: 1}),
        # 12 tokens in two trajectories, of 9 and of 3 tokens.
        ("sequence_mean", {20: 12 / 18, 21: 12 / 18, 22: 12 / 18, 23: 12 / 6}),
        ("sequence_sum", {20: 12 / 2, 21: 12 / 2, 22: 12 / 2, 23: 12 / 2}),
        ("constant", {20: 12 / 32, 21: 12 / 32, 22: 12 / 32, 23: 12 / 32}),
    ],
)
def test_the_loss_is_averaged_over_tokens_or_over_trajectories(aggregation: str, weights: dict[int, float]) -> None:
    found = columns([group_of_two()], loss_aggregation=aggregation, rollout_max_response_len=16)
    assert {token: weight for token, (_, weight) in found.items()} == pytest.approx(weights, abs=1e-5)


def test_segments_that_are_samples_have_weights_and_optimizer_steps_of_samples() -> None:
    settings = {"segments_are_samples": True, "loss_aggregation": "sequence_mean"}
    found = columns([group_of_two()], global_batch_size=4, **settings)
    # 12 tokens in four segments, of 3, 5, 1 and 3 tokens.
    assert {token: weight for token, (_, weight) in found.items()} == pytest.approx({20: 1, 21: 0.6, 22: 3, 23: 1})
    [steps] = policy_steps([group_of_two()], run_config(global_batch_size=2, **settings), ranks=1, computes_all=True)
    assert [(step.trajectories, step.total_tokens) for step in steps] == [(2, 8), (2, 4)]
    # No step has more than global_batch_size segments.
    [steps] = policy_steps([group_of_two()], run_config(global_batch_size=3, **settings), ranks=1, computes_all=True)
    assert [step.trajectories for step in steps] == [2, 2]


def test_the_longest_segment_of_a_trajectory_sets_its_length_penalty() -> None:
    settings = {"rollout_max_response_len": 6, "overlong_buffer_len": 2, "overlong_penalty": 1.0}
    # The segment of 5 tokens is one token into the buffer.
    assert advantages([group_of_two()], **settings) == {20: 0.25, 21: 0.25, 22: 0.25, 23: -0.25}


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "fixed size": {"use_dynamic_batch_size": False},
    "rows": {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 4},
    "shared prefixes": {"share_prefixes": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_segment_is_packed_once_in_the_step_of_its_trajectory(layout: str, ranks: int) -> None:
    groups = []
    for number in range(4):
        first, second, third, alone = group_of_two()
        segments = [first, second, third][: number % 3 + 1]
        renamed = [replace(one, index=2 * number) for one in segments]
        groups.append(Group([*renamed, replace(alone, index=2 * number + 1)]))
        for one in groups[-1]:
            one.tokens[-1] = 100 + 2 * number + (one.index or 0) % 2  # the trajectory's number
    config = run_config(num_steps_per_rollout=2, max_tokens_per_gpu=16, **LAYOUTS[layout])
    rank_steps = policy_steps(groups, config, ranks=ranks, share_prefixes=True, computes_all=True)
    assert len({len(step.micro_batches) for steps in rank_steps for step in steps[:1]}) == 1
    ends = [Counter(last_tokens([steps[number] for steps in rank_steps])) for number in range(2)]
    assert ends == [Counter({100: 1, 101: 1, 102: 2, 103: 1}), Counter({104: 3, 105: 1, 106: 1, 107: 1})]
    for steps in rank_steps:
        for step in steps:
            assert all(batch.computed_tokens - batch.padding <= 16 for batch in step.micro_batches)


def last_tokens(steps: Sequence[TrainStep]) -> list[int]:
    return [
        int(batch.tokens[t])
        for step in steps
        for batch in step.micro_batches
        for t in batch.targets
        if batch.tokens[t] >= 100
    ]


def test_segments_that_share_a_prefix_are_one_unit_in_which_it_is_computed_once() -> None:
    group = group_of_two()
    [unit] = prefix_units(group, [0] * 4, cap=100, at_most=8)
    # The prompt of 3 tokens, 3 + 5 tokens after it with the first one shared, and the other responses.
    assert unit.tokens == 3 + 3 + 5 + 1 + 3
    stranger = segment(0, 0, prompt=[7, 7])
    units = prefix_units([*group, stranger], [0] * 5, cap=100, at_most=8)
    assert [len(one.members) for one in units] == [4, 1]


# --- rewards ---------------------------------------------------------------------------------------------------------


async def test_a_reward_function_scores_the_segment_that_ended_last_for_the_whole_trajectory() -> None:
    seen: list[int] = []

    async def reward(args: Any, sample: Sample) -> float:
        seen.append(sample.tokens[sample.prompt_length])
        return float(sample.tokens[sample.prompt_length])

    group = group_of_two()
    for one in group:
        one.reward = None
    await Rewarder(reward, args=None, name="my.reward", timeout_seconds=5.0).score(group)
    assert seen == [22, 23]
    assert [one.reward for one in group] == [22.0, 22.0, 22.0, 23.0]


async def test_rewards_that_a_generate_function_set_are_kept_and_shared() -> None:
    async def reward(args: Any, sample: Sample) -> float:
        return 7.0

    group = group_of_two()
    group[0].reward, group[1].reward, group[2].reward, group[3].reward = 0.25, None, 0.5, None
    await Rewarder(reward, args=None, name="my.reward", timeout_seconds=5.0).score(group)
    assert [one.reward for one in group] == [0.25, 0.5, 0.5, 7.0]


async def test_a_reward_for_whole_groups_sees_one_segment_per_trajectory() -> None:
    def reward(args: Any, samples: list[Sample]) -> list[float]:
        return [float(one.tokens[one.prompt_length]) for one in samples]

    group = group_of_two()
    await Rewarder(reward, args=None, name="my.reward", timeout_seconds=5.0, whole_groups=True).score(group)
    assert [one.reward for one in group] == [22.0, 22.0, 22.0, 23.0]


def test_the_metrics_and_the_shuffled_rewards_count_trajectories() -> None:
    groups = [group_of_two((1.0, 0.0)), group_of_two((4.0, 3.0))]
    assert mean_reward(groups) == 2.0
    shuffle_rewards(groups, seed=1)
    assert sorted(reward for group in groups for reward in group.rewards) == [0.0, 1.0, 3.0, 4.0]
    assert all(len({one.reward for one in segments}) == 1 for group in groups for segments in group.trajectories)


# --- generate functions ----------------------------------------------------------------------------------------------


async def branching(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two segments, and an empty one; the second sample of a group has one."""
    own = await args.turns.sample(sample, sampling_params)
    if sample.index == 1:
        return [own]
    other = replace(own, tokens=[7, 7], response="", response_length=0, spans=[], rollout_log_probs=[])
    other = await args.turns.sample(other, sampling_params)
    return [other, Sample(prompt="Q", tokens=[1], status=SampleStatus.COMPLETED), own]


async def test_a_function_may_return_the_segments_of_its_trajectory() -> None:
    async with generating_with(branching) as (generator, _):
        group = Group([Sample(index=i, prompt="Q") for i in range(3)])
        await generator.generate(group)
    assert [(one.index, one.trajectory) for one in group] == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 2)]
    assert [one.tokens[0] for one in group] == [7, ord("Q"), ord("Q"), 7, ord("Q")]


@pytest.mark.parametrize("result", [[], [1], "text", [[Sample()]]])
async def test_other_results_of_a_function_fail_the_sample(result: Any) -> None:
    async def wrong(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
        return result

    async with generating_with(wrong) as (generator, _):
        with pytest.raises(TrajectoryError, match="return the sample, or the list of the samples"):
            await generator.generate(Group([Sample(index=0, prompt="Q")]))


async def test_a_sample_that_failed_does_not_discard_the_segments_of_the_others() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        if sample.index == 1:
            raise KeyError("no tools")
        return await branching(args, sample, sampling_params)

    async with generating_with(mine) as (generator, _):
        group = Group([Sample(index=i, prompt="Q") for i in range(3)])
        with pytest.raises(TrajectoryError, match="no tools"):
            await generator.generate(group)
        assert [len(segments) for segments in group.trajectories] == [2, 1, 2]
        # Only the sample that failed is generated again, and its number is not that of another trajectory.
        group.reset(keeps_finished=True)
        generator._function = lambda args, sample, params: branching(args, replace(sample, index=5), params)
        await generator.generate(group)
    assert [(len(one), one[0].index) for one in group.trajectories] == [(2, 0), (2, 1), (2, 2)]


async def test_an_aborted_trajectory_of_several_segments_starts_over() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        own = replace(sample, status=SampleStatus.COMPLETED, tokens=[81, 5], response_length=1)
        return [own, await args.turns.sample(sample, sampling_params)]

    async with generating_with(mine, None) as (generator, engine):
        group = Group([Sample(index=0, prompt="Q")])
        running = asyncio.create_task(generator.generate(group))
        await engine.begun.wait()
        await generator.abort(group)
        await running
    [again] = group
    assert (again.status, again.tokens, again.response_length, again.trajectory) == (SampleStatus.ABORTED, [], 0, None)


def test_a_rollout_function_may_return_a_list_of_segments_for_a_sample() -> None:
    first, second, third, alone = group_of_two()
    for one in (first, second, third):
        one.rollout_id = None  # slime's name
    [nested] = as_groups([[[first, second, third], alone]], 2, 2)
    assert [one.trajectory for one in nested] == [0, 0, 0, None]
    [flat] = as_groups(list(group_of_two()), 2, 2)
    assert len(flat.trajectories) == 2
    with pytest.raises(UserError, match="returned 1 samples in the group of sample 0"):
        as_groups([[[first, second, third]]], 2, 2)


# --- files -----------------------------------------------------------------------------------------------------------


async def test_segments_are_the_same_after_the_store_and_the_files(tmp_path: Path) -> None:
    group = group_of_two()
    save_groups(tmp_path / "0", 0, [group])
    assert load_groups(tmp_path / "0") == (0, [group])
    with closing(SqliteRunStore(tmp_path / "store", "a")) as store:
        change = GroupChange(feed_index="sample_0_0", attempt=0, state=GroupState.FINISHED, order=0, content=group)
        await store.write(Changes(number=1, groups={3: change}))
        assert await store.load(3) == group


def test_a_recording_replays_segments_and_the_rewards_that_the_generate_function_set(tmp_path: Path) -> None:
    group = group_of_two()
    group[3].reward = None
    record = GroupRecord.of(group, prompt="hash", live_version=4, seconds=1.0)
    store = RecordingStore(tmp_path)
    store.save(0, Recording(groups=[record], seconds=1.0), {})
    [loaded] = store.load(0).recording.groups
    pending = Group([Sample(index=4, prompt="Q"), Sample(index=5, prompt="Q")], feed_index="sample_0_0")
    samples = list(pending)
    loaded.replay_into(pending, live_version=6)
    assert [one.index for one in pending] == [4, 4, 4, 5]
    assert (pending[0], pending[3]) == (samples[0], samples[1]), "other code may hold the samples"
    assert [one.reward for one in pending] == [1.0, 1.0, 1.0, None]
    assert [len(segments) for segments in trajectories_of(pending)] == [3, 1]
    assert [one.tokens for one in pending] == [one.tokens for one in group]
    assert {span.version for one in pending for span in one.spans} == {6}

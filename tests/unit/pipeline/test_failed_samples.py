"""Samples that fail for reasons of infrastructure: they are generated and scored again alone."""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.adapters.system.clock import SystemClock
from miles_async.batching.batch import policy_steps
from miles_async.errors import EngineLostError, InfrastructureError, TrajectoryError, is_infrastructure
from miles_async.pipeline.run_state import RunState
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import REWARD_ERROR, DropReason, Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Feed, Trace, lifecycle_of
from tests.unit.config.test_config_checks import refusal
from tests.unit.rollout.test_generate_functions import generating_with


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed samples are generated again at once."""
    monkeypatch.setattr("miles_async.rollout.generate.FIRST_PAUSE_SECONDS", 0.0)


def three() -> Group:
    return Group([Sample(index=i, prompt="Q", metadata={"row": i}) for i in range(3)], feed_index="sample_0_0")


def failing(error: Exception, index: int, times: int) -> tuple[Any, Counter[int | None]]:
    """A function that samples one turn, and then raises `error` the first `times` times for one sample."""
    calls: Counter[int | None] = Counter()

    async def function(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        calls[sample.index] += 1
        sample.metadata["turns"] = sample.metadata.get("turns", 0) + 1
        await args.turns.sample(sample, sampling_params)
        if sample.index == index and calls[index] <= times:
            raise error
        return sample

    return function, calls


async def test_a_sample_whose_tool_server_fails_is_generated_again_alone() -> None:
    function, calls = failing(ConnectionError("no tools"), index=1, times=2)
    async with generating_with(function, "one", "three", "seven") as (generator, engine):
        group = three()
        await generator.generate(group)
    assert calls == {0: 1, 1: 3, 2: 1}
    assert [sample.response for sample in group] == ["one", "ok", "seven"]
    assert [sample.metadata for sample in group] == [{"row": i, "turns": 1} for i in range(3)]
    assert engine.discarded == [(1, DropReason.FAILED, 5), (1, DropReason.FAILED, 2)]


async def test_a_sample_of_status_failed_without_a_reward_is_generated_again() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        again = sample.response_length == 0 and not engine.discarded
        await args.turns.sample(sample, sampling_params)
        if again and sample.index == 0:
            sample.status = SampleStatus.FAILED
        return sample

    async with generating_with(mine) as (generator, engine):
        group = three()
        await generator.generate(group)
    assert [sample.status for sample in group] == [SampleStatus.COMPLETED] * 3
    assert [index for index, _, _ in engine.discarded] == [0]


async def test_the_attempts_of_a_sample_are_limited_and_its_error_names_it() -> None:
    function, calls = failing(TimeoutError("slow tools"), index=1, times=9)
    async with generating_with(function, max_attempts=2) as (generator, _):
        group = three()
        with pytest.raises(InfrastructureError, match=r"sample 1: .*slow tools") as raised:
            await generator.generate(group)
    assert calls[1] == 2
    assert [sample.index for sample in raised.value.samples] == [1]
    assert [sample.status for sample in group] == [
        SampleStatus.COMPLETED,
        SampleStatus.FAILED,
        SampleStatus.COMPLETED,
    ]


async def test_a_bug_of_the_function_is_not_repeated_and_the_other_samples_are_kept() -> None:
    function, calls = failing(TypeError("no int"), index=1, times=9)
    async with generating_with(function) as (generator, _):
        group = three()
        with pytest.raises(TrajectoryError, match="no int") as raised:
            await generator.generate(group)
    assert calls[1] == 1
    assert not isinstance(raised.value, InfrastructureError)
    assert [sample.index for sample in raised.value.samples] == [1]
    group.reset(keeps_finished=True)
    assert [sample.response for sample in group] == ["ok", "", "ok"]


async def test_all_attempts_of_a_sample_together_have_the_time_limit() -> None:
    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        await asyncio.sleep(0.02)
        raise ConnectionError("no tools")

    async with generating_with(mine, timeout_seconds=0.05, max_attempts=1000) as (generator, _):
        with pytest.raises(InfrastructureError, match=r"longer than 0\.05 s \(generate_timeout_seconds\)"):
            await generator.generate(three())


async def test_a_sample_that_failed_before_an_abort_is_not_continued_after_it() -> None:
    failed = asyncio.Event()

    async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if sample.index == 0 and not failed.is_set():
            failed.set()
            raise ConnectionError("no tools")
        if sample.index == 0:
            await hangs.wait()
            raise ConnectionError("no tools")
        return await args.turns.sample(sample, sampling_params)

    hangs = asyncio.Event()
    async with generating_with(mine) as (generator, _):
        group = three()
        running = asyncio.create_task(generator.generate(group))
        await failed.wait()
        stopping = asyncio.create_task(generator.abort(group))
        await asyncio.sleep(0.01)
        hangs.set()
        await stopping
        with pytest.raises(InfrastructureError, match="the run aborted it after it had failed"):
            await running
    assert [sample.status for sample in group] == [SampleStatus.FAILED, *[SampleStatus.COMPLETED] * 2]


class ServerError(Exception):
    pass


ServerError.__module__, ServerError.__qualname__ = "openai", "InternalServerError"


class DerivedError(ServerError):
    pass


def caused(error: Exception) -> Exception:
    outer = RuntimeError("the tool failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        InfrastructureError("mine"),
        EngineLostError("engine-0"),
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.ENETUNREACH, "no network"),
        DerivedError(),
        caused(caused(BrokenPipeError())),
    ],
    ids=repr,
)
def test_failures_of_infrastructure_are_recognised(error: Exception) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize(
    "error", [TypeError(), KeyError("page"), FileNotFoundError(2, "No such file", "tools.json"), caused(ValueError())]
)
def test_other_errors_are_those_of_the_function(error: Exception) -> None:
    assert not is_infrastructure(error)


def rewarder(function: Callable[..., Any], **options: Any) -> Rewarder:
    return Rewarder(function, args=None, name="my.reward", timeout_seconds=5.0, **options)


async def judged_remotely(args: Any, sample: Sample) -> float:
    if sample.index == 1:
        raise ConnectionError("the judge is down")
    return 1.0


def judged_in_a_thread(args: Any, sample: Sample) -> float:
    return asyncio.run(judged_remotely(args, sample))


@pytest.mark.parametrize("function", [judged_remotely, judged_in_a_thread])
async def test_a_reward_server_that_fails_costs_one_reward(function: Any) -> None:
    group = three()
    with pytest.raises(InfrastructureError, match=r"sample 1: .* the judge is down") as raised:
        await rewarder(function).score(group)
    assert [sample.index for sample in raised.value.samples] == [1]
    assert [sample.reward for sample in group] == [1.0, None, 1.0]


async def test_a_reward_for_whole_groups_that_fails_names_all_samples() -> None:
    async def down(args: Any, samples: list[Sample]) -> list[float]:
        raise ConnectionError("the judge is down")

    group = three()
    with pytest.raises(InfrastructureError) as raised:
        await rewarder(down, whole_groups=True, boxed=True).score(group)
    assert [id(sample) for sample in raised.value.samples] == [id(sample) for sample in group]


async def test_a_reward_function_that_raises_names_the_sample_that_has_to_be_generated_again() -> None:
    def wrong(args: Any, sample: Sample) -> float:
        return 1.0 if sample.index != 2 else float("x")

    group = three()
    with pytest.raises(TrajectoryError) as raised:
        await rewarder(wrong, boxed=True).score(group)
    assert [id(sample) for sample in raised.value.samples] == [id(group[2])]


async def test_a_reward_that_is_no_number_names_its_sample() -> None:
    group = three()
    with pytest.raises(TrajectoryError, match="returned nan") as raised:
        await rewarder(lambda args, sample: float("nan") if sample.index == 1 else 1.0).score(group)
    assert [sample.index for sample in raised.value.samples] == [1]


def test_a_reset_puts_the_samples_back_that_a_group_was_trained_without() -> None:
    group = three()
    failed = group[1]
    group.leave_out([failed])
    assert [sample.index for sample in group] == [0, 2]
    group.reset()
    assert [sample.index for sample in group] == [0, 1, 2]
    assert group[1] is failed


def test_the_stored_prompt_of_a_group_includes_the_samples_that_were_left_out() -> None:
    group = three()
    group[2].trajectory, group[1].metadata[REWARD_ERROR] = 7, "slow"
    group.append(replace(group[2]))
    group.leave_out(group[1:])
    assert len(group) == 1
    prompts = Group.from_prompt_dict(json.loads(json.dumps(group.prompt_dict())))
    assert prompts == three()
    assert prompts.feed_index == "sample_0_0"


def test_a_group_is_completed_with_the_prompts_that_it_lacks_and_never_beyond_its_size() -> None:
    group = Group(three()[2:])
    group.complete(three())
    assert [sample.index for sample in group.missing] == [0, 1]
    group.complete(three())
    assert len(group.missing) == 2
    group.put_back()
    assert group == three()
    renamed = Group(Sample(prompt="Q") for _ in range(2))
    renamed.complete(three())
    assert len(renamed.prompts) == 3


def test_samples_that_return_to_their_group_are_generated_again_also_if_finished_ones_are_kept() -> None:
    group = Group([trained(i, 1.0) for i in range(3)])
    group.leave_out(group[:1])
    group.reset(keeps_finished=True)
    assert [sample.response_length for sample in group] == [0, 1, 1]


def test_a_saved_group_keeps_the_prompts_of_the_samples_that_were_left_out(tmp_path: Path) -> None:
    group = three()
    group.leave_out(group[1:2])
    save_groups(tmp_path / "0", 0, [group])
    _, [loaded] = load_groups(tmp_path / "0")
    assert [sample.index for sample in loaded] == [0, 2]
    assert loaded.prompts == three()


def test_an_aborted_group_that_keeps_its_tokens_gets_the_samples_back_that_it_lost() -> None:
    feed = Feed(3)
    lifecycle = lifecycle_of(RunState(SystemClock(), DirectJournal(Trace())), feed)
    group = feed.get_samples(1)[0]
    lifecycle.feed(group)
    group.leave_out(group[:1])
    for sample in group:
        sample.tokens, sample.response_length, sample.status = [1, 2], 1, SampleStatus.ABORTED
    lifecycle.salvage(group, DropReason.PARTIAL)
    [again] = feed.get_samples(1)
    assert [(sample.index, sample.response_length) for sample in again] == [(0, 0), (1, 1), (2, 1)]


def test_a_group_cannot_need_more_samples_than_it_has() -> None:
    said = refusal(n_samples_per_prompt=4, min_samples_per_group=5)
    assert "min_samples_per_group 5 is more than n_samples_per_prompt 4" in said


def trained(index: int, reward: float) -> Sample:
    return Sample(
        index=index,
        tokens=[1, 2, 50 + index],
        response_length=1,
        rollout_log_probs=[-0.5],
        spans=[VersionSpan(0, 0, 1)],
        reward=reward,
        status=SampleStatus.COMPLETED,
    )


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"use_dynamic_batch_size": False},
        {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 4},
        {"share_prefixes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_without_some_samples_are_trained_with_advantages_over_those_that_are_left(
    layout: dict[str, Any], ranks: int
) -> None:
    groups = [Group(trained(4 * number + i, float(i % 2)) for i in range(4)) for number in range(4)]
    groups[1].leave_out(groups[1][:1])
    groups[2].leave_out([groups[2][0], groups[2][3]])
    config = run_config(
        num_steps_per_rollout=2, n_samples_per_prompt=4, grpo_std_normalization=False, max_tokens_per_gpu=64, **layout
    )
    steps = policy_steps(groups, config, ranks=ranks, share_prefixes=True, computes_all=True)
    advantages = {
        int(batch.tokens[target]) - 50: round(float(advantage), 4)
        for rank in steps
        for step in rank
        for batch in step.micro_batches
        for target, advantage in zip(batch.targets, batch.advantages, strict=True)
    }
    missing = {4, 8, 11}
    assert set(advantages) == set(range(16)) - missing
    assert [advantages[i] for i in range(4)] == [-0.5, 0.5, -0.5, 0.5]
    assert [advantages[i] for i in (5, 6, 7)] == [0.3333, -0.6667, 0.3333]
    assert [advantages[i] for i in (9, 10)] == [0.5, -0.5]

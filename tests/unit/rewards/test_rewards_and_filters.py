"""How groups are scored and filtered, and how errors of rewards are handled."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from miles_async.errors import TrajectoryError, UserError
from miles_async.filters import check_reward_nonzero_std
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.grader import grade
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import FROM_DATASET, Group, Sample
from miles_async.user_code import is_async
from tests.configuration import run_config


def group_of(*responses: str, **fields: Any) -> Group:
    samples = [Sample(index=i, response=text, label="4", **fields) for i, text in enumerate(responses, start=7)]
    return Group(samples, feed_index="sample_0_3")


async def scored(rewarder: Rewarder | RunRewards, group: Group) -> list[Any]:
    await rewarder.score(group)
    return [sample.reward for sample in group]


def custom(function: Callable[[Any, Sample], Any], timeout_seconds: float = 5.0) -> Rewarder:
    return Rewarder(function, args=None, name="my.reward", timeout_seconds=timeout_seconds)


def configured(**settings: Any) -> RunRewards:
    return RunRewards(run_config(**settings), args=None)


async def never(args: Any, sample: Sample) -> float:
    """Named by its path in a test below."""
    await asyncio.Event().wait()
    return 0.0


def count_fours(args: Any, sample: Sample) -> int:
    """Named by path in a test below."""
    return sample.response.count("4")


async def test_exact_compares_the_stripped_response_with_the_label() -> None:
    rewarder = configured(rm_type="exact")
    assert await scored(rewarder, group_of(" 4\n", "44", "")) == [1.0, 0.0, 0.0]


async def test_a_custom_reward_is_loaded_by_its_path() -> None:
    rewarder = configured(custom_rm_path=f"{__name__}.count_fours")
    assert await scored(rewarder, group_of("404", "4", "0")) == [2.0, 1.0, 0.0]


async def test_an_async_reward_scores_all_samples_at_once() -> None:
    together = asyncio.Barrier(3)

    async def reward(args: Any, sample: Sample) -> float:
        await together.wait()
        return float(len(sample.response))

    assert await scored(custom(reward), group_of("a", "bb", "ccc")) == [1.0, 2.0, 3.0]


async def test_a_plain_reward_may_block_without_stopping_the_loop() -> None:
    loop, called, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def blocks(args: Any, sample: Sample) -> bool:
        loop.call_soon_threadsafe(called.set)
        return release.wait(60)

    group = group_of("a")
    scoring = asyncio.create_task(custom(blocks, timeout_seconds=60).score(group))
    await called.wait()
    release.set()
    await scoring
    assert [sample.reward for sample in group] == [1.0]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_reward_that_replaces_the_metadata_leaves_a_group_its_data_set_and_adapter(fails: bool) -> None:
    origin = {"name": "tests", "adapter": "code", "row": 5, "epochs": 0.5}

    def reward(args: Any, sample: Sample) -> float:
        sample.metadata[FROM_DATASET]["adapter"] = "another"
        sample.metadata = {"judged": True}
        return 1 / (not fails)

    group = group_of("4", "5")
    for sample in group:
        sample.metadata = {FROM_DATASET: dict(origin), "rm_type": "exact"}
    with suppress(TrajectoryError):
        await custom(reward).score(group)
    assert [sample.metadata for sample in group] == [{"judged": True, FROM_DATASET: origin}] * 2
    assert (group.dataset, group.adapter) == ("tests", "code")


@pytest.mark.parametrize(
    "reward, complaint",
    [
        (lambda args, sample: math.nan, "sample 7: reward my.reward returned nan"),
        (lambda args, sample: "4", "sample 7: reward my.reward returned '4', a str, not a number"),
        (lambda args, sample: None, "sample 7: .*a NoneType"),
        (lambda args, sample: 1 / 0, "sample 7: reward my.reward raised ZeroDivisionError: division by zero"),
    ],
)
async def test_an_error_of_a_reward_names_its_sample(reward: Callable[[Any, Sample], Any], complaint: str) -> None:
    with pytest.raises(TrajectoryError, match=complaint):
        await scored(custom(reward), group_of("4"))


@pytest.mark.parametrize("escape", [SystemExit(3), StopIteration()])
async def test_a_reward_that_exits_its_thread_fails_only_its_group(escape: BaseException) -> None:
    def leave(args: Any, samples: Any) -> Any:
        raise escape

    rewarder = Rewarder(leave, args=None, name="my.reward", timeout_seconds=5.0, whole_groups=True)
    with pytest.raises(TrajectoryError, match=rf"group sample_0_3: .*{type(escape).__name__}"):
        await scored(rewarder, group_of("4"))
    with pytest.raises(TrajectoryError, match=type(escape).__name__):
        await scored(custom(leave), group_of("4"))


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_an_async_reward_that_exits_the_process_fails_only_its_group(whole_groups: bool) -> None:
    async def leave(args: Any, samples: Any) -> Any:
        raise SystemExit(3)

    rewarder = Rewarder(leave, args=None, name="my.reward", timeout_seconds=5.0, whole_groups=whole_groups)
    with pytest.raises(TrajectoryError, match="raised SystemExit: 3"):
        await scored(rewarder, group_of("4"))


async def test_a_plain_reward_runs_in_the_context_of_its_group() -> None:
    """Skip roles read their manager from the context, and log lines their group."""
    here: ContextVar[float] = ContextVar("here")
    here.set(2.0)
    assert await scored(custom(lambda args, sample: here.get()), group_of("4")) == [2.0]


async def judge_is_down(args: Any, sample: Sample) -> float:
    raise ConnectionError("the judge is down")


async def awaited_length(args: Any, sample: Sample) -> float:
    return float(len(sample.response))


@pytest.mark.parametrize(
    "function, answer",
    [
        (awaited_length, (2.0, None)),
        (lambda args, sample: np.float32(0.5), (0.5, None)),
        (lambda args, sample: object(), ("raised TypeError: float() argument must be a string or a real", "function")),
        (lambda args, sample: 1 / 0, ("raised ZeroDivisionError: division by zero", "function")),
        (lambda args, sample: [0] * 10**18, ("raised MemoryError: ", "limit")),
        (judge_is_down, ("raised ConnectionError: the judge is down", "infrastructure")),
        (never, ("took longer than 0.01 s (reward_timeout_seconds)", "infrastructure")),
    ],
)
def test_a_grader_process_answers_for_any_result_of_its_function(function: Any, answer: tuple[Any, Any]) -> None:
    [result] = graded(function, "ab")
    value, cause = answer
    assert result.get("cause") == cause
    given = result["reward"] if cause is None else result["error"][: len(value)]
    assert given == value


def test_a_grader_process_answers_for_each_sample_of_a_group() -> None:
    first, second, third = graded(lambda args, sample: 1 / (sample.index - 8), *"abc")
    assert (first, third) == ({"reward": -1.0}, {"reward": 1.0})
    assert second["cause"] == "function"


def test_a_grader_process_answers_once_for_a_whole_group() -> None:
    assert graded(lambda args, samples: [len(samples)] * 3, *"abc", whole_groups=True) == [{"reward": [3, 3, 3]}]


def graded(function: Any, *responses: str, whole_groups: bool = False) -> list[dict[str, Any]]:
    task = {"is_async": is_async(function), "whole_groups": whole_groups, "timeout_seconds": 0.01}
    return list(map(json.loads, grade(function, None, list(group_of(*responses)), task)))


async def test_rewards_that_hang_in_threads_do_not_stop_others() -> None:
    """More of them than a shared pool of threads would have."""
    release = threading.Event()
    stuck = custom(lambda args, sample: release.wait(60), timeout_seconds=0.05)
    try:
        failures = await asyncio.gather(*(stuck.score(group_of("a")) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(failure, TrajectoryError) for failure in failures)
        assert await scored(custom(lambda args, sample: 1.0), group_of("a")) == [1.0]
    finally:
        release.set()


async def test_an_async_reward_that_raises_names_its_sample() -> None:
    async def reward(args: Any, sample: Sample) -> float:
        if sample.index == 8:
            raise RuntimeError("judge is down")
        return 0.0

    with pytest.raises(TrajectoryError, match=r"sample 8: reward my\.reward raised RuntimeError: judge is down"):
        await scored(custom(reward), group_of("a", "b"))


async def test_a_reward_that_times_out_fails_its_sample() -> None:
    rewarder = configured(custom_rm_path=f"{__name__}.never", reward_timeout_seconds=0.01)
    with pytest.raises(TrajectoryError, match=r"sample 7: .* longer than 0\.01 s \(reward_timeout_seconds\)"):
        await asyncio.wait_for(scored(rewarder, group_of("a")), 30)


async def test_numpy_numbers_and_booleans_are_numbers() -> None:
    rewards = await scored(custom(lambda args, sample: np.float32(0.5)), group_of("a"))
    assert rewards == [0.5]
    assert type(rewards[0]) is float
    assert await scored(custom(lambda args, sample: True), group_of("a")) == [1.0]


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({}, "rm_type None is unknown: set code, dapo, data_source, deepscaler, exact"),
        ({"rm_type": "exakt"}, "rm_type 'exakt' is unknown"),
        ({"rm_type": "reasoning_gym"}, "scores only reasoning_gym_task problems"),
        ({"custom_rm_path": "no_such_module.f"}, "custom_rm_path 'no_such_module.f' cannot be imported: .*No module"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        configured(**settings)


@pytest.mark.parametrize("rewards, kept", [([1.0, 1.0, 1.0], False), ([0.0, 1.0, 0.0], True), ([0.5], False)])
def test_groups_of_equal_rewards_are_not_kept(rewards: list[float], kept: bool) -> None:
    group = Group(Sample(reward=reward) for reward in rewards)
    assert bool(check_reward_nonzero_std(None, group)) is kept

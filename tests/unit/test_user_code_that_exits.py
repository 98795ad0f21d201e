"""A user's function that leaves with `sys.exit`, KeyboardInterrupt or CancelledError fails as with any exception."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from miles_async.adapters.datasets.buffer import Buffer
from miles_async.errors import TrajectoryError, UserError
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rewards.grader import grade
from miles_async.rewards.rewarder import Rewarder
from miles_async.rollout.contract import call_rollout_function, flat_args
from miles_async.skip import RolloutSkip, SkipContext, SkipManager, base
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.unit.gym import CHAIN_SUM
from tests.unit.rollout.test_generate_functions import generating_with, one
from workers.functions import dynamic_filter
from workers.preflight import preflight

ESCAPES = [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()]


@pytest.fixture(params=ESCAPES, ids=["exit", "interrupt", "cancellation"])
def escape(request: pytest.FixtureRequest) -> BaseException:
    error: BaseException = request.param
    return error


@pytest.fixture
def leave(escape: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise escape

    return function


@pytest.fixture
def leave_async(escape: BaseException) -> Callable[..., Any]:
    async def function(*args: Any, **kwargs: Any) -> Any:
        raise escape

    return function


@pytest.fixture
def module(leave: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module whose function `leave` ends the process."""
    module = ModuleType("leaving")
    module.leave = leave  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leaving", module)
    return "leaving"


def group() -> Group:
    return Group([Sample(index=0, tokens=[1, 2], response_length=1, reward=1.0)], feed_index="sample_0_0")


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_a_reward_fails_its_group(leave: Callable[..., Any], whole_groups: bool) -> None:
    rewarder = Rewarder(leave, None, name="leaving.leave", timeout_seconds=5.0, whole_groups=whole_groups)
    fresh = Group([Sample(index=0)], feed_index="sample_0_0")
    with pytest.raises(TrajectoryError, match=r"reward leaving\.leave raised"):
        await rewarder.score(fresh)
    await rewarder.close()


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_an_async_reward_fails_its_group(leave_async: Callable[..., Any], whole_groups: bool) -> None:
    rewarder = Rewarder(leave_async, None, name="leaving.leave", timeout_seconds=5.0, whole_groups=whole_groups)
    with pytest.raises(TrajectoryError, match=r"reward leaving\.leave raised"):
        await rewarder.score(Group([Sample(index=0)], feed_index="sample_0_0"))


def test_a_reward_in_a_grader_process_answers_with_an_error(leave: Callable[..., Any]) -> None:
    task = {"is_async": False, "whole_groups": False, "timeout_seconds": 5.0}
    [answer] = grade(leave, None, [Sample(index=0)], task)
    assert json.loads(answer)["cause"] == "function"


async def test_a_generate_function_fails_its_sample(leave_async: Callable[..., Any]) -> None:
    async with generating_with(leave_async) as (generator, _):
        with pytest.raises(TrajectoryError, match="the generate function raised"):
            await generator.generate(one())


async def test_a_rollout_function_ends_the_run_with_a_sentence(
    leave: Callable[..., Any], leave_async: Callable[..., Any]
) -> None:
    source: RolloutSource = None  # type: ignore[assignment]  # The function ends before it takes a sample.
    for function, evaluation, name in ((leave, False, "rollout"), (leave_async, True, "evaluation")):
        with pytest.raises(UserError, match=f"the {name} function raised .*: return from it"):
            await call_rollout_function(function, flat_args(run_config()), 0, source, evaluation=evaluation)


def test_a_dynamic_filter_fails_its_group(module: str) -> None:
    config = run_config(dynamic_sampling_filter_path=f"{module}.leave")
    with pytest.raises(TrajectoryError, match=r"filter leaving\.leave raised"):
        dynamic_filter(config, flat_args(config))(group())


def test_a_buffer_filter_is_replaced_by_the_default(leave: Callable[..., Any]) -> None:
    reports: list[str] = []
    buffer = Buffer(leave, None, lambda reason, sentence: reports.append(reason))
    buffer.add([group()])
    assert len(buffer.take(1)) == 1
    assert reports == ["buffer_filter_raised"]


def test_an_over_sampling_filter_ends_the_run_with_a_sentence(leave: Callable[..., Any]) -> None:
    choose = BatchCollector._choose
    with pytest.raises(UserError, match="over_sampling_filter_path raised"):
        choose(None, leave, [group()], 1)  # type: ignore[arg-type]


def test_a_skip_role_is_named(module: str, escape: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(RolloutSkip):
        def __init__(self, settings: Any, config: Any) -> None:
            raise escape

    monkeypatch.setitem(base.REGISTERED, "rollout", Leaving)
    with pytest.raises(UserError, match=r"skip\.rollout: .*Leaving raised .*: change its constructor"):
        SkipManager(run_config(), SkipContext())


def test_a_function_for_the_warm_start_is_named(module: str) -> None:
    config = run_config(
        **CHAIN_SUM,
        rm_type="reasoning_gym",
        eval_size=0,
        warm_start_max_steps=1,
        warm_start_examples_path=f"{module}.leave",
    )
    with pytest.raises(UserError, match=r"warm_start_examples_path leaving\.leave raised"):
        preflight(config)


async def wait_forever(*args: Any, **kwargs: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_a_reward_that_the_run_cancels_does_not_fail(whole_groups: bool) -> None:
    rewarder = Rewarder(wait_forever, None, name="mine.wait", timeout_seconds=None, whole_groups=whole_groups)
    scoring = asyncio.create_task(rewarder.score(Group([Sample(index=0)], feed_index="sample_0_0")))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_a_generate_function_that_the_run_cancels_does_not_fail() -> None:
    async with generating_with(wait_forever) as (generator, _):
        group = one()
        generating = asyncio.create_task(generator.generate(group))
        await asyncio.sleep(0)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        assert group[0].status is Sample.Status.PENDING


async def test_a_rollout_function_that_the_run_cancels_does_not_fail() -> None:
    source: RolloutSource = None  # type: ignore[assignment]  # The function ends before it takes a sample.
    call = call_rollout_function(wait_forever, flat_args(run_config()), 0, source, evaluation=False)
    rollout = asyncio.create_task(call)
    await asyncio.sleep(0)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

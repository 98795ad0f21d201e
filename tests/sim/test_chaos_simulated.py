"""The series of simulated runs that lose processes: its first runs, and what it says of a run that loses a prompt."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos.simulated import play
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.types import DropReason, Group
from tests.sim.lost_workers import KILLS_WORKERS

pytestmark = KILLS_WORKERS


@pytest.mark.parametrize("number", range(20))
def test_a_run_that_loses_processes_at_drawn_calls_trains_each_prompt_once(number: int) -> None:
    happened, failure = play(1, number)
    assert failure is None
    assert happened["trained"] >= 20 * 8


def test_the_series_with_adapters_loses_engines_too() -> None:
    played = [play(1, number, adapters=True) for number in range(4)]
    assert [failure for _, failure in played if failure is not None] == []
    happened = sum((one for one, _ in played), Counter[str]())
    assert all(happened[lost] for lost in ("engines", "learners", "rollout_workers", "loads"))


def test_the_series_with_several_adapters_trains_each_prompt_once() -> None:
    played = [play(1, number, several=True) for number in range(4)]
    assert [failure for _, failure in played if failure is not None] == []
    happened = sum((one for one, _ in played), Counter[str]())
    assert all(happened[lost] for lost in ("engines", "rollout_workers", "loads"))


def test_a_group_may_be_as_old_as_a_version_between_its_oldest_and_its_newest_one() -> None:
    # Tokens of versions 10 to 12, of which 11 and 12 were rolled back, are 2, 4 and 3 versions old at version 15.
    assert play(17, 1417)[1] is None


def test_a_run_that_loses_a_prompt_is_reported_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    requeue = GroupLifecycle.requeue

    def forget_what_a_worker_had_in_flight(self: GroupLifecycle, group: Group, reason: DropReason) -> None:
        if reason is DropReason.WORKER_LOST:
            self.drop(group, reason)
        else:
            requeue(self, group, reason)

    monkeypatch.setattr(GroupLifecycle, "requeue", forget_what_a_worker_had_in_flight)
    failures = [failure for number in range(6) if (failure := play(1, number)[1]) is not None]
    assert failures
    assert failures[0].startswith("run ")

"""The audit must catch a scheduler that is wrong: three bugs are planted, and each is found."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.window import FIFOWindow
from miles_async.types import DropReason, Group
from tests.configuration import run_config
from tests.sim.engines import EngineModel
from tests.sim.world import World

CONFIG = run_config(
    rollout_batch_size=8,
    over_sampling_batch_size=24,
    num_rollout=80,
    n_samples_per_prompt=1,
    max_weight_staleness=3,
    windowed_fifo_ratio=0.375,
)


def long_tailed(group: Group, rng: object) -> float:
    return 40.0 if group.feed_index.endswith("7") else 1.0


def test_a_sound_scheduler_passes() -> None:
    assert World(config=CONFIG, latency=long_tailed).run().audit.violations == []


def test_a_window_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FIFOWindow.__init__

    def one_wider(self: FIFOWindow[Group], window_size: int) -> None:
        original(self, window_size + 1)

    monkeypatch.setattr(FIFOWindow, "__init__", one_wider)
    violations = World(config=CONFIG, latency=long_tailed).run().audit.violations
    assert any("was bypassed 9 times with a window of 9" in violation for violation in violations)


def test_a_slot_freed_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = GroupLifecycle.advance

    def frees_at_training(
        self: GroupLifecycle, groups: list[Group], state: GroupState, *, rollout: int | None = None
    ) -> None:
        if state is GroupState.PUBLISHED:
            return
        advance(self, groups, state, rollout=rollout)
        if state is GroupState.TRAINED:
            advance(self, groups, GroupState.PUBLISHED)

    monkeypatch.setattr(GroupLifecycle, "advance", frees_at_training)
    violations = World(config=CONFIG).run().audit.violations
    assert any("was freed before version" in violation for violation in violations)


def test_a_recycled_group_that_is_trained_as_well_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    retry = GroupLifecycle.retry

    def copies(self: GroupLifecycle, group: Group, reason: DropReason, error: str, **options: Any) -> None:
        twin = Group([], feed_index=group.feed_index)
        twin.extend(type(sample)(index=sample.index) for sample in group)
        self.data.add_samples([twin])
        retry(self, group, reason, error, **options)

    monkeypatch.setattr(GroupLifecycle, "retry", copies)
    violations = World(config=CONFIG, engines=EngineModel(failure_rate=0.1)).run().audit.violations
    assert any("was trained twice" in violation for violation in violations)

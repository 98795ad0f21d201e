"""Properties that hold in every order of events that hypothesis tries."""

from __future__ import annotations

import random
from typing import Literal

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_async.events import StepStarted
from miles_async.scheduling.window import FIFOWindow
from miles_async.types import Group
from tests.configuration import run_config
from tests.sim.engines import EngineModel
from tests.sim.world import World


class WindowMachine(RuleBasedStateMachine):
    """The stream window against a model that only counts: who passed whom, who is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 0
        self.admitted = 0
        self.unfinished: set[int] = set()
        self.finished: set[int] = set()
        self.passed: dict[int, int] = {}

    @precondition(lambda self: self.width == 0)
    @rule(width=st.integers(1, 6))
    def start(self, width: int) -> None:
        self.width = width
        self.window = FIFOWindow[int](width)

    @precondition(lambda self: self.width > 0)
    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        for _ in range(count):
            self.unfinished.add(self.admitted)
            self.passed[self.admitted] = 0
            self.admitted += 1

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.unfinished.remove(position)
        self.finished.add(position)
        self.window.mark_completed(position, position)
        self.collect()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.unfinished.remove(position)
        self.window.drop(position)
        self.collect()

    def collect(self) -> None:
        for position in self.window.drain():
            self.finished.remove(position)
            for older in self.unfinished | self.finished:
                if older < position:
                    self.passed[older] += 1

    @invariant()
    def no_group_is_passed_more_often_than_the_window_allows(self) -> None:
        assert all(times <= self.width - 1 for times in self.passed.values())

    @invariant()
    def nothing_waits_that_may_go(self) -> None:
        """No starvation: the oldest finished group waits only while an older one is unfinished."""
        if self.finished:
            assert self.unfinished
            assert min(self.unfinished) < min(self.finished)

    @invariant()
    def held_back_groups_are_counted(self) -> None:
        if self.width:
            assert self.window.blocked == len(self.finished)


WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTheStreamWindow = WindowMachine.TestCase


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 8),
    over=st.integers(0, 16),
    limit=st.one_of(st.none(), st.integers(0, 4)),
    ratio=st.one_of(st.none(), st.floats(0, 1)),
    interval=st.integers(1, 3),
    failures=st.sampled_from([0.0, 0.1, 0.4]),
    lost=st.sampled_from([0.0, 0.1]),
    concurrency=st.one_of(st.none(), st.integers(1, 12)),
    kept=st.sampled_from([1.0, 0.6, 0.3]),
    deadline=st.one_of(st.none(), st.floats(0.5, 20.0)),
    action=st.sampled_from(["recycle", "salvage"]),
    tail=st.floats(0.1, 2.5),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_drops_failures_deadlines_and_latencies_ends_with_a_clean_audit(
    batch: int,
    over: int,
    limit: int | None,
    ratio: float | None,
    interval: int,
    failures: float,
    lost: float,
    concurrency: int | None,
    kept: float,
    deadline: float | None,
    action: Literal["recycle", "salvage"],
    tail: float,
    seed: int,
) -> None:
    verdicts = random.Random(seed)
    world = World(
        config=run_config(
            rollout_batch_size=batch,
            over_sampling_batch_size=batch + over,
            num_rollout=12,
            n_samples_per_prompt=1,
            max_weight_staleness=limit,
            windowed_fifo_ratio=ratio,
            max_attempts=3,
            head_deadline_seconds=deadline,
            head_deadline_action=action,
            update_weights_interval=interval,
            # An engine with one place takes long for a few tails in a row; that is no stall.
            no_progress_warn_seconds=10_000,
            no_progress_abort_seconds=100_000,
        ),
        latency=lambda group, rng: min(300.0, rng.lognormvariate(0.0, tail)),
        engines=EngineModel(failure_rate=failures, lost_rate=lost, concurrency=concurrency),
        keep=lambda group: verdicts.random() < kept,
        seed=seed,
    ).run()
    assert world.audit.violations == []
    assert all(len(step.groups) == batch for step in world.trace.of(StepStarted))
    returned = world.returned | {group.feed_index for group in world.feed.get_samples(10_000)}
    dead_lettered = {feed_index for feed_index, _, _ in world.dead_letters.letters}
    assert world.audit.owed <= returned | dead_lettered, (
        "a prompt that is owed an attempt is neither in the feed nor dead-lettered"
    )
    if limit is not None:
        assert world.bounds.staleness is not None
        assert world.audit.greatest_age <= limit
        if action == "recycle":
            assert world.audit.greatest_age <= world.bounds.staleness, "the bound covers fresh attempts"


def test_a_group_that_never_ends_does_not_starve_the_others_until_the_window_is_full() -> None:
    def one_stuck(group: Group, rng: random.Random) -> float:
        return 300.0 if group.feed_index == "sample_0_3" else 1.0

    world = World(
        config=run_config(rollout_batch_size=4, num_rollout=30, max_weight_staleness=2),
        latency=one_stuck,
    ).run()
    assert world.audit.violations == []
    assert world.audit.greatest_bypass == world.bounds.window - 1

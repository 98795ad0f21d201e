"""A run on the real stack that trains three adapters, loses its rollout worker and its learner, and is resumed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from miles_async.events import (
    Evaluated,
    Event,
    GroupGenerated,
    GroupMoved,
    LearnerRestored,
    PublishEnded,
    RunContinued,
    StepEnded,
    StepStarted,
)
from miles_async.models.lora import TENSORS
from miles_async.observability.trace.event_log import read_events
from tests.audit import Audit
from tests.configuration import KEY_FLAGS
from tests.stack.job import Job

ADAPTERS = {"long": {"weight": 2}, "short": {}, "sums": {}}
REWARDS = {
    # Each reward varies within groups of an untrained model, so that each adapter has a gradient.
    "long": {"custom_rm_path": "tests.stack.isolated_rewards.length"},
    "short": {"custom_rm_path": "tests.stack.isolated_rewards.brevity"},
    "sums": {"custom_rm_path": "tests.stack.isolated_rewards.digits"},
}
BATCH, FIRST, ALL, LIMIT = 8, 8, 20, 2
FAULTS = [
    {"kind": "kill", "point": "channel.stage.after", "call": 6, "process": "rollout_worker"},
    {"kind": "kill", "point": "learner.train.before", "call": 8, "process": "learner"},
]


class Runs:
    """The first run, and the one that is resumed from its checkpoint and loses two processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        datasets = {}
        for name, reward in REWARDS.items():
            path = folder / f"{name}.jsonl"
            rows = ({"prompt": f"{row} + 1 =", "label": str(row + 1)} for row in range(200))
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            datasets[name] = {"prompt_data": str(path), "adapter": name, **reward}
        self.flags = (
            *("--datasets", json.dumps(datasets), *KEY_FLAGS, "--reasoning-gym-task", "null", "--eval-size", "4"),
            *("--adapters", json.dumps(ADAPTERS), "--lora-rank", "4", "--lora-alpha", "8"),
            *("--rollout-batch-size", str(BATCH), "--over-sampling-batch-size", str(2 * BATCH)),
            *("--max-weight-staleness", str(LIMIT), "--warm-start-max-steps", "0", "--lr-warmup-steps", "0"),
            *("--save-interval", "4"),
        )
        self.first = self.play("first", "--num-rollout", str(FIRST))
        more = ("--num-rollout", str(ALL), "--load", str(self.saved("first")), "--inject-faults", json.dumps(FAULTS))
        self.second = self.play("second", *more)

    def saved(self, name: str) -> Path:
        return self.folder / name / "saved"

    def exported(self, name: str) -> dict[str, str]:
        """A checksum of each adapter that a run has exported at its end."""
        last = {"first": FIRST, "second": ALL}[name] - 1
        folder = self.folder / name / f"exported-{last}"
        return {one.name: hashlib.sha256((one / TENSORS).read_bytes()).hexdigest() for one in folder.iterdir()}

    def play(self, name: str, *flags: str) -> list[Event]:
        folder = self.folder / name
        folder.mkdir()
        targets = ("--save", str(self.saved(name)), "--save-hf", str(folder / "exported-{rollout_id}"))
        job = Job(folder, (*self.flags, *targets, *flags))
        assert job.ended(within=900) == 0, job.err
        return list(read_events(folder / "runs/latest/events.jsonl"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("adapters"))


def test_every_batch_trains_one_adapter_within_its_staleness_limit(runs: Runs) -> None:
    for events in (runs.first, runs.second):
        audit = Audit(LIMIT)
        for event in events:
            audit.observe(event)
        assert audit.violations == []
        adapters = {event.sequence: event.adapter for event in events if isinstance(event, GroupMoved)}
        for step in (event for event in events if isinstance(event, StepStarted)):
            assert {adapters[sequence] for sequence in step.groups} == {step.adapter}
    steps = [event.rollout for event in (*runs.first, *runs.second) if isinstance(event, StepEnded)]
    assert set(steps) == set(range(ALL))


def test_no_group_has_tokens_of_a_version_of_another_adapter(runs: Runs) -> None:
    for events in (runs.first, runs.second):
        owners = {event.version: event.adapter for event in events if isinstance(event, PublishEnded)}
        groups = [event for event in events if isinstance(event, GroupGenerated)]
        assert groups
        assert all(owners[version] == group.adapter for group in groups for version in group.versions)


def test_all_adapters_are_trained_in_turns(runs: Runs) -> None:
    steps = Counter(event.adapter for event in runs.first if isinstance(event, StepStarted))
    assert steps.keys() == ADAPTERS.keys()


def test_each_adapter_changes_and_differs_from_the_others(runs: Runs) -> None:
    first, second = runs.exported("first"), runs.exported("second")
    assert first.keys() == second.keys() == ADAPTERS.keys()
    assert len({*first.values(), *second.values()}) == 2 * len(ADAPTERS)


def test_held_out_problems_are_answered_by_the_adapter_of_their_data_set(runs: Runs) -> None:
    assert {event.name for event in runs.first if isinstance(event, Evaluated)} == ADAPTERS.keys()


def test_a_resumed_run_goes_on_after_the_loss_of_the_rollout_worker_and_of_the_learner(runs: Runs) -> None:
    assert sum(isinstance(event, RunContinued) for event in runs.second) == 2
    restored = [event for event in runs.second if isinstance(event, LearnerRestored)]
    assert restored
    assert {event.adapter for event in restored} <= ADAPTERS.keys()
    before, after = (
        {event.feed_index for event in events if isinstance(event, GroupMoved) and event.after == "trained"}
        for events in (runs.first, runs.second)
    )
    assert not before & after, "no prompt is trained twice"

"""A run whose rollout worker is killed or stopped continues with another one and keeps learner and engines."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from miles_async.events import GroupMoved, RunEnded, StepEnded
from miles_async.observability.diagnosis.audit import Audit
from miles_async.observability.trace.event_log import read_events
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

BATCHES = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")
WORKER = "ray::RolloutWorker"


def test_a_lost_rollout_worker_is_replaced_until_no_batch_is_trained_between_two_losses(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    with job(tmp_path, *BATCHES, "--max-restarts", "1", "--store-dir", str(stores)) as running:
        running.says("Staleness stats", START_SECONDS)
        kept = running.process("ray::LearnerRank"), running.process("sglang::scheduler")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            os.kill(running.process(WORKER), number)
            running.says_again("another rollout worker was ready", START_SECONDS)
            for _ in range(2):  # the line of the second batch follows the step of the first one
                running.says_again("Staleness stats", START_SECONDS)
            assert (running.process("ray::LearnerRank"), running.process("sglang::scheduler")) == kept
        os.kill(running.process(WORKER), signal.SIGKILL)
        running.says_again("another rollout worker was ready", START_SECONDS)
        os.kill(running.process(WORKER), signal.SIGKILL)
        assert running.ended(within=PATIENCE_SECONDS) == 1
        assert running.left_running(patience=PATIENCE_SECONDS) == {}
    assert "rollout-4 died" in running.err
    [events] = (tmp_path / "runs" / "latest").glob("events.jsonl")
    audit, trained, steps = Audit(staleness_limit=2), Counter[str](), list[int]()
    for event in read_events(events):
        audit.observe(event)
        match event:
            case GroupMoved(after="trained", feed_index=prompt):
                trained[prompt] += 1
            case StepEnded(rollout=rollout):
                steps.append(rollout)
            case RunEnded(reason=reason):
                assert "rollout-4 died" in reason
            case _:
                pass
    assert audit.violations == []
    assert set(trained.values()) == {1}
    assert steps == list(range(len(steps))), "no batch was skipped or repeated"
    [store] = stores.iterdir()
    assert (store / "run.sqlite").exists()

"""What the driver does about a rollout worker that does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workers.rollout
from miles_async.errors import FatalError
from tests.configuration import run_config
from workers.rollout import REPORT_SECONDS, RolloutWorker
from workers.watchdog import LOST_SECONDS, SILENCE_SECONDS, Watchdog

STALLED = 1000.0
"""Seconds without progress, more than --no-progress-abort-seconds."""


class Run:
    """A stalled run whose rollout worker has been silent for `silent` seconds."""

    def __init__(self, silent: float) -> None:
        self.killed = 0
        heartbeats: Any = SimpleNamespace(
            look=lambda now: [],
            addresses={},
            kill_stopped=lambda silent, now: None,
            silence=lambda process, now: silent,
        )
        rollout = SimpleNamespace(end_hung=self._end_hung)
        cluster: Any = SimpleNamespace(heartbeats=heartbeats, rollout=rollout, logs=Path("logs"))
        subscribers: Any = SimpleNamespace(
            emit=lambda *events: None,
            update_scrape_targets=lambda addresses: None,
            tick=lambda now: None,
            stall=SimpleNamespace(stalled_for=lambda now: STALLED),
        )
        self.watchdog = Watchdog(cluster, subscribers, run_config().observability)
        self.watchdog._dumped_in_stall = True

    def _end_hung(self, seconds: float) -> None:
        self.killed += 1


@pytest.mark.parametrize("silent", [0.0, 2.0, SILENCE_SECONDS - 1.0])
def test_a_short_silence_of_the_rollout_worker_does_not_end_a_stalled_run(silent: float) -> None:
    """The rollout worker knows for how long its groups may need; the driver does not."""
    run = Run(silent)
    run.watchdog.look(0.0)
    assert not run.killed


def test_a_rollout_worker_that_hangs_is_killed_and_the_run_goes_on() -> None:
    run = Run(SILENCE_SECONDS)
    run.watchdog.look(0.0)
    assert run.killed


def test_a_run_whose_rollout_worker_cannot_be_replaced_ends() -> None:
    run = Run(LOST_SECONDS)
    with pytest.raises(FatalError, match="has not answered for 300s, and the run made no progress for 1000s"):
        run.watchdog.look(0.0)


async def test_a_rollout_worker_whose_service_has_stopped_reporting_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers.rollout, "heartbeat", lambda metrics=None: metrics)
    config: Any = run_config()
    worker = RolloutWorker(config, "train_async.py", Path())  # type: ignore[arg-type]
    answers: list[Any] = []
    worker._outbox.filled_at -= REPORT_SECONDS
    answers.append(await worker.heartbeat())
    worker._serves.set()
    answers.append(await worker.heartbeat())
    worker._outbox.put(1, [])
    answers.append(await worker.heartbeat())
    assert answers == [None, False, None], "it reports nothing while it starts, then something is wrong"

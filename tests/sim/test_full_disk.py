"""A simulated run whose run folder cannot be written trains to its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_async.events import Event
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from tests.configuration import run_config
from tests.sim.world import World

pytestmark = pytest.mark.virtual_time


@dataclass
class Observed:
    """Passes events to the subscribers as the driver does."""

    subscribers: EventSubscribers

    def emit(self, event: Event) -> None:
        self.subscribers.emit(event)
        self.subscribers.tick(event.time)


def test_a_full_disk_does_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(num_rollout=8, rollout_batch_size=4, run_dir=str(tmp_path), reasoning_gym_task="chain_sum")
    folder = RunFolder.create(config)
    folder.events.symlink_to("/dev/full")
    with EventSubscribers(config, folder) as subscribers:
        world = World(config=config, sinks=(Observed(subscribers),)).run()
    assert len(world.trainer.batches) == 8
    assert world.audit.violations == []
    assert "".join(capsys.readouterr()).count("cannot be written") == 1

"""A simulated run whose run folder cannot be written trains to its end and loses nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.events import Event
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.types import DropReason, Group
from tests.configuration import run_config
from tests.sim.engines import EngineModel
from tests.sim.world import DeadLetterBox, Trace, World

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


class FileOnAFullDisk(DeadLetterBox):
    """Writes dead letters to a file on a disk that is full for the first 20 letters."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = DeadLetterFile(path, Trace())
        self._path = path
        path.symlink_to("/dev/full")

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        super().dead_letter(group, reason, error)
        if len(self.letters) == 20:
            self._path.unlink()
        self.file.dead_letter(group, reason, error)


def test_a_temporarily_full_disk_loses_no_dead_letter(tmp_path: Path) -> None:
    box = FileOnAFullDisk(tmp_path / "dead_letters.jsonl")
    config = run_config(num_rollout=20, rollout_batch_size=4, max_attempts=1)
    world = World(config=config, dead_letters=box, engines=EngineModel(failure_rate=0.3)).run()
    assert len(world.trainer.batches) == 20
    written = [json.loads(line)["feed_index"] for line in (tmp_path / "dead_letters.jsonl").read_text().splitlines()]
    assert len(written) > 20
    assert written == [feed_index for feed_index, _, _ in box.letters]

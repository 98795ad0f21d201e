"""No dead letter is lost if the dead-letter file cannot be written for a while."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.storage import dead_letters
from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.events import DeadLettersUnwritten, Event
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.summary import summarize, summary_text
from miles_async.observability.view import RunView
from miles_async.types import DropReason, Group, Sample
from tests.configuration import run_config
from tests.sim.world import Trace
from tests.unit.example_events import RUN


def group(number: int) -> Group:
    sample = Sample(index=number, prompt="2+2=", tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5])
    return Group([sample], feed_index=f"sample_0_{number}")


def letters_in(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Disk:
    """The folder of a dead-letter file on a disk that is full from the start, until `free` is called."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "dead_letters.jsonl"
        self.path.symlink_to("/dev/full")

    def free(self) -> None:
        self.path.unlink()


def test_unwritten_letters_are_written_with_the_next_one(tmp_path: Path) -> None:
    disk, events = Disk(tmp_path), Trace()
    file = DeadLetterFile(disk.path, events)
    file.dead_letter(group(0), DropReason.FAILED, "it failed")
    file.dead_letter(group(1), DropReason.STALE, "too old")
    disk.free()
    file.dead_letter(group(2), DropReason.FAILED, "it failed")
    assert [letter["feed_index"] for letter in letters_in(disk.path)] == ["sample_0_0", "sample_0_1", "sample_0_2"]
    assert letters_in(disk.path)[1]["samples"][0]["prompt"] == "2+2="
    assert [(event.letters, event.prompts) for event in events.of(DeadLettersUnwritten)] == [
        (1, ["sample_0_0"]),
        (2, ["sample_0_0", "sample_0_1"]),
        (0, []),
    ]


async def test_unwritten_letters_are_written_even_without_another_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "RETRY_SECONDS", 0)
    disk, written = Disk(tmp_path), asyncio.Event()

    class Events(Trace):
        def emit(self, event: Event) -> None:
            if isinstance(event, DeadLettersUnwritten) and not event.letters:
                written.set()

    file = DeadLetterFile(disk.path, Events())
    file.dead_letter(group(0), DropReason.FAILED, "it failed")
    retries = asyncio.create_task(file.retry_forever())
    disk.free()
    await written.wait()
    retries.cancel()
    assert [letter["feed_index"] for letter in letters_in(disk.path)] == ["sample_0_0"]


def test_letters_in_memory_are_limited_in_size_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_COMPLETE_BYTES", 5_000)
    disk = Disk(tmp_path)
    file = DeadLetterFile(disk.path, Trace())
    for number in range(100):
        file.dead_letter(group(number), DropReason.FAILED, "it failed " * 1_000)
    disk.free()
    file.retry()
    letters = letters_in(disk.path)
    assert [letter["feed_index"] for letter in letters] == [f"sample_0_{number}" for number in range(100)]
    assert {letter["reason"] for letter in letters} == {"failed"}
    assert len(disk.path.read_bytes()) < 5_000 + 100 * 700


def unwritten(*prompts: str) -> DeadLettersUnwritten:
    return DeadLettersUnwritten(
        time=101.0, letters=len(prompts), prompts=list(prompts), error="No space left on device" if prompts else None
    )


def test_the_summary_names_the_prompts_whose_letters_are_not_written() -> None:
    view = RunView()
    for event in (RUN, unwritten("sample_0_3"), unwritten("sample_0_3", "sample_0_8")):
        view.apply(event)
    assert summarize(view)["unwritten_dead_letters"] == 2
    assert summarize(view)["unwritten_prompts"] == ["sample_0_3", "sample_0_8"]
    assert "dead letters of 2 prompts: sample_0_3, sample_0_8" in summary_text(view)
    view.apply(unwritten())
    assert "sample_0_3" not in summary_text(view)


def test_unwritten_letters_are_logged_once_until_they_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(run_dir=str(tmp_path), reasoning_gym_task="chain_sum")
    with EventSubscribers(config, RunFolder.create(config)) as subscribers:
        subscribers.emit(unwritten("sample_0_3"), unwritten("sample_0_3", "sample_0_8"))
        assert "".join(capsys.readouterr()).count("dead letters cannot be written") == 1
        subscribers.emit(unwritten())
    assert "all dead letters are written" in "".join(capsys.readouterr())

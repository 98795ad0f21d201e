"""`--resume auto` continues the newest run that did not end, or begins with what is left of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from miles_async.adapters.storage.checkpoints import CheckpointFolder, LoadedCheckpoint
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.config.checks import problems
from miles_async.config.model_shape import dimensions
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.events import EventsReceived, RunEnded, StartupChanged, WarningRaised, encode
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.trace.event_log import cut_incomplete_batch, read_events
from miles_async.stored_run import Changes
from tests.configuration import run_config
from workers.beginning import unfinished_run, write_beginning


def config(tmp_path: Path, **settings: Any) -> RunConfig:
    given: dict[str, Any] = {"run_dir": str(tmp_path / "runs"), "save": str(tmp_path / "save"), "save_interval": 2}
    return run_config(resume="auto", **given | settings)


def run(config: RunConfig, *, saved: int | None = None, reason: str | None = None) -> RunFolder:
    """Leave what a run leaves that was lost, or that ended for `reason`, after the checkpoint of rollout `saved`."""
    folder = RunFolder.create(config)
    folder.events.write_bytes(b"" if reason is None else encode(RunEnded(time=1.0, reason=reason)) + b"\n")
    progress = {"saved": saved, "metadata": {}, "data": {"order": {}, "sample_offset": 7}}
    with closing(SqliteRunStore(folder.store, folder.path.name)) as store:
        asyncio.run(store.write(Changes(number=1, progress=progress)))
    return folder


def save(tmp_path: Path, run: str, *rollouts: int, **facts: Any) -> None:
    checkpoints = CheckpointFolder(tmp_path / "save")
    for rollout in rollouts:
        draft = checkpoints.begin(rollout)
        (draft / "weights").write_text(f"weights of {rollout}")
        progress = {"run": run, "rollout": rollout, "version": rollout, "changed": None, "model": {}}
        progress |= {"data": {}, "owed": []}
        checkpoints.write_progress(draft, progress | facts)
        checkpoints.commit(draft, rollout, keep=5)


def folder_of(checkpoint: LoadedCheckpoint | None) -> Path | None:
    return None if checkpoint is None else checkpoint.folder


def test_without_an_earlier_run_a_run_begins(tmp_path: Path) -> None:
    assert unfinished_run(config(tmp_path)) is None


def test_a_run_that_was_lost_continues_in_its_folder_from_its_newest_checkpoint(tmp_path: Path) -> None:
    lost = run(config(tmp_path), saved=3)
    save(tmp_path, lost.path.name, 1, 3)
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert found.position is not None
    assert (found.folder, folder_of(found.starts_from)) == (lost, tmp_path / "save" / "rollout_0000003")
    assert found.position["sample_offset"] == 7


def test_a_run_that_was_lost_before_its_first_checkpoint_continues_from_its_beginning(tmp_path: Path) -> None:
    save(tmp_path, "another run", 5)
    lost = run(config(tmp_path))
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert (found.folder, found.starts_from) == (lost, None)


def test_a_run_that_was_lost_does_not_continue_with_adapters_of_another_form(tmp_path: Path) -> None:
    began = config(tmp_path, lora_rank=4)
    save(tmp_path, run(began, saved=3).path.name, 3, model=dimensions(began))
    assert unfinished_run(began) is not None
    with pytest.raises(UserError, match=r"lora_scale 4\.0, not 8\.0"):
        unfinished_run(config(tmp_path, lora_rank=4, lora_alpha=32.0))


def began_with_a_checkpoint(tmp_path: Path, run: RunFolder) -> Path:
    """Let `run` be one that began with a checkpoint of another run."""
    save(tmp_path, "another run", 5)
    checkpoint = tmp_path / "save" / "rollout_0000005"
    write_beginning(run, LoadedCheckpoint(checkpoint, 5))
    return checkpoint


def test_a_run_that_began_with_a_checkpoint_continues_from_it_before_its_own_first_one(tmp_path: Path) -> None:
    lost = run(config(tmp_path))
    checkpoint = began_with_a_checkpoint(tmp_path, lost)
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert found.folder == lost
    assert found.began_with == found.starts_from == LoadedCheckpoint(checkpoint, 5)


def test_a_run_that_began_with_a_checkpoint_and_has_lost_its_store_begins_again_with_it(tmp_path: Path) -> None:
    lost = run(config(tmp_path))
    checkpoint = began_with_a_checkpoint(tmp_path, lost)
    (lost.store / "run.sqlite").unlink()
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert (found.folder, folder_of(found.starts_from)) == (None, checkpoint)


def test_a_run_that_was_lost_before_its_first_prompt_begins_again_with_its_checkpoint(tmp_path: Path) -> None:
    lost = RunFolder.create(config(tmp_path))
    checkpoint = began_with_a_checkpoint(tmp_path, lost)
    with closing(SqliteRunStore(lost.store, lost.path.name)):
        pass
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert (found.folder, folder_of(found.began_with)) == (None, checkpoint)


def test_a_run_whose_first_checkpoint_was_deleted_before_its_own_first_one_is_refused(tmp_path: Path) -> None:
    lost = run(config(tmp_path))
    rmtree(began_with_a_checkpoint(tmp_path, lost))
    with pytest.raises(UserError, match="is gone: unset resume to begin another run"):
        unfinished_run(config(tmp_path))


@pytest.mark.parametrize("reason", ["interrupted", "learner-0 died"])
def test_a_run_that_was_stopped_or_failed_continues(tmp_path: Path, reason: str) -> None:
    assert unfinished_run(config(tmp_path)) is None
    run(config(tmp_path), reason=reason)
    assert unfinished_run(config(tmp_path)) is not None


def test_a_run_that_came_to_its_end_is_not_continued(tmp_path: Path) -> None:
    run(config(tmp_path), reason="done")
    assert unfinished_run(config(tmp_path)) is None


def test_a_run_that_saves_elsewhere_is_not_continued(tmp_path: Path) -> None:
    run(config(tmp_path, save=str(tmp_path / "other")))
    assert unfinished_run(config(tmp_path)) is None


def test_a_damaged_newest_checkpoint_starts_another_run_from_the_one_before(tmp_path: Path) -> None:
    lost = run(config(tmp_path), saved=3)
    save(tmp_path, lost.path.name, 1, 3)
    (tmp_path / "save" / "rollout_0000003" / "weights").write_text("weights of ?")
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert (found.folder, folder_of(found.starts_from)) == (None, tmp_path / "save" / "rollout_0000001")


def test_without_its_store_a_run_continues_as_another_run_with_the_prompts_of_its_checkpoint(tmp_path: Path) -> None:
    lost = run(config(tmp_path), saved=3)
    save(tmp_path, lost.path.name, 3)
    for file in lost.store.iterdir():
        file.unlink()
    found = unfinished_run(config(tmp_path))
    assert found is not None
    assert (found.folder, folder_of(found.starts_from)) == (None, tmp_path / "save" / "rollout_0000003")


@pytest.mark.parametrize("has_log", [True, False])
def test_a_run_that_was_lost_before_its_store_existed_starts_again(tmp_path: Path, has_log: bool) -> None:
    lost = RunFolder.create(config(tmp_path))
    if has_log:
        lost.events.write_bytes(encode(StartupChanged(time=1.0, part="router", seconds=None)) + b"\n")
    assert unfinished_run(config(tmp_path)) is None


def test_a_run_that_generated_and_left_neither_checkpoint_nor_store_is_refused(tmp_path: Path) -> None:
    lost = run(config(tmp_path))
    lost.events.write_bytes(encode(EventsReceived(time=1.0, number=1)) + b"\n")
    (lost.store / "run.sqlite").unlink()
    with pytest.raises(UserError, match="unset resume to begin another run"):
        unfinished_run(config(tmp_path))


def test_resume_needs_checkpoints_at_intervals_and_excludes_load(tmp_path: Path) -> None:
    assert "set save and save_interval" in " ".join(problems(config(tmp_path, save_interval=None), "train.py"))
    assert "unset load" in " ".join(problems(config(tmp_path, load="somewhere"), "train.py"))
    assert not any("resume" in sentence for sentence in problems(config(tmp_path), "train.py"))


@pytest.mark.parametrize(
    "rest", [b"", b'{"type":"Warn', b'{"type":"WarningRaised","text":"?","time":1.0}\n', b'{"type":"EventsRec']
)
def test_what_follows_the_last_complete_batch_is_cut_off_the_log(tmp_path: Path, rest: bytes) -> None:
    log, warning = tmp_path / "events.jsonl", WarningRaised(time=1.0, text="kept")
    complete = b"".join(encode(event) + b"\n" for event in (warning, EventsReceived(time=1.0, number=4)))
    log.write_bytes(complete + rest)
    assert cut_incomplete_batch(log) == 4
    assert log.read_bytes() == complete
    assert [type(event) for event in read_events(log)] == [WarningRaised, EventsReceived]


def test_a_log_without_a_complete_batch_is_emptied(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps({"type": "WarningRaised", "text": "?", "time": 1.0}) + "\n")
    assert cut_incomplete_batch(log) == 0
    assert log.read_bytes() == b""

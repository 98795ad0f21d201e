"""A run loses no checkpoint to other runs in the same folder, to a user who goes back, or to damaged files."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.adapters.system import work_time
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from tests.configuration import run_config
from workers import driver
from workers.beginning import checkpoint_to_resume
from workers.preflight import PreflightResult, lock_checkpoints

WEIGHTS = "actor/__0_0.distcp"


def save(folder: CheckpointFolder, *rollouts: int, keep: int = 2) -> Path:
    """Write checkpoints after these rollouts; returns the last one."""
    for rollout_id in rollouts:
        draft = folder.begin(rollout_id)
        (draft / "actor").mkdir()
        (draft / WEIGHTS).write_text(f"weights of {rollout_id}")
        folder.write_progress(draft, {"rollout": rollout_id, "data": {}, "owed": [], "model": {}})
        checkpoint = folder.commit(draft, rollout_id, keep)
    return checkpoint


def resumed(root: Path) -> CheckpointFolder:
    """The folder as a run sees it that was resumed from the newest checkpoint."""
    return CheckpointFolder(root, CheckpointFolder(root).latest().folder)


def rollouts(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("rollout_")) for path in root.glob("rollout_*"))


def test_a_second_run_is_refused_with_process_and_host_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    with CheckpointFolder(folder).lock():
        with (
            pytest.raises(UserError, match=f"process {os.getpid()} on host {socket.gethostname()}.*another folder"),
            CheckpointFolder(folder).lock(),
        ):
            raise AssertionError("two runs share a folder")
        draft = CheckpointFolder(folder).begin(1)
        assert draft.is_dir()
    with CheckpointFolder(folder).lock():
        pass


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with capture_logs() as logs, CheckpointFolder(tmp_path).lock():
        save(CheckpointFolder(tmp_path), 1)
    [line] = logs
    assert "cannot be locked" in line["event"]


def test_a_run_without_a_learner_creates_no_checkpoint_folder(tmp_path: Path) -> None:
    with lock_checkpoints(run_config(save=str(tmp_path / "saved"), debug_rollout_only=True)):
        assert not (tmp_path / "saved").exists()


def test_a_run_whose_folder_is_in_use_ends_before_it_looks_for_a_run_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(config: RunConfig, entry: str) -> PreflightResult:
        raise AssertionError("the other run may still change its checkpoints")

    monkeypatch.setattr(driver, "preflight", look)
    with CheckpointFolder(tmp_path / "saved").lock():
        code = driver.drive(run_config(save=str(tmp_path / "saved")), [], entry="train_async.py")
    assert code == driver.REFUSED
    assert "is in use by another run" in capsys.readouterr().err


def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoints_and_deletes_no_other(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 7, 8, 9)
    newest = save(CheckpointFolder(tmp_path), 0, 1, 2, 3)
    assert CheckpointFolder(tmp_path).latest().folder == newest
    assert rollouts(tmp_path) == [2, 3, 8, 9]


def test_a_resumed_run_counts_the_checkpoints_before_it(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 1, 2)
    save(resumed(tmp_path), 3)
    assert rollouts(tmp_path) == [2, 3]
    save(resumed(tmp_path), 4, keep=1)
    assert rollouts(tmp_path) == [4]


@pytest.mark.parametrize("marker", ["rollout_0000010", "rollout_0000010\nrollout_0000015\nrollout_0000010\n"])
def test_a_run_that_goes_back_keeps_the_checkpoint_that_it_was_resumed_from(tmp_path: Path, marker: str) -> None:
    save(CheckpointFolder(tmp_path), 5, 10, 15, 20, keep=4)
    (tmp_path / "latest").write_text(marker)
    newest = save(resumed(tmp_path), 12)
    assert {10, 12} <= set(rollouts(tmp_path))
    newest = save(resumed(tmp_path), 13)
    assert CheckpointFolder(tmp_path).latest().folder == newest
    assert rollouts(tmp_path) == [5, 12, 13, 15, 20], "checkpoints that were given up are the user's to delete"


def test_a_run_that_was_resumed_from_another_folder_deletes_nothing_there(tmp_path: Path) -> None:
    old = save(CheckpointFolder(tmp_path / "old"), 1, 2)
    save(CheckpointFolder(tmp_path / "new", old), 3, 4, 5)
    assert (rollouts(tmp_path / "old"), rollouts(tmp_path / "new")) == ([1, 2], [4, 5])


def test_files_folders_and_their_names_are_on_disk_before_the_marker_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append("marker" if path.name.startswith(".latest") else str(path.relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(CheckpointFolder(tmp_path / "runs" / "saved"), 1)
    draft = "runs/saved/.rollout_0000001.tmp"
    before_marker = flushed[: flushed.index("marker")]
    assert {".", "runs"} <= set(before_marker), "the folders that had to be created"
    assert {f"{draft}/{WEIGHTS}", f"{draft}/actor", f"{draft}/progress.json", draft} <= set(before_marker)
    assert before_marker[-1] == "runs/saved", "the new name of the draft"
    assert flushed[-1] == "runs/saved", "the name of the marker"


def damage_weights(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).write_text("half")


def flip_a_bit_of_the_weights(checkpoint: Path) -> None:
    weights = bytearray((checkpoint / WEIGHTS).read_bytes())
    weights[0] ^= 1
    (checkpoint / WEIGHTS).write_bytes(weights)


def change_a_digit_of_the_progress(checkpoint: Path) -> None:
    text = (checkpoint / "progress.json").read_text()
    (checkpoint / "progress.json").write_text(text.replace("9", "3"))


def delete_weights(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()


def delete_checkpoint(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("elsewhere"))


def empty_progress(checkpoint: Path) -> None:
    (checkpoint / "progress.json").write_text("{}")


def binary_progress(checkpoint: Path) -> None:
    (checkpoint / "progress.json").write_bytes(bytes(range(256)))


def binary_file_list(checkpoint: Path) -> None:
    (checkpoint / "files.json").write_bytes(bytes(range(256)))


DAMAGES = [
    (damage_weights, r"rollout_0000009 is damaged: actor/__0_0.distcp has 4 bytes instead of 12"),
    (flip_a_bit_of_the_weights, r"rollout_0000009 is damaged: the contents of actor/__0_0\.distcp have changed"),
    (change_a_digit_of_the_progress, r"rollout_0000009 is damaged: the contents of progress\.json have changed"),
    (delete_weights, r"rollout_0000009 is damaged: actor/__0_0.distcp is missing"),
    (delete_checkpoint, r"rollout_0000009 is gone"),
    (empty_progress, r"progress\.json is broken: no valid rollout, data, owed, model"),
    (binary_progress, r"progress\.json is broken: .*decode"),
    (binary_file_list, r"files\.json is broken"),
]


@pytest.mark.parametrize("damage, sentence", DAMAGES)
def test_a_run_falls_back_from_a_damaged_checkpoint_to_the_previous_one_with_a_warning(
    tmp_path: Path, damage: Any, sentence: str
) -> None:
    intact = save(CheckpointFolder(tmp_path), 4)
    damage(save(resumed(tmp_path), 9))
    found = CheckpointFolder(tmp_path).latest()
    assert found.folder == intact
    [said] = found.damage
    assert re.search(sentence, said)
    settings = run_config(load=str(tmp_path), num_rollout=6)
    with capture_logs() as logs:
        assert checkpoint_to_resume(settings) == found
    assert [line["event"] for line in logs] == [f"{said}; resuming from an older checkpoint"]
    save(CheckpointFolder(tmp_path, intact), 6)
    assert CheckpointFolder(tmp_path).latest().damage == []


@pytest.mark.parametrize("damage, sentence", DAMAGES)
def test_a_damaged_checkpoint_without_a_previous_one_is_refused(tmp_path: Path, damage: Any, sentence: str) -> None:
    damage(save(CheckpointFolder(tmp_path), 9))
    with pytest.raises(UserError, match=f"holds no intact checkpoint: .*{sentence}.*name of another checkpoint"):
        CheckpointFolder(tmp_path).latest()


@pytest.mark.parametrize("written_with", [True, False])
def test_without_checksums_only_sizes_are_compared(tmp_path: Path, written_with: bool) -> None:
    newest = save(CheckpointFolder(tmp_path, checksums=written_with), 4, 9)
    flip_a_bit_of_the_weights(newest)
    loaded = {"load": str(tmp_path), "num_rollout": 20}
    found = checkpoint_to_resume(run_config(**loaded, checkpoint_checksums=False))
    assert found is not None
    assert found.folder == newest
    checked = checkpoint_to_resume(run_config(**loaded))
    assert checked is not None
    assert (checked.folder == newest) is not written_with


@pytest.mark.parametrize("progress", ["[]", "3", '{"rollout": "3", "data": {}, "owed": []}', '{"rollout": 3}'])
def test_progress_with_an_unknown_schema_is_refused(tmp_path: Path, progress: str) -> None:
    (tmp_path / "progress.json").write_text(progress)
    with pytest.raises(UserError, match=r"progress\.json is broken: no valid .*; load another checkpoint"):
        read_progress(tmp_path)


def test_the_check_of_a_checkpoint_reports_all_bytes_that_it_reads(tmp_path: Path) -> None:
    folder, read = CheckpointFolder(tmp_path), list[int]()
    draft = folder.begin(4)
    (draft / "weights").write_bytes(b"0" * 3_000_000)
    progress = {"rollout": 4, "data": {}, "owed": [], "model": {}, "run": "a run", "version": 3, "changed": None}
    folder.write_progress(draft, progress)
    path = folder.commit(draft, 4, keep=1)
    assert folder.newest_of("a run", read.append) is not None
    assert sum(read) == 3_000_000 + (path / "progress.json").stat().st_size
    assert len(read) > 2


async def test_a_learner_works_while_a_checkpoint_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit reads all files for their checksums, which may take longer than --no-progress-abort-seconds."""
    now, seconds = [1000.0], list[float]()
    monkeypatch.setattr(work_time, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class NoWork:
        async def on_all(self, method: str, *arguments: Any) -> list[float]:
            return [0.0]

        on_first = on_all

    ranks: Any = NoWork()
    learner = RayLearner(run_config(save=str(tmp_path)), ranks, "run")
    loop = asyncio.get_running_loop()

    def slow_commit(*arguments: Any) -> None:
        now[0] += 700.0
        seconds.append(asyncio.run_coroutine_threadsafe(learner.work_seconds(), loop).result())

    monkeypatch.setattr(CheckpointFolder, "commit", slow_commit)
    await learner.copy_state(5)
    await learner.write_state(5, {"rollout": 5, "data": {}, "owed": []})
    assert seconds == [700.0]


class Rank:
    """A learner rank that has nothing to save."""

    def __init__(self) -> None:
        self.written = 0

    def __getattr__(self, name: str) -> Rank:
        return self

    async def remote(self, *arguments: Any) -> None:
        self.written += 1


async def test_a_resumed_learner_deletes_the_checkpoint_that_it_was_resumed_from_when_it_is_old(tmp_path: Path) -> None:
    resumed_from = save(CheckpointFolder(tmp_path), 4)
    rank: Any = Rank()
    learner = RayLearner(run_config(save=str(tmp_path), save_keep=1), RayRanks([rank]), "run", resumed_from)
    await learner.copy_state(5)
    await learner.write_state(5, {"rollout": 5, "data": {}, "owed": []})
    assert rollouts(tmp_path) == [5]


async def test_a_commit_in_progress_is_completed_when_its_caller_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, commit = asyncio.Event(), threading.Event(), CheckpointFolder.commit
    loop = asyncio.get_running_loop()

    def slow_commit(*arguments: Any) -> Path:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        return commit(*arguments)

    monkeypatch.setattr(CheckpointFolder, "commit", slow_commit)
    rank: Any = Rank()
    learner = RayLearner(run_config(save=str(tmp_path)), RayRanks([rank]), "run")
    await learner.copy_state(5)
    writing = asyncio.ensure_future(learner.write_state(5, {"rollout": 5, "data": {}, "owed": []}))
    await begun.wait()
    writing.cancel()
    await asyncio.wait([writing])
    may_end.set()
    await loop.shutdown_default_executor()
    assert CheckpointFolder(tmp_path).latest().damage == []


async def test_progress_that_is_not_json_ends_the_run_before_the_ranks_write(tmp_path: Path) -> None:
    rank: Any = Rank()
    learner = RayLearner(run_config(save=str(tmp_path)), RayRanks([rank]), "run")
    await learner.copy_state(5)
    assert rank.written == 1
    with pytest.raises(FatalError, match=r"checkpoint of rollout 5 could not be written .* set is not JSON"):
        await learner.write_state(5, {"rollout": 5, "data": {}, "owed": [{"metadata": {"seen": {1, 2}}}]})
    assert rank.written == 1

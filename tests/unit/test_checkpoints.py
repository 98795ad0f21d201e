from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.errors import UserError
from tests.configuration import run_config
from workers.preflight import checkpoint_to_resume


def save(root: Path, rollout_id: int, keep: int = 2, folder: CheckpointFolder | None = None) -> Path:
    """By the run that `folder` belongs to, by default a new one."""
    folder = folder or CheckpointFolder(root)
    draft = folder.begin(rollout_id)
    (draft / "actor").mkdir()
    (draft / "actor" / "__0_0.distcp").write_text(f"weights of {rollout_id}")
    folder.write_progress(draft, progress_after(rollout_id))
    return folder.commit(draft, rollout_id, keep)


def progress_after(rollout_id: int) -> dict[str, object]:
    return {"rollout": rollout_id, "data": {}, "owed": []}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_checkpoint_is_resumed(tmp_path: Path) -> None:
    save(tmp_path, 4)
    newest = save(tmp_path, 9)
    assert CheckpointFolder(tmp_path).latest().folder == newest
    assert read_progress(newest) == progress_after(9)
    assert (newest / "actor" / "__0_0.distcp").read_text() == "weights of 9"


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for rollout_id in (1, 2, 3):
        save(tmp_path, rollout_id, folder=folder)
    assert names(tmp_path) == ["latest", "rollout_0000002", "rollout_0000003"]
    save(tmp_path, 4, keep=1, folder=folder)
    assert names(tmp_path) == ["latest", "rollout_0000004"]


def test_an_incomplete_checkpoint_is_never_resumed(tmp_path: Path) -> None:
    whole, folder = save(tmp_path, 1), CheckpointFolder(tmp_path)
    draft = folder.begin(2)
    (draft / "half").write_text("half")
    assert folder.latest().folder == whole
    folder.discard(draft)
    assert names(tmp_path) == ["latest", "rollout_0000001"]


def test_the_next_checkpoint_deletes_incomplete_files_of_a_killed_run(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    (CheckpointFolder(tmp_path).begin(2) / "half").write_text("half")
    assert CheckpointFolder(tmp_path).latest().folder == whole
    save(tmp_path, 7)
    assert names(tmp_path) == ["latest", "rollout_0000001", "rollout_0000007"]


def test_if_the_disk_is_full_the_previous_checkpoint_stays_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save(tmp_path, 1)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert CheckpointFolder(tmp_path).latest().folder == whole
    assert read_progress(whole) == progress_after(1)


def test_a_resumed_run_may_write_the_same_rollout_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert save(tmp_path, 1) == CheckpointFolder(tmp_path).latest().folder


def test_a_run_that_cannot_be_resumed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def resumed(load: Path | None, num_rollout: int = 9) -> Path | None:
        path = None if load is None else str(load)
        found = checkpoint_to_resume(run_config(load=path, num_rollout=num_rollout))
        return None if found is None else found.folder

    assert resumed(None) is None
    with pytest.raises(UserError, match=r"holds no checkpoint .* unset load to start a new run"):
        resumed(tmp_path)
    newest = save(tmp_path, 4)
    assert resumed(tmp_path, 6) == newest
    with pytest.raises(UserError, match=r"after 5 rollouts, and num_rollout is 5: raise num_rollout"):
        resumed(tmp_path, 5)
    (newest / "progress.json").write_text("{")
    with pytest.raises(UserError, match=r"progress\.json is broken"):
        resumed(tmp_path)
    (newest / "progress.json").unlink()
    with pytest.raises(UserError, match="rollout_0000004 is gone"):
        resumed(tmp_path)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.config.checks import problems
from miles_async.config.fields import with_settings
from miles_async.errors import UserError
from tests.configuration import run_config
from tests.wrong_inputs.builders import checkpoint
from workers.beginning import checkpoint_to_resume, newest_checkpoint
from workers.preflight import lock_checkpoints


def save(root: Path, rollout_id: int, keep: int = 2, folder: CheckpointFolder | None = None) -> Path:
    """By the run that `folder` belongs to, by default a new one."""
    folder = folder or CheckpointFolder(root)
    draft = folder.begin(rollout_id)
    (draft / "actor").mkdir()
    (draft / "actor" / "__0_0.distcp").write_text(f"weights of {rollout_id}")
    folder.write_progress(draft, progress_after(rollout_id))
    return folder.commit(draft, rollout_id, keep)


def progress_after(rollout_id: int) -> dict[str, object]:
    return {"rollout": rollout_id, "data": {}, "owed": [], "model": {}}


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


@pytest.mark.parametrize("colocate", [True, False])
def test_the_same_command_begins_a_job_and_continues_it(tmp_path: Path, colocate: bool) -> None:
    config = run_config(load=str(tmp_path / "saved"), save=str(tmp_path / "saved"), colocate=colocate)
    assert not [text for text in problems(config, "train.py") if "load" in text or "save" in text]
    assert newest_checkpoint(config, checksums=False) is None, "the folder does not exist before the first start"
    with lock_checkpoints(config), capture_logs() as logs:
        CheckpointFolder(tmp_path / "saved").begin(4)  # what a killed run leaves is no checkpoint
        assert checkpoint_to_resume(config) is None
    assert [line["event"] for line in logs] == [
        "the folder of load has no checkpoint yet, so the run starts from the beginning"
    ]
    newest = save(tmp_path / "saved", 4)
    with lock_checkpoints(config):
        found = checkpoint_to_resume(config)
    assert found is not None
    assert found.folder == newest


def test_a_folder_to_load_may_be_missing_where_slime_would_begin_with_ref_load(tmp_path: Path) -> None:
    config = run_config(load=str(tmp_path / "later"), save=str(tmp_path / "saved"), ref_load=str(tmp_path / "model"))
    assert newest_checkpoint(config, checksums=False) is None
    with pytest.raises(UserError, match="holds no checkpoint"):
        newest_checkpoint(with_settings(config, ref_load=None), checksums=False)


@pytest.mark.parametrize("load", ["model", "model_torch_dist"])
def test_the_model_itself_and_its_conversion_begin_a_run(tmp_path: Path, load: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model_torch_dist").mkdir()
    (tmp_path / "model_torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
    model: dict[str, Any] = {"hf_checkpoint": str(tmp_path / "model"), "ref_load": str(tmp_path / "model_torch_dist")}
    assert newest_checkpoint(run_config(load=str(tmp_path / load), **model), checksums=False) is None
    with pytest.raises(UserError, match="holds no checkpoint"):
        newest_checkpoint(run_config(load=str(tmp_path), **model), checksums=False)


def test_resume_auto_tells_a_colocated_job_what_to_use_instead(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save": str(tmp_path), "save_interval": 2, "resume": "auto"}
    sentence = "resume auto cannot continue a colocated run: unset resume, and set load to the same folder as save"
    assert sentence in problems(run_config(**saving, colocate=True), "train.py")
    assert not [text for text in problems(run_config(**saving), "train.py") if "resume auto" in text]


def test_a_run_that_cannot_be_resumed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def resumed(load: Path | None, num_rollout: int = 9) -> Path | None:
        path = None if load is None else str(load)
        found = checkpoint_to_resume(run_config(load=path, num_rollout=num_rollout))
        return None if found is None else found.folder

    assert resumed(None) is None
    with pytest.raises(UserError, match=r"holds no checkpoint .*: set load to the save folder of an earlier run"):
        resumed(tmp_path / "missing")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match=r"holds no checkpoint .* or to an empty folder to start a new run"):
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

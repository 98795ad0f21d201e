"""The checkpoint folder of a run: complete checkpoints, and a marker file with the name of the newest one.

    <save>/rollout_0000019/actor/          Megatron distributed checkpoint of the policy; `critic/` likewise
    <save>/rollout_0000019/progress.json   state of the pipeline: rollout, data position, unfinished groups
    <save>/latest                          name of the newest complete checkpoint, written last

A checkpoint is written to a hidden draft folder, flushed to disk and renamed, so an interrupted run leaves the previous
checkpoint intact.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_async.atomic_files import flush_folder, replace_folder, write_atomically
from miles_async.errors import UserError

_MARKER = "latest"
_PREFIX = "rollout_"


class CheckpointFolder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, rollout_id: int) -> Path:
        """Create and return an empty draft folder for the checkpoint after `rollout_id`.

        Deletes drafts of killed runs. `latest` never returns a draft.
        """
        for leftover in self._root.glob(f".{_PREFIX}*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        draft = self._root / f".{_PREFIX}{rollout_id:07d}.tmp"
        draft.mkdir(parents=True)
        return draft

    def commit(self, draft: Path, rollout_id: int, progress: Mapping[str, Any], keep: int) -> Path:
        """Turn the draft into the newest checkpoint, and delete all but the newest `keep` checkpoints.

        Returns the path of the checkpoint. Raises OSError if the disk is full; the marker then still names the previous
        checkpoint.
        """
        (draft / "progress.json").write_text(json.dumps(progress))
        flush_folder(draft)
        path = self._root / f"{_PREFIX}{rollout_id:07d}"
        # The folder exists already if this run was resumed from an earlier checkpoint.
        replace_folder(draft, path)
        # The marker is written last: until then, an interrupted commit leaves the previous checkpoint the newest.
        write_atomically(self._root / _MARKER, path.name.encode())
        for old in sorted(self._root.glob(f"{_PREFIX}*"))[:-keep]:
            # After a resume, checkpoints of later rollouts may exist; the new checkpoint must survive all the same.
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def latest(self) -> Path:
        """Return the newest complete checkpoint. Raises UserError if there is none."""
        marker = self._root / _MARKER
        if not marker.is_file():
            raise UserError(
                f"load {self._root} holds no checkpoint (no file {_MARKER!r}): unset load to start a new run, or set "
                "load to the save folder of an earlier run"
            )
        path = self._root / marker.read_text().strip()
        if not (path / "progress.json").is_file():
            raise UserError(
                f"load {self._root}: the newest checkpoint {path.name} is gone; write the name of another checkpoint "
                f"into {marker}"
            )
        return path


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Return the `progress` that `commit` stored. Raises UserError if the file is not valid JSON."""
    try:
        progress: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text())
    except json.JSONDecodeError as error:
        raise UserError(
            f"checkpoint {checkpoint}: progress.json is broken: {error}; load another checkpoint"
        ) from error
    return progress

"""The folder that checkpoints of a run are kept in: whole ones only, the newest named by a marker written last.

<save>/rollout_0000019/actor/  what the learner's ranks wrote: a Megatron distributed checkpoint; critic/ likewise
<save>/rollout_0000019/progress.json
<save>/latest                  the name of the newest whole one
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
        """An empty folder to write the checkpoint after `rollout_id` into; nobody takes it for a whole one."""
        for left_over in self._root.glob(f".{_PREFIX}*.tmp"):  # by a run that was killed while it wrote
            shutil.rmtree(left_over, ignore_errors=True)
        draft = self._root / f".{_PREFIX}{rollout_id:07d}.tmp"
        draft.mkdir(parents=True)
        return draft

    def commit(self, draft: Path, rollout_id: int, progress: Mapping[str, Any], keep: int) -> Path:
        """Make the draft a checkpoint, then the newest one, then remove all but the newest `keep`.

        Raises OSError when the disk is full; the marker then still names the checkpoint before.
        """
        (draft / "progress.json").write_text(json.dumps(progress))
        flush_folder(draft)
        path = self._root / f"{_PREFIX}{rollout_id:07d}"
        # A run that was resumed from an earlier checkpoint writes the later ones a second time.
        replace_folder(draft, path)
        write_atomically(self._root / _MARKER, path.name.encode())
        for old in sorted(self._root.glob(f"{_PREFIX}*"))[:-keep]:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def latest(self) -> Path:
        """The newest whole checkpoint. Raises UserError when there is none."""
        marker = self._root / _MARKER
        if not marker.is_file():
            raise UserError(
                f"load {self._root} holds no checkpoint (no file {_MARKER!r}): unset load to start afresh, or name the "
                "save folder of an earlier run"
            )
        path = self._root / marker.read_text().strip()
        if not (path / "progress.json").is_file():
            raise UserError(
                f"load {self._root}: its newest checkpoint {path.name} is gone; write another into {marker}"
            )
        return path


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What `commit` was given. Raises UserError when the file is broken."""
    try:
        progress: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"checkpoint {checkpoint}: progress.json is broken: {error}; load another one") from error
    return progress

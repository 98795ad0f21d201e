"""The checkpoint folder of a run: complete checkpoints, and a marker file that lists them.

    <save>/rollout_0000019/actor/          Megatron distributed checkpoint of the policy; `critic/` likewise
    <save>/rollout_0000019/progress.json   state of the pipeline: rollout, data position, unfinished groups
    <save>/rollout_0000019/files.json      size and checksum of each file, by which a damaged checkpoint is recognised
    <save>/latest                          names of the newest checkpoint and of those before it, one per line
    <save>/.lock                           locked by the run that writes to the folder

A checkpoint is written to a hidden draft folder, flushed to disk and renamed, so an interrupted run leaves the previous
checkpoint intact.

`latest` lists the checkpoints of one line of training: a run and the runs that it was resumed from. Only these count
towards `save_keep`, and only these are deleted. To go back to an older checkpoint, write its name into `latest`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from miles_async.adapters.storage.checksum import checksum, file_chunks
from miles_async.adapters.storage.folder_lock import create_folder, lock_folder
from miles_async.atomic_files import flush_folder, replace_folder, write_atomically
from miles_async.errors import UserError

_MARKER, _PROGRESS, _FILES = "latest", "progress.json", "files.json"
_PREFIX = "rollout_"
CHECKSUM_THREADS = 4
"""Files whose checksums are computed at the same time."""

OnRead = Callable[[int], None]
"""Called in several threads with the number of bytes that were read of a checkpoint."""

log = structlog.get_logger(__name__)


def _ignore_read(size: int) -> None: ...


def checkpoint_name(rollout_id: int) -> str:
    """The name of the folder of the checkpoint after `rollout_id`."""
    return f"{_PREFIX}{rollout_id:07d}"


class LoadedCheckpoint(NamedTuple):
    """An intact checkpoint, from which a learner is started."""

    folder: Path
    rollout: int
    """The last rollout that it contains."""
    version: int = 0
    """The weight version of this run that was staged last before it was written; 0 if it is of another run."""
    changed: str | None = None
    """The adapter whose weights have changed since; see `LearnerProgress`."""
    damage: Sequence[str] = ()
    """One sentence for each newer checkpoint that is damaged, newest first."""


class CheckpointFolder:
    """The checkpoints of one run. Call `lock` before the first `begin`."""

    def __init__(self, root: Path, resumed_from: Path | None = None, *, checksums: bool = True) -> None:
        """`resumed_from` is the checkpoint that the run was resumed from, in this folder or in another one.

        Without `checksums`, only the sizes of files are stored and compared.
        """
        self._root = root
        self._checksums = checksums
        self._names: list[str] = []
        """Names of the checkpoints of this line of training, newest first."""
        if resumed_from is not None and resumed_from.parent.resolve() == root.resolve():
            listed = self._listed()
            older = listed[listed.index(resumed_from.name) + 1 :] if resumed_from.name in listed else []
            # A user who goes back by hand may change only the first line; later rollouts were given up then.
            self._names = [resumed_from.name, *(name for name in older if name < resumed_from.name)]

    def lock(self) -> AbstractContextManager[None]:
        """Keep other runs from writing to the folder; see `lock_folder`."""
        return lock_folder(self._root, "save")

    def begin(self, rollout_id: int) -> Path:
        """Create and return an empty draft folder for the checkpoint after `rollout_id`.

        Deletes drafts of killed runs. `latest` never returns a draft.
        """
        create_folder(self._root)
        for leftover in self._root.glob(f".{_PREFIX}*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        draft = self._root / f".{checkpoint_name(rollout_id)}.tmp"
        draft.mkdir()
        return draft

    def write_progress(self, draft: Path, progress: Mapping[str, Any]) -> None:
        """Write the state of the pipeline into a draft. Other threads run between any two groups of `progress`.

        Raises OSError if the disk is full.
        """
        with (draft / _PROGRESS).open("w") as file:
            file.writelines(json_pieces(progress))

    def commit(self, draft: Path, rollout_id: int, keep: int | None) -> Path:
        """Turn the draft into the newest checkpoint, and delete all but the newest `keep` checkpoints of this run, if
        `keep` is a number.

        Checkpoints of the runs that this run was resumed from count as its own. A checkpoint of another run is replaced
        if it has the same name, and kept otherwise. Returns the path of the checkpoint. Raises OSError if the disk is
        full; the marker then still names the previous checkpoint. Reads all files for their checksums, so call this in
        a thread.
        """
        sizes = _sizes(draft)
        found = _file_checksums(draft, list(sizes)) if self._checksums else {}
        files = {name: {"bytes": size, "checksum": found.get(name)} for name, size in sizes.items()}
        (draft / _FILES).write_text(json.dumps(files))
        flush_folder(draft)
        path = self._root / checkpoint_name(rollout_id)
        # The folder exists already if this run was resumed from an earlier checkpoint.
        replace_folder(draft, path)
        names = [path.name, *(name for name in self._names if name != path.name)]
        kept = len(names) if keep is None else keep
        self._names, old = names[:kept], names[kept:]
        # The marker is written last: until then, an interrupted commit leaves the previous checkpoint the newest.
        write_atomically(self._root / _MARKER, "".join(f"{name}\n" for name in self._names).encode())
        for name in old:
            shutil.rmtree(self._root / name, ignore_errors=True)
        return path

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def is_empty(self) -> bool:
        """Return whether the folder exists and holds at most the lock and the drafts of runs without a checkpoint."""
        return self._root.is_dir() and all(path.name.startswith(".") for path in self._root.iterdir())

    def latest(self) -> LoadedCheckpoint:
        """Return the newest intact checkpoint. Raises UserError if there is none."""
        if not (self._root / _MARKER).is_file():
            raise UserError(
                f"load {self._root} holds no checkpoint (no file {_MARKER!r}): set load to the save folder of an "
                "earlier run, or to an empty folder to start a new run"
            )
        damage: list[str] = []
        for checkpoint, progress in self._intact(damage):
            return LoadedCheckpoint(checkpoint, progress["rollout"], damage=damage)
        raise UserError(
            f"load {self._root} holds no intact checkpoint: {'; '.join(damage) or f'{_MARKER} is empty'}. Write the "
            f"name of another checkpoint into {self._root / _MARKER}, or set load to another folder"
        )

    def newest_of(self, run: str, on_read: OnRead = _ignore_read) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint that run `run` has written; None before its first one.

        Reads the files of the checkpoint for their checksums.
        """
        damage: list[str] = []
        for checkpoint, progress in self._intact(damage, run, on_read):
            return LoadedCheckpoint(checkpoint, progress["rollout"], progress["version"], progress["changed"], damage)
        return None

    def _intact(
        self, damage: list[str], run: str | None = None, on_read: OnRead = _ignore_read
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The intact checkpoints, newest first, with their progress; of run `run` only those before any other run's.

        Adds one sentence to `damage` for each checkpoint that is damaged.
        """
        for name in self._listed():
            checkpoint = self._root / name
            try:
                progress = read_progress(checkpoint)
                if run is not None and progress.get("run") != run:
                    return
                _check_files(checkpoint, on_read, checksums=self._checksums)
            except UserError as error:
                damage.append(str(error))
            else:
                yield checkpoint, progress

    def _listed(self) -> list[str]:
        """The names in the marker, newest first."""
        try:
            return (self._root / _MARKER).read_text(errors="replace").split()
        except FileNotFoundError:
            return []


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Return the progress that `write_progress` stored. Raises UserError if the file is missing or not valid."""
    try:
        progress = json.loads((checkpoint / _PROGRESS).read_text())
    except FileNotFoundError:
        raise UserError(f"checkpoint {checkpoint.name} is gone or has no {_PROGRESS}") from None
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"checkpoint {checkpoint}: {_PROGRESS} is broken: {error}; load another checkpoint") from error
    kinds = {"rollout": int, "data": dict, "owed": list, "model": dict}
    values = progress if isinstance(progress, dict) else {}
    wrong = [name for name, kind in kinds.items() if not isinstance(values.get(name), kind)]
    if wrong:
        raise UserError(
            f"checkpoint {checkpoint}: {_PROGRESS} is broken: no valid {', '.join(wrong)}; load another checkpoint"
        )
    return progress  # type: ignore[no-any-return]


def json_pieces(value: Any, depth: int = 3) -> Iterator[str]:
    """Encode `value` as JSON in many pieces: containers are taken apart down to `depth`.

    The C encoder of `json` never releases the interpreter lock. One call for a large value would stop the event loop
    just as long if it ran in another thread; one call per group does not. A group's metadata cannot change during the
    call, for the same reason.
    """
    if depth and isinstance(value, dict):
        yield "{"
        for number, (name, entry) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(str(name))}: "
            yield from json_pieces(entry, depth - 1)
        yield "}"
    elif depth and isinstance(value, list):
        yield "["
        for number, entry in enumerate(value):
            yield ", " if number else ""
            yield from json_pieces(entry, depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def _check_files(checkpoint: Path, on_read: OnRead, *, checksums: bool) -> None:
    """Raises UserError if a file is missing or damaged. Without `checksums`, only sizes are compared."""
    if not (checkpoint / _FILES).is_file():
        return  # written by a version of this project that did not list the files
    try:
        files = {
            str(name): (int(entry["bytes"]), entry["checksum"])
            for name, entry in dict(json.loads((checkpoint / _FILES).read_text())).items()
        }
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"checkpoint {checkpoint}: {_FILES} is broken: {error}") from error
    sizes = _sizes(checkpoint)
    for name, (size, _) in files.items():
        if name not in sizes:
            raise UserError(f"checkpoint {checkpoint} is damaged: {name} is missing")
        if sizes[name] != size:
            raise UserError(f"checkpoint {checkpoint} is damaged: {name} has {sizes[name]} bytes instead of {size}")
    if not checksums:
        return
    started = time.monotonic()
    expected = {name: stored for name, (_, stored) in files.items() if stored is not None}
    try:
        found = _file_checksums(checkpoint, list(expected), on_read)
    except OSError as error:
        raise UserError(f"checkpoint {checkpoint} is damaged: {error}") from error
    for name, stored in expected.items():
        if found[name] != stored:
            raise UserError(f"checkpoint {checkpoint} is damaged: the contents of {name} have changed (checksum)")
    if (seconds := time.monotonic() - started) > 10:
        log.info("the checksums of the checkpoint were compared", checkpoint=str(checkpoint), seconds=round(seconds, 1))


def _file_checksums(folder: Path, names: Sequence[str], on_read: OnRead = _ignore_read) -> dict[str, str]:
    """Checksum of each of these files, several files at a time: hashing releases the interpreter lock."""

    def chunks(name: str) -> Iterator[bytes]:
        for chunk in file_chunks(folder / name):
            on_read(len(chunk))
            yield chunk

    with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: checksum(chunks(name)), names), strict=True))


def _sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file below `folder`, except the list of sizes itself."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / _FILES)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}

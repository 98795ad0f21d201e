"""A folder of recordings, one sub-folder per step: `{step}/gen_batch.safetensors` and `{step}/meta.json`.

The samples are arrays in the batch file (`sample_arrays.py`); `meta.json` has everything else. No pickle is involved.

An entry appears complete or not at all: both files are written to a temporary folder, flushed to disk, and the folder
is renamed. `meta.json` carries a checksum of itself and one of the batch file, so damage is detected before an entry is
used. All functions block; call them outside the event loop.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import orjson
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from miles_async.adapters.storage.checksum import checksum, file_chunks
from miles_async.adapters.storage.sample_arrays import SampleArrays, SampleHeader, read_samples
from miles_async.atomic_files import atomic_folder
from miles_async.columns.column import SampleLimits
from miles_async.errors import TrajectoryError
from miles_async.parsing import parse
from miles_async.recording import GroupRecord, Recording, is_generated
from miles_async.sample_schema import check_stored
from miles_async.types import trajectories_of

BATCH, META = "gen_batch.safetensors", "meta.json"
FORMAT = 3
DRAFT_LIFETIME_SECONDS = 3600.0
"""A temporary folder older than this belongs to a writer that was killed."""


_OF_GROUP = "feed_index", "prompt", "version", "seconds"
"""The fields of a `GroupRecord` that `meta.json` has beside its samples."""


class _GroupHeader(Struct):
    """The JSON of a group."""

    feed_index: str
    prompt: str
    version: int
    seconds: Annotated[float, Meta(ge=0)]
    samples: list[SampleHeader]


class _Header(Struct):
    """The part of `meta.json` that is checked before it is used."""

    seconds: Annotated[float, Meta(ge=0)]
    groups: Annotated[list[_GroupHeader], Meta(min_length=1)]
    identity: dict[str, Any]


class RecordingDamagedError(Exception):
    """An entry fails its checks; the message states the reason."""


class StoreFullError(Exception):
    """The entry would exceed the size limit of the store."""


@dataclass(frozen=True, slots=True)
class LoadedRecording:
    recording: Recording
    identity: dict[str, Any]
    """The conditions under which it was recorded (`rollout/recordings.py`)."""


class RecordingStore:
    """The recordings of one role in one folder.

    Several processes may write to the folder at the same time: the first complete entry of a step stays.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        """List the existing entries. A missing folder counts as empty and is created by the first `save`.

        `max_bytes` limits the total size of the entries; None means no limit.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._bytes = size_of(folder) if max_bytes is not None else 0
        self._steps = set(steps_in(folder))
        self._deletes_drafts_at = 0.0
        """When `save` looks for old drafts next (`time.monotonic`)."""

    @property
    def steps(self) -> Set[int]:
        """Steps with an entry: those found when the store was opened, and those saved since. It changes with them."""
        return self._steps

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, recording: Recording, identity: Mapping[str, Any]) -> None:
        """Write an entry. If the step has an entry already, the existing entry stays.

        Raises OSError if the folder is not writable, StoreFullError if the entry exceeds the size limit, and TypeError
        if metadata cannot be expressed in JSON.
        """
        content, arrays = _take_apart(recording)
        # The first check avoids writing an entry that is too large; the second one knows the exact size.
        self._check_limit(arrays.nbytes)
        self._delete_old_drafts()
        try:
            with atomic_folder(self.path(step)) as draft:
                arrays.write(draft / BATCH)
                meta = {
                    "format": FORMAT,
                    "step": step,
                    "identity": dict(identity),
                    "batch": {"bytes": (draft / BATCH).stat().st_size, "blake2b": checksum(file_chunks(draft / BATCH))},
                    **content,
                }
                (draft / META).write_bytes(orjson.dumps(meta | {"checksum": _meta_checksum(meta)}))
                size = size_of(draft)
                self._check_limit(size)
        except OSError as error:
            # A rename cannot replace a folder that has contents: another writer was first, and its entry stays.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with self._lock:
            self._bytes += size
            self._steps.add(step)

    def load(self, step: int) -> LoadedRecording:
        """Verify and load an entry.

        Raises RecordingDamagedError if the entry fails its checks. The entry is renamed first, so that the step can be
        recorded again. The samples are checked by `check_samples`.
        """
        path = self.path(step)
        try:
            meta = _verified_meta(path)
            return LoadedRecording(_read(path / BATCH, meta, step), meta["identity"])
        except (RecordingDamagedError, TrajectoryError, SafetensorError, OSError) as error:
            raise self._damaged(step, error) from error
        except (KeyError, TypeError) as error:
            raise self._damaged(step, RecordingDamagedError(f"{META} has another structure: {error!r}")) from error

    def check_samples(self, step: int, recording: Recording, limits: SampleLimits, samples_per_group: int) -> None:
        """Check a loaded entry, whose checksum only shows that the file is unchanged since it was written.

        Raises RecordingDamagedError if a sample cannot be trained. The entry is renamed first, as in `load`.
        """
        try:
            for group in recording.groups:
                if (count := len(trajectories_of(group.samples))) != samples_per_group:
                    raise TrajectoryError(f"{group.feed_index} has {count} samples of {samples_per_group}")
                check_stored(group.samples, limits, group.version)
                if not is_generated(group.samples):
                    raise TrajectoryError(f"{group.feed_index} has a sample that is not generated completely")
        # ValueError: bytes that are no text, or an incomplete version span.
        except (TrajectoryError, ValueError) as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> RecordingDamagedError:
        return RecordingDamagedError(f"{self.path(step)} is damaged ({error}) and {self._set_aside(step)}")

    def _check_limit(self, size: int) -> None:
        if self._max_bytes is not None and self._bytes + size > self._max_bytes:
            raise StoreFullError(f"{self.folder} holds {self._bytes} bytes of at most {self._max_bytes}")

    def _set_aside(self, step: int) -> str:
        """Rename a damaged entry, and return what was done as the end of a sentence."""
        with self._lock:
            self._steps.discard(step)
        aside = self.folder / f"{step}.damaged-{uuid.uuid4().hex[:8]}"
        try:
            self.path(step).rename(aside)
        except OSError as error:
            return f"could not be set aside: {error.strerror}"
        return f"was set aside as {aside.name}"

    def _delete_old_drafts(self) -> None:
        """Delete the drafts of writers that were killed. The search reads the whole folder, so it is rare."""
        with self._lock:
            now = time.monotonic()
            if now < self._deletes_drafts_at:
                return
            self._deletes_drafts_at = now + DRAFT_LIFETIME_SECONDS
        for draft in self.folder.glob(".*.tmp"):
            try:
                if time.time() - draft.stat().st_mtime > DRAFT_LIFETIME_SECONDS:
                    shutil.rmtree(draft, ignore_errors=True)
            except FileNotFoundError:
                continue  # another writer renamed its draft after the listing


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have an entry in `folder`, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal() and entry.is_dir())


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _take_apart(recording: Recording) -> tuple[dict[str, Any], SampleArrays]:
    """Everything but the arrays as JSON values, and the arrays."""
    parts = SampleArrays.of([sample for group in recording.groups for sample in group.samples])
    headers = iter(parts.headers)
    groups = [
        {name: getattr(group, name) for name in _OF_GROUP} | {"samples": [next(headers) for _ in group.samples]}
        for group in recording.groups
    ]
    return {"seconds": recording.seconds, "groups": groups}, parts


def _read(path: Path, meta: dict[str, Any], step: int) -> Recording:
    """Read a file whose checksum was verified; `meta` contains the JSON of `_take_apart`.

    Raises TrajectoryError if `meta` or the lengths of the arrays are invalid. The samples are not checked.
    """
    parse(meta, _Header, "recording")
    with safe_open(path, framework="numpy") as file:
        samples = iter(read_samples(file, [header for group in meta["groups"] for header in group["samples"]]))
    groups = [
        GroupRecord(**{name: group[name] for name in _OF_GROUP}, samples=[next(samples) for _ in group["samples"]])
        for group in meta["groups"]
    ]
    return Recording(groups=groups, seconds=meta["seconds"], replayed_from=step)


def _verified_meta(path: Path) -> dict[str, Any]:
    """Return the meta data of an entry whose files match their checksums. Raises RecordingDamagedError or OSError."""
    try:
        meta = orjson.loads((path / META).read_bytes())
    except orjson.JSONDecodeError:
        raise RecordingDamagedError(f"{META} is not valid JSON") from None
    if not isinstance(meta, dict) or meta.pop("checksum", None) != _meta_checksum(meta):
        raise RecordingDamagedError(f"the checksum of {META} does not match")
    if meta["format"] != FORMAT:
        raise RecordingDamagedError(f"the format is {meta['format']}, this version reads {FORMAT}")
    batch, expected = path / BATCH, meta["batch"]
    # The size is compared first: it is cheap, and it differs if a file was cut off.
    if batch.stat().st_size != expected["bytes"] or checksum(file_chunks(batch)) != expected["blake2b"]:
        raise RecordingDamagedError(f"the checksum of {BATCH} does not match")
    return meta


def _meta_checksum(meta: dict[str, Any]) -> str:
    return checksum([orjson.dumps(meta, option=orjson.OPT_SORT_KEYS)])

"""Recordings in a folder, one folder per step: `{step}/gen_batch.safetensors` and `{step}/meta.json`.

A step appears whole or not at all: both files are written under another name and fsynced, then the folder is renamed.
`meta.json` carries checksums of itself and of the batch, so that whatever happened to an entry since is noticed before
anything of it is used. No pickle. Everything here blocks; call it off the event loop.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from miles_async.adapters.storage import recording_codec as codec
from miles_async.adapters.storage.recording_codec import decode, describe
from miles_async.atomic_files import atomic_folder
from miles_async.recording import Recording

BATCH, META = "gen_batch.safetensors", "meta.json"
FORMAT = 1
DRAFT_LIFETIME_SECONDS = 3600.0
"""A draft that old belongs to a writer that was killed."""
_CHUNK = 1 << 20


class RecordingDamagedError(Exception):
    """An entry that cannot be trusted, and why."""


class StoreFullError(Exception):
    """The entry would exceed the size limit."""


@dataclass(frozen=True, slots=True)
class Loaded:
    recording: Recording
    identity: dict[str, Any]
    """What it was recorded under."""


class RecordingStore:
    """The recordings of one role in one folder. Several processes may write to it: the first whole entry stays."""

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        """Looks up what is there. Creates nothing; a missing folder is an empty one."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._bytes = size_of(folder) if max_bytes is not None else 0
        self._steps = frozenset(steps_in(folder))

    @property
    def steps(self) -> frozenset[int]:
        """Steps with an entry, as far as known here."""
        return self._steps

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int, recording: Recording, identity: Mapping[str, Any]) -> None:
        """Write an entry; where another writer was first, theirs stays.

        Raises OSError when the folder cannot be written, StoreFullError beyond the limit, TypeError for metadata
        that JSON has no form for.
        """
        content = describe(recording)
        self._refuse_beyond_limit(codec.size_of(content))
        self._remove_old_drafts()
        try:
            with atomic_folder(self.path(step)) as draft:
                codec.write(recording, content, draft / BATCH)
                meta = {
                    "format": FORMAT,
                    "step": step,
                    "identity": dict(identity),
                    "batch": {"bytes": (draft / BATCH).stat().st_size, "blake2b": _digest_of(draft / BATCH)},
                    **content,
                }
                (draft / META).write_bytes(orjson.dumps(meta | {"checksum": _checksum(meta)}))
                size = size_of(draft)
                self._refuse_beyond_limit(size)
        except OSError as error:
            # A rename cannot replace a folder that has contents: another writer was first, and its entry stays.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with self._lock:
            self._bytes += size
            self._steps |= {step}

    def load(self, step: int) -> Loaded:
        """Raises Damaged, after setting the entry aside so that the step can be recorded anew."""
        path = self.path(step)
        try:
            meta = _verified(path)
            # Bytes that match their checksum are those that were written.
            return Loaded(decode(path / BATCH, meta, step), meta["identity"])
        except (RecordingDamagedError, OSError) as damage:
            raise RecordingDamagedError(f"{path} is damaged ({damage}) and {self._set_aside(step)}") from damage

    def _refuse_beyond_limit(self, size: int) -> None:
        if self._max_bytes is not None and self._bytes + size > self._max_bytes:
            raise StoreFullError(f"{self.folder} holds {self._bytes} bytes of at most {self._max_bytes}")

    def _set_aside(self, step: int) -> str:
        with self._lock:
            self._steps -= {step}
        aside = self.folder / f"{step}.damaged-{uuid.uuid4().hex[:8]}"
        try:
            self.path(step).rename(aside)
        except OSError as error:
            return f"could not be set aside: {error.strerror}"
        return f"was set aside as {aside.name}"

    def _remove_old_drafts(self) -> None:
        for draft in self.folder.glob(".*.tmp"):
            try:
                if time.time() - draft.stat().st_mtime > DRAFT_LIFETIME_SECONDS:
                    shutil.rmtree(draft, ignore_errors=True)
            except FileNotFoundError:
                continue  # its writer has just renamed it


def steps_in(folder: Path) -> list[int]:
    """Steps that have a folder there, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal() and entry.is_dir())


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _verified(path: Path) -> dict[str, Any]:
    """The entry's meta, once both files are what was written. Raises Damaged or OSError."""
    try:
        meta = orjson.loads((path / META).read_bytes())
    except orjson.JSONDecodeError:
        raise RecordingDamagedError(f"{META} is no JSON") from None
    if not isinstance(meta, dict) or meta.pop("checksum", None) != _checksum(meta):
        raise RecordingDamagedError(f"the checksum of {META} does not match")
    if meta["format"] != FORMAT:
        raise RecordingDamagedError(f"its format is {meta['format']}, this version reads {FORMAT}")
    if (path / BATCH).stat().st_size != meta["batch"]["bytes"] or _digest_of(path / BATCH) != meta["batch"]["blake2b"]:
        raise RecordingDamagedError(f"the checksum of {BATCH} does not match")
    return meta


def _checksum(meta: dict[str, Any]) -> str:
    return hashlib.blake2b(orjson.dumps(meta, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _digest_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

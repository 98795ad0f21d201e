"""Files and folders that appear complete or not at all, even if the process is killed or the machine loses power.

Everything is written under a temporary name in the target's own folder, flushed to disk and then renamed: a rename
within one file system is atomic (POSIX `rename`). A temporary name starts with a dot and ends with `.tmp`; it carries a
random part, so several processes may write the same target at the same time. A killed process can leave such a
temporary file behind, and the next run may delete it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the contents of `path` with `data`; readers see either the old or the new contents.

    The folder must exist. Raises OSError if the disk is full or the folder is not writable; `path` is then unchanged.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and move the file to `path` when the block ends.

    For libraries that write to a path. If the block raises, the temporary file is deleted and `path` is unchanged.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)


@contextmanager
def atomic_folder(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary folder to fill, and rename it to `path` when the block ends.

    Missing parent folders are created. Set `durable=False` for files that need not survive a power failure: flushing
    large files takes time. Raises OSError if `path` exists and is not an empty folder. If the block or the rename
    raises, the temporary folder is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
        if durable:
            flush_folder(temporary)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if durable:
        flush_to_disk(path.parent)


def replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`; an existing folder of that name is deleted afterwards.

    A rename cannot replace a folder that has contents, so the existing folder is moved aside first. Nothing has the
    name `path` between the two renames. Raises OSError if a rename fails.
    """
    old = temporary_path(path)
    if path.exists():
        path.rename(old)
    new.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def temporary_path(path: Path) -> Path:
    """An unused hidden name beside `path`, which matches `.{path.name}.*.tmp`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def flush_folder(folder: Path) -> None:
    """Flush every file below `folder`, every folder below it, and `folder` itself to disk."""
    for path in sorted(folder.rglob("*")):
        flush_to_disk(path)
    flush_to_disk(folder)


def flush_to_disk(path: Path) -> None:
    """Call fsync on `path`: for a file this makes its contents durable, for a folder the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

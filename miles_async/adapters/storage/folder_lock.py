"""Locks a folder for one run, so that two runs never write to the same folder."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from miles_async.atomic_files import flush_to_disk
from miles_async.errors import UserError

_LOCK = ".lock"

log = structlog.get_logger(__name__)


@contextmanager
def lock_folder(folder: Path, setting: str) -> Iterator[None]:
    """Keep other runs from locking `folder` inside the block; creates the folder.

    `setting` is the name of the setting that names the folder, for error messages. The operating system releases the
    lock when the process ends, however it ends. Raises UserError that names the process and the host of the other run
    if there is one, and OSError if the folder is not writable. On a file system without locks, a warning replaces the
    lock.
    """
    create_folder(folder)
    with (folder / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{setting} {folder} is in use by another run ({file.read().strip() or 'which is starting'}): wait "
                f"until that run has ended, or set {setting} to another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning(f"{setting} {folder} cannot be locked ({error}): let no other run write to it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
        file.flush()
        yield


def create_folder(folder: Path) -> None:
    """Create a folder and its parents, and flush their names to disk: fsync of a folder does not flush its own name."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_to_disk(path.parent)

"""A small file system in memory that can be filled and made read-only. Only root may mount it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

SIZE = "32m"


class SmallDisk:
    """A file system that is mounted on a folder inside a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self._folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Lazily, because a process that has just been killed may still have a file open.
        _run("umount", "--lazy", str(self._folder))

    def fill(self) -> None:
        """Leave no space."""
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Undo `fill`."""
        self._filler.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Possible only while no file is open for writing."""
        _run("mount", "-o", "remount,ro", str(self._folder))

    def make_writable(self) -> None:
        """Undo `make_read_only`."""
        _run("mount", "-o", "remount,rw", str(self._folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)

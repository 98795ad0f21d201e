"""Disks that are full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: what a full disk does, without filling one."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
"""Run a shell command that may mount file systems, which only this command sees."""


def run_on_a_small_disk(folder: Path, script: str, size: str) -> str:
    """Run a Python script in `folder`, which is a file system of `size` for the script, and return its output."""
    mount = f'mount -t tmpfs -o size={size} none "$0"'
    if subprocess.run([*SMALL_DISK, mount, str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not allow unprivileged users to mount file systems")
    result = subprocess.run(
        [*SMALL_DISK, f'{mount} && cd "$0" && exec "$1" -c "$2"', str(folder), sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr

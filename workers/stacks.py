"""The Python stacks of every process of a run, for one that hangs: read from outside, by py-spy, so that even a process
that is stopped or stuck in C shows where it is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_SECONDS = 10.0
"""For one process."""
PY_SPY = Path(sys.executable).with_name("py-spy")


def dump_stacks(processes: Iterable[psutil.Process], folder: Path) -> Path:
    """Write one file with all stacks into `folder`; returns its path. Blocks for up to some seconds per process."""
    path = folder / f"stacks-{time.strftime('%H%M%S')}.txt"
    with path.open("w") as file:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline()) or process.name()
                file.write(f"==== pid {process.pid}, {process.status()}: {command[:200]}\n{_stack(process.pid)}\n")
                file.flush()
    return path


def _stack(pid: int) -> str:
    # --nonblocking: py-spy would stop the process otherwise, and wait for one that is stopped already.
    command = [str(PY_SPY), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}"
    if ended.returncode == 0:
        return ended.stdout
    reason = ended.stderr.strip() or "py-spy said nothing"
    if "ermission" in reason:
        reason += "; allow it with: sudo sysctl kernel.yama.ptrace_scope=0"
    return f"no stack: {reason}"

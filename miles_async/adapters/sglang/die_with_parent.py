"""Runs a Python module as a server that cannot outlive the process that started it.

    python -m miles_async.adapters.sglang.die_with_parent MODULE …

The parent holds the write end of this process's standard input. When the parent ends, even by SIGKILL, the pipe closes
and the whole process group is killed.

A forked child watches the pipe. A thread could not: it would wait for the interpreter lock, which sglang-router holds
while it serves. A parent-death signal (`PR_SET_PDEATHSIG`) would not do either: it is sent when the *thread* that
started this process ends, and Ray's actors change threads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def kill_group_with_parent() -> None:
    """Watch standard input in a forked child; returns at once in this process."""
    if os.fork() == 0:
        # A polite end of the group must not end the watcher before the servers.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    kill_group_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

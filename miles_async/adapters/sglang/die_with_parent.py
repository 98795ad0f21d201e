"""Run a server that cannot outlive the process that started it.

    python -m miles_async.adapters.sglang.die_with_parent MODULE …

The starter holds the write end of this process's standard input. However the starter ends, killed outright or not, the
pipe closes, and the whole process group goes with it. A small process of its own watches for that: a thread would wait
for the interpreter lock, which sglang-router keeps while it serves; and a parent-death signal would follow the *thread*
that started us, and Ray's actors change threads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def end_with_starter() -> None:
    """Watch in a forked child; the parent returns at once."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    end_with_starter()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

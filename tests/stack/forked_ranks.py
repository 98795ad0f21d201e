"""Learner ranks without Ray: one process imports Megatron and is forked into the ranks."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Concatenate, ParamSpec

import pytest

from tests.stack.job import ROOT
from tests.waiting import START_SECONDS

P = ParamSpec("P")


@contextmanager
def run_ranks(module: str, folder: Path) -> Iterator[None]:
    """Run `module` with `folder` as its argument. Fails the test at the end of the block if a rank has failed."""
    ranks = subprocess.Popen([sys.executable, "-m", module, str(folder)], cwd=ROOT, start_new_session=True)
    try:
        yield
        try:
            code = ranks.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGQUIT)
            time.sleep(1.0)  # each process writes its stacks
            raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    if code:
        # Every test that needs the ranks fails with this message, so it is short.
        pytest.fail(f"the learner ranks of {module} ended with code {code}; the output shows why", pytrace=False)


def fork_ranks(count: int, run: Callable[Concatenate[int, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Fork `count` processes, each of which calls `run` with its number and the other arguments.

    Exits when all have ended. If one fails, the others would wait for it, so they are terminated.
    """
    # If the ranks hang, the output of the test shows where each of them waits.
    faulthandler.register(signal.SIGQUIT, chain=False)
    gc.freeze()  # Garbage collection in a forked process would otherwise copy the pages of all imported modules.
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(number, *args), kwargs=kwargs) for number in range(count)]
    for process in processes:
        process.start()
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        wait(running)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            sys.exit(1)

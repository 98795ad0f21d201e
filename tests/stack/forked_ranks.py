"""Learner ranks without Ray, forked from a process that has imported Megatron."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Concatenate, ParamSpec

import pytest

from tests.forked import forked_from
from tests.stack.learning import without_compiler
from tests.waiting import START_SECONDS

P = ParamSpec("P")
_PROCESSES = forked_from("tests.stack.learning")


@contextmanager
def run_ranks(module: str, folder: Path) -> Iterator[None]:
    """Run `module` with `folder` as its argument. Fails the test at the end of the block if a rank has failed."""
    ranks = _PROCESSES.Process(target=_run, args=(module, folder))
    ranks.start()
    assert ranks.pid is not None
    try:
        yield
        ranks.join(START_SECONDS)
        if ranks.exitcode is None:
            os.killpg(ranks.pid, signal.SIGQUIT)
            time.sleep(1.0)  # each process writes its stacks
            raise TimeoutError(f"the learner ranks of {module} have not ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.kill()  # also before it has a group
        ranks.join()
    if ranks.exitcode:
        # Every test that needs the ranks fails with this message, so it is short.
        pytest.fail(
            f"the learner ranks of {module} ended with code {ranks.exitcode}; the output shows why", pytrace=False
        )


def _run(module: str, folder: Path) -> None:
    os.setsid()
    sys.argv = [module, str(folder)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_ranks(count: int, run: Callable[Concatenate[int, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Fork `count` processes, each of which calls `run` with its number and the other arguments.

    Exits when all have ended. If one fails, the others would wait for it, so they are terminated.
    """
    # If the ranks hang, the output of the test shows where each of them waits.
    faulthandler.register(signal.SIGQUIT, chain=False)
    gc.freeze()  # Garbage collection in a forked process would otherwise copy the pages of all imported modules.
    fork = multiprocessing.get_context("fork")

    def run_rank(number: int) -> None:
        with without_compiler():
            run(number, *args, **kwargs)

    processes = [fork.Process(target=run_rank, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        wait(running)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            sys.exit(1)


def layouts_by_process(ranks: Mapping[str, int]) -> list[list[tuple[str, int]]]:
    """For each process, the layouts that it takes part in and its rank there, in order. `ranks` are those of a layout.

    Layouts with more ranks come first, and those of fewer ranks are divided among the processes. Ranks of a layout thus
    reach it together. A rank that arrives early retries the connection to rank 0 at intervals that grow to seconds.
    """
    processes: list[list[tuple[str, int]]] = [[] for _ in range(max(ranks.values()))]
    for name, count in sorted(ranks.items(), key=lambda named: -named[1]):
        first = min(range(0, len(processes), count), key=lambda process: len(processes[process]))
        for rank in range(count):
            processes[first + rank].append((name, rank))
    return processes

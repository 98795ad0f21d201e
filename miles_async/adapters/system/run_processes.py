"""Finds the processes of a run on this machine by their command lines."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil

from miles_async.config.schema.faults import RunProcess

_ARGUMENTS: dict[RunProcess, str] = {
    "rollout_worker": "ray::RolloutWorker",
    "learner": "ray::LearnerRank",
    "engine_actor": "ray::Engine",
    "engine_server": "sglang::scheduler",
    "router_actor": "ray::Router",
    "router_server": "miles_async.adapters.sglang.router_process",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
"""An argument of the command line contains this text. Ray and SGLang replace the command line by a title."""


def run_process(process: psutil.Process) -> RunProcess | None:
    """Return which part of a run the process is; None for the driver and for processes without a part of their own."""
    try:
        # The first three arguments are the program, or `python -m module`.
        arguments = process.cmdline()[:3]
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return None
    for part, text in _ARGUMENTS.items():
        if any(text in argument for argument in arguments):
            return part
    return None


def of_part(part: RunProcess, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are this part of a run."""
    return [process for process in processes if run_process(process) == part]


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    return bool(_status(process) == psutil.STATUS_STOPPED)


def kill_if_stopped(process: psutil.Process) -> None:
    """Kill a process if it is stopped (SIGSTOP). Does nothing if it has ended."""
    if is_stopped(process):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_remaining(processes: Iterable[psutil.Process], patience: float) -> None:
    """Wait up to `patience` seconds until the processes have ended, then kill those that remain."""
    _, remaining = psutil.wait_procs(processes, timeout=patience)
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def raylets_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the raylets that have started these processes of actors."""
    parents = set[psutil.Process]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if (parent := process.parent()) is not None:
                parents.add(parent)
    return of_part("raylet", parents)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; a zombie has."""
    return _status(process) in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)

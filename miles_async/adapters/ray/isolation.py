"""Keeps signals that are meant for this process away from Ray, and Ray's signal handlers away from this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services, utils
from ray._private.node import Node

from miles_async.adapters.system.sessions import SessionReaper


@contextmanager
def isolated_ray(reaper: SessionReaper) -> Iterator[None]:
    """Let Ray's processes that are started in this block lead sessions of their own, which `reaper` kills at the end.

    A batch system, a service manager or a closing terminal signals the whole process group of the driver. Ray's
    processes would end at once, and the driver could not end the run in an orderly way.

    `ray.init` also replaces the handler of SIGTERM by one that exits from inside native code. Inside this block it does
    not. Ray's native code installs a handler too, which prints a stack and calls the previous handler: install your own
    handler again after the block.

    Two of Ray's services are not started, because they would only cost CPU time: the log monitor, which sends the
    output of workers to a driver that does not want it (`log_to_driver=False`), and the autoscaler, because a Ray that
    this run starts has one machine only.

    Messages of Ray's Python code go to the log of this process, like those of any other library. On import, Ray had
    routed them to standard error.

    Ray has no public interface for any of this, so this function replaces private attributes of Ray meanwhile.
    """

    ray_log = logging.getLogger("ray")
    ray_log.handlers.clear()
    ray_log.propagate = True
    ray_log.setLevel(logging.NOTSET)

    class SessionPopen(services.ConsolePopen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, start_new_session=True, **kwargs)
            reaper.add(self.pid)

    with (
        _replaced(services, "ConsolePopen", SessionPopen),
        _replaced(utils, "set_sigterm_handler", _do_nothing),
        _replaced(Node, "start_log_monitor", _do_nothing),
        _replaced(Node, "start_monitor", _do_nothing),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _do_nothing(*_: Any) -> None:
    pass

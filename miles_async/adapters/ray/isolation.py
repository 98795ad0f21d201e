"""Keeps signals that are meant for this process away from Ray, and Ray's signal handlers away from this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services, utils

from miles_async.adapters.system.sessions import SessionReaper


@contextmanager
def isolated_ray(reaper: SessionReaper) -> Iterator[None]:
    """Let Ray's processes that are started in this block lead sessions of their own, which `reaper` kills at the end.

    A batch system, a service manager or a closing terminal signals the whole process group of the driver. Ray's
    processes would end at once, and the driver could not end the run in an orderly way.

    `ray.init` also replaces the handler of SIGTERM by one that exits from inside native code. Inside this block it does
    not. Ray's native code installs a handler too, which prints a stack and calls the previous handler: install your own
    handler again after the block.

    Ray has no public interface for either, so this function replaces two of its private attributes meanwhile.
    """

    class SessionPopen(services.ConsolePopen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, start_new_session=True, **kwargs)
            reaper.add(self.pid)

    popen, set_sigterm_handler = services.ConsolePopen, utils.set_sigterm_handler
    services.ConsolePopen = SessionPopen  # type: ignore[misc]
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
        utils.set_sigterm_handler = set_sigterm_handler

"""Settings for all tests: the time limit of real runs, the event loop of async tests, and repeatable examples."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

from tests.sim.virtual_time import VirtualTimeLoop
from tests.waiting import START_SECONDS

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
REAL = (TESTS / "bridge", TESTS / "run", TESTS / "stack")
"""The tiers whose tests start engines, learners or whole runs."""
REAL_TIMEOUT_SECONDS = 4 * START_SECONDS
"""Ends such a test if it hangs. The test's own limits are shorter and name what did not happen."""
SHARED = ("tests.stack.conftest", "tests.stack.engine_fixtures", "tests.unit.gym")
"""Each keeps a cluster, an engine or a slow import for the whole session, which all test files that name it share."""
LONGEST = (
    "tests.stack.engine_fixtures",
    "tests.stack.conftest",
    "tests/stack/test_chaos.py",
    "tests/stack/test_tutorial.py",
    "tests/stack/test_pages.py",
    "tests/stack/test_several_adapters.py",
    "tests/run/test_run_with_faults.py",
    "tests/stack/test_endings.py",
    "tests/stack/test_broken_link.py",
    "tests/stack/test_learner_parallel.py",
    "tests/stack/test_debug_runs.py",
    "tests/stack/test_posted_groups.py",
    "tests/stack/test_notebook.py",
)
"""Files, and names in `SHARED`, whose tests take longest together. They come first, so that several processes end at
nearly the same time."""


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Async tests run on asyncio, and on a virtual clock if they carry the marker `virtual_time`."""
    virtual = request.node.get_closest_marker("virtual_time") is not None
    return "asyncio", {"loop_factory": VirtualTimeLoop} if virtual else {}


def pytest_collection() -> None:
    # Imported here, because a process that only distributes tests over others starts sooner without Hypothesis.
    from hypothesis import settings

    # Shared cores make any deadline flaky, and a suite that gates merges must not draw new cases on its own.
    settings.register_profile("suite", deadline=None, derandomize=True)
    settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if any(folder in item.path.parents for folder in REAL):
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_SECONDS))


def pytest_collection_finish() -> None:
    # The imported modules stay until the end: without this, each full garbage collection would search them again.
    gc.freeze()


class WholeFiles(LoadScopeScheduling):
    """With several processes (`make test`): a file's tests go to the same one, and so do all that share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared_by(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles:
    return WholeFiles(config, log)


def _turn(item: pytest.Item) -> int:
    together = _shared_by(item.nodeid.partition("::")[0])
    return LONGEST.index(together) if together in LONGEST else len(LONGEST)


@cache
def _shared_by(file: str) -> str:
    text = (ROOT / file).read_text()
    return next((name for name in SHARED if name in text), file)


@pytest.fixture(autouse=True)
def _structlog_restored() -> Iterator[None]:
    """Restore the configuration of structlog, which everything that starts a process of a run changes."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    """Restore the handlers and the level of logging, which a test changes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

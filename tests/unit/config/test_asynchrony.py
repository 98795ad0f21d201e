"""The schedule follows from the source of the rollout function, without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miles_async.config.asynchrony import Asynchrony, asynchrony_of
from miles_async.config.checks import notes
from miles_async.config.derived import FULLY_ASYNC_FUNCTION, bounds_of, has_worker, schedule_of, table
from miles_async.rollout import fully_async
from miles_async.scheduling.bounds import Schedule
from tests.configuration import run_config

SHIPPED = "from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async as shipped\n"
STREAMS = {
    "a wrapper": f"{SHIPPED}async def rollout(*args, **kw):\n    return (await shipped(*args, **kw))[::-1]",
    "a wrapper through another function": f"{SHIPPED}async def inner(*a):\n    return await shipped(*a)\n\n"
    "async def rollout(*a, evaluation=False):\n    return await inner(*a)",
    "functools.wraps": f"{SHIPPED}from functools import wraps\n\n@wraps(shipped)\nasync def rollout(*a, **kw): ...",
    "an assignment": f"{SHIPPED}from functools import partial\nrollout = partial(shipped)",
    "an attribute": "import miles_async.rollout.fully_async_rollout as fa\n\n"
    "async def rollout(*a, **kw):\n    return await fa.generate_rollout_fully_async(*a, **kw)",
    "another name": f"{SHIPPED.replace('as shipped', 'as rollout')}",
    "the stream": "async def rollout(args, rollout_id, data_source, evaluation=False):\n"
    "    return await data_source.drain_stream(rollout_id, 8)",
    "the decorator": "from miles_async.rollout import fully_async\n\n@fully_async\ndef rollout(*a, **kw): ...",
    "the decorator with an argument": "import miles_async.rollout as mr\n\n"
    "@mr.fully_async(keeps_groups=False)\ndef rollout(*a, **kw): ...",
}
WORKERS = {
    "the decorator": "from miles_async.rollout import fully_async\n\n"
    "@fully_async(keeps_groups=True)\ndef rollout(*a, **kw): ...",
    "a thread": """
import threading

class Worker:
    def __init__(self, data): self.data = data
    def start(self): threading.Thread(target=self.work, daemon=True).start()
    def work(self): self.data.get_samples(1)

def worker_of(data):
    return Worker(data)

def rollout(args, rollout_id, data_buffer, evaluation=False):
    worker_of(data_buffer).start()
""",
}
BATCHES = {
    "one batch": "def rollout(args, rollout_id, data_source, evaluation=False):\n    return data_source.get_samples(8)",
    "a thread that takes no prompts": "from threading import Thread\n\ndef rollout(*a):\n    Thread().start()",
    "a stream in a function that is not used": f"{SHIPPED}async def other(): await shipped()\n\ndef rollout(*a): ...",
    "no such function": "x = 1",
    "no valid Python": "def rollout(:",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user, which fails if it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "imported_by_nobody.py"


@pytest.mark.parametrize(
    "source, asynchrony",
    [
        *[pytest.param(source, Asynchrony.STREAM, id=f"stream: {name}") for name, source in STREAMS.items()],
        *[pytest.param(source, Asynchrony.WORKER, id=f"worker: {name}") for name, source in WORKERS.items()],
        *[pytest.param(source, Asynchrony.BATCH, id=f"batch: {name}") for name, source in BATCHES.items()],
    ],
)
def test_a_function_is_recognised_without_importing_its_module(
    module: Path, source: str, asynchrony: Asynchrony
) -> None:
    module.write_text(f"{source}\nassert False, 'this module was imported'\n")
    assert asynchrony_of("imported_by_nobody.rollout") is asynchrony
    assert "imported_by_nobody" not in sys.modules


def test_a_function_in_a_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_imported_by_nobody" / "functions"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("assert False")
    (package / "__init__.py").write_text("from .own import rollout")
    (package / "own.py").write_text(STREAMS["the stream"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert asynchrony_of("package_imported_by_nobody.functions.own.rollout") is Asynchrony.STREAM
    assert asynchrony_of("package_imported_by_nobody.functions.rollout") is Asynchrony.STREAM


def test_a_module_that_was_changed_is_read_again(module: Path) -> None:
    for source, asynchrony in ((STREAMS["the stream"], Asynchrony.STREAM), ("def rollout(): ...", Asynchrony.BATCH)):
        module.write_text(source)
        assert asynchrony_of("imported_by_nobody.rollout") is asynchrony


@pytest.mark.parametrize("source", [STREAMS["a wrapper"], WORKERS["a thread"]])
def test_a_wrapper_or_a_worker_is_fully_asynchronous_unless_the_schedule_is_set(module: Path, source: str) -> None:
    module.write_text(source)
    function = {"rollout_function_path": "imported_by_nobody.rollout"}
    assert schedule_of(run_config(**function), "train_async.py") is Schedule.FULLY_ASYNC
    assert schedule_of(run_config(**function, schedule="one_step_off"), "train_async.py") is Schedule.ONE_STEP_OFF
    assert schedule_of(run_config(**function), "train.py") is Schedule.SYNCHRONOUS


def test_a_wrapper_has_the_bounds_of_the_shipped_function(module: Path) -> None:
    module.write_text(STREAMS["a wrapper"])
    sizes = {"max_weight_staleness": 2, "windowed_fifo_ratio": 0.3}
    wrapper = run_config(**sizes, rollout_function_path="imported_by_nobody.rollout")
    shipped = run_config(**sizes, rollout_function_path=FULLY_ASYNC_FUNCTION)
    assert bounds_of(wrapper, "train_async.py") == bounds_of(shipped, "train_async.py")
    assert table(wrapper, "train_async.py") == table(shipped, "train_async.py")
    assert "the rollout function drains the stream" in table(wrapper, "train_async.py")


def test_the_table_of_a_worker_shows_its_limits(module: Path) -> None:
    module.write_text(WORKERS["a thread"])
    run = run_config(rollout_function_path="imported_by_nobody.rollout", max_weight_staleness=2, rollout_batch_size=8)
    lines = table(run, "train_async.py").splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert has_worker(run)
    assert rows["schedule"].endswith("the rollout function has a worker that keeps groups between calls")
    assert rows["held"].split()[1] == str(bounds_of(run, "train_async.py").room)
    assert rows["staleness"].split()[1] == "2"
    assert not {"N", "W", "B", "queue"} & rows.keys()


def test_settings_of_the_producer_are_noted_beside_a_worker(module: Path) -> None:
    module.write_text(WORKERS["a thread"])
    run = run_config(
        rollout_function_path="imported_by_nobody.rollout",
        windowed_fifo_ratio=0.5,
        dynamic_sampling_filter_path="miles_async.filters.check_no_aborted",
    )
    unused = [note for note in notes(run, "train_async.py") if "has no effect" in note]
    assert [note.split()[0] for note in unused] == ["windowed_fifo_ratio", "dynamic_sampling_filter_path"]


def test_the_decorator_returns_the_function_itself() -> None:
    def rollout() -> None: ...

    assert fully_async(rollout) is rollout
    assert fully_async(keeps_groups=True)(rollout) is rollout

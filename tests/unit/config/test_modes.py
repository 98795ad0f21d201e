"""The mode of a rollout function is what the function declares, and the schedule of the run follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import notes
from miles_async.config.flags import parse_flags
from miles_async.config.generation import bounds_of, generates, rollout_mode, schedule_of
from miles_async.config.load import checked_config
from miles_async.config.table import table
from miles_async.config.user_functions import load_function
from miles_async.modes.mode import MODES, RolloutMode, Undeclared, mode_of
from miles_async.modes.shipped import Batch, OwnWorker, Stream, Supervised, Windowed
from miles_async.rollout import fully_async
from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async
from miles_async.scheduling.bounds import Schedule
from tests.configuration import run_config
from tests.plugin_packages import install_plugin

SIGNATURE = "args, rollout_id, data_source, evaluation=False"
SHIPPED = "from miles_async.rollout.fully_async_rollout import generate_rollout_fully_async as shipped\n"
CALLS_THE_SHIPPED_FUNCTION = f"{SHIPPED}async def rollout({SIGNATURE}):\n    return await shipped(args, rollout_id, 0)"
STREAMS = {
    "the decorator": f"from miles_async.rollout import fully_async\n\n@fully_async\ndef rollout({SIGNATURE}): ...",
    "the decorator with an argument": "import miles_async.rollout as mr\n\n"
    f"@mr.fully_async(keeps_groups=False)\ndef rollout({SIGNATURE}): ...",
    "functools.wraps": f"{SHIPPED}from functools import wraps\n\n@wraps(shipped)\nasync def rollout({SIGNATURE}): ...",
    "functools.partial": f"{SHIPPED}from functools import partial\nrollout = partial(shipped)",
    "another name": SHIPPED.replace("as shipped", "as rollout"),
    "an object": "from miles_async.rollout import fully_async\n\n@fully_async\nclass Rollout:\n"
    f"    def __call__(self, {SIGNATURE}): ...\n\nrollout = Rollout()",
}
WORKERS = {
    "the decorator": "from miles_async.rollout import fully_async\n\n"
    f"@fully_async(keeps_groups=True)\ndef rollout({SIGNATURE}): ...",
}
UNDECLARED = {
    "one batch": f"def rollout({SIGNATURE}):\n    return data_source.get_samples(8)",
    "a thread": "import threading\n\n"
    f"def rollout({SIGNATURE}):\n    threading.Thread(target=data_source.get_samples, args=(1,)).start()",
    "a call of a declared function": CALLS_THE_SHIPPED_FUNCTION,
    "something else under the same name": f"def rollout({SIGNATURE}): ...\nrollout.rollout_mode = 'stream'",
    "no such function": "x = 1",
    "no valid Python": "def rollout(:",
    "an end of the process": "raise SystemExit(0)",
}
_numbers = iter(range(1000))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of the user, and returns the path of its function `rollout`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        # A process imports a module once, so each module has another name.
        name = f"mode_of_a_user_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return f"{name}.rollout"

    return write


@pytest.mark.parametrize("mode", MODES.shipped.values(), ids=MODES.shipped)
def test_the_function_of_a_shipped_mode_declares_the_mode(mode: RolloutMode) -> None:
    function = load_function(mode.function, setting="rollout_function_path")
    assert type(mode_of(function)) is type(mode)


@pytest.mark.parametrize(
    "source, mode",
    [
        *[pytest.param(source, Stream, id=f"stream: {name}") for name, source in STREAMS.items()],
        *[pytest.param(source, OwnWorker, id=f"worker: {name}") for name, source in WORKERS.items()],
        *[pytest.param(source, Undeclared, id=f"undeclared: {name}") for name, source in UNDECLARED.items()],
    ],
)
def test_a_function_of_a_user_has_the_mode_that_it_declares_or_inherits(
    write: Callable[[str], str], source: str, mode: type[RolloutMode]
) -> None:
    assert type(rollout_mode(run_config(rollout_function_path=write(source)))) is mode


def test_the_mode_of_a_shipped_function_is_found_without_an_import_of_the_function() -> None:
    program = (
        "import json, sys\n"
        "from miles_async.config.generation import schedule_of\n"
        "from miles_async.config.load import load_config\n"
        "from miles_async.config.schema import RunConfig, Rollout\n"
        f"config = RunConfig(rollout=Rollout(rollout_function_path={Stream.function!r}))\n"
        "assert schedule_of(config, 'train_async.py') == 'fully_async'\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('miles_async.rollout.') or name in "
        "('torch', 'ray', 'numpy')]))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []


def test_the_module_of_a_function_that_cannot_be_imported_is_executed_once(write: Callable[[str], str]) -> None:
    counts = "counts_imports_of_a_user"
    run = run_config(rollout_function_path=write(f"import sys\nsys.{counts} = vars(sys).get({counts!r}, 0) + 1\n1 / 0"))
    for _ in range(3):
        assert type(rollout_mode(run)) is Undeclared
    assert vars(sys).pop(counts) == 1


@pytest.mark.parametrize("source", [STREAMS["functools.wraps"], WORKERS["the decorator"]])
def test_a_declared_function_is_fully_asynchronous_unless_the_schedule_is_set(
    write: Callable[[str], str], source: str
) -> None:
    function = {"rollout_function_path": write(source)}
    assert schedule_of(run_config(**function), "train_async.py") is Schedule.FULLY_ASYNC
    assert schedule_of(run_config(**function, schedule="one_step_off"), "train_async.py") is Schedule.ONE_STEP_OFF
    assert schedule_of(run_config(**function), "train.py") is Schedule.SYNCHRONOUS


@pytest.mark.parametrize("source", UNDECLARED.values(), ids=UNDECLARED)
def test_a_function_without_a_declaration_is_called_while_the_batch_before_trains(
    write: Callable[[str], str], source: str
) -> None:
    run = run_config(rollout_function_path=write(source))
    assert schedule_of(run, "train_async.py") is Schedule.ONE_STEP_OFF
    assert schedule_of(run, "train.py") is Schedule.SYNCHRONOUS
    schedule, *_ = table(run, "train_async.py").splitlines()
    assert schedule.endswith("one step off  train_async.py; the rollout function declares no mode")
    assert f"held {bounds_of(run, 'train_async.py').held:>18}" in table(run, "train_async.py")


def test_a_wrapper_has_the_bounds_of_the_shipped_function(write: Callable[[str], str]) -> None:
    sizes = {"max_weight_staleness": 2, "windowed_fifo_ratio": 0.3}
    wrapper = run_config(**sizes, rollout_function_path=write(STREAMS["functools.wraps"]))
    shipped = run_config(**sizes, rollout_function_path=Stream.function)
    assert bounds_of(wrapper, "train_async.py") == bounds_of(shipped, "train_async.py")
    assert table(wrapper, "train_async.py") == table(shipped, "train_async.py")
    assert "the rollout function takes groups from the stream of the producer" in table(wrapper, "train_async.py")


def test_the_table_of_a_worker_shows_its_limits(write: Callable[[str], str]) -> None:
    function = write(WORKERS["the decorator"])
    run = run_config(rollout_function_path=function, max_weight_staleness=2, rollout_batch_size=8)
    lines = table(run, "train_async.py").splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert rows["schedule"].endswith("the rollout function has a worker that keeps groups between calls")
    assert rows["held"].split()[1] == str(bounds_of(run, "train_async.py").held)
    assert bounds_of(run, "train_async.py").held == bounds_of(run, "train_async.py").room
    assert rows["staleness"].split()[1] == "2"
    assert not {"N", "W", "B", "queue"} & rows.keys()


def test_settings_of_the_producer_are_noted_beside_a_worker(write: Callable[[str], str]) -> None:
    run = run_config(
        rollout_function_path=write(WORKERS["the decorator"]),
        windowed_fifo_ratio=0.5,
        dynamic_sampling_filter_path="miles_async.filters.check_no_aborted",
    )
    assert (
        "windowed_fifo_ratio and dynamic_sampling_filter_path have no effect: they need a rollout function without a "
        "worker, because the worker generates the groups"
    ) in notes(run, "train_async.py")


def test_the_filter_of_a_data_set_is_noted_beside_a_worker_too(write: Callable[[str], str]) -> None:
    sets = {"code": {"prompt_data": "code.jsonl", "dynamic_sampling_filter_path": "my_module.keep"}}
    run = run_config(rollout_function_path=write(WORKERS["the decorator"]), datasets=sets)
    unused = [note for note in notes(run, "train_async.py") if "has no effect" in note]
    assert [note.split()[0] for note in unused] == ["dynamic_sampling_filter_path"]


def test_the_decorator_returns_the_function_itself() -> None:
    def rollout() -> None: ...

    assert fully_async(rollout) is rollout
    assert fully_async(keeps_groups=True)(rollout) is rollout


def test_a_wrapper_of_a_wrapper_has_the_mode_of_the_innermost_function() -> None:
    @wraps(generate_rollout_fully_async)
    async def timed(*arguments: Any) -> Any: ...

    assert type(mode_of(partial(timed, 1))) is Stream


@pytest.mark.parametrize("mode", [Batch, Windowed, Stream, Supervised])
def test_the_name_of_a_mode_stands_for_its_function(mode: type[RolloutMode]) -> None:
    config, _ = checked_config(parse_flags(["--rollout-function-path", mode.name]), entry="train_async.py")
    assert config.rollout.rollout_function_path == mode.function


OWN_MODE = """
from miles_async.modes.mode import RolloutMode

class Recorded(RolloutMode):
    "Returns recorded groups."
    summary = "returns recorded groups"
    function = "{function}"
    needs_engines = False
"""


def test_a_package_adds_a_mode_with_one_file_and_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str]
) -> None:
    function = write("raise AssertionError('the module of the function was imported')")
    install_plugin(
        tmp_path, monkeypatch, MODES, "recorded", "recorded_mode:Recorded", OWN_MODE.format(function=function)
    )
    config, _ = checked_config(parse_flags(["--rollout-function-path", "recorded"]), entry="train_async.py")
    assert config.rollout.rollout_function_path == function
    assert rollout_mode(config).summary == "returns recorded groups"
    without_evaluation = run_config(rollout_function_path=function, eval_size=0)
    assert not generates(without_evaluation)
    assert "the rollout function returns recorded groups" in table(without_evaluation, "train_async.py")


def test_a_mode_that_cannot_be_used_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, MODES, "recorded", "broken_mode:Recorded", "import modules_of_nobody")
    _, found = checked_config(parse_flags(["--rollout-function-path", "recorded"]), entry="train_async.py")
    [sentence] = [sentence for sentence in found if "recorded" in sentence]
    assert sentence.startswith(
        "the entry point recorded = broken_mode:Recorded of the distribution users cannot be imported: "
        "ModuleNotFoundError"
    )


@pytest.fixture(autouse=True)
def forget_installed_modes() -> Iterator[None]:
    yield
    MODES.forget()

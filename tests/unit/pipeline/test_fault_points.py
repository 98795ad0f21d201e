"""Faults happen at named points: each call that leaves the pipeline is one, and a seed decides at which call."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from miles_async import ports as ports_module
from miles_async.adapters.ray.learner import RayRanks
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.system.faults import FaultEffects, JumpingClock, corrupt
from miles_async.config.schema import Fault
from miles_async.errors import EngineLostError, FatalError, StoreError, TrajectoryError, UserError
from miles_async.fault_points import POINTS, SYNCHRONOUS, FaultPoints
from miles_async.pipeline.journal import EventOutbox
from miles_async.pipeline.run_ports import Ports, RunFunctions
from miles_async.ports import Generator, RunStore
from miles_async.types import Group, Sample
from tests.configuration import run_config
from workers.faults import FaultInjector, FaultSchedule

PIPELINE = Path(inspect.getfile(Ports)).parent
OUTSIDE_PORTS = {"store": RunStore, "outbox": EventOutbox, "ranks": RayRanks, "evaluator": Generator}
"""An evaluator is the generator of a data set for evaluations."""
PROTOCOLS: dict[str, type[Any]] = OUTSIDE_PORTS | {
    name: kind
    for name, kind in get_type_hints(Ports).items()
    if getattr(kind, "__module__", "") == ports_module.__name__
}
WAITS_INSIDE_THE_PROCESS = {"wait", "gather", "shield", "sleep", "aenter", "aexit", "acquire"}
"""Functions of asyncio that wait for tasks, timers or locks of the same process."""


def methods(kind: type[Any], *, asynchronous: bool) -> set[str]:
    return {
        name
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name[0] != "_" and inspect.iscoroutinefunction(value) is asynchronous
    }


def test_each_asynchronous_method_of_a_port_has_points() -> None:
    for name, kind in PROTOCOLS.items():
        found = {method for method in POINTS[name] if f"{name}.{method}" not in SYNCHRONOUS}
        assert found == methods(kind, asynchronous=True), name
    assert POINTS.keys() - PROTOCOLS.keys() == {"functions"}
    assert set(POINTS["functions"]) == set(get_type_hints(RunFunctions))


def test_the_synchronous_methods_with_points_exist() -> None:
    for method in SYNCHRONOUS:
        port, _, name = method.partition(".")
        assert name in POINTS[port]
        assert name in {known for kind in PROTOCOLS[port].__mro__ for known in vars(kind)}


def awaited_calls(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The object and the name of each function that is called in an `await` expression."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute):
                yield ast.unparse(function.value).rpartition(".")[2].lstrip("_"), function.attr.strip("_")
            elif isinstance(function, ast.Name):
                yield "", function.id.strip("_")


def test_each_await_of_the_pipeline_is_a_point_or_waits_inside_the_process() -> None:
    trees = [ast.parse(path.read_text()) for path in PIPELINE.glob("*.py")]
    defined = {
        node.name.strip("_") for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    }
    unknown = {
        (receiver, name)
        for tree in trees
        for receiver, name in awaited_calls(tree)
        if name not in POINTS.get(receiver, ())
        and name not in POINTS["functions"]
        and name not in defined | WAITS_INSIDE_THE_PROCESS
    }
    assert unknown == set()


async def test_a_call_is_reported_before_and_after_it_and_its_result_is_returned() -> None:
    reached: list[Any] = []

    class Store:
        label = "kept"

        async def read(self) -> str:
            reached.append("read")
            return "state"

    def note(point: str, arguments: Sequence[Any]) -> float:
        reached.append(point)
        return 0.0

    store = FaultPoints(note, SystemClock().sleep).port("store", Store())
    assert (await store.read(), store.label) == ("state", "kept")
    assert reached == ["store.read.before", "read", "store.read.after"]


def test_a_fault_is_due_at_its_call_and_as_often_as_configured() -> None:
    schedule = FaultSchedule([Fault(kind="delay", point="learner.*", call=2, times=2)], seed=0)
    points = ["learner.train.before", "store.read.before", "learner.train.after", "learner.train.before"] * 2
    assert [bool(schedule.due(point)) for point in points] == [False, False, True, True, False, False, False, False]


def test_the_seed_draws_the_call_of_a_fault() -> None:
    def first_call(seed: int) -> int:
        schedule = FaultSchedule([Fault(kind="kill", point="store.write.before", within=50)], seed)
        return next(call for call in range(1, 51) if schedule.due("store.write.before"))

    calls = [first_call(seed) for seed in range(20)]
    assert calls == [first_call(seed) for seed in range(20)]
    assert len(set(calls)) > 10


def test_a_fault_that_has_happened_does_not_happen_again_in_the_same_run_folder(tmp_path: Path) -> None:
    config = run_config(inject_faults=[{"kind": "error", "point": "store.write.before", "call": 1}])

    def injector() -> FaultInjector:
        return FaultInjector(config.faults, tmp_path / "faults.jsonl", SystemClock())

    with pytest.raises(StoreError, match="a configured fault"):
        injector()._reached("store.write.before", ())
    assert injector()._reached("store.write.before", ()) == 0


def test_a_run_without_faults_calls_its_ports_directly(tmp_path: Path) -> None:
    clock, store = SystemClock(), object()
    injector = FaultInjector(run_config().faults, tmp_path / "faults.jsonl", clock)
    assert injector.clock is clock
    assert injector.port("store", store) is store


def test_another_seed_of_the_faults_lets_them_happen_at_another_call(tmp_path: Path) -> None:
    fault = {"kind": "delay", "point": "store.write.before", "seconds": 7.0, "within": 50}
    delayed = []
    for seed in (0, 1):
        config = run_config(inject_faults=[fault], fault_seed=seed)
        injector = FaultInjector(config.faults, tmp_path / f"{seed}.jsonl", SystemClock())
        delayed.append([injector._reached("store.write.before", ()) for _ in range(50)])
    assert sum(delayed[0]) == sum(delayed[1]) == 7
    assert delayed[0] != delayed[1]


@pytest.mark.parametrize(
    "kind, point, error",
    [
        ("error", "generator.generate.before", EngineLostError),
        ("error", "rewarder.score.before", TrajectoryError),
        ("error", "learner.train.after", FatalError),
        ("disk_full", "store.write.before", StoreError),
        ("disk_full", "learner.write_state.before", FatalError),
    ],
)
def test_an_error_is_that_of_the_port(kind: Any, point: str, error: type[Exception], tmp_path: Path) -> None:
    effects = FaultEffects(tmp_path / "faults.jsonl", JumpingClock(SystemClock()))
    with pytest.raises(error, match=point):
        effects.happen(0, Fault(kind=kind, point=point), point, ())


def test_a_jump_moves_the_wall_clock_and_not_the_monotonic_one(tmp_path: Path) -> None:
    clock = JumpingClock(SystemClock())
    before = clock.time(), clock.monotonic()
    FaultEffects(tmp_path / "f", clock).happen(0, Fault(kind="clock_jump", seconds=-3600), "store.write.before", ())
    assert clock.time() < before[0] - 3000
    assert clock.monotonic() >= before[1]


@pytest.mark.parametrize("point", ["generator.generate.after", "rewarder.score.after"])
def test_a_poisoned_sample_has_a_value_that_is_not_a_number(point: str, tmp_path: Path) -> None:
    group = Group([Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)], feed_index="x")
    effects = FaultEffects(tmp_path / "f", JumpingClock(SystemClock()))
    effects.happen(0, Fault(kind="poison", point=point), point, (group,))
    values = [*group[0].rollout_log_probs, group[0].scalar_reward]
    assert sum(value != value for value in values) == 1


def test_one_byte_of_the_newest_matching_file_is_changed(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_bytes(b"abcde")
    corrupt(f"{tmp_path}/part-*")
    assert (tmp_path / "part-0").read_bytes() == b"ab\x9cde"
    with pytest.raises(UserError, match="set file"):
        corrupt(f"{tmp_path}/other-*")


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ({"kind": "kill", "point": "learner.trian.before"}, "no point of kind kill matches 'learner.trian.before'"),
        ({"kind": "disk_full", "point": "fleet.check.before"}, "no point of kind disk_full matches"),
        ({"kind": "delay", "point": "data.get_samples.before"}, "no point of kind delay matches"),
        ({"kind": "corrupt"}, "set file"),
        ({"kind": "explode"}, "input should be 'kill'"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run_config(inject_faults=[fault])

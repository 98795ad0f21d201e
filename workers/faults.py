"""Injects the configured faults into a rollout worker."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from miles_async.adapters.system.faults import FaultEffects, JumpingClock
from miles_async.config.schema import Faults
from miles_async.config.schema.faults import Fault
from miles_async.fault_points import FaultPoints
from miles_async.pipeline.run_ports import Ports, RunFunctions
from miles_async.ports import Clock

T = TypeVar("T")


class FaultInjector:
    """Wraps what a rollout worker calls, so that each configured fault happens at its point.

    Without faults nothing is wrapped.
    """

    def __init__(self, faults: Faults, listed: Path, clock: Clock) -> None:
        """`listed` is the file that lists the faults that have happened in this run."""
        self._faults = faults.inject_faults
        self.clock = JumpingClock(clock) if self._faults else clock
        """The clock that the run has to use."""
        if isinstance(self.clock, JumpingClock):
            self._effects = FaultEffects(listed, self.clock)
            self._schedule = FaultSchedule(self._faults, faults.fault_seed, self._effects.happened())
            self._points = FaultPoints(self._reached, clock.sleep)

    def port(self, name: str, target: T) -> T:
        """Return `target`, which implements the port `name`, with its faults."""
        if not self._faults:
            return target
        wrapped: T = self._points.port(name, target)
        return wrapped

    def ports(self, ports: Ports) -> Ports:
        """Return the ports of the run with their faults."""
        return at_fault_points(ports, self._points) if self._faults else ports

    def _reached(self, point: str, arguments: Sequence[Any]) -> float:
        due = self._schedule.due(point)
        return sum(self._effects.happen(number, self._faults[number], point, arguments) for number in due)


class FaultSchedule:
    """Counts the calls that match each fault, and returns the faults that are due.

    A schedule depends on the configured faults, their seed and the number of calls alone.

    Example:

        schedule = FaultSchedule([Fault(kind="kill", point="learner.train.*", call=2)], seed=0)
        schedule.due("learner.train.before")  # []
        schedule.due("learner.train.after")   # [0]: the second call that matches fault 0
    """

    def __init__(self, faults: Sequence[Fault], seed: int, happened: Collection[int] = ()) -> None:
        """`happened` are the numbers of faults that happened before, in an earlier rollout worker of the run."""
        rng = random.Random(f"faults {seed}")
        # A call is drawn for each fault, so that the draws do not depend on the other faults.
        drawn = [rng.randint(1, fault.within) for fault in faults]
        self._waiting = {
            number: (fault.points, fault.call or drawn[number], fault.times)
            for number, fault in enumerate(faults)
            if number not in happened
        }
        self._calls = dict.fromkeys(self._waiting, 0)

    def due(self, point: str) -> list[int]:
        """Count a call that has reached `point`. Returns the numbers of the faults that happen now."""
        found = []
        for number, (points, first, times) in self._waiting.items():
            if point in points:
                self._calls[number] += 1
                if first <= self._calls[number] < first + times:
                    found.append(number)
        return found


def at_fault_points(ports: Ports, points: FaultPoints) -> Ports:
    """Return the ports of a run, whose calls are reported at `points`. The journal's store is not among them."""
    functions = ports.functions
    return replace(
        ports,
        clock=points.port("clock", ports.clock),
        data=points.port("data", ports.data),
        generator=points.port("generator", ports.generator),
        rewarder=points.port("rewarder", ports.rewarder),
        learner=points.port("learner", ports.learner),
        channel=points.port("channel", ports.channel),
        fleet=points.port("fleet", ports.fleet),
        dead_letters=points.port("dead_letters", ports.dead_letters),
        functions=RunFunctions(
            rollout=functions.rollout and points.function("functions.rollout", functions.rollout),
            prepare=points.function("functions.prepare", functions.prepare),
            evaluate=functions.evaluate and points.function("functions.evaluate", functions.evaluate),
        ),
        eval_sets=[replace(one, generator=points.port("evaluator", one.generator)) for one in ports.eval_sets],
    )

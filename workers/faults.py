"""Injects the configured faults into a rollout worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from miles_async.adapters.system.faults import FaultEffects, JumpingClock
from miles_async.config.schema import Faults
from miles_async.fault_points import FaultPoints
from miles_async.pipeline.faults import FaultSchedule, at_fault_points
from miles_async.pipeline.run_ports import Ports
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

"""Faults that are injected into a run, to test how it recovers."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, model_validator

from miles_async.fault_points import SYNCHRONOUS, all_points
from miles_async.section import Section

Kind = Literal["kill", "stop", "delay", "error", "disk_full", "corrupt", "clock_jump", "poison"]
RunProcess = Literal[
    "rollout_worker",
    "learner",
    "engine_actor",
    "engine_server",
    "router_actor",
    "router_server",
    "driver",
    "raylet",
    "gcs",
]

_METHODS: dict[Kind, tuple[str, ...]] = {
    "disk_full": ("store.write", "learner.copy_state", "learner.write_state"),
    "error": (
        "store.write",
        "generator.generate",
        "generator.abort",
        "rewarder.score",
        "learner.*",
        "channel.connect",
        "fleet.commit",
        "fleet.admit",
        "fleet.check",
        "fleet.restart",
        "fleet.check_router",
    ),
    "poison": ("generator.generate", "rewarder.score"),
}
"""The methods at which a kind of fault is possible; the other kinds are possible at all of them."""


class Fault(Section):
    """One entry of `inject_faults`."""

    kind: Kind
    """`kill` and `stop` send SIGKILL and SIGSTOP to `process`. `delay` delays the call by `seconds`. `error` raises the
    error of a lost engine or learner, of a failed reward or of a failed store. `disk_full` raises the error of a full
    disk. `corrupt` changes one byte of `file`. `clock_jump` moves the wall clock of the rollout worker by `seconds`.
    `poison` sets a log-probability or the reward of one sample to NaN."""
    point: str = "*"
    """Where the fault happens, such as `learner.train.before`; `*` matches any text (`miles_async/fault_points.py`)."""
    call: int | None = Field(None, ge=1)
    """At which of the matching calls the fault happens, counted from 1. If unset, fault_seed draws it."""
    within: int = Field(1000, ge=1)
    """Upper limit of a drawn call."""
    times: int = Field(1, ge=1)
    """Number of matching calls in a row at which the fault happens."""
    process: RunProcess = "rollout_worker"
    """The process that kill and stop send their signal to. Only the rollout worker is found if Ray is joined."""
    seconds: float = 5.0
    """Length of a delay, or the jump of the clock, which may be negative."""
    file: str | None = None
    """The file that corrupt damages; with `*` in it, the newest file that matches."""

    @model_validator(mode="after")
    def _can_happen(self) -> Self:
        if not self.points:
            raise ValueError(f"no point of kind {self.kind} matches {self.point!r}: see miles_async/fault_points.py")
        if self.kind == "corrupt" and self.file is None:
            raise ValueError("corrupt needs the name of a file: set file")
        return self

    @property
    def points(self) -> frozenset[str]:
        """The points at which this fault can happen."""
        return frozenset(point for point in all_points() if fnmatchcase(point, self.point) and self._possible(point))

    def _possible(self, point: str) -> bool:
        method, _, side = point.rpartition(".")
        if self.kind == "delay":
            return method not in SYNCHRONOUS
        if self.kind == "poison" and side == "before":
            return False
        return any(fnmatchcase(method, pattern) for pattern in _METHODS.get(self.kind, ("*",)))


class Faults(Section):
    """Faults to inject into the run, for tests of how it recovers. A run has none by default."""

    inject_faults: list[Fault] = []
    """Faults, such as [{kind: kill, point: learner.train.before, call: 3}]. Each entry has a kind (kill, stop, delay,
    error, disk_full, corrupt, clock_jump or poison) and a point. Each fault happens once per run folder."""
    fault_seed: int = 0
    """Seed of the calls at which faults without `call` happen."""

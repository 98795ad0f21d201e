"""The points at which faults can be injected into a run: the calls that leave the rollout worker.

A point is `PORT.METHOD.before` or `PORT.METHOD.after`, such as `learner.train.before`. The simulator and the real stack
use the same points. Every `await` of `pipeline/` either is such a call or waits for another task of the same process;
at the latter nothing changes outside, so a fault there has the effect of a fault at the next call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any

from miles_async.ports import (
    Clock,
    DataSource,
    DeadLetters,
    Fleet,
    Generator,
    Learner,
    Rewarder,
    RunStore,
    WeightChannel,
)

SYNCHRONOUS = frozenset({"outbox.put", "data.get_samples", "data.add_samples", "dead_letters.dead_letter"})
"""The methods with points that are not coroutine functions."""

_PORTS: Mapping[str, type] = {
    "clock": Clock,
    "store": RunStore,
    "data": DataSource,
    "generator": Generator,
    "evaluator": Generator,
    "rewarder": Rewarder,
    "learner": Learner,
    "channel": WeightChannel,
    "fleet": Fleet,
    "dead_letters": DeadLetters,
}


def _methods(port: str) -> list[str]:
    """The methods with points: all coroutine functions of the port, and those in SYNCHRONOUS."""
    declared = {name: value for kind in reversed(_PORTS[port].__mro__) for name, value in vars(kind).items()}
    return [name for name, value in declared.items() if iscoroutinefunction(value) or f"{port}.{name}" in SYNCHRONOUS]


POINTS: Mapping[str, Sequence[str]] = {port: _methods(port) for port in _PORTS} | {
    "outbox": ("put",),
    "ranks": ("give_batch", "on_all", "on_first"),
    "functions": ("rollout", "prepare", "evaluate"),
}
"""The methods with points, by port (`pipeline/run_ports.py`). `functions` are the user's functions.

`ranks` are the calls to single ranks of the learner (`adapters/ray/learner.py`): a rollout worker may die when some
ranks have received their part of a batch and others have not.
"""

Reached = Callable[[str, Sequence[Any]], float]
"""`(point, arguments) -> seconds`: called at a point with the arguments of the call. It may raise or end the process.

The call, or its return, is delayed by the seconds; methods in SYNCHRONOUS are not delayed.
"""


def all_points() -> list[str]:
    """Return the names of all points."""
    return [
        f"{port}.{method}.{side}"
        for port, methods in POINTS.items()
        for method in methods
        for side in ("before", "after")
    ]


class FaultPoints:
    """Reports each call of a port at its points.

    Example:

        points = FaultPoints(reached, clock.sleep)
        learner = points.port("learner", learner)
        await learner.train(3, groups)  # reached("learner.train.before", (3, groups)), the call, reached(… "after" …)
    """

    def __init__(self, reached: Reached, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._reached = reached
        self._sleep = sleep

    def port(self, name: str, target: Any) -> Any:
        """Return an object that behaves like `target`, which implements the port `name`, and reports its calls."""
        return _Port(self, name, target)

    def function(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that behaves like `function` and reports its calls. `method` is `PORT.METHOD`."""
        reached, sleep = self._reached, self._sleep

        def call(*arguments: Any, **keywords: Any) -> Any:
            reached(f"{method}.before", arguments)
            result = function(*arguments, **keywords)
            reached(f"{method}.after", arguments)
            return result

        async def call_and_wait(*arguments: Any, **keywords: Any) -> Any:
            if seconds := reached(f"{method}.before", arguments):
                await sleep(seconds)
            result = await function(*arguments, **keywords)
            if seconds := reached(f"{method}.after", arguments):
                await sleep(seconds)
            return result

        return call if method in SYNCHRONOUS else call_and_wait


class _Port:
    def __init__(self, points: FaultPoints, name: str, target: Any) -> None:
        self._points = points
        self._name = name
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._points.function(f"{self._name}.{name}", value) if name in POINTS[self._name] else value

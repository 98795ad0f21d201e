"""Decides at which calls faults are injected, and reports the calls of a run's ports at fault points.

A schedule depends on the configured faults, their seed and the number of calls alone. What a fault does is elsewhere:
`adapters/system/faults.py` on the real stack, `tests/sim/lost_workers.py` in the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from miles_async.config.schema.faults import Fault
from miles_async.fault_points import FaultPoints
from miles_async.pipeline.run_ports import Ports, RunFunctions


class FaultSchedule:
    """Counts the calls that match each fault, and returns the faults that are due.

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

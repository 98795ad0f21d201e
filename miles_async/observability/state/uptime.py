"""When a run was served, and what interrupted it: drivers, rollout workers and learners that were lost and replaced.

The events of one rollout worker arrive in order, even if a driver or a rollout worker is lost: what the lost one has
stored is delivered first. So an interruption lasts from the last report of one rollout worker until the training loop
of the next one begins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import StrEnum
from math import inf


class Interruption(StrEnum):
    """Why no rollout worker served the run."""

    NO_DRIVER = "no_driver"
    """From the last report before a driver was lost, or ended, until the next one started."""
    DRIVER_START = "driver_start"
    """From then until the training loop of the next driver began."""
    ROLLOUT_WORKER = "rollout_worker"
    """A rollout worker was lost and replaced."""
    LEARNER = "learner"
    """The learner was lost, and replaced together with the rollout worker."""


class Uptime:
    """The time in which the run was served, and the interruptions of it.

    The training phase begins with the first training step.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[Interruption, float] = defaultdict(float)
        """Seconds of the interruptions that have ended."""
        self.restarts: Counter[str] = Counter()
        """How often a process was replaced: `driver`, `rollout_worker` (alone) and `learner`."""
        self.training_began: float | None = None
        """When the first training step began."""
        self._before_training = 0.0
        """Seconds of the interruptions before that."""
        self._driver_started: float | None = None
        """When another driver started, whose rollout worker has not reported yet."""
        self._since: float | None = None
        """When the interruption that lasts now began: at the last report of the previous rollout worker."""
        self._cause = Interruption.ROLLOUT_WORKER
        self._served_until = inf
        """The last report, if no rollout worker is known to live."""

    @property
    def interrupted(self) -> bool:
        """Whether another rollout worker restores the run."""
        return self._since is not None

    def start_training(self, time: float) -> None:
        """Begin the training phase, if it has not begun."""
        if self.training_began is None:
            self.training_began, self._before_training = time, sum(self.seconds.values())

    def restart_driver(self, time: float, last_report: float) -> None:
        """Another driver continues the run. Stored reports of the previous rollout worker may still follow."""
        self._driver_started, self._served_until = time, last_report
        self.restarts["driver"] += 1

    def is_of_next_driver(self, time: float) -> bool:
        """Whether a report of a rollout worker is the first one of the driver that was started last."""
        return self._driver_started is not None and time >= self._driver_started

    def interrupt(self, last_report: float, cause: Interruption) -> None:
        """Another rollout worker begins to restore the run. `last_report` is the last time of its predecessor.

        A learner that is replaced with the rollout worker is the cause. A new driver starts everything itself.
        """
        if self._driver_started is not None:
            cause = Interruption.DRIVER_START
        elif self._since is None:
            self.restarts[cause] += 1
        elif (self._cause, cause) == (Interruption.ROLLOUT_WORKER, Interruption.LEARNER):
            self.restarts -= Counter([self._cause])  # `-=` removes counts of 0
            self.restarts[cause] += 1
        else:
            return
        if self._since is None:
            self._since = self._served_until = last_report
        self._cause = cause

    def resume(self, time: float) -> float:
        """The training loop runs again. Return when the interruption began."""
        assert self._since is not None
        since, started = self._since, self._driver_started
        if started is not None:
            self.seconds[Interruption.NO_DRIVER] += max(0.0, started - since)
            self.seconds[Interruption.DRIVER_START] += max(0.0, time - max(started, since))
        else:
            self.seconds[self._cause] += max(0.0, time - since)
        self._since, self._driver_started, self._served_until = None, None, inf
        return since

    def training_seconds(self, until: float) -> float:
        """Return the seconds of the training phase up to `until` in which the run was served.

        `until` is not before the end of the last interruption.
        """
        if self.training_began is None:
            return 0.0
        until = min(until, self._served_until)
        return max(0.0, until - self.training_began - sum(self.seconds.values()) + self._before_training)

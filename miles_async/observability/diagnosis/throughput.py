"""Estimates how many groups per second a run would train if one part of it were different.

A small model plays the recent groups of the run, with the seconds that each of them took, through the window, the slots
and the learner of the run. Then it plays them again with one change. The absolute numbers of such a model are rough,
because it knows nothing of retries, memory or the load of evaluations. Their ratio is what the verdict prints.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from miles_async.observability.state.groups import Seconds
from miles_async.scheduling.window import FIFOWindow

MAX_GROUPS = 2048
"""Groups that one estimate generates, for `FEWEST_BATCHES` batches at least: some ten milliseconds."""
FEWEST_BATCHES, MOST_BATCHES = 4, 64
"""The first quarter of the batches fills the queue."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a run consists of. Seconds of the learner are those per batch."""

    in_flight: int
    """N: the most groups in flight, from admission until their reward is complete."""
    window: int
    """W, in groups."""
    slots: int | None
    """B: the most groups between admission and live weights. None without a staleness limit."""
    room: int
    """The most groups in flight, blocked by the window and queued together."""
    batch: int
    """Groups per batch."""
    groups: Sequence[Seconds]
    """Recent groups, in the order in which they finished, without the pauses of the engines."""
    kept: float
    """Fraction of the groups that filters keep, above 0."""
    step: float
    """Seconds of the optimizer steps of a batch."""
    save: float
    evaluate: float
    """Seconds per batch in which the learner waits for checkpoints and evaluations."""
    stage: float
    """Seconds in which the learner copies its weights for a publish. The publish before it has ended by then."""
    write: float
    """Seconds in which the engines are paused for a publish, while the learner goes on."""
    batch_seconds: float
    """The time from one batch to the next, as it was measured."""


def groups_per_second(model: Model) -> float:
    """Return the rate at which the modelled run trains groups; 0 if it trains none."""
    return _Play(model, max(FEWEST_BATCHES, min(MOST_BATCHES, int(MAX_GROUPS * model.kept) // model.batch))).rate()


class _Play:
    """One run of the model on a virtual clock. After each batch, its weights are published."""

    def __init__(self, model: Model, batches: int) -> None:
        self._model = model
        self._batches = batches
        # Groups that finished one after the other were not admitted in this order.
        self._groups = Random(0).sample(list(model.groups), len(model.groups))
        self._window = FIFOWindow[bool](model.window)
        self._paused = 0.0
        """Seconds in which the engines were paused. The ends below do not include them."""
        self._ends: list[tuple[float, int]] = []
        """When the groups in flight end, and their positions."""
        self._admitted = 0
        self._held = 0
        """Slots in use."""
        self._waiting = 0
        """Groups in flight, blocked by the window and queued."""
        self._queued = 0
        self._kept = 0.0
        self._learner_free = 0.0
        self._publishes: deque[tuple[float, float]] = deque()
        """When the engines are paused for each coming publish, and when they go on."""
        self._running = False
        """Whether the first of them has begun."""
        self._trained: list[float] = []
        """When each batch was trained."""

    def rate(self) -> float:
        now = 0.0
        while len(self._trained) < self._batches:
            self._train(now)
            self._admit(now)
            upcoming = [self._paused + self._ends[0][0]] if self._ends else []
            if self._publishes:
                upcoming.append(self._publishes[0][self._running])
            if self._queued >= self._model.batch:
                upcoming.append(self._learner_free)
            if not upcoming:
                return 0.0  # No group is in flight, and no slot will be free.
            now = max(now, min(upcoming))
            self._publish(now)
            self._end_groups(now)
        # The first batches find an empty queue.
        skipped = self._batches // 4
        seconds = self._trained[-1] - self._trained[skipped]
        return (self._batches - 1 - skipped) * self._model.batch / seconds if seconds > 0 else 0.0

    def _train(self, now: float) -> None:
        model = self._model
        if self._queued < model.batch or now < self._learner_free:
            return
        self._queued -= model.batch
        self._waiting -= model.batch
        trained = now + model.step
        self._trained.append(trained)
        before = self._publishes[-1][1] if self._publishes else 0.0
        staged = max(trained, before) + model.stage
        self._publishes.append((staged, staged + model.write))
        self._learner_free = staged + model.save + model.evaluate

    def _publish(self, now: float) -> None:
        while self._publishes and self._publishes[0][self._running] <= now:
            if self._running:
                self._publishes.popleft()
                self._held -= self._model.batch
            else:
                self._paused += self._model.write
            self._running = not self._running

    def _admit(self, now: float) -> None:
        model = self._model
        slots = math.inf if model.slots is None else model.slots
        while len(self._ends) < model.in_flight and self._held < slots and self._waiting < model.room:
            seconds = self._groups[self._admitted % len(self._groups)]
            heapq.heappush(self._ends, (now - self._paused + seconds.generation + seconds.reward, self._admitted))
            self._admitted += 1
            self._held += 1
            self._waiting += 1

    def _end_groups(self, now: float) -> None:
        while self._ends and self._paused + self._ends[0][0] <= now:
            _, position = heapq.heappop(self._ends)
            self._kept += self._model.kept
            if self._kept >= 1.0:
                self._kept -= 1.0
                self._window.mark_completed(position, True)
            else:
                self._window.drop(position)
                self._held -= 1
                self._waiting -= 1
        self._queued += sum(1 for _ in self._window.drain())

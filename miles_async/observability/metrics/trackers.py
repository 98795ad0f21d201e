"""TensorBoard and Weights & Biases, for whoever wants the curves there, too. None of them can stop or slow a run.

Each sink lives in a thread of its own behind a bounded queue. What does not fit is dropped; a sink that raises is
closed with one warning; one that hangs at the end is left behind.

Names are slime's: `train/…` over optimizer steps, `rollout/…` and `eval/…` over rollouts (or over optimizer steps with
`--wandb-always-use-train-step`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol

import structlog

from miles_async.config.schema import RunConfig
from miles_async.events import BatchDrained, Evaluated, Event, PublishEnded, StepEnded, StepStarted
from miles_async.observability.run_folder import RunFolder

MAX_QUEUED_POINTS = 10_000
CLOSE_SECONDS = 30.0
"""Weights & Biases takes seconds to start and to end, on a busy machine many."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """Values at one place of an axis."""

    axis: str
    """`train/step` or `rollout/step`."""
    step: int
    values: Mapping[str, float]


class Sink(Protocol):
    def write(self, point: Point) -> None: ...

    def close(self) -> None: ...


class PointBuilder:
    """Turns events into points."""

    def __init__(self, steps_per_rollout: int, *, always_train_step: bool) -> None:
        self._steps_per_rollout = steps_per_rollout
        self._always_train_step = always_train_step
        self._started: StepStarted | None = None
        self._drained: BatchDrained | None = None
        self._rollout = 0

    def points(self, event: Event) -> Iterator[Point]:
        match event:
            case BatchDrained():
                self._drained = event
            case StepStarted():
                self._started = event
            case StepEnded():
                self._rollout = event.rollout + 1
                yield Point("train/step", self._train_step, self._train(event))
                yield self._over_rollouts(self._batch(event))
            case PublishEnded() if event.live:
                yield self._over_rollouts(
                    {
                        "rollout/publish_staged_seconds": event.staged_seconds,
                        "rollout/publish_paused_seconds": event.paused_seconds,
                        "rollout/weight_version": event.version,
                    }
                )
            case Evaluated():
                self._rollout = event.rollout + 1
                yield self._over_rollouts(
                    {
                        f"eval/{event.name}": event.reward,
                        f"eval/{event.name}-accuracy": event.accuracy,
                        f"eval/{event.name}-truncated_ratio": event.truncated,
                    }
                )
            case _:
                pass

    @property
    def _train_step(self) -> int:
        return self._rollout * self._steps_per_rollout

    def _over_rollouts(self, values: Mapping[str, float]) -> Point:
        if self._always_train_step:
            return Point("train/step", self._train_step, values)
        return Point("rollout/step", self._rollout, values)

    def _train(self, event: StepEnded) -> dict[str, float]:
        seconds = event.ended - event.started
        return {
            **{f"train/{name}": value for name, value in event.metrics.items()},
            "train/seconds": seconds,
            "train/tokens": event.tokens,
        }

    def _batch(self, event: StepEnded) -> dict[str, float]:
        values = {"rollout/reward": event.reward, "rollout/response_length": event.response_length}
        if (started := self._started) is not None:
            values["rollout/staleness_mean"] = sum(started.staleness) / len(started.staleness)
            values["rollout/staleness_max"] = max(started.staleness)
        if (drained := self._drained) is not None:
            values |= {
                "rollout/queue_size": drained.depth,
                "rollout/recycled": drained.recycled,
                "rollout/drain_wait_seconds": drained.waited,
            }
        return values


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        import wandb

        settings = config.observability
        self._run = wandb.init(
            project=settings.wandb_project or settings.project_name,
            group=settings.wandb_group or settings.experiment_name,
            name=folder.path.name,
            mode=settings.wandb_mode,
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        for axis, families in {"train/step": ["train/*"], "rollout/step": ["rollout/*", "eval/*"]}.items():
            over = "train/step" if settings.wandb_always_use_train_step else axis
            self._run.define_metric(over)
            for family in families:
                self._run.define_metric(family, step_metric=over)

    def write(self, point: Point) -> None:
        self._run.log({point.axis: point.step, **point.values})

    def close(self) -> None:
        self._run.finish()


class BackgroundTracker:
    """A sink in a thread of its own."""

    def __init__(self, name: str, opening: Callable[[], Sink]) -> None:
        self._name = name
        self._points: queue.Queue[Point | None] = queue.Queue(MAX_QUEUED_POINTS)
        self._lost = 0
        self._failed = False
        self._thread = Thread(target=self._live, args=(opening,), name=name, daemon=True)
        self._thread.start()

    def write(self, point: Point) -> None:
        if self._failed:
            return
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Wait a while for what was written to arrive."""
        with suppress(queue.Full):
            if not self._failed:
                self._points.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._lost += self._points.qsize()
            log.warning("a sink hangs and is left behind", sink=self._name)
        if self._lost:
            log.warning("a sink was too slow for all points", sink=self._name, lost=self._lost)

    def _live(self, opening: Callable[[], Sink]) -> None:
        # Whatever goes wrong in somebody else's library, the run goes on without it.
        try:
            sink = opening()
            while (point := self._points.get()) is not None:
                sink.write(point)
            sink.close()
        except Exception as error:
            self._failed = True
            sentence = f"{type(error).__name__}: {error}"
            log.warning("a sink failed; the run goes on without it", sink=self._name, error=sentence)


class Trackers:
    """Those that are asked for."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        settings = config.observability
        self._curves = PointBuilder(
            config.learner.num_steps_per_rollout, always_train_step=settings.wandb_always_use_train_step
        )
        self._sinks: list[BackgroundTracker] = []
        if settings.use_tensorboard:
            self._sinks.append(BackgroundTracker("tensorboard", lambda: TensorBoard(folder.path / "tensorboard")))
        if settings.use_wandb:
            self._sinks.append(BackgroundTracker("wandb", lambda: WeightsAndBiases(config, folder)))

    def observe(self, event: Event) -> None:
        if self._sinks:
            for point in self._curves.points(event):
                for sink in self._sinks:
                    sink.write(point)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

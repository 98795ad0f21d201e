"""Experiment trackers: TensorBoard and Weights & Biases. A tracker can neither stop nor slow down a run.

Each tracker runs in its own thread behind a bounded queue. Points that do not fit into the queue are dropped. A tracker
that raises an exception is disabled with one warning, and a tracker that hangs at the end of the run is abandoned.

The names of the metrics are those of slime: `train/…` over optimizer steps, `rollout/…` and `eval/…` over rollouts (or
over optimizer steps with `--wandb-always-use-train-step`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import structlog

from miles_async.config.redaction import read_secret, redacted_values
from miles_async.config.schema import RunConfig
from miles_async.events import BatchDrained, Evaluated, Event, PublishEnded, StepEnded, StepStarted
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView

MAX_QUEUED_POINTS = 10_000
CLOSE_SECONDS = 30.0
"""How long to wait for a tracker at the end. Weights & Biases takes seconds to start and to finish."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """Values at one step of an axis."""

    axis: str
    """`train/step` or `rollout/step`."""
    step: int
    values: Mapping[str, float]


class Tracker(Protocol):
    """A library that stores and plots metrics."""

    def write(self, point: Point) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        import wandb

        settings = config.observability
        server = {"base_url": settings.wandb_host, "api_key": read_secret("wandb_key", settings.wandb_key)}
        given: dict[str, Any] = {name: value for name, value in server.items() if value is not None}
        self._run = wandb.init(
            entity=settings.wandb_team,
            project=settings.wandb_project or settings.project_name,
            group=settings.wandb_group or settings.experiment_name,
            name=folder.path.name,
            mode=settings.wandb_mode,
            dir=str(folder.path),
            config=redacted_values(config),
            settings=wandb.Settings(silent=True, console="off", **given),
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
    """Runs a tracker in its own thread."""

    def __init__(self, name: str, create: Callable[[], Tracker]) -> None:
        """`create` is called in the thread, because importing and opening a tracker may take seconds."""
        self._name = name
        self._points: queue.Queue[Point | None] = queue.Queue(MAX_QUEUED_POINTS)
        self._dropped = 0
        self._failed = False
        self._thread = Thread(target=self._run, args=(create,), name=name, daemon=True)
        self._thread.start()

    def write(self, point: Point) -> None:
        if self._failed:
            return
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait up to `CLOSE_SECONDS` until all points are written."""
        with suppress(queue.Full):
            if not self._failed:
                self._points.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._dropped += self._points.qsize()
            log.warning("the tracker hangs and is abandoned", tracker=self._name)
        if self._dropped:
            log.warning("the tracker was too slow; some points are missing", tracker=self._name, dropped=self._dropped)

    def _run(self, create: Callable[[], Tracker]) -> None:
        # The run must continue without the tracker, whichever exception the tracker's library raises.
        try:
            tracker = create()
            while (point := self._points.get()) is not None:
                tracker.write(point)
            tracker.close()
        except Exception as error:
            self._failed = True
            sentence = f"{type(error).__name__}: {error}"
            log.warning("the tracker failed; the run continues without it", tracker=self._name, error=sentence)


class Trackers:
    """The trackers that the configuration enables."""

    def __init__(self, view: RunView, config: RunConfig, folder: RunFolder) -> None:
        settings = config.observability
        self._view = view
        self._steps_per_rollout = config.steps_per_rollout
        self._always_train_step = settings.wandb_always_use_train_step
        self._trackers: list[BackgroundTracker] = []
        if settings.use_tensorboard:
            self._trackers.append(
                BackgroundTracker("tensorboard", lambda: TensorBoardTracker(folder.path / "tensorboard"))
            )
        if settings.use_wandb:
            self._trackers.append(BackgroundTracker("wandb", lambda: WandbTracker(config, folder)))

    def observe(self, event: Event) -> None:
        if self._trackers:
            for point in self.points(event):
                for tracker in self._trackers:
                    tracker.write(point)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def points(self, event: Event) -> Iterator[Point]:
        """Convert an event that the view has applied to points."""
        match event:
            case StepEnded():
                train = {f"train/{name}": value for name, value in event.metrics.items()}
                train |= {"train/seconds": event.seconds, "train/tokens": event.tokens}
                yield Point("train/step", (event.rollout + 1) * self._steps_per_rollout, train)
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
                oldest, newest = event.versions
                yield self._over_rollouts(
                    {
                        f"eval/{event.name}": event.reward,
                        f"eval/{event.name}-accuracy": event.accuracy,
                        f"eval/{event.name}-truncated_ratio": event.truncated,
                        f"eval/{event.name}-missing_samples": event.missing,
                        f"eval/{event.name}-oldest_weight_version": oldest,
                        f"eval/{event.name}-newest_weight_version": newest,
                    },
                    # Training may be some rollouts ahead when an evaluation ends.
                    rollout=event.rollout + 1,
                )

    def _over_rollouts(self, values: Mapping[str, float], rollout: int | None = None) -> Point:
        """The values after `rollout` rollouts, by default after those trained so far."""
        if rollout is None:
            last = self._view.last(StepEnded)
            rollout = last.rollout + 1 if last is not None else 0
        if self._always_train_step:
            return Point("train/step", rollout * self._steps_per_rollout, values)
        return Point("rollout/step", rollout, values)

    def _batch(self, event: StepEnded) -> dict[str, float]:
        values = {"rollout/reward": event.reward, "rollout/response_length": event.response_length}
        if (started := self._view.last(StepStarted)) is not None:
            values["rollout/staleness_mean"] = sum(started.staleness) / len(started.staleness)
            values["rollout/staleness_max"] = max(started.staleness)
        if (drained := self._view.last(BatchDrained)) is not None:
            values |= {
                "rollout/queue_size": drained.depth,
                "rollout/recycled": drained.recycled,
                "rollout/drain_wait_seconds": drained.waited,
            }
        return values

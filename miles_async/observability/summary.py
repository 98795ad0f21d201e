"""The summary of a run: `summary.json` for scripts, and a block of text for the terminal."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from miles_async.atomic_files import write_atomically
from miles_async.events import (
    ClusterReady,
    DeadLettersUnwritten,
    EngineBusy,
    Evaluated,
    Event,
    GroupMoved,
    PublishEnded,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
)
from miles_async.observability.diagnosis.verdict import KNOBS, Verdicts
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason


class RunSummary:
    """Computes the summary from the event stream. Figures without an event are None.

    - `wall_seconds` covers the whole run. Rates and idle shares cover the training phase, which lasts from the start of
      the first optimizer step to the end of the last one.
    - `publish_ms_*` lasts from the start of staging until every engine decodes again. `pause_ms_*` is the part of it in
      which the engines were paused. Version 0, the initial weights, is not counted as a publish.
    """

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._cluster: ClusterReady | None = None
        self._verdicts = Verdicts()
        self._ended: RunEnded | None = None
        self._last_time = 0.0
        self._steps: list[StepEnded] = []
        self._publishes: list[PublishEnded] = []
        self._staleness: Counter[int] = Counter()
        self._batch: list[int] = []
        """Staleness of the groups in the current training step."""
        self._dropped: Counter[str] = Counter()
        self._busy: list[tuple[float, float]] = []
        self._unwritten: DeadLettersUnwritten | None = None
        """Dead letters that are not in the dead-letter file."""
        self._scores: dict[str, float] = {}
        """The last score of every data set, under the names that slime uses."""
        self._main_set: str | None = None
        """The first data set evaluated, whose accuracy before and after training is reported."""
        self._accuracy_before: float | None = None
        self._accuracy_after: float | None = None

    def observe(self, event: Event) -> None:
        self._last_time = max(self._last_time, event.time)
        self._verdicts.observe(event)
        match event:
            case RunStarted():
                self._run = event
                self._busy.append((event.time, 0.0))
            case ClusterReady():
                self._cluster = event
            case GroupMoved():
                if event.after == GroupState.DROPPED and event.reason is not None:
                    self._dropped[event.reason] += 1
            case StepStarted():
                self._batch = event.staleness
            case StepEnded():
                self._steps.append(event)
                if event.finite:
                    self._staleness.update(self._batch)
            case PublishEnded():
                if event.live and event.version > 0:
                    self._publishes.append(event)
            case EngineBusy():
                self._busy.append((event.time, event.busy))
            case Evaluated():
                self._evaluated(event)
            case DeadLettersUnwritten():
                self._unwritten = event
            case RunEnded():
                self._ended = event
            case _:
                pass

    def figures(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        started = self._run.time if self._run is not None else None
        ended = self._ended.time if self._ended is not None else self._last_time
        publish_ms = [1e3 * (publish.staged_seconds + publish.paused_seconds) for publish in self._publishes]
        verdict = self._verdicts.overall
        pause_ms = [1e3 * publish.paused_seconds for publish in self._publishes]
        return {
            "run": self._run.run if self._run is not None else None,
            "entry": self._run.entry if self._run is not None else None,
            "started": _timestamp(started),
            "ended": _timestamp(ended),
            "reason": self._ended.reason if self._ended is not None else None,
            "wall_seconds": ended - started if started is not None else None,
            "warm_start_seconds": self._cluster.warm_start_seconds if self._cluster is not None else None,
            "rollouts": len(self._steps),
            "accuracy_before": self._accuracy_before,
            "accuracy_after": self._accuracy_after,
            "scores": self._scores,
            "reward_first": self._steps[0].reward if self._steps else None,
            "reward_last": self._steps[-1].reward if self._steps else None,
            **self._training_phase(),
            "weight_transfer": self._cluster.weight_transfer if self._cluster is not None else None,
            "versions": max((publish.version for publish in self._publishes), default=0),
            "publish_ms_median": median(publish_ms) if publish_ms else None,
            "publish_ms_max": max(publish_ms, default=None),
            "pause_ms_median": median(pause_ms) if pause_ms else None,
            "pause_ms_max": max(pause_ms, default=None),
            "publish_bytes": sum(publish.bytes for publish in self._publishes),
            "staleness_max": max(self._staleness, default=None),
            "staleness_histogram": {str(age): self._staleness[age] for age in sorted(self._staleness)},
            "recycled": self._dropped[DropReason.STALE],
            "dropped": dict(sorted(self._dropped.items())),
            "unwritten_dead_letters": self._unwritten.letters if self._unwritten is not None else 0,
            "unwritten_prompts": self._unwritten.prompts if self._unwritten is not None else [],
            "verdict": verdict,
            "knob": KNOBS[verdict] if verdict is not None else None,
            "verdict_seconds": {kind: round(seconds, 3) for kind, seconds in self._verdicts.seconds.items()},
        }

    def _evaluated(self, event: Evaluated) -> None:
        self._scores[f"eval/{event.name}"] = event.reward
        self._scores[f"eval/{event.name}-truncated_ratio"] = event.truncated
        self._main_set = self._main_set or event.name
        if event.name != self._main_set:
            return
        if event.rollout < 0:
            self._accuracy_before = event.accuracy
        else:
            self._accuracy_after = event.accuracy

    def _training_phase(self) -> dict[str, float | None]:
        seconds = self._steps[-1].time - self._steps[0].started if self._steps else 0.0
        if seconds <= 0:
            names = ("training_seconds", "groups_per_second", "tokens_per_second")
            return dict.fromkeys((*names, "learner_idle_share", "engine_idle_share"))
        stepping = sum(step.seconds for step in self._steps)
        engine_share = None
        if len(self._busy) > 1:
            # Engines report their busy seconds now and then, so the values at the two ends are interpolated.
            times, busy_seconds = zip(*self._busy, strict=True)
            begin, end = np.interp([self._steps[0].started, self._steps[-1].time], times, busy_seconds)
            engine_share = 1 - float(end - begin) / seconds
        return {
            "training_seconds": seconds,
            "groups_per_second": self._staleness.total() / seconds,
            "tokens_per_second": sum(step.tokens for step in self._steps) / seconds,
            "learner_idle_share": 1 - stepping / seconds,
            "engine_idle_share": engine_share,
        }

    def write(self, path: Path) -> None:
        """Write `summary.json` to `path`. Raises OSError if it cannot be written."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.figures()), indent=2) + b"\n")

    def text(self) -> str:
        """Return the figures as lines of text."""
        figures = self.figures()
        width = max(len(name) for name in _LINES)
        lines = {name: _line(template, figures) for name, template in _LINES.items()}
        if (unwritten := self._unwritten) is not None and unwritten.letters:
            prompts = ", ".join(unwritten.prompts) + (", …" if unwritten.letters > len(unwritten.prompts) else "")
            lines["not written"] = f"dead letters of {unwritten.letters} prompts: {prompts}"
        return "\n".join(f"{name:<{width}}  {line}" for name, line in lines.items())


_LINES = {
    "accuracy": "{accuracy_before:.3f} before, {accuracy_after:.3f} after",
    "reward": "{reward_first:.3f} in the first batch, {reward_last:.3f} in the last of {rollouts}",
    "wall time": "{wall_seconds:.1f} s; warm start {warm_start_seconds:.1f} s, training {training_seconds:.1f} s",
    "trained": "{groups_per_second:.1f} groups/s, {tokens_per_second:.0f} tokens/s",
    "idle": "learner {learner_idle_share:.0%}, engines {engine_idle_share:.0%}",
    "publish": "{publish_ms_median:.0f} ms median, {publish_ms_max:.0f} ms max, {weight_transfer}, version {versions}",
    "pause": "{pause_ms_median:.0f} ms median, {pause_ms_max:.0f} ms max",
    "staleness": "max {staleness_max}, groups by age {staleness_histogram}",
    "recycled": "{recycled} groups; dropped {dropped}",
    "verdict": "{verdict}: {knob}",
    "ended": "{reason}",
}


class _Missing:
    """A missing figure, which every format specification renders as a dash."""

    def __format__(self, specification: str) -> str:
        return "-"


def _line(template: str, figures: dict[str, Any]) -> str:
    shown = {name: _Missing() if value is None else _counts(value) for name, value in figures.items()}
    return template.format(**shown)


def _counts(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return value


def _timestamp(seconds: float | None) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds is not None else None

"""The summary of a run: `summary.json` for scripts, and a block of text for the terminal."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from miles_async.atomic_files import write_atomically
from miles_async.events import (
    ClusterReady,
    CollapseRiskChanged,
    DeadLettersUnwritten,
    EngineBusy,
    Evaluated,
    Event,
    GroupGenerated,
    GroupMoved,
    LearnerRestored,
    PublishEnded,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
)
from miles_async.observability.diagnosis.verdict import KNOBS, Verdicts
from miles_async.observability.diagnosis.waste import CAUSES
from miles_async.observability.timeline import Timeline
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

MAX_VALUES = 1024
"""Most values of a series that are kept in memory."""
MAX_BATCHES = 256
"""Most batches whose rewards are listed one by one. In a longer run, each value is the mean over several batches."""


class _Milliseconds:
    """A duration that is measured many times. Of more than `MAX_VALUES` values, every n-th is kept for the median."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride = 1
        """n; it doubles when `MAX_VALUES` values are kept."""
        self._measured = 0
        self.max: float | None = None

    def add(self, seconds: float) -> None:
        value = 1e3 * seconds
        self.max = value if self.max is None else max(self.max, value)
        if self._measured % self._stride == 0:
            self._values.append(value)
        self._measured += 1
        if len(self._values) == MAX_VALUES:
            self._values = self._values[::2]
            self._stride *= 2

    @property
    def median(self) -> float | None:
        return median(self._values) if self._values else None


@dataclass(slots=True)
class _Steps:
    """The training steps of a run."""

    first: StepEnded
    last: StepEnded
    newest: int = -1
    """The newest batch that the current weights were trained on."""
    seconds: float = 0.0
    tokens: int = 0

    def add(self, step: StepEnded) -> None:
        self.last = step
        self.newest = step.rollout
        self.seconds += step.seconds
        self.tokens += step.tokens

    @property
    def count(self) -> int:
        """Batches that the current weights were trained on in this run, without those that a lost learner undid."""
        return self.newest - self.first.rollout + 1


class _EngineSeconds:
    """The time in which the engines were busy, between the start of the first step and the end of the last step.

    Engines report their busy seconds now and then, so the values at the two ends are interpolated.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)
        """Time and busy seconds of the reports that may still be needed, oldest first."""
        self._reported = 0
        self._start: float | None = None
        self._busy_at_start: float | None = None
        """Known as soon as there is a report after the start."""

    def report(self, time: float, busy: float) -> None:
        self._reports.append((time, busy))
        self._reported += 1
        if self._busy_at_start is None and self._start is not None and time >= self._start:
            self._busy_at_start = self._at(self._start)

    def step_started(self, time: float) -> None:
        if self._start is None:
            self._start = time

    def step_ended(self, time: float) -> None:
        # All later steps end later, so they need no report before the last one up to this time.
        while self._busy_at_start is not None and len(self._reports) > 1 and self._reports[1][0] <= time:
            self._reports.popleft()

    def until(self, end: float) -> float | None:
        """The busy seconds from the first step to `end`, the end of the last step; None without reports."""
        if self._reported < 2 or self._start is None:
            return None
        start = self._busy_at_start if self._busy_at_start is not None else self._at(self._start)
        return self._at(end) - start

    def _at(self, time: float) -> float:
        times, busy = zip(*self._reports, strict=True)
        return float(np.interp(time, times, busy))


class RunSummary:
    """Computes the summary from the event stream, in memory that does not grow. Figures without an event are None.

    - `wall_seconds` covers the whole run. Rates and idle shares cover the training phase, which lasts from the start of
      the first optimizer step to the end of the last one.
    - `wasted_tokens` are the response tokens that were generated and not trained, by reason, and `wasted_share` is
      their share of all generated tokens. The tokens of groups that were being generated when a rollout worker was
      lost, and that are generated twice, are estimated; `lost_tokens_at_most` is an upper bound.
    - `left_out_samples` is the number of samples that failed and without which their group was trained.
    - `publish_ms_*` lasts from the start of staging until every engine decodes again. `pause_ms_*` is the part of it in
      which the engines were paused. Version 0, the initial weights, is not counted as a publish.
    """

    def __init__(self) -> None:
        self._run: RunStarted | None = None
        self._cluster: ClusterReady | None = None
        self._verdicts = Verdicts()
        self._ended: RunEnded | None = None
        self._last_time = 0.0
        self._steps: _Steps | None = None
        self._version = 0
        """The newest version that was published."""
        self._publish, self._pause = _Milliseconds(), _Milliseconds()
        self._publish_bytes = 0
        self._staleness: Counter[int] = Counter()
        self._batch: list[int] = []
        """Staleness of the groups in the current training step."""
        self._dropped: Counter[str] = Counter()
        self._left_out = 0
        """Samples without which their group was generated."""
        self._lost_in_flight = 0
        """Groups that were being generated when a rollout worker was lost."""
        self._engines = _EngineSeconds()
        self._collapse: CollapseRiskChanged | None = None
        """The first announcement of a collapse."""
        self._unwritten: DeadLettersUnwritten | None = None
        """Dead letters that are not in the dead-letter file."""
        self._scores: dict[str, float] = {}
        """The last score of every data set, under the names that slime uses."""
        self._main_set: str | None = None
        """The first data set evaluated, whose accuracy before and after training is reported."""
        self._before: Evaluated | None = None
        self._after: Evaluated | None = None
        self._rewards = Timeline(0.0, width=1.0, max_buckets=MAX_BATCHES)
        """The reward of each batch. Times are rollout ids."""

    def observe(self, event: Event) -> None:
        self._last_time = max(self._last_time, event.time)
        self._verdicts.observe(event)
        match event:
            case RunStarted():
                # A driver that continues the run emits it again.
                self._run, self._ended = self._run or event, None
                self._engines.report(event.time, 0.0)
            case ClusterReady():
                self._cluster = event
            case GroupMoved():
                if event.after == GroupState.DROPPED and event.reason is not None:
                    self._dropped[event.reason] += 1
                    self._lost_in_flight += event.was_lost_in_flight
            case GroupGenerated():
                self._left_out += event.missing
            case StepStarted():
                self._batch = event.staleness
                self._engines.step_started(event.time)
            case LearnerRestored() if self._steps is not None:
                self._steps.newest = event.rollout
            case StepEnded():
                self._steps = self._steps or _Steps(event, event)
                self._steps.add(event)
                self._rewards.observe("reward", event.rollout, event.reward)
                self._engines.step_ended(event.time)
                if event.finite:
                    self._staleness.update(self._batch)
            case PublishEnded():
                if event.live and event.version > 0:
                    self._published(event)
            case EngineBusy():
                self._engines.report(event.time, event.busy)
            case Evaluated():
                self._evaluated(event)
            case CollapseRiskChanged():
                self._collapse = self._collapse or event
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
        verdict, waste = self._verdicts.overall, self._verdicts.waste
        rewards = self._rewards.figures()
        return {
            "run": self._run.run if self._run is not None else None,
            "entry": self._run.entry if self._run is not None else None,
            "started": _timestamp(started),
            "ended": _timestamp(ended),
            "reason": self._ended.reason if self._ended is not None else None,
            "wall_seconds": ended - started if started is not None else None,
            "warm_start_seconds": self._cluster.warm_start_seconds if self._cluster is not None else None,
            "rollouts": self._steps.count if self._steps is not None else 0,
            "accuracy_before": self._before.accuracy if self._before is not None else None,
            "accuracy_before_interval": list(self._before.interval) if self._before is not None else None,
            "accuracy_after": self._after.accuracy if self._after is not None else None,
            "accuracy_after_interval": list(self._after.interval) if self._after is not None else None,
            "scores": self._scores,
            "reward_first": self._steps.first.reward if self._steps is not None else None,
            "reward_last": self._steps.last.reward if self._steps is not None else None,
            "collapse_announced_after_rollout": self._collapse.rollout if self._collapse is not None else None,
            **self._training_phase(),
            "weight_transfer": self._cluster.weight_transfer if self._cluster is not None else None,
            "versions": self._version,
            "publish_ms_median": self._publish.median,
            "publish_ms_max": self._publish.max,
            "pause_ms_median": self._pause.median,
            "pause_ms_max": self._pause.max,
            "publish_bytes": self._publish_bytes,
            "staleness_max": max(self._staleness, default=None),
            "staleness_histogram": {str(age): self._staleness[age] for age in sorted(self._staleness)},
            "recycled": self._dropped[DropReason.STALE],
            "dropped": dict(sorted(self._dropped.items())),
            "generated_tokens": waste.generated,
            "wasted_share": waste.share,
            "wasted_tokens": {reason: tokens for reason, tokens in sorted(waste.by_reason.items()) if tokens},
            "wasted_mainly": CAUSES[waste.main_reason].what if waste.main_reason is not None else None,
            "wasted_knob": CAUSES[waste.main_reason].knob if waste.main_reason is not None else None,
            "left_out_samples": self._left_out,
            "lost_tokens_at_most": self._lost_in_flight * (self._run.longest_group if self._run is not None else 0),
            "unwritten_dead_letters": self._unwritten.letters if self._unwritten is not None else 0,
            "unwritten_prompts": self._unwritten.prompts if self._unwritten is not None else [],
            "verdict": verdict,
            "knob": KNOBS[verdict] if verdict is not None else None,
            "verdict_seconds": {kind: round(seconds, 3) for kind, seconds in self._verdicts.seconds.items()},
            "configuration": self._run.configuration if self._run is not None else "",
            "untested": list(self._run.untested) if self._run is not None else [],
            "batches_per_reward": round(rewards["width"]),
            "rewards": rewards["series"].get("reward", {"mean": []})["mean"],
        }

    def _published(self, event: PublishEnded) -> None:
        self._version = max(self._version, event.version)
        self._publish.add(event.staged_seconds + event.paused_seconds)
        self._pause.add(event.paused_seconds)
        self._publish_bytes += event.bytes

    def _evaluated(self, event: Evaluated) -> None:
        self._scores[f"eval/{event.name}"] = event.reward
        self._scores[f"eval/{event.name}-truncated_ratio"] = event.truncated
        self._scores[f"eval/{event.name}-missing_samples"] = event.missing
        self._main_set = self._main_set or event.name
        if event.name != self._main_set:
            return
        if event.rollout < 0:
            self._before = event
        else:
            self._after = event

    def _training_phase(self) -> dict[str, float | None]:
        steps = self._steps
        seconds = steps.last.time - steps.first.started if steps is not None else 0.0
        if steps is None or seconds <= 0:
            names = ("training_seconds", "groups_per_second", "tokens_per_second")
            return dict.fromkeys((*names, "learner_idle_share", "engine_idle_share"))
        busy = self._engines.until(steps.last.time)
        return {
            "training_seconds": seconds,
            "groups_per_second": self._staleness.total() / seconds,
            "tokens_per_second": steps.tokens / seconds,
            "learner_idle_share": 1 - steps.seconds / seconds,
            "engine_idle_share": 1 - busy / seconds if busy is not None else None,
        }

    def write(self, path: Path) -> None:
        """Write `summary.json` to `path`. Raises OSError if it cannot be written."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.figures()), indent=2) + b"\n")

    def text(self) -> str:
        """Return the figures as lines of text."""
        figures = self.figures()
        width = max(len(name) for name in _LINES)
        lines = {name: _line(template, figures) for name, template in _LINES.items()}
        if self._main_set is None:
            del lines["accuracy"]
        elif (after := self._after) is not None and after.missing:
            lines["accuracy"] += f"; {after.missing} samples without a score are left out"
        if (unwritten := self._unwritten) is not None and unwritten.letters:
            prompts = ", ".join(unwritten.prompts) + (", …" if unwritten.letters > len(unwritten.prompts) else "")
            lines["not written"] = f"dead letters of {unwritten.letters} prompts: {prompts}"
        if self._run is not None and self._run.untested:
            lines["untested"] = " ".join(self._run.untested)
        if (collapse := self._collapse) is not None:
            lines["collapse"] = f"announced after rollout {collapse.rollout}: {collapse.why}; {collapse.knob}"
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
    "wasted": "{wasted_share:.1%} of {generated_tokens} tokens, mainly because {wasted_mainly}; {wasted_tokens}",
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

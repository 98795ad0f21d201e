"""Keeps the Prometheus metrics of a run up to date, and declares those that change with events.

What the view knows is read at each scrape (`view_metrics.py`). All other metrics change with every event, not once per
step. The driver serves them, which is neither the learner nor the rollout worker, so the metrics stay available while
one of these hangs.

Names begin with `PREFIX` and contain their unit. Prometheus stores one series per label value, so a label whose values
come from users or libraries is limited to `MAX_LABEL_VALUES` values.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from miles_async import events
from miles_async.observability.metrics.view_metrics import MAX_LABEL_VALUES, PREFIX, shown_label, view_metrics
from miles_async.observability.state.groups import ENDED, Group
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
REWARDS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

M = TypeVar("M", Counter, Gauge, Histogram, Info)
Values = dict[str, list[tuple[dict[str, str], list[float]]]]
"""The series of metrics by the name of the metric. A series has its labels, and its value; a histogram has the number
of observations in each bucket, and their sum."""
Totals = dict[str, dict[str, float]]
"""The values of counters, by name and label value. A counter without a label has the label value ''."""


class MetricsRecorder(Collector):
    """Keeps the metrics of a run up to date.

    Pass every event that the view has applied to `observe`, and the time to `tick` once a second.
    """

    def __init__(self, registry: CollectorRegistry, view: RunView) -> None:
        self.metrics: dict[str, Counter | Gauge | Histogram | Info] = {}
        """The metrics that change with events, by name."""
        self._registry = registry
        self._view = view
        self._now = 0.0
        self._totals: Totals = {}
        """What the counters of the view were when they were served last."""
        self._created = time.time()
        registry.register(self)
        self._declare_run()
        self._declare_groups()
        self._declare_staleness()
        self._declare_learner()
        self._declare_weights_and_engines()

    def values(self) -> tuple[Values, Totals]:
        """Return what `restore` takes."""
        return {name: list(_series_of(metric)) for name, metric in self.metrics.items()}, self._totals

    def restore(self, values: tuple[Values, Totals]) -> None:
        """Give the metrics the values that they had when another driver ended. Call it before any other method."""
        of_events, self._totals = values
        for name, all_series in of_events.items():
            for labels, numbers in all_series:
                _restore(self.metrics[name], labels, numbers)

    def tick(self, now: float) -> None:
        """Note the time, in wall-clock seconds, for the metrics that grow without events."""
        self._now = now

    def collect(self) -> list[Metric]:
        """Return the metrics of what the view knows. The registry calls this at each scrape."""
        with self._view.lock:
            return [self._undiminished(family) for family in view_metrics(self._view, self._now)]

    def _undiminished(self, family: GaugeMetricFamily | CounterMetricFamily) -> Metric:
        # Events arrive slightly late, so a scrape may count idle seconds that a later event shows to have been busy. A
        # counter must never decrease, so it keeps its value until the true total has caught up.
        if isinstance(family, GaugeMetricFamily):
            return family
        served = self._totals.setdefault(family.name, {})
        for sample in family.samples:
            label = "".join(sample.labels.values())
            served[label] = max(sample.value, served.get(label, 0.0))
        family.samples.clear()
        for label, total in served.items():
            family.add_metric([label], total, self._created)
        return family

    def _add(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        metric = kind(PREFIX + name, text, labels, registry=self._registry, **options)
        self.metrics[name] = metric
        return metric

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._add(Gauge, name, text, *labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._add(Counter, name, text, *labels)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return self._add(Histogram, name, text, *labels, buckets=buckets)

    def _declare_run(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._run = self._add(Info, "run", "Name and entry script of the run.")
        self._cluster = self._add(Info, "cluster", "How weights are transferred.")
        self._last_progress_timestamp = gauge(
            "last_progress_timestamp_seconds",
            "When a group was last queued, or a step, publish or evaluation last ended.",
            "what",
        )
        self._disk_free = gauge(
            "disk_free_bytes", "Free space of the disk with a folder of the run: run, store or save.", "folder"
        )
        self._stalls = counter(
            "stalls",
            "Warnings that the run made no progress. Worry if it rises: read the line `stall` in logs/driver.jsonl.",
        )
        self._loop_lag_seconds = histogram(
            "loop_lag_seconds",
            "Delay with which the rollout worker's event loop wakes up. Worry if its 99th percentile exceeds 0.25 s: a "
            "function of yours blocks the event loop, or the processors are overloaded.",
            buckets=LAG_SECONDS,
        )
        self._process_silent_seconds = gauge(
            "process_silent_seconds", "Seconds since a process last answered; 0 while it answers.", "name"
        )

    def _declare_groups(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._ended_groups = counter(
            "ended_groups", "Groups that were published or dropped, by reason.", "outcome", "reason"
        )
        self._left_out_samples = counter(
            "left_out_samples",
            "Samples that failed and without which their group is trained. Worry if it rises steadily: "
            "`SampleDiscarded` in events.jsonl has the errors of the tool or function.",
        )
        self._unfinished_rewards = counter(
            "unfinished_rewards",
            "Samples that count as wrong because their reward exceeded its limits of time or memory. Worry if it rises "
            "steadily: the reward function hangs on some texts. Fix it, or raise --reward-timeout-seconds or "
            "--reward-memory-gb.",
        )
        self._filtered_groups = counter(
            "filtered_groups",
            "Groups that a filter dropped, by reason. Worry if most groups are dropped: the prompts are too easy "
            "or too hard. Choose others, or set --difficulty-band.",
            "reason",
        )
        self._removed_samples = counter("removed_samples", "Samples that a sample filter removed from the loss.")
        self._skipped_data = counter(
            "skipped_data",
            "Data rows or groups that were skipped, by reason. Worry if it is more than a few: the log line `data "
            "skipped` says what is wrong with the row.",
            "reason",
        )
        self._expired_agent_sessions = counter(
            "expired_agent_sessions",
            "Sessions of external generators that were closed because nothing used them. Worry if it rises: the "
            "generator crashes or forgets to post its groups.",
        )
        self._recycled_groups = counter(
            "recycled_groups", "Groups that were recycled because they were too stale to train."
        )
        self._generation_seconds = histogram(
            "generation_seconds", "Time from the first request to the last token of a group.", buckets=SECONDS
        )
        self._reward_seconds = histogram(
            "reward_seconds",
            "Time from the last token of a group to its reward. Worry if it is as long as generation: make the reward "
            "faster, or raise --reward-processes.",
            buckets=SECONDS,
        )
        self._group_reward = histogram(
            "group_reward",
            "Mean reward of a generated group. Worry if all groups are in one bucket: groups without a difference "
            "teach nothing. Read samples on the live page, and check reward and prompts.",
            buckets=REWARDS,
        )
        self._group_response_tokens = histogram(
            "group_response_tokens", "Response tokens of a generated group.", buckets=TOKENS
        )
        self._dead_letters = counter("dead_letters", "Prompts that got no further attempt.")
        self._generated_samples = counter("generated_samples", "Samples that were generated and rewarded.")
        self._truncated_samples = counter(
            "truncated_samples",
            "Samples that were truncated at the response limit. Worry if more than a fifth of `generated_samples` are: "
            "raise --rollout-max-response-len, or teach shorter answers.",
        )

    def _declare_staleness(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._staleness_versions = histogram(
            "staleness_versions",
            "Staleness in versions of groups when they were queued, trained or recycled.",
            "groups",
            buckets=VERSIONS,
        )
        self._staleness_seconds = histogram(
            "staleness_seconds",
            "Seconds since generation began, for groups when they were queued, trained or recycled.",
            "groups",
            buckets=SECONDS,
        )
        self._key_age_versions = histogram(
            "key_age_versions",
            "Versions by which the oldest keys and values of a generated group were older than the weights "
            "(--max-kv-staleness).",
            buckets=VERSIONS,
        )
        self._reused_tokens = counter(
            "reused_tokens",
            "Tokens of prompts and responses whose keys and values of older weights engines did not compute again "
            "after a publish (--max-kv-staleness), in generated groups.",
        )
        self._staleness_part_versions = histogram(
            "staleness_part_versions",
            "Staleness of trained groups in versions, by part: publish_lag (the engines were behind when generation "
            "began), sampling (published during generation) and waiting (in window and queue). The parts add up.",
            "part",
            buckets=VERSIONS,
        )
        self._staleness_part_seconds = histogram(
            "staleness_part_seconds",
            "Staleness of trained groups in seconds, by part: publish_lag, sampling and waiting.",
            "part",
            buckets=SECONDS,
        )

    def _declare_learner(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._drain_wait_seconds = histogram(
            "drain_wait_seconds",
            "Seconds for which the learner waited for a batch. Worry if it is longer than `step_seconds`: rollout is "
            "the bottleneck. The verdict names the setting to change.",
            buckets=SECONDS,
        )
        self._step_seconds = histogram("step_seconds", "Duration of the optimizer steps of one batch.", buckets=SECONDS)
        self._step_tokens = counter("step_tokens", "Prompt and response tokens of all steps, also of undone ones.")
        self._step_metric = gauge(
            "step_metric", "Loss, gradient norm and other learner metrics of the last batch.", "name"
        )
        self._nonfinite_steps = counter(
            "nonfinite_steps", "Batches that were skipped because the loss or the gradient was not finite."
        )
        self._skipped_evaluations = counter(
            "skipped_evaluations",
            "Evaluations that were skipped because a newer one was due before they could start. Worry if it rises: "
            "evaluations take longer than --eval-interval batches. Raise it, or lower --eval-size.",
        )

    def _declare_weights_and_engines(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._trainer_version = gauge("trainer_weight_version", "Newest weight version of the learner.")
        self._live_version = gauge(
            "live_weight_version",
            "Newest weight version that all routed engines hold. Worry if it stays behind `trainer_weight_version`: "
            "publishes are slow or fail. See the alert VersionLag.",
        )
        self._publishes = counter("publishes", "Weight publishes, by outcome.", "outcome")
        for outcome in ("live", "failed"):  # so that the first failure is an increase
            self._publishes.labels(outcome)
        self._engine_changes = counter(
            "engine_changes",
            "How often an engine was routed, fenced or lost. Worry if `lost` keeps rising: the log of the engine in "
            "the run folder has the cause.",
            "engine",
            "state",
        )
        self._publish_seconds = histogram(
            "publish_seconds",
            "Duration of a publish by phase. Generation continues while staged. paused is the sum of stopping, write, "
            "commit (old prefixes are dropped, the version is announced) and resuming. Worry if `paused` is a large "
            "part of `step_seconds`: use a faster --weight-transfer, or raise --update-weights-interval.",
            "phase",
            buckets=SECONDS,
        )
        self._publish_bytes = counter("publish_bytes", "Bytes of weights written to engines.")
        self._write_failures = counter(
            "weight_write_failures",
            "Weight writes that failed, by what was done next. Worry if it rises: the log line `weight write failed` "
            "has the error. `retry` costs seconds, `fence` an engine.",
            "then",
        )

    def observe(self, event: events.Event) -> None:
        match event:
            case events.GroupMoved():
                self._group_moved(event)
            case events.GroupGenerated():
                self._group_generated(event)
            case events.Pulse() if self._view.present(events.Pulse) is event:
                self._live_version.set(event.live_version)
                self._trainer_version.set(event.trainer_version)
            case events.LoopLag():
                self._loop_lag_seconds.observe(event.seconds)
            case events.BatchDrained():
                self._drain_wait_seconds.observe(event.waited)
            case events.StepStarted():
                self._step_started(event)
            case events.StepEnded():
                self._step_ended(event)
            case events.PublishStarted():
                self._trainer_version.set(event.version)
            case events.PublishEnded():
                self._publish_ended(event)
            case events.EngineChanged() if self._view.present(events.EngineChanged) is event:
                self._engine_changes.labels(event.engine, event.state).inc()
                if event.state == "lost":
                    # A series that is no longer updated would look like an engine that hangs, so it is removed.
                    self._process_silent_seconds.remove(event.engine)
            case events.ProcessSilent():
                # When an engine is removed, one last event reports that it is no longer silent. This event must not
                # create the series of the engine again.
                engine = self._view.engines.known.get(event.process)
                if event.seconds or engine is None or engine.state != "lost":
                    self._process_silent_seconds.labels(event.process).set(event.seconds)
            case events.Evaluated():
                self._record_progress("evaluation", event.time)
            case _:
                self._observe_rare(event)

    def _observe_rare(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._run.info({"run": event.run, "entry": event.entry})
                self._process_silent_seconds.clear()
            case events.ClusterReady():
                self._cluster.info({"weight_transfer": event.weight_transfer})
                self._record_progress("start", event.time)
            case events.GroupFiltered():
                _bounded(self._filtered_groups, event.reason).inc()
            case events.SamplesRemoved():
                self._removed_samples.inc(event.samples)
            case events.AgentSessionExpired():
                self._expired_agent_sessions.inc()
            case events.DataSkipped():
                _bounded(self._skipped_data, event.reason).inc()
            case events.DeadLettered():
                self._dead_letters.inc()
            case events.WriteFailed():
                self._write_failures.labels(event.then).inc()
            case events.EvaluationSkipped():
                self._skipped_evaluations.inc()
            case events.Stalled():
                self._stalls.inc()

    def watch_disks(self, folders: Mapping[str, Path]) -> None:
        """Serve the free space of the disks with these folders, by name; it is read at each scrape."""
        self._disk_free.clear()
        for name, folder in folders.items():
            self._disk_free.labels(name).set_function(partial(_free_bytes, folder))

    def _record_progress(self, what: str, now: float) -> None:
        self._last_progress_timestamp.labels(what).set(now)

    def _group_moved(self, event: events.GroupMoved) -> None:
        groups = self._view.groups
        if event.after == GroupState.QUEUED:
            self._observe_age("queued", groups.live.get(event.sequence), event.time)
            self._record_progress("queued", event.time)
        elif event.after in ENDED:
            self._ended_groups.labels(event.after, event.reason or "").inc()
            if event.reason == DropReason.STALE:
                self._recycled_groups.inc()
                self._observe_age("recycled", groups.ended, event.time)

    def _observe_age(self, which: str, group: Group | None, now: float) -> None:
        if group is not None and group.generated is not None:
            versions, seconds = self._view.staleness.age(group.generated, now)
            self._staleness_versions.labels(which).observe(versions)
            self._staleness_seconds.labels(which).observe(seconds)

    def _group_generated(self, event: events.GroupGenerated) -> None:
        self._generation_seconds.observe(event.generation_seconds)
        self._reward_seconds.observe(event.reward_seconds)
        self._group_reward.observe(event.reward)
        self._group_response_tokens.observe(event.response_tokens)
        self._reused_tokens.inc(event.reused_tokens)
        self._key_age_versions.observe(event.key_age)
        samples = self._view.run.samples_per_group if self._view.run is not None else 1
        self._generated_samples.inc(samples - event.missing)
        self._truncated_samples.inc(event.truncated)
        self._left_out_samples.inc(event.missing)
        self._unfinished_rewards.inc(event.unfinished_rewards)

    def _step_started(self, event: events.StepStarted) -> None:
        if not event.adapter:
            self._trainer_version.set(event.version)
        staleness, live = self._view.staleness, self._view.groups.live
        for sequence, versions in zip(event.groups, event.staleness, strict=True):
            self._staleness_versions.labels("trained").observe(versions)
            if (group := live.get(sequence)) is None or group.generated is None:
                continue
            self._staleness_seconds.labels("trained").observe(event.time - group.generated.started)
            for name, part_versions, seconds in staleness.parts(group.generated, event):
                self._staleness_part_versions.labels(name).observe(part_versions)
                self._staleness_part_seconds.labels(name).observe(seconds)

    def _step_ended(self, event: events.StepEnded) -> None:
        self._step_seconds.observe(event.seconds)
        self._step_tokens.inc(event.tokens)
        if not event.finite:
            self._nonfinite_steps.inc()
        for name, value in event.metrics.items():
            _bounded(self._step_metric, name).set(value)
        self._record_progress("step", event.time)

    def _publish_ended(self, event: events.PublishEnded) -> None:
        self._publishes.labels("live" if event.live else "failed").inc()
        phases = {"staged": event.staged_seconds, "paused": event.paused_seconds, **event.pause}
        for phase, seconds in phases.items():
            self._publish_seconds.labels(phase).observe(seconds)
        self._publish_bytes.inc(event.bytes)
        if event.live:
            self._live_version.set(event.version)
            self._record_progress("publish", event.time)


def _bounded(metric: M, value: str) -> M:
    """Return the series of a label value. After `MAX_LABEL_VALUES` of them, all values share `other`."""
    shown = shown_label(value)
    known = (shown,) in metric._metrics or len(metric._metrics) < MAX_LABEL_VALUES
    return metric.labels(shown if known else "other")


def _free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk with `folder`; NaN if they cannot be read."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return math.nan


def _series_of(metric: Counter | Gauge | Histogram | Info) -> Iterator[tuple[dict[str, str], list[float]]]:
    """Yield labels and numbers of each series of a metric, as in `Values`."""
    [collected] = metric.collect()
    if not isinstance(metric, Histogram):
        for sample in collected.samples:
            if not sample.name.endswith("_created"):
                yield sample.labels, [sample.value]
        return
    # A histogram with a negative bound serves no sums.
    sums = {tuple(sample.labels.values()): sample.value for sample in collected.samples if sample.name.endswith("_sum")}
    cumulative = [0.0]
    for sample in collected.samples:
        if sample.name.endswith("_bucket"):
            cumulative.append(sample.value)
            if sample.labels["le"] == "+Inf":
                labels = {name: value for name, value in sample.labels.items() if name != "le"}
                counts = (after - before for before, after in pairwise(cumulative))
                yield labels, [*counts, sums.get(tuple(labels.values()), 0.0)]
                cumulative = [0.0]


def _restore(metric: Counter | Gauge | Histogram | Info, labels: dict[str, str], numbers: list[float]) -> None:
    *counts, value = numbers
    series = metric.labels(**labels) if labels and not isinstance(metric, Info) else metric
    match series:
        case Info():
            series.info(labels)
        case Counter():
            series.inc(value)
        case Gauge():
            series.set(value)
        case Histogram():
            # The library can only observe values one by one.
            series._sum.inc(value)
            for bucket, count in zip(series._buckets, counts, strict=True):
                bucket.inc(count)

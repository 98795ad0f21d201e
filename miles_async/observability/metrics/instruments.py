"""Declares every Prometheus metric of a run.

Names begin with `miles_async_` and contain their unit. Prometheus stores one series per label value, so a label whose
values come from users or libraries is limited to `MAX_LABEL_VALUES` values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from miles_async.observability.state.tokens import CAUSES
from miles_async.visible_text import visible_text

VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
REWARDS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

MAX_LABEL_VALUES = 64
MAX_LABEL_CHARACTERS = 80

M = TypeVar("M", Counter, Gauge, Histogram)
Values = dict[str, list[tuple[dict[str, str], list[float]]]]
"""The series of metrics by the name of their attribute in `Instruments`. A series has its labels, and its value; a
histogram has the number of observations in each bucket, and their sum."""


def _shown(value: str) -> str:
    return visible_text(value[:MAX_LABEL_CHARACTERS])


class BoundedLabels(Generic[M]):
    """A metric with one label. The first `MAX_LABEL_VALUES` values of the label get their own series.

    All further values share the series `other`.
    """

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._series: dict[str, M] = {}

    def labels(self, value: str) -> M:
        series = self._series.get(value)
        if series is None:
            known = len(self._series) < MAX_LABEL_VALUES
            series = self._metric.labels(_shown(value) if known else "other")
            if known:
                self._series[value] = series
        return series

    def show(self: BoundedLabels[Gauge], values: Mapping[str, float]) -> None:
        """Set the series of a gauge to these values, and remove the series of other label values."""
        for gone in [value for value in self._series if value not in values]:
            self._metric.remove(_shown(gone))
            del self._series[gone]
        for value, number in values.items():
            self.labels(value).set(number)

    @property
    def metric(self) -> M:
        return self._metric


class Instruments:
    """All metrics of one run, registered in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._declare_run()
        self._declare_queue_and_window()
        self._declare_generation()
        self._declare_staleness()
        self._declare_learner()
        self._declare_adapters()
        self._declare_data_sets()
        self._declare_evaluations()
        self._declare_weights_and_engines()

    def values(self) -> Values:
        """Return the values of all metrics, as `restore` takes them."""
        return {
            name: list(series_of(metric.metric if isinstance(metric, BoundedLabels) else metric))
            for name, metric in vars(self).items()
            if metric is not self._registry
        }

    def restore(self, values: Values) -> None:
        """Give the metrics of a run the values that they had when another driver ended."""
        for name, all_series in values.items():
            metric = vars(self)[name]
            for labels, numbers in all_series:
                match metric:
                    case Info():
                        metric.info(labels)
                    case BoundedLabels():
                        [value] = labels.values()
                        _restore(metric.labels(value), numbers)
                    case _:
                        _restore(metric.labels(**labels) if labels else metric, numbers)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"miles_async_{name}", text, labels, registry=self._registry)

    def _unknown_gauge(self, name: str, text: str) -> Gauge:
        """A gauge that is NaN until it is set, so that no alert takes an unknown value for 0."""
        gauge = self._gauge(name, text)
        gauge.set(math.nan)
        return gauge

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"miles_async_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"miles_async_{name}", text, labels, buckets=bounds, registry=self._registry)

    def _gauges(self, name: str, text: str, label: str) -> BoundedLabels[Gauge]:
        return BoundedLabels(self._gauge(name, text, label))

    def _histograms(self, name: str, text: str, bounds: tuple[float, ...], label: str) -> BoundedLabels[Histogram]:
        # `BoundedLabels` remembers the series, which are observed for every group.
        return BoundedLabels(self._histogram(name, text, bounds, label))

    def _declare_run(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.run = Info("miles_async_run", "Name and entry script of the run.", registry=self._registry)
        self.cluster = Info("miles_async_cluster", "How weights are transferred.", registry=self._registry)
        self.warm_start_seconds = gauge("warm_start_seconds", "Duration of the warm start; near 0 if it was cached.")
        self.verdict = self._gauges(
            "verdict",
            "1 for the current bottleneck of the run, 0 for all others. "
            "Worry if it is neither `balanced` nor `trainer-bound`: the log line `verdict` names the setting to "
            "change.",
            "verdict",
        )
        self.collapse_risk = gauge(
            "collapse_risk", "1 while the effective sample size and the reward announce a collapse, else 0."
        )
        self.training = gauge(
            "training", "1 from the first optimizer step after a start or a restart of the driver until the run ends."
        )
        self.trainer_seconds = counter(
            "trainer_seconds",
            "The learner's time, by what it did or what it waited for. "
            "Worry if `step` is not most of it: the verdict names the setting to change.",
            "doing",
        )
        self.last_progress_timestamp = gauge(
            "last_progress_timestamp_seconds",
            "When a group was last queued, or a step, publish or evaluation last ended.",
            "what",
        )
        self.since_progress_seconds = gauge("since_progress_seconds", "Seconds since the last progress of any kind.")
        self.no_progress_warn_seconds = self._unknown_gauge(
            "no_progress_warn_seconds",
            "Seconds without progress after which the run warns; no less than a slow group takes while the run waits "
            "for groups. NaN until the first batch is requested.",
        )
        self.eta_seconds = self._unknown_gauge(
            "eta_seconds",
            "Seconds that the remaining batches need at the pace so far. Undone batches remain, and their time counts. "
            "NaN before the first batch.",
        )
        self.restarts = counter("restarts", "How often driver, rollout_worker and learner were replaced.", "name")
        for process in ("driver", "rollout_worker", "learner"):
            self.restarts.labels(process)
        self.driver_replaced = self._unknown_gauge(
            "lost_driver_replaced_timestamp_seconds",
            "When the last driver began that continues a run whose driver was lost. NaN if there is none.",
        )
        self.disk_free = gauge(
            "disk_free_bytes", "Free space of the disk with a folder of the run: run, store or save.", "folder"
        )
        self.stalls = counter(
            "stalls",
            "Warnings that the run made no progress. Worry if it rises: read the line `stall` in logs/driver.jsonl.",
        )
        self.loop_lag_seconds = self._histogram(
            "loop_lag_seconds",
            "Delay with which the rollout worker's event loop wakes up. "
            "Worry if its 99th percentile exceeds 0.25 s: a function of yours blocks the event loop, or "
            "the processors are overloaded.",
            LAG_SECONDS,
        )
        self.process_silent_seconds = gauge(
            "process_silent_seconds", "Seconds since a process last answered; 0 while it answers.", "name"
        )

    def _declare_queue_and_window(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.queue_depth = gauge("queue_depth_groups", "Finished groups that wait for the learner.")
        self.queue_capacity = gauge("queue_capacity_groups", "Most groups that the queue holds.")
        self.window = gauge("window_groups", "Window size W: how far past the head a group may be collected.")
        self.slots = self._unknown_gauge(
            "slots_groups", "Most groups between admission and publish (B); NaN if unlimited."
        )
        self.held_slots = gauge(
            "held_slots_groups",
            "Groups between admission and publish. "
            "Worry if it equals `slots_groups` while engines are idle: raise --max-weight-staleness, or train faster.",
        )
        self.head_age_seconds = gauge(
            "head_age_seconds", "Seconds for which the same group has been the window's head."
        )
        self.blocked_groups = gauge("blocked_groups", "Finished groups that the window holds back.")
        self.in_flight_groups = gauge("in_flight_groups", "Groups that are being generated, rewarded or filtered.")
        self.in_flight_requests = gauge("in_flight_requests", "Requests at the engines.")
        self.oldest_request_seconds = gauge(
            "oldest_request_seconds",
            "Seconds for which the oldest group has been at the engines. "
            "Worry if it exceeds `slow_group_seconds`: `make groups` names the group. Look at the tool or "
            "the engine that it waits for.",
        )
        self.rewarding_groups = gauge(
            "rewarding_groups",
            "Groups that wait for their reward. "
            "Worry if it is most of `in_flight_groups`: make the reward faster, or set --reward-timeout-seconds.",
        )
        self.groups_by_state = self._gauges("groups", "Live groups in each state of the ledger.", "state")
        self.ended_groups = counter(
            "ended_groups", "Groups that were published or dropped, by reason.", "outcome", "reason"
        )
        self.wasted_tokens = counter(
            "wasted_tokens",
            "Response tokens that were generated and not trained, by reason. Those of lost processes are estimated. "
            "Worry if it grows by more than a fifth of `generated_tokens`: `wasted_knob` in summary.json "
            "names the setting.",
            "reason",
        )
        for reason in CAUSES:  # so that a rate is 0, and not unknown, before the first group is dropped
            self.wasted_tokens.labels(reason)
        self.generated_tokens = counter("generated_tokens", "Response tokens that were generated, trained or not.")
        self.left_out_samples = counter(
            "left_out_samples",
            "Samples that failed and without which their group is trained. "
            "Worry if it rises steadily: `SampleDiscarded` in events.jsonl has the errors of the tool or function.",
        )
        self.unfinished_rewards = counter(
            "unfinished_rewards",
            "Samples that count as wrong because their reward exceeded its limits of time or memory. "
            "Worry if it rises steadily: the reward function hangs on some texts. Fix it, or raise "
            "--reward-timeout-seconds or --reward-memory-gb.",
        )
        self.filtered_groups = BoundedLabels(
            counter(
                "filtered_groups",
                "Groups that a filter dropped, by reason. "
                "Worry if most groups are dropped: the prompts are too easy or too hard. Choose others, or "
                "set --difficulty-band.",
                "reason",
            )
        )
        self.removed_samples = counter("removed_samples", "Samples that a sample filter removed from the loss.")
        self.skipped_data = BoundedLabels(
            counter(
                "skipped_data",
                "Data rows or groups that were skipped, by reason. "
                "Worry if it is more than a few: the log line `data skipped` says what is wrong with the row.",
                "reason",
            )
        )
        self.expired_agent_sessions = counter(
            "expired_agent_sessions",
            "Sessions of external generators that were closed because nothing used them. "
            "Worry if it rises: the generator crashes or forgets to post its groups.",
        )
        self.recycled_groups = counter(
            "recycled_groups", "Groups that were recycled because they were too stale to train."
        )
        self.admission_blocked_seconds = counter(
            "admission_blocked_seconds", "Seconds in which no group could be admitted, by cause.", "cause"
        )

    def _declare_generation(self) -> None:
        histogram = self._histogram
        self.generation_seconds = histogram(
            "generation_seconds", "Time from the first request to the last token of a group.", SECONDS
        )
        self.slow_group_seconds = self._unknown_gauge(
            "slow_group_seconds",
            "Twice the 99th percentile of the seconds from first request to reward of the last 1000 groups: almost no "
            "group takes longer. NaN before 50 groups have ended.",
        )
        self.reward_seconds = histogram(
            "reward_seconds",
            "Time from the last token of a group to its reward. "
            "Worry if it is as long as generation: make the reward faster, or raise --reward-processes.",
            SECONDS,
        )
        self.group_reward = histogram(
            "group_reward",
            "Mean reward of a generated group. "
            "Worry if all groups are in one bucket: groups without a difference teach nothing. Read "
            "samples on the live page, and check reward and prompts.",
            REWARDS,
        )
        self.group_response_tokens = histogram("group_response_tokens", "Response tokens of a generated group.", TOKENS)
        self.dead_letters = self._counter("dead_letters", "Prompts that got no further attempt.")
        self.unwritten_dead_letters = self._gauge(
            "unwritten_dead_letters", "Dead letters that could not be written and are kept in memory."
        )
        self.generated_samples = self._counter("generated_samples", "Samples that were generated and rewarded.")
        self.truncated_samples = self._counter(
            "truncated_samples",
            "Samples that were truncated at the response limit. "
            "Worry if more than a fifth of `generated_samples` are: raise --rollout-max-response-len, or "
            "teach shorter answers.",
        )

    def _declare_staleness(self) -> None:
        histograms = self._histograms
        self.staleness_versions = histograms(
            "staleness_versions", "Staleness in versions of groups when they were queued, trained or recycled.",
            VERSIONS, "groups",
        )  # fmt: skip
        self.staleness_seconds = histograms(
            "staleness_seconds",
            "Seconds since generation began, for groups when they were queued, trained or recycled.",
            SECONDS,
            "groups",
        )
        self.staleness_limit = self._unknown_gauge("staleness_limit_versions", "--max-weight-staleness; NaN if unset.")
        self.key_age_versions = self._histogram(
            "key_age_versions",
            "Versions by which the oldest keys and values of a generated group were older than the weights "
            "(--max-kv-staleness).",
            VERSIONS,
        )
        self.reused_tokens = self._counter(
            "reused_tokens",
            "Tokens of prompts and responses whose keys and values of older weights engines did not compute again "
            "after a publish (--max-kv-staleness), in generated groups.",
        )
        self.staleness_part_versions = histograms(
            "staleness_part_versions",
            "Staleness of trained groups in versions, by part: publish_lag (the engines were behind when generation "
            "began), sampling (published during generation) and waiting (in window and queue). The parts add up.",
            VERSIONS, "part",
        )  # fmt: skip
        self.staleness_part_seconds = histograms(
            "staleness_part_seconds",
            "Staleness of trained groups in seconds, by part: publish_lag, sampling and waiting.",
            SECONDS,
            "part",
        )

    def _declare_learner(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.drain_wait_seconds = histogram(
            "drain_wait_seconds",
            "Seconds for which the learner waited for a batch. "
            "Worry if it is longer than `step_seconds`: rollout is the bottleneck. The verdict names the "
            "setting to change.",
            SECONDS,
        )
        self.step_seconds = histogram("step_seconds", "Duration of the optimizer steps of one batch.", SECONDS)
        self.step_tokens = counter("step_tokens", "Prompt and response tokens of all steps, also of undone ones.")
        self.step_reward = gauge(
            "step_reward",
            "Mean reward of the last trained batch. "
            "Worry if it falls over tens of batches, or stays at 0: read samples on the live page. The "
            "FAQ has the causes.",
        )
        self.step_response_tokens = gauge(
            "step_response_tokens",
            "Mean response length of the last trained batch. "
            "Worry if it approaches --rollout-max-response-len, or falls to a few tokens: look at what "
            "the reward pays for.",
        )
        self.step_metric = self._gauges(
            "step_metric", "Loss, gradient norm and other learner metrics of the last batch.", "name"
        )
        self.rollout = gauge("rollout_batches", "Batches that were trained.")
        self.undone_batches = counter(
            "undone_batches", "Batches whose training was lost, because the learner continued from a checkpoint."
        )
        self.unsaved_batches = gauge(
            "unsaved_batches", "Batches trained after the newest checkpoint, which are undone if the learner is lost."
        )
        self.save_interval = self._unknown_gauge(
            "save_interval_batches", "--save-interval; NaN if no checkpoints are written at intervals."
        )
        self.last_checkpoint_timestamp = self._unknown_gauge(
            "last_checkpoint_timestamp_seconds",
            "When the newest checkpoint was complete. NaN before the first. "
            "Worry if it is older than --save-interval batches take: a checkpoint is slow, or hangs. See "
            "the alert CheckpointOld.",
        )
        self.nonfinite_steps = counter(
            "nonfinite_steps", "Batches that were skipped because the loss or the gradient was not finite."
        )
        self.learner_idle_seconds = counter(
            "learner_idle_seconds",
            "Seconds in which the learner ran no optimizer step, from the first step on, without interruptions.",
        )

    def _declare_adapters(self) -> None:
        self.adapter_version = self._gauges(
            "adapter_live_version", "Newest version of an adapter that is live, if the run trains several.", "adapter"
        )
        self.adapter_reward = self._gauges(
            "adapter_reward",
            "Mean reward of the last groups of an adapter, if the run trains several. "
            "Worry if it is 0 or full for a long time: its data sets teach nothing. Lower its weight, or "
            "change its prompts.",
            "adapter",
        )
        self.adapter_trained = self._gauges(
            "adapter_trained_groups", "Groups that have trained an adapter, if the run trains several.", "adapter"
        )
        self.adapter_share = self._gauges(
            "adapter_share_ratio",
            "Fraction of all trained groups that have trained an adapter, if the run trains several. "
            "Worry if it is below the share of its weight in --adapters: its groups take longer than those of others.",
            "adapter",
        )
        self.adapter_staleness = self._gauges(
            "adapter_staleness_versions",
            "Mean staleness of the last batch of an adapter, if the run trains several.",
            "adapter",
        )
        self.adapter_queue = self._gauges(
            "adapter_queue_groups", "Groups in the queue of an adapter, if the run trains several.", "adapter"
        )

    def _declare_data_sets(self) -> None:
        self.dataset_reward = self._gauges(
            "dataset_reward",
            "Mean reward of the last groups of a data set. "
            "Worry if it is 0 or full for a long time: the data set teaches nothing. Lower its weight, or "
            "change its prompts.",
            "dataset",
        )
        self.dataset_trained = self._gauges(
            "dataset_trained_groups", "Groups of a data set that were trained.", "dataset"
        )
        self.dataset_filtered = self._gauges(
            "dataset_filtered_groups",
            "Groups of a data set that a filter dropped. "
            "Worry if it grows faster than `dataset_trained_groups`: the prompts are too easy or too hard.",
            "dataset",
        )
        self.dataset_share = self._gauges(
            "dataset_share_ratio",
            "Fraction of all trained groups that are from a data set. "
            "Worry if it differs from the weights of --datasets: filters or slow answers remove its groups.",
            "dataset",
        )
        self.dataset_epochs = self._gauges(
            "dataset_epochs",
            "Number of times that the prompts of a data set were used. "
            "Worry if it is large while `eval_reward` falls: the policy memorizes. Add data.",
            "dataset",
        )

    def _declare_evaluations(self) -> None:
        self.eval_accuracy = self._gauges(
            "eval_accuracy_ratio",
            "Fraction of samples with the full reward on a data set. "
            "Worry if it falls while `step_reward` rises: the policy exploits the reward. Read samples.",
            "name",
        )
        self.eval_reward = self._gauges(
            "eval_reward",
            "Mean reward on a data set. "
            "Worry if it falls while `step_reward` rises: the policy exploits the reward. Read samples.",
            "name",
        )
        self.eval_truncated = self._gauges(
            "eval_truncated_ratio",
            "Fraction of truncated samples on a data set. "
            "Worry if it rises: answers reach --rollout-max-response-len, and truncated ones rarely score.",
            "name",
        )
        self.eval_missing = self._gauges(
            "eval_missing_samples",
            "Samples without a score in the last evaluation of a data set. "
            "Worry if it is not 0: the warning about this evaluation has the error. The other figures "
            "leave these samples out.",
            "name",
        )
        self.eval_oldest_version = self._gauges(
            "eval_oldest_weight_version", "Oldest weight version of the last evaluation of a data set.", "name"
        )
        self.eval_newest_version = self._gauges(
            "eval_newest_weight_version", "Newest weight version of the last evaluation of a data set.", "name"
        )
        self.skipped_evaluations = self._counter(
            "skipped_evaluations",
            "Evaluations that were skipped because a newer one was due before they could start. "
            "Worry if it rises: evaluations take longer than --eval-interval batches. Raise it, or lower --eval-size.",
        )

    def _declare_weights_and_engines(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.trainer_version = gauge("trainer_weight_version", "Newest weight version of the learner.")
        self.live_version = gauge(
            "live_weight_version",
            "Newest weight version that all routed engines hold. "
            "Worry if it stays behind `trainer_weight_version`: publishes are slow or fail. See the alert VersionLag.",
        )
        self.engine_version = self._gauges("engine_weight_version", "Weight version that an engine holds.", "engine")
        self.adapter_requests = self._gauges(
            "adapter_requests", "Requests at the engines, by the version of the adapter (--lora-rank).", "version"
        )
        self.engine_routed = self._gauges(
            "engine_routed", "1 while the engine receives requests, 0 while it is fenced.", "engine"
        )
        self.engine_idle_seconds = counter(
            "engine_idle_seconds",
            "Seconds without any request at the engines, from the first step on, without interruptions.",
        )
        self.engines_idle = self._gauges(
            "engines_idle",
            "1 for the reason why no engine has a request (start, no_engine, publish, window, learner, reward or "
            "other), 0 for all others and while one has.",
            "cause",
        )
        self.publishes = counter("publishes", "Weight publishes, by outcome.", "outcome")
        for outcome in ("live", "failed"):  # so that the first failure is an increase
            self.publishes.labels(outcome)
        self.engine_changes = counter(
            "engine_changes",
            "How often an engine was routed, fenced or lost. "
            "Worry if `lost` keeps rising: the log of the engine in the run folder has the cause.",
            "engine",
            "state",
        )
        self.router_up = self._unknown_gauge(
            "router_up", "1 while the router answers, 0 while it does not, NaN while the run starts."
        )
        self.router_engines = self._gauges(
            "router_engines",
            "Engines that the router lists, by their health as seen by the router. "
            "Worry if some stay unhealthy: their logs in the run folder have the cause.",
            "health",
        )
        self.publish_seconds = self._histograms(
            "publish_seconds",
            "Duration of a publish by phase. Generation continues while staged. paused is the sum of stopping, write, "
            "commit (old prefixes are dropped, the version is announced) and resuming. "
"Worry if `paused` is a large part of `step_seconds`: use a faster --weight-transfer, or "
"raise --update-weights-interval.",
            SECONDS, "phase",
        )  # fmt: skip
        self.publish_bytes = counter("publish_bytes", "Bytes of weights written to engines.")
        self.write_failures = counter(
            "weight_write_failures",
            "Weight writes that failed, by what was done next. "
            "Worry if it rises: the log line `weight write failed` has the error. `retry` costs seconds, "
            "`fence` an engine.",
            "then",
        )


def series_of(metric: Counter | Gauge | Histogram | Info) -> Iterator[tuple[dict[str, str], list[float]]]:
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


def _restore(series: Counter | Gauge | Histogram, numbers: list[float]) -> None:
    *counts, value = numbers
    match series:
        case Counter():
            series.inc(value)
        case Gauge():
            series.set(value)
        case Histogram():
            # The library can only observe values one by one.
            series._sum.inc(value)
            for bucket, count in zip(series._buckets, counts, strict=True):
                bucket.inc(count)

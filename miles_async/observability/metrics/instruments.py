"""Every Prometheus metric of a run, declared here and nowhere else.

Names begin with `miles_async_` and carry their unit; a label whose values come from users or libraries takes so many of
them and calls the rest `other`, because every value is a series that Prometheus keeps.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from miles_async.observability.metrics.histogram import Histogram

VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
REWARDS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

MAX_LABEL_VALUES = 64
LONGEST_VALUE = 80

M = TypeVar("M", Counter, Gauge)


class Bounded(Generic[M]):
    """A metric with one label of foreign values: the first 64 get series of their own, the others share `other`."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._series: dict[str, M] = {}

    def labels(self, value: str) -> M:
        series = self._series.get(value)
        if series is None:
            known = len(self._series) < MAX_LABEL_VALUES
            series = self._metric.labels(value[:LONGEST_VALUE] if known else "other")
            if known:
                self._series[value] = series
        return series


class Instruments:
    """The metrics of one run, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._declare_run()
        self._declare_queue_and_window()
        self._declare_generation()
        self._declare_staleness()
        self._declare_learner()
        self._declare_weights_and_engines()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"miles_async_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"miles_async_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], label: str | None = None) -> Histogram:
        return Histogram(f"miles_async_{name}", text, label, bounds, self._registry)

    def _declare_run(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.run = Info("miles_async_run", "What runs.", registry=self._registry)
        self.cluster = Info("miles_async_cluster", "What it runs on.", registry=self._registry)
        self.warm_start_seconds = gauge("warm_start_seconds", "Seconds that the warm start took; near 0 if cached.")
        self.verdict = gauge("verdict", "1 for what holds the run back now, 0 for the others.", "verdict")
        self.trainer_seconds = counter(
            "trainer_seconds", "The trainer's time, by what it did, or what kept it waiting.", "doing"
        )
        self.last_progress_timestamp = gauge(
            "last_progress_timestamp_seconds",
            "When a group was queued, or a step, publish or evaluation ended.",
            "what",
        )
        self.since_progress_seconds = gauge("since_progress_seconds", "Seconds since the last progress of any kind.")
        self.stalls = counter("stalls", "Warnings that nothing moved for too long.")
        self.loop_lag_seconds = self._histogram("loop_lag_seconds", "How late the event loop wakes.", LAG_SECONDS)
        self.process_silent_seconds = gauge(
            "process_silent_seconds", "How long a process has not answered; 0 while it does.", "name"
        )

    def _declare_queue_and_window(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.queue_depth = gauge("queue_depth_groups", "Finished groups waiting for the trainer.")
        self.queue_capacity = gauge("queue_capacity_groups", "Groups the queue holds at most.")
        self.window = gauge("window_groups", "W: how far past the head a group may be collected.")
        self.slots = gauge("slots_groups", "B: groups between admission and publish at most; absent if unbounded.")
        self.held_slots = gauge("held_slots_groups", "Groups between admission and publish now.")
        self.head_age_seconds = gauge("head_age_seconds", "How long the same group has been the window's head.")
        self.blocked_groups = gauge("blocked_groups", "Finished groups that the window holds back.")
        self.in_flight_groups = gauge("in_flight_groups", "Groups being generated, rewarded or filtered.")
        self.in_flight_requests = gauge("in_flight_requests", "Requests at the engines.")
        self.oldest_request_seconds = gauge("oldest_request_seconds", "How long the oldest group is at the engines.")
        self.rewarding_groups = gauge("rewarding_groups", "Groups that wait for their reward.")
        self.groups_by_state = gauge("groups", "Live groups in each state of the ledger.", "state")
        self.ended_groups = counter("ended_groups", "Groups published, or dropped and why.", "outcome", "reason")
        self.filtered_groups = Bounded(counter("filtered_groups", "Groups that a filter dropped, and why.", "reason"))
        self.removed_samples = counter("removed_samples", "Samples that a filter took out of the loss.")
        self.skipped_data = Bounded(counter("skipped_data", "Rows or groups passed over, and why.", "reason"))
        self.recycled_groups = counter("recycled_groups", "Groups sent back as too stale to train.")
        self.admission_blocked_seconds = counter(
            "admission_blocked_seconds", "Seconds in which admission could not go on, and why.", "cause"
        )

    def _declare_generation(self) -> None:
        histogram = self._histogram
        self.generation_seconds = histogram("generation_seconds", "First request to last token of a group.", SECONDS)
        self.reward_seconds = histogram("reward_seconds", "Last token of a group to its reward.", SECONDS)
        self.group_reward = histogram("group_reward", "Mean reward of each generated group.", REWARDS)
        self.group_response_tokens = histogram(
            "group_response_tokens", "Response tokens of each generated group.", TOKENS
        )
        self.generated_samples = self._counter("generated_samples", "Samples generated and rewarded.")
        self.truncated_samples = self._counter("truncated_samples", "Samples cut at the response limit.")

    def _declare_staleness(self) -> None:
        histogram = self._histogram
        self.staleness_versions = histogram(
            "staleness_versions", "Versions behind the trainer, of groups as they were queued, trained or recycled.",
            VERSIONS, "groups",
        )  # fmt: skip
        self.staleness_seconds = histogram(
            "staleness_seconds", "The same groups: seconds since their generation began.", SECONDS, "groups"
        )
        self.staleness_limit = self._gauge("staleness_limit_versions", "--max-weight-staleness; absent if unset.")
        self.staleness_part_versions = histogram(
            "staleness_part_versions",
            "What the staleness of trained groups is made of: publish_lag, sampling, waiting. The parts add up.",
            VERSIONS, "part",
        )  # fmt: skip
        self.staleness_part_seconds = histogram("staleness_part_seconds", "The same parts in seconds.", SECONDS, "part")

    def _declare_learner(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.drain_wait_seconds = histogram("drain_wait_seconds", "How long the trainer waited per batch.", SECONDS)
        self.step_seconds = histogram("step_seconds", "Optimizer steps of one batch.", SECONDS)
        self.step_tokens = counter("step_tokens", "Prompt and response tokens trained.")
        self.step_reward = gauge("step_reward", "Mean reward of the last trained batch.")
        self.step_response_tokens = gauge("step_response_tokens", "Mean response length of the last trained batch.")
        self.step_metric = Bounded(gauge("step_metric", "Loss, gradient norm and the rest of the last batch.", "name"))
        self.rollout = gauge("rollout_batches", "Batches trained.")
        self.nonfinite_steps = counter("nonfinite_steps", "Batches whose loss or gradient was not finite.")
        self.learner_idle_seconds = counter("learner_idle_seconds", "Seconds outside optimizer steps.")
        self.eval_accuracy = Bounded(gauge("eval_accuracy_ratio", "Share of samples with the full reward.", "name"))
        self.eval_reward = Bounded(gauge("eval_reward", "Mean reward on a data set.", "name"))
        self.eval_truncated = Bounded(gauge("eval_truncated_ratio", "Share of samples that were cut.", "name"))

    def _declare_weights_and_engines(self) -> None:
        gauge, counter = self._gauge, self._counter
        self.trainer_version = gauge("trainer_weight_version", "Weight snapshots handed to publishing.")
        self.live_version = gauge("live_weight_version", "Newest version on every routed engine.")
        self.engine_version = gauge("engine_weight_version", "Weight version each engine holds.", "engine")
        self.engine_routed = gauge("engine_routed", "1 while requests may reach the engine.", "engine")
        self.engine_idle_seconds = counter("engine_idle_seconds", "Seconds without a request at any engine.")
        self.publishes = counter("publishes", "Weight publishes.", "outcome")
        self.engine_changes = counter(
            "engine_changes", "Times an engine was routed, fenced or lost.", "engine", "state"
        )
        self.router_up = gauge("router_up", "1 while the router answers.")
        self.router_engines = gauge("router_engines", "Engines in the router's list, as it finds them.", "health")
        self.publish_seconds = self._histogram(
            "publish_seconds",
            "Publish by phase: staged beside generation; paused, made of stopping, write, commit and resuming.",
            SECONDS, "phase",
        )  # fmt: skip
        self.publish_bytes = counter("publish_bytes", "Bytes written to engines.")
        self.write_failures = counter("weight_write_failures", "Weight writes that failed, and what was done.", "then")

"""The Prometheus metrics of a run: a fold over the event stream, declared here and nowhere else.

They are set when things happen, not once a step, and served by a process that is neither learner nor rollout worker,
so they keep moving while either hangs. What grows with time alone (idle seconds, seconds without progress) grows in
`tick`. Names begin with `miles_async_` and end in their unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from miles_async.core.ledger import LIVE, State
from miles_async.observability.events import (
    AdmissionBlocked,
    ClusterReady,
    DataSkipped,
    Drained,
    EngineBusy,
    EngineChanged,
    Evaluated,
    Event,
    GroupFiltered,
    GroupGenerated,
    GroupMoved,
    LoopLag,
    PublishEnded,
    PublishStarted,
    Queue,
    RunStarted,
    SamplesRemoved,
    Stalled,
    StepEnded,
    StepStarted,
)
from miles_async.observability.verdict import Bottleneck
from miles_async.types import DropReason

_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_REWARDS = (-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(slots=True)
class _LearnerIdle:
    """Seconds outside optimizer steps since the run began."""

    settled: float = 0.0
    since: float | None = None
    """None inside a step, and before the run began."""

    def at(self, now: float) -> float:
        return self.settled + (max(0.0, now - self.since) if self.since is not None else 0.0)

    def step_started(self, now: float) -> None:
        self.settled, self.since = self.at(now), None


@dataclass(slots=True)
class _EngineIdle:
    """Seconds without a request at the engines since the run began, from the last EngineBusy."""

    began: float
    heard: float
    busy: float = 0.0
    in_flight: int = 0

    def at(self, now: float) -> float:
        # While requests are in flight, busy seconds grow as fast as the clock, so idle seconds stand still.
        return (self.heard if self.in_flight else max(self.heard, now)) - self.began - self.busy


class Metrics:
    """Feed every event to `observe`, and the time to `tick` about once a second."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._declare_pipeline()
        self._declare_learner()
        self._declare_weights_and_engines()
        self._learner_idle = _LearnerIdle()
        self._engine_idle: _EngineIdle | None = None
        self._counted: dict[Counter, float] = {}
        self._last_progress: float | None = None
        self._routed: set[str] = set()

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._run_started(event)
            case ClusterReady():
                self._cluster.info({"weight_transfer": event.weight_transfer})
                self._warm_start_seconds.set(event.warm_start_seconds)
            case GroupMoved():
                self._group_moved(event)
            case GroupGenerated():
                self._generation_seconds.observe(event.generated - event.started)
                self._reward_seconds.observe(event.time - event.generated)
                self._group_reward.observe(event.reward)
                self._group_response_tokens.observe(event.response_tokens)
                self._truncated_samples.inc(event.truncated)
            case GroupFiltered():
                self._filtered_groups.labels(event.reason).inc()
            case SamplesRemoved():
                self._removed_samples.inc(event.samples)
            case DataSkipped():
                self._skipped_data.labels(event.reason).inc()
            case AdmissionBlocked():
                self._admission_blocked_seconds.labels(event.cause).inc(event.seconds)
            case Queue():
                self._queue_depth.set(event.depth)
                self._blocked_groups.set(event.blocked)
            case Drained():
                self._queue_depth.set(event.depth)
                self._drain_wait_seconds.observe(event.waited)
            case StepStarted():
                self._learner_idle.step_started(event.time)
                self._trainer_version.set(event.version)
                for versions in event.staleness:
                    self._trained_staleness.observe(versions)
            case StepEnded():
                self._step_ended(event)
            case PublishStarted():
                self._trainer_version.set(event.version)
            case PublishEnded():
                self._publish_ended(event)
            case Evaluated():
                self._eval_accuracy.labels(event.name).set(event.accuracy)
                self._eval_reward.labels(event.name).set(event.reward)
                self._eval_truncated.labels(event.name).set(event.truncated)
                self._progressed(event.time)
            case EngineChanged():
                self._engine_changed(event)
            case EngineBusy():
                self._in_flight_requests.set(event.in_flight)
                if self._engine_idle is not None:
                    self._engine_idle.heard, self._engine_idle.busy = event.time, event.busy
                    self._engine_idle.in_flight = event.in_flight
            case Stalled():
                self._stalls.inc()
            case LoopLag():
                self._loop_lag_seconds.observe(event.seconds)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Bring what grows with time alone up to `now` (wall-clock seconds)."""
        if self._last_progress is not None:
            self._since_progress_seconds.set(max(0.0, now - self._last_progress))
        self._raise_to(self._learner_idle_seconds, self._learner_idle.at(now))
        if self._engine_idle is not None:
            self._raise_to(self._engine_idle_seconds, self._engine_idle.at(now))

    def judged(self, verdict: Bottleneck, trainer_seconds: Mapping[str, float]) -> None:
        """Take over the verdict, and what the trainer's time went into since the run began."""
        for kind in Bottleneck:
            self._verdict.labels(kind).set(kind is verdict)
        for doing, seconds in trainer_seconds.items():
            self._raise_to(self._trainer_seconds.labels(doing), seconds)

    def _raise_to(self, counter: Counter, total: float) -> None:
        # Events arrive a little late, so a tick can count seconds that an event then takes back; a counter must not
        # fall, so it waits until the true total has caught up.
        counted = self._counted.get(counter, 0.0)
        if total > counted:
            counter.inc(total - counted)
            self._counted[counter] = total

    def _progressed(self, now: float) -> None:
        self._last_progress = now
        self._last_progress_timestamp.set(now)
        self._since_progress_seconds.set(0)

    def _run_started(self, event: RunStarted) -> None:
        self._run.info({"run": event.run, "entry": event.entry})
        self._queue_capacity.set(event.queue_capacity)
        self._window.set(event.window)
        if event.slots is not None:
            self._slots.set(event.slots)
        self._learner_idle.since = event.time
        self._engine_idle = _EngineIdle(began=event.time, heard=event.time)
        self._progressed(event.time)

    def _group_moved(self, event: GroupMoved) -> None:
        for state in LIVE:
            self._groups_by_state.labels(state).set(event.counts.get(state, 0))
        self._in_flight_groups.set(event.counts.get(State.IN_FLIGHT, 0))
        if event.after in (State.PUBLISHED, State.DROPPED):
            self._ended_groups.labels(event.after, event.reason or "").inc()
        if event.reason == DropReason.STALE:
            self._recycled_groups.inc()
        if event.after == State.QUEUED:
            self._progressed(event.time)

    def _step_ended(self, event: StepEnded) -> None:
        self._learner_idle.since = event.ended
        self._step_seconds.observe(event.ended - event.started)
        self._step_tokens.inc(event.tokens)
        self._step_reward.set(event.reward)
        self._step_response_tokens.set(event.response_length)
        if not event.finite:
            self._nonfinite_steps.inc()
        for name, value in event.metrics.items():
            self._step_metric.labels(name).set(value)
        self._progressed(event.time)

    def _publish_ended(self, event: PublishEnded) -> None:
        self._publishes.labels("live" if event.live else "failed").inc()
        self._publish_seconds.labels("staged").observe(event.staged_seconds)
        self._publish_seconds.labels("paused").observe(event.paused_seconds)
        self._publish_seconds.labels("write").observe(event.write_seconds)
        self._publish_bytes.inc(event.bytes)
        if event.live:
            for engine in self._routed.difference(event.fenced):
                self._engine_version.labels(engine).set(event.version)
            self._progressed(event.time)

    def _engine_changed(self, event: EngineChanged) -> None:
        if event.state == "routed":
            self._routed.add(event.engine)
        else:
            self._routed.discard(event.engine)
        self._engine_routed.labels(event.engine).set(event.state == "routed")
        if event.version is not None:
            self._engine_version.labels(event.engine).set(event.version)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"miles_async_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"miles_async_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"miles_async_{name}", text, labels, buckets=buckets, registry=self._registry)

    def _declare_pipeline(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._run = Info("miles_async_run", "What runs.", registry=self._registry)
        self._cluster = Info("miles_async_cluster", "What it runs on.", registry=self._registry)
        self._warm_start_seconds = gauge("warm_start_seconds", "Seconds that the warm start took; near 0 if cached.")
        self._queue_depth = gauge("queue_depth_groups", "Finished groups waiting for the trainer.")
        self._queue_capacity = gauge("queue_capacity_groups", "Groups the queue holds at most.")
        self._window = gauge("window_groups", "W: how far past the head a group may be collected.")
        self._slots = gauge("slots_groups", "B: groups between admission and publish at most; absent if unbounded.")
        self._blocked_groups = gauge("blocked_groups", "Finished groups that the window holds back.")
        self._in_flight_groups = gauge("in_flight_groups", "Groups being generated, rewarded or filtered.")
        self._in_flight_requests = gauge("in_flight_requests", "Requests at the engines.")
        self._groups_by_state = gauge("groups", "Live groups in each state of the ledger.", "state")
        self._ended_groups = counter("ended_groups", "Groups published, or dropped and why.", "outcome", "reason")
        self._filtered_groups = counter("filtered_groups", "Groups that a filter dropped, and why.", "reason")
        self._removed_samples = counter("removed_samples", "Samples that a filter took out of the loss.")
        self._skipped_data = counter("skipped_data", "Rows or returned groups passed over, and why.", "reason")
        self._recycled_groups = counter("recycled_groups", "Groups sent back as too stale to train.")
        self._admission_blocked_seconds = counter(
            "admission_blocked_seconds", "Seconds in which admission could not go on, and why.", "cause"
        )
        self._generation_seconds = histogram("generation_seconds", "First request to last token of a group.", _SECONDS)
        self._reward_seconds = histogram("reward_seconds", "Last token of a group to its reward.", _SECONDS)
        self._group_reward = histogram("group_reward", "Mean reward of each generated group.", _REWARDS)
        self._group_response_tokens = histogram(
            "group_response_tokens", "Response tokens of each generated group.", _TOKENS
        )
        self._truncated_samples = counter("truncated_samples", "Samples cut at the response limit.")
        self._loop_lag_seconds = histogram("loop_lag_seconds", "How late the event loop wakes.", _LAG_SECONDS)
        self._verdict = gauge("verdict", "1 for what holds the run back now, 0 for the others.", "verdict")
        self._trainer_seconds = counter(
            "trainer_seconds", "The trainer's time, by what it did, or what kept it waiting.", "doing"
        )
        self._stalls = counter("stalls", "Warnings that no group was collected for too long.")
        self._last_progress_timestamp = gauge(
            "last_progress_timestamp_seconds", "When a group was queued, a step, publish or evaluation ended."
        )
        self._since_progress_seconds = gauge("since_progress_seconds", "Seconds since the last progress.")

    def _declare_learner(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._drain_wait_seconds = histogram("drain_wait_seconds", "How long the trainer waited per batch.", _SECONDS)
        self._trained_staleness = histogram(
            "trained_staleness_versions", "Staleness of each group as its step began.", _VERSIONS
        )
        self._step_seconds = histogram("step_seconds", "Optimizer steps of one batch.", _SECONDS)
        self._step_tokens = counter("step_tokens", "Prompt and response tokens trained.")
        self._step_reward = gauge("step_reward", "Mean reward of the last trained batch.")
        self._step_response_tokens = gauge("step_response_tokens", "Mean response length of the last trained batch.")
        self._step_metric = gauge("step_metric", "Loss, gradient norm and the rest of the last batch.", "name")
        self._nonfinite_steps = counter("nonfinite_steps", "Batches whose loss or gradient was not finite.")
        self._learner_idle_seconds = counter("learner_idle_seconds", "Seconds outside optimizer steps.")
        self._eval_accuracy = gauge("eval_accuracy_ratio", "Share of a data set's samples with full reward.", "name")
        self._eval_reward = gauge("eval_reward", "Mean reward on a data set.", "name")
        self._eval_truncated = gauge("eval_truncated_ratio", "Share of a data set's samples that were cut.", "name")

    def _declare_weights_and_engines(self) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._trainer_version = gauge("trainer_weight_version", "Weight snapshots handed to publishing.")
        self._engine_version = gauge("engine_weight_version", "Weight version each engine holds.", "engine")
        self._engine_routed = gauge("engine_routed", "1 while requests may reach the engine.", "engine")
        self._engine_idle_seconds = counter("engine_idle_seconds", "Seconds without a request at any engine.")
        self._publishes = counter("publishes", "Weight publishes.", "outcome")
        self._publish_seconds = histogram(
            "publish_seconds", "Publish by phase: staged beside generation; paused, of which write.", _SECONDS, "phase"
        )
        self._publish_bytes = counter("publish_bytes", "Bytes written to engines.")

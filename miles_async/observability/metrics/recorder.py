"""What the metrics of a run say: a fold over the event stream onto the instruments.

They are set when things happen, not once a step, and served by a process that is neither learner nor rollout worker,
so they keep moving while either hangs. What grows with time alone (idle seconds, seconds without progress) grows in
`tick`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from miles_async.events import (
    AdmissionBlocked,
    BatchDrained,
    ClusterReady,
    DataSkipped,
    EngineBusy,
    EngineChanged,
    Evaluated,
    Event,
    GroupFiltered,
    GroupGenerated,
    GroupMoved,
    LoopLag,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    QueueChanged,
    RouterChanged,
    RunStarted,
    SamplesRemoved,
    Stalled,
    StepEnded,
    StepStarted,
    WriteFailed,
)
from miles_async.observability.diagnosis.staleness import StalenessTracker
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.metrics.instruments import Instruments
from miles_async.scheduling.ledger import LIVE, GroupState
from miles_async.types import DropReason


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


class MetricsRecorder:
    """Feed every event to `observe`, and the time to `tick` about once a second."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._set = Instruments(registry)
        self._show_counts()
        self._staleness = StalenessTracker()
        self._learner_idle = _LearnerIdle()
        self._engine_idle: _EngineIdle | None = None
        self._counted: dict[Counter, float] = {}
        self._blocked_seconds: dict[str, float] = {}
        """Seconds that are over, by cause."""
        self._last_progress: float | None = None
        self._routed: set[str] = set()
        self._lost: set[str] = set()
        self._samples_per_group = 1

    def observe(self, event: Event) -> None:
        match event:
            case GroupMoved():
                self._group_moved(event)
            case GroupGenerated():
                self._group_generated(event)
            case QueueChanged():
                self._depth, self._blocked = event.depth, event.blocked
            case Pulse():
                self._pulse(event)
            case LoopLag():
                self._set.loop_lag_seconds.observe(event.seconds)
            case AdmissionBlocked():
                self._blocked_seconds[event.cause] = self._blocked_seconds.get(event.cause, 0.0) + event.seconds
                self._raise_blocked(event.cause, 0.0)
            case EngineBusy():
                self._engine_busy(event)
            case BatchDrained():
                self._depth = event.depth
                self._set.drain_wait_seconds.observe(event.waited)
            case StepStarted():
                self._step_started(event)
            case StepEnded():
                self._step_ended(event)
            case PublishStarted():
                self._trainer_at(event.version, event.time)
            case PublishEnded():
                self._publish_ended(event)
            case EngineChanged():
                self._engine_changed(event)
            case ProcessSilent():
                # An engine that was removed is told of once more: it is not silent. Its series stays away.
                if event.seconds or event.process not in self._lost:
                    self._set.process_silent_seconds.labels(event.process).set(event.seconds)
            case Evaluated():
                self._evaluated(event)
            case _:
                self._rare(event)

    def _show_counts(self) -> None:
        """Gauges that most events change are read when they are asked for, from what the last event said."""
        self._counts: Mapping[str, int] = {}
        self._depth, self._blocked = 0, 0
        self._progress: dict[str, float] = {}
        for state in LIVE:
            self._set.groups_by_state.labels(state).set_function(partial(self._count, state))
        self._set.in_flight_groups.set_function(partial(self._count, GroupState.IN_FLIGHT))
        self._set.held_slots.set_function(lambda: sum(self._counts.values()))
        self._set.queue_depth.set_function(lambda: self._depth)
        self._set.blocked_groups.set_function(lambda: self._blocked)

    def _count(self, state: str) -> int:
        return self._counts.get(state, 0)

    def _rare(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._run_started(event)
            case ClusterReady():
                self._set.cluster.info({"weight_transfer": event.weight_transfer})
                self._set.warm_start_seconds.set(event.warm_start_seconds)
                # A start may take long; only from here on is standing still a stall.
                self._progressed("start", event.time)
            case GroupFiltered():
                self._set.filtered_groups.labels(event.reason).inc()
            case SamplesRemoved():
                self._set.removed_samples.inc(event.samples)
            case DataSkipped():
                self._set.skipped_data.labels(event.reason).inc()
            case WriteFailed():
                self._set.write_failures.labels(event.then).inc()
            case RouterChanged():
                self._set.router_up.set(event.up)
                self._set.router_engines.labels("healthy").set(event.healthy)
                self._set.router_engines.labels("unhealthy").set(event.engines - event.healthy)
            case Stalled():
                self._set.stalls.inc()
            case _:
                pass

    def tick(self, now: float) -> None:
        """Bring what grows with time alone up to `now` (wall-clock seconds)."""
        if self._last_progress is not None:
            self._set.since_progress_seconds.set(max(0.0, now - self._last_progress))
        self._raise_to(self._set.learner_idle_seconds, self._learner_idle.at(now))
        if self._engine_idle is not None:
            self._raise_to(self._set.engine_idle_seconds, self._engine_idle.at(now))

    def set_verdict(self, verdict: Bottleneck, trainer_seconds: Mapping[str, float]) -> None:
        """Take over the verdict, and what the trainer's time went into since the run began."""
        for kind in Bottleneck:
            self._set.verdict.labels(kind).set(kind is verdict)
        for doing, seconds in trainer_seconds.items():
            self._raise_to(self._set.trainer_seconds.labels(doing), seconds)

    def _raise_to(self, counter: Counter, total: float) -> None:
        # Events arrive a little late, so a tick can count seconds that an event then takes back; a counter must not
        # fall, so it waits until the true total has caught up.
        counted = self._counted.get(counter, 0.0)
        if total > counted:
            counter.inc(total - counted)
            self._counted[counter] = total

    def _raise_blocked(self, cause: str, still_waiting: float) -> None:
        total = self._blocked_seconds.get(cause, 0.0) + still_waiting
        self._raise_to(self._set.admission_blocked_seconds.labels(cause), total)

    def _progressed(self, what: str, now: float) -> None:
        self._last_progress = now
        if what not in self._progress:
            self._set.last_progress_timestamp.labels(what).set_function(lambda: self._progress[what])
        self._progress[what] = now

    def _run_started(self, event: RunStarted) -> None:
        self._set.run.info({"run": event.run, "entry": event.entry})
        self._set.queue_capacity.set(event.queue_capacity)
        self._set.window.set(event.window)
        if event.slots is not None:
            self._set.slots.set(event.slots)
        if event.staleness_limit is not None:
            self._set.staleness_limit.set(event.staleness_limit)
        self._samples_per_group = event.samples_per_group
        self._learner_idle.since = event.time
        self._engine_idle = _EngineIdle(began=event.time, heard=event.time)

    def _group_moved(self, event: GroupMoved) -> None:
        self._counts = event.counts
        if event.after == GroupState.QUEUED:
            self._aged("queued", event)
            self._progressed("queued", event.time)
        elif event.after in (GroupState.PUBLISHED, GroupState.DROPPED):
            self._set.ended_groups.labels(event.after, event.reason or "").inc()
            if event.reason == DropReason.STALE:
                self._set.recycled_groups.inc()
                self._aged("recycled", event)
            self._staleness.forget(event.sequence)

    def _aged(self, groups: str, event: GroupMoved) -> None:
        if age := self._staleness.age(event.sequence, event.time):
            self._set.staleness_versions.labels(groups).observe(age[0])
            self._set.staleness_seconds.labels(groups).observe(age[1])

    def _group_generated(self, event: GroupGenerated) -> None:
        self._staleness.record_generation(event)
        self._set.generation_seconds.observe(event.generated - event.started)
        self._set.reward_seconds.observe(event.time - event.generated)
        self._set.group_reward.observe(event.reward)
        self._set.group_response_tokens.observe(event.response_tokens)
        self._set.generated_samples.inc(self._samples_per_group)
        self._set.truncated_samples.inc(event.truncated)

    def _pulse(self, event: Pulse) -> None:
        self._depth, self._blocked = event.queue, event.blocked
        self._set.head_age_seconds.set(event.head_seconds)
        self._set.oldest_request_seconds.set(event.oldest_seconds)
        self._set.rewarding_groups.set(event.rewarding)
        self._set.live_version.set(event.live_version)
        self._trainer_at(event.trainer_version, event.time)
        if event.waits_for is not None:
            self._raise_blocked(event.waits_for, event.waits_seconds)

    def _engine_busy(self, event: EngineBusy) -> None:
        self._set.in_flight_requests.set(event.in_flight)
        if self._engine_idle is not None:
            self._engine_idle.heard, self._engine_idle.busy = event.time, event.busy
            self._engine_idle.in_flight = event.in_flight

    def _trainer_at(self, version: int, now: float) -> None:
        self._staleness.record_version(version, now)
        self._set.trainer_version.set(version)

    def _step_started(self, event: StepStarted) -> None:
        self._trainer_at(event.version, event.time)
        self._learner_idle.step_started(event.time)
        for sequence, versions in zip(event.groups, event.staleness, strict=True):
            self._set.staleness_versions.labels("trained").observe(versions)
            if age := self._staleness.age(sequence, event.time):
                self._set.staleness_seconds.labels("trained").observe(age[1])
        for name, versions, seconds in self._staleness.parts(event):
            self._set.staleness_part_versions.labels(name).observe(versions)
            self._set.staleness_part_seconds.labels(name).observe(seconds)

    def _step_ended(self, event: StepEnded) -> None:
        self._learner_idle.since = event.ended
        self._set.step_seconds.observe(event.ended - event.started)
        self._set.step_tokens.inc(event.tokens)
        self._set.step_reward.set(event.reward)
        self._set.step_response_tokens.set(event.response_length)
        self._set.rollout.set(event.rollout + 1)
        if not event.finite:
            self._set.nonfinite_steps.inc()
        for name, value in event.metrics.items():
            self._set.step_metric.labels(name).set(value)
        self._progressed("step", event.time)

    def _publish_ended(self, event: PublishEnded) -> None:
        self._set.publishes.labels("live" if event.live else "failed").inc()
        phases = {"staged": event.staged_seconds, "paused": event.paused_seconds, **event.pause}
        for phase, seconds in phases.items():
            self._set.publish_seconds.labels(phase).observe(seconds)
        self._set.publish_bytes.inc(event.bytes)
        if event.live:
            self._set.live_version.set(event.version)
            for engine in self._routed.difference(event.fenced):
                self._set.engine_version.labels(engine).set(event.version)
            self._progressed("publish", event.time)

    def _engine_changed(self, event: EngineChanged) -> None:
        if event.state == "routed":
            self._routed.add(event.engine)
        else:
            self._routed.discard(event.engine)
        self._set.engine_changes.labels(event.engine, event.state).inc()
        if event.state == "lost":
            self._lost.add(event.engine)
            # A series that stands still forever would read like an engine that does.
            self._set.engine_routed.remove(event.engine)
            self._set.engine_version.remove(event.engine)
            self._set.process_silent_seconds.remove(event.engine)
            return
        self._lost.discard(event.engine)
        self._set.engine_routed.labels(event.engine).set(event.state == "routed")
        if event.version is not None:
            self._set.engine_version.labels(event.engine).set(event.version)

    def _evaluated(self, event: Evaluated) -> None:
        self._set.eval_accuracy.labels(event.name).set(event.accuracy)
        self._set.eval_reward.labels(event.name).set(event.reward)
        self._set.eval_truncated.labels(event.name).set(event.truncated)
        self._progressed("evaluation", event.time)

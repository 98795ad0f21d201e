"""Updates the Prometheus metrics of a run from its event stream.

Metrics change with every event, not once per step. The driver serves them, which is neither the learner nor the rollout
worker, so the metrics stay available while one of these hangs. Metrics that grow with time alone, such as idle seconds,
are updated by `tick`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from miles_async import events
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.metrics.instruments import Instruments, Values, series_of
from miles_async.observability.state.engines import IdleCause, idle_cause
from miles_async.observability.state.groups import ENDED, Group
from miles_async.observability.state.tokens import LEFTOVER, REMOVED
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import LIVE, GroupState
from miles_async.types import DropReason

PRESENT = events.EngineBusy, events.EngineChanged, events.Pulse, events.RouterChanged
"""Events that describe the present state of a process. A driver that continues a run may still receive those of
processes that the driver before it had started."""


class RecordedMetrics(NamedTuple):
    """What a recorder knows besides its view."""

    values: Values
    saved: int | None
    """The rollout of the newest checkpoint."""
    lost: set[str]
    """Engines that were lost."""


class MetricsRecorder:
    """Keeps the metrics of a run up to date.

    Pass every event that the view has applied to `observe`, and the time to `tick` once a second.
    """

    def __init__(self, registry: CollectorRegistry, view: RunView) -> None:
        self._metrics = Instruments(registry)
        self._view = view
        self._bind_gauges()
        self._counted: dict[Counter, float] = {}
        """The value of each counter that `_increase_to` has increased."""
        self._saved: int | None = None
        """The rollout of the newest checkpoint."""
        self._lost: set[str] = set()
        """Engines that were lost."""

    @property
    def recorded(self) -> RecordedMetrics:
        return RecordedMetrics(self._metrics.values(), self._saved, self._lost)

    def restore(self, recorded: RecordedMetrics) -> None:
        """Continue the metrics of another recorder. Call it before any other method."""
        self._metrics.restore(recorded.values)
        self._saved, self._lost = recorded.saved, recorded.lost

    def observe(self, event: events.Event) -> None:
        if isinstance(event, PRESENT) and event.time < self._view.past:
            return  # the process has ended
        match event:
            case events.GroupMoved():
                self._group_moved(event)
            case events.GroupGenerated():
                self._group_generated(event)
            case events.SampleDiscarded():
                self._count_tokens(event.reason)
            case events.Pulse():
                self._pulse(event)
            case events.LoopLag():
                self._metrics.loop_lag_seconds.observe(event.seconds)
            case events.AdmissionBlocked():
                self._count_blocked(event.cause, 0.0)
            case events.EngineBusy():
                self._metrics.in_flight_requests.set(event.in_flight)
            case events.BatchDrained():
                self._metrics.drain_wait_seconds.observe(event.waited)
            case events.StepStarted():
                self._step_started(event)
            case events.StepEnded():
                self._step_ended(event)
            case events.PublishStarted():
                self._metrics.trainer_version.set(event.version)
            case events.PublishEnded():
                self._publish_ended(event)
            case events.EngineChanged():
                self._engine_changed(event)
            case events.ProcessSilent():
                # When an engine is removed, one last event reports that it is no longer silent. This event must not
                # create the series of the engine again.
                if event.seconds or event.process not in self._lost:
                    self._metrics.process_silent_seconds.labels(event.process).set(event.seconds)
            case events.Evaluated():
                self._evaluated(event)
            case _:
                self._observe_rare(event)

    def _bind_gauges(self) -> None:
        """Make gauges that change with most events read their value when they are scraped.

        Setting them at every event would take a lock for each of thousands of events a second.
        """
        view = self._view
        for state in LIVE:
            self._metrics.groups_by_state.labels(state).set_function(partial(self._count, state))
        self._metrics.in_flight_groups.set_function(partial(self._count, GroupState.IN_FLIGHT))
        self._metrics.held_slots.set_function(lambda: sum(view.groups.counts.values()))
        self._metrics.queue_depth.set_function(lambda: view.queue.depth if view.queue is not None else 0)
        self._metrics.blocked_groups.set_function(lambda: view.queue.blocked if view.queue is not None else 0)

    def _count(self, state: str) -> int:
        return self._view.groups.counts.get(state, 0)

    def _observe_rare(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._run_started(event)
            case events.ClusterReady():
                self._metrics.cluster.info({"weight_transfer": event.weight_transfer})
                warm_start = self._view.warm_start or event
                self._metrics.warm_start_seconds.set(warm_start.warm_start_seconds)
                self._record_progress("start", event.time)
            case events.GroupFiltered():
                self._metrics.filtered_groups.labels(event.reason).inc()
            case events.SamplesRemoved():
                self._metrics.removed_samples.inc(event.samples)
                self._count_tokens(REMOVED)
            case events.RunEnded():
                self._count_tokens(LEFTOVER)
                self._metrics.training.set(0)
            case events.AgentSessionExpired():
                self._metrics.expired_agent_sessions.inc()
            case events.DataSkipped():
                self._metrics.skipped_data.labels(event.reason).inc()
            case events.CheckpointWritten():
                self._saved = event.rollout
                self._metrics.last_checkpoint_timestamp.set(event.time)
            case events.LearnerRestored():
                self._saved = event.rollout
                self._metrics.rollout.set(event.rollout + 1)
            case events.DeadLettered():
                self._metrics.dead_letters.inc()
            case events.DeadLettersUnwritten():
                self._metrics.unwritten_dead_letters.set(event.letters)
            case events.WriteFailed():
                self._metrics.write_failures.labels(event.then).inc()
            case events.RouterChanged():
                self._metrics.router_up.set(event.up)
                self._metrics.router_engines.labels("healthy").set(event.healthy)
                self._metrics.router_engines.labels("unhealthy").set(event.engines - event.healthy)
            case events.CollapseRiskChanged():
                self._metrics.collapse_risk.set(event.high)
            case events.EvaluationSkipped():
                self._metrics.skipped_evaluations.inc()
            case events.Stalled():
                self._metrics.stalls.inc()

    def tick(self, now: float) -> None:
        """Update the metrics that grow with time alone to `now` (wall-clock seconds)."""
        view, progress = self._view, self._view.progress
        idle = progress.idle_seconds + max(0.0, now - progress.time) if progress is not None else 0.0
        self._metrics.since_progress_seconds.set(idle)
        self._increase_to(self._metrics.learner_idle_seconds, view.learner_idle_seconds(now))
        self._increase_to(self._metrics.engine_idle_seconds, view.engine_idle_seconds(now))
        for process, restarts in view.uptime.restarts.items():
            self._increase_to(self._metrics.restarts.labels(process), restarts)
        self._increase_to(self._metrics.undone_batches, view.steps.undone.batches)
        self._metrics.driver_replaced.set(view.lost_driver_replaced or math.nan)
        self._metrics.unsaved_batches.set(self._unsaved_batches())
        self._metrics.eta_seconds.set(self._eta_seconds())
        busy = view.engine_use.last
        pulse = view.last(events.Pulse) if view.past == -math.inf and not view.uptime.interrupted else None
        cause = idle_cause(pulse, view.engines.routed, publishing=view.publishes.running is not None)
        for each in IdleCause:
            self._metrics.engines_idle.labels(each).set(cause is each and (busy is None or not busy.in_flight))
        verdict = view.finding.verdict
        for kind in Bottleneck:
            self._metrics.verdict.labels(kind).set(kind is verdict)
        for doing, seconds in view.learner.seconds.items():
            self._increase_to(self._metrics.trainer_seconds.labels(doing), seconds)

    def watch_disks(self, folders: Mapping[str, Path]) -> None:
        """Serve the free space of the disks with these folders, by name; it is read at each scrape."""
        self._metrics.disk_free.clear()
        for name, folder in folders.items():
            self._metrics.disk_free.labels(name).set_function(partial(_free_bytes, folder))

    def _unsaved_batches(self) -> int:
        batches, steps = self._view.steps.batches, self._view.steps
        return batches if self._saved is None else min(batches, max(0, steps.next_rollout - self._saved - 1))

    def _eta_seconds(self) -> float:
        view = self._view
        if view.run is None or view.steps.last is None or not view.steps.kept.batches:
            return math.nan
        seconds = view.uptime.training_seconds(view.steps.last.time)
        return max(0, view.run.rollouts - view.steps.next_rollout) * seconds / view.steps.kept.batches

    def _increase_to(self, counter: Counter, total: float) -> None:
        # Events arrive slightly late, so a tick may count idle seconds that a later event shows to have been busy. A
        # counter must never decrease, so it keeps its value until the true total has caught up.
        if counter not in self._counted:
            [(_, [self._counted[counter]])] = series_of(counter)
        if total > self._counted[counter]:
            counter.inc(total - self._counted[counter])
            self._counted[counter] = total

    def _count_blocked(self, cause: str, still_waiting: float) -> None:
        total = self._view.blocked_seconds[cause] + still_waiting
        self._increase_to(self._metrics.admission_blocked_seconds.labels(cause), total)

    def _record_progress(self, what: str, now: float) -> None:
        self._metrics.last_progress_timestamp.labels(what).set(now)

    def _run_started(self, event: events.RunStarted) -> None:
        self._forget_processes()
        self._metrics.run.info({"run": event.run, "entry": event.entry})
        self._metrics.queue_capacity.set(event.queue_capacity)
        self._metrics.window.set(event.window)
        self._metrics.save_interval.set(event.save_interval or math.nan)
        if event.slots is not None:
            self._metrics.slots.set(event.slots)
        if event.staleness_limit is not None:
            self._metrics.staleness_limit.set(event.staleness_limit)

    def _forget_processes(self) -> None:
        """Forget the state of the processes that an earlier driver of this run has started."""
        self._metrics.training.set(0)
        self._metrics.router_up.set(math.nan)
        for past in (self._metrics.head_age_seconds, self._metrics.oldest_request_seconds):
            past.set(0)
        for of_processes in (
            self._metrics.router_engines,
            self._metrics.engine_routed,
            self._metrics.engine_version,
            self._metrics.process_silent_seconds,
        ):
            of_processes.clear()
        self._lost.clear()

    def _group_moved(self, event: events.GroupMoved) -> None:
        groups = self._view.groups
        self._show_adapter(event.adapter)
        if event.dataset and (event.after in ENDED or event.before in ENDED):
            self._count_groups_of_datasets()
        if event.after == GroupState.QUEUED:
            self._observe_age("queued", groups.live.get(event.sequence), event.time)
            self._record_progress("queued", event.time)
        elif event.after in ENDED:
            self._metrics.ended_groups.labels(event.after, event.reason or "").inc()
            if event.reason == DropReason.STALE:
                self._metrics.recycled_groups.inc()
                self._observe_age("recycled", groups.ended, event.time)
            if event.reason is not None:
                self._count_tokens(event.reason)

    def _show_adapter(self, name: str) -> None:
        """Show what an adapter has got so far. Does nothing unless the run trains several."""
        if not name:
            return
        adapter, metrics = self._view.adapters.known[name], self._metrics
        metrics.adapter_version.labels(name).set(adapter.version)
        metrics.adapter_reward.labels(name).set(adapter.reward or 0.0)
        metrics.adapter_trained.labels(name).set(adapter.trained)
        metrics.adapter_staleness.labels(name).set(adapter.age or 0.0)
        metrics.adapter_queue.labels(name).set(adapter.queue)
        for each in self._view.adapters.known:
            metrics.adapter_share.labels(each).set(self._view.adapters.share(each))

    def _count_groups_of_datasets(self) -> None:
        datasets = self._view.datasets
        for name, dataset in datasets.known.items():
            self._metrics.dataset_trained.labels(name).set(dataset.trained)
            self._metrics.dataset_filtered.labels(name).set(dataset.filtered)
            self._metrics.dataset_share.labels(name).set(datasets.share(name))

    def _observe_age(self, which: str, group: Group | None, now: float) -> None:
        if group is not None and group.generated is not None:
            versions, seconds = self._view.staleness.age(group.generated, now)
            self._metrics.staleness_versions.labels(which).observe(versions)
            self._metrics.staleness_seconds.labels(which).observe(seconds)

    def _count_tokens(self, wasted_for: str | None = None) -> None:
        tokens = self._view.tokens
        self._increase_to(self._metrics.generated_tokens, tokens.generated)
        if wasted_for is not None and tokens.by_reason[wasted_for]:
            self._increase_to(self._metrics.wasted_tokens.labels(wasted_for), tokens.by_reason[wasted_for])

    def _group_generated(self, event: events.GroupGenerated) -> None:
        self._count_tokens()
        self._metrics.generation_seconds.observe(event.generation_seconds)
        self._metrics.reward_seconds.observe(event.reward_seconds)
        self._metrics.group_reward.observe(event.reward)
        self._metrics.group_response_tokens.observe(event.response_tokens)
        self._metrics.reused_tokens.inc(event.reused_tokens)
        self._metrics.key_age_versions.observe(event.key_age)
        samples = self._view.run.samples_per_group if self._view.run is not None else 1
        self._metrics.generated_samples.inc(samples - event.missing)
        self._metrics.truncated_samples.inc(event.truncated)
        self._metrics.left_out_samples.inc(event.missing)
        self._metrics.unfinished_rewards.inc(event.unfinished_rewards)
        self._show_adapter(event.adapter)
        if event.dataset:
            dataset = self._view.datasets.known[event.dataset]
            self._metrics.dataset_reward.labels(event.dataset).set(dataset.reward or 0.0)
            self._metrics.dataset_epochs.labels(event.dataset).set(dataset.epochs)

    def _pulse(self, event: events.Pulse) -> None:
        self._metrics.head_age_seconds.set(event.head_seconds)
        self._metrics.no_progress_warn_seconds.set(event.warn_seconds or math.nan)
        self._metrics.slow_group_seconds.set(event.slow_group_seconds or math.nan)
        self._metrics.oldest_request_seconds.set(event.oldest_seconds)
        self._metrics.rewarding_groups.set(event.rewarding)
        self._metrics.live_version.set(event.live_version)
        self._metrics.trainer_version.set(event.trainer_version)
        self._metrics.adapter_requests.clear()
        for version, requests in event.adapters.items():
            self._metrics.adapter_requests.labels(version).set(requests)
        if event.waits_for is not None:
            self._count_blocked(event.waits_for, event.waits_seconds)

    def _step_started(self, event: events.StepStarted) -> None:
        self._count_tokens(DropReason.ABORTED)
        self._show_adapter(event.adapter)
        if not event.adapter:
            self._metrics.trainer_version.set(event.version)
        if event.time >= self._view.past:
            self._metrics.training.set(1)
        staleness, live = self._view.staleness, self._view.groups.live
        for sequence, versions in zip(event.groups, event.staleness, strict=True):
            self._metrics.staleness_versions.labels("trained").observe(versions)
            if (group := live.get(sequence)) is None or group.generated is None:
                continue
            self._metrics.staleness_seconds.labels("trained").observe(event.time - group.generated.started)
            for name, part_versions, seconds in staleness.parts(group.generated, event):
                self._metrics.staleness_part_versions.labels(name).observe(part_versions)
                self._metrics.staleness_part_seconds.labels(name).observe(seconds)

    def _step_ended(self, event: events.StepEnded) -> None:
        self._metrics.step_seconds.observe(event.seconds)
        self._metrics.step_tokens.inc(event.tokens)
        self._metrics.step_reward.set(event.reward)
        self._metrics.step_response_tokens.set(event.response_length)
        self._metrics.rollout.set(event.rollout + 1)
        if not event.finite:
            self._metrics.nonfinite_steps.inc()
        for name, value in event.metrics.items():
            self._metrics.step_metric.labels(name).set(value)
        self._record_progress("step", event.time)

    def _publish_ended(self, event: events.PublishEnded) -> None:
        self._metrics.publishes.labels("live" if event.live else "failed").inc()
        phases = {"staged": event.staged_seconds, "paused": event.paused_seconds, **event.pause}
        for phase, seconds in phases.items():
            self._metrics.publish_seconds.labels(phase).observe(seconds)
        self._metrics.publish_bytes.inc(event.bytes)
        if event.live:
            self._metrics.live_version.set(event.version)
            self._show_adapter(event.adapter)
            for engine in self._view.engines.routed:
                self._metrics.engine_version.labels(engine).set(event.version)
            self._record_progress("publish", event.time)

    def _engine_changed(self, event: events.EngineChanged) -> None:
        self._metrics.engine_changes.labels(event.engine, event.state).inc()
        if event.state == "lost":
            self._lost.add(event.engine)
            # A series that is no longer updated would look like an engine that hangs, so it is removed.
            self._metrics.engine_routed.remove(event.engine)
            self._metrics.engine_version.remove(event.engine)
            self._metrics.process_silent_seconds.remove(event.engine)
            return
        self._lost.discard(event.engine)
        self._metrics.engine_routed.labels(event.engine).set(event.state == "routed")
        if event.version is not None:
            self._metrics.engine_version.labels(event.engine).set(event.version)

    def _evaluated(self, event: events.Evaluated) -> None:
        self._metrics.eval_accuracy.labels(event.name).set(event.accuracy)
        self._metrics.eval_reward.labels(event.name).set(event.reward)
        self._metrics.eval_truncated.labels(event.name).set(event.truncated)
        self._metrics.eval_missing.labels(event.name).set(event.missing)
        oldest, newest = event.versions
        self._metrics.eval_oldest_version.labels(event.name).set(oldest)
        self._metrics.eval_newest_version.labels(event.name).set(newest)
        self._record_progress("evaluation", event.time)


def _free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk with `folder`; NaN if they cannot be read."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return math.nan

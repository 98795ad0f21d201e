"""Updates the Prometheus metrics of a run.

What the view knows is shown at each scrape: almost all gauges, and counters of what the view counts. All other metrics
change with every event, not once per step. The driver serves them, which is neither the learner nor the rollout worker,
so the metrics stay available while one of these hangs.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.registry import Collector

from miles_async import events
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.metrics.instruments import Instruments, Values, series_of
from miles_async.observability.state.engines import IdleCause, idle_cause
from miles_async.observability.state.groups import ENDED, Group
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import LIVE, GroupState
from miles_async.types import DropReason


class MetricsRecorder(Collector):
    """Keeps the metrics of a run up to date.

    Pass every event that the view has applied to `observe`, and the time to `tick` once a second.
    """

    def __init__(self, registry: CollectorRegistry, view: RunView) -> None:
        registry.register(self)  # first, so that `collect` is called before the counters are read
        self._metrics = Instruments(registry)
        self._view = view
        self._now = 0.0
        self._counted: dict[Counter, float] = {}
        """The value of each counter that `_increase_to` has increased."""

    def values(self) -> Values:
        """Return what `restore` takes."""
        return self._metrics.values()

    def restore(self, values: Values) -> None:
        """Continue the metrics of another recorder. Call it before any other method."""
        self._metrics.restore(values)

    def tick(self, now: float) -> None:
        """Note the time, in wall-clock seconds, for the metrics that grow without events."""
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Show what the view knows. The registry calls this at the beginning of each scrape."""
        with self._view.lock:
            self._show_run()
            self._show_groups()
            self._show_processes()
            self._show_steps()
            self._show_parts()
            self._count()
        return ()

    def _show_run(self) -> None:
        view, metrics = self._view, self._metrics
        if (run := view.last(events.RunStarted)) is not None:
            metrics.queue_capacity.set(run.queue_capacity)
            metrics.window.set(run.window)
            metrics.save_interval.set(run.save_interval or math.nan)
            metrics.slots.set(math.nan if run.slots is None else run.slots)
            metrics.staleness_limit.set(math.nan if run.staleness_limit is None else run.staleness_limit)
        if view.warm_start is not None:
            metrics.warm_start_seconds.set(view.warm_start.warm_start_seconds)
        progress = view.progress
        idle = progress.idle_seconds + max(0.0, self._now - progress.time) if progress is not None else 0.0
        metrics.since_progress_seconds.set(idle)
        metrics.driver_replaced.set(view.lost_driver_replaced or math.nan)
        metrics.training.set(view.present(events.StepStarted) is not None and view.ended is None)
        verdict = view.finding.verdict
        metrics.verdict.show({kind: kind is verdict for kind in Bottleneck})
        if (risk := view.last(events.CollapseRiskChanged)) is not None:
            metrics.collapse_risk.set(risk.high)

    def _show_groups(self) -> None:
        counts, queue, metrics = self._view.groups.counts, self._view.queue, self._metrics
        metrics.groups_by_state.show({state: counts.get(state, 0) for state in LIVE})
        metrics.in_flight_groups.set(counts.get(GroupState.IN_FLIGHT, 0))
        metrics.held_slots.set(sum(counts.values()))
        metrics.queue_depth.set(queue.depth if queue is not None else 0)
        metrics.blocked_groups.set(queue.blocked if queue is not None else 0)
        if (unwritten := self._view.last(events.DeadLettersUnwritten)) is not None:
            metrics.unwritten_dead_letters.set(unwritten.letters)

    def _show_processes(self) -> None:
        view, metrics = self._view, self._metrics
        pulse, busy = view.present(events.Pulse), view.present(events.EngineBusy)
        router = view.present(events.RouterChanged)
        metrics.head_age_seconds.set(pulse.head_seconds if pulse else 0.0)
        metrics.oldest_request_seconds.set(pulse.oldest_seconds if pulse else 0.0)
        metrics.rewarding_groups.set(pulse.rewarding if pulse else 0)
        metrics.no_progress_warn_seconds.set((pulse.warn_seconds if pulse else 0.0) or math.nan)
        metrics.slow_group_seconds.set((pulse.slow_group_seconds if pulse else 0.0) or math.nan)
        metrics.adapter_requests.show(pulse.adapters if pulse else {})
        metrics.in_flight_requests.set(busy.in_flight if busy else 0)
        metrics.router_up.set(router.up if router else math.nan)
        health = {"healthy": router.healthy, "unhealthy": router.engines - router.healthy} if router else {}
        metrics.router_engines.show(health)
        known, routed = view.engines.versions, view.engines.routed
        metrics.engine_version.show({name: version for name, version in known.items() if version is not None})
        metrics.engine_routed.show({name: name in routed for name in known})
        reported = view.engine_use.last
        idle = reported is None or not reported.in_flight
        publishing = view.publishes.running is not None
        cause = idle_cause(None if view.uptime.interrupted else pulse, routed, publishing=publishing)
        metrics.engines_idle.show({each: idle and cause is each for each in IdleCause})

    def _show_steps(self) -> None:
        view, metrics = self._view, self._metrics
        steps = view.steps
        if steps.last is not None:
            metrics.step_reward.set(steps.last.reward)
            metrics.step_response_tokens.set(steps.last.response_length)
        metrics.rollout.set(steps.next_rollout)
        metrics.unsaved_batches.set(steps.unsaved_batches)
        if (written := view.last(events.CheckpointWritten)) is not None:
            metrics.last_checkpoint_timestamp.set(written.time)
        remaining = math.nan
        if view.run is not None and steps.last is not None and steps.kept.batches:
            seconds = view.uptime.training_seconds(steps.last.time) / steps.kept.batches
            remaining = max(0, view.run.rollouts - steps.next_rollout) * seconds
        metrics.eta_seconds.set(remaining)

    def _show_parts(self) -> None:
        """Show the adapters, data sets and evaluations."""
        metrics, adapters, datasets = self._metrics, self._view.adapters, self._view.datasets
        metrics.adapter_version.show({name: one.version for name, one in adapters.known.items()})
        metrics.adapter_reward.show({name: one.reward or 0.0 for name, one in adapters.known.items()})
        metrics.adapter_trained.show({name: one.trained for name, one in adapters.known.items()})
        metrics.adapter_share.show({name: adapters.share(name) for name in adapters.known})
        metrics.adapter_staleness.show({name: one.age or 0.0 for name, one in adapters.known.items()})
        metrics.adapter_queue.show({name: one.queue for name, one in adapters.known.items()})
        metrics.dataset_reward.show({name: one.reward or 0.0 for name, one in datasets.known.items()})
        metrics.dataset_trained.show({name: one.trained for name, one in datasets.known.items()})
        metrics.dataset_filtered.show({name: one.filtered for name, one in datasets.known.items()})
        metrics.dataset_share.show({name: datasets.share(name) for name in datasets.known})
        metrics.dataset_epochs.show({name: one.epochs for name, one in datasets.known.items()})
        last = {name: newest for name, (*_, newest) in self._view.evaluations.items()}
        metrics.eval_accuracy.show({name: one.accuracy for name, one in last.items()})
        metrics.eval_reward.show({name: one.reward for name, one in last.items()})
        metrics.eval_truncated.show({name: one.truncated for name, one in last.items()})
        metrics.eval_missing.show({name: one.missing for name, one in last.items()})
        metrics.eval_oldest_version.show({name: one.versions[0] for name, one in last.items()})
        metrics.eval_newest_version.show({name: one.versions[1] for name, one in last.items()})

    def _count(self) -> None:
        """Increase the counters of what the view counts."""
        view, metrics = self._view, self._metrics
        self._increase_to(metrics.generated_tokens, view.tokens.generated)
        self._increase_to(metrics.learner_idle_seconds, view.learner_idle_seconds(self._now))
        self._increase_to(metrics.engine_idle_seconds, view.engine_idle_seconds(self._now))
        self._increase_to(metrics.undone_batches, view.steps.undone.batches)
        counted: dict[Counter, Mapping[str, float]] = {
            metrics.wasted_tokens: view.tokens.by_reason,
            metrics.restarts: view.uptime.restarts,
            metrics.trainer_seconds: view.learner.seconds,
            metrics.admission_blocked_seconds: view.blocked_until_now(),
        }
        for counter, totals in counted.items():
            for label, total in totals.items():
                self._increase_to(counter.labels(label), total)

    def observe(self, event: events.Event) -> None:
        match event:
            case events.GroupMoved():
                self._group_moved(event)
            case events.GroupGenerated():
                self._group_generated(event)
            case events.Pulse() if self._view.present(events.Pulse) is event:
                self._metrics.live_version.set(event.live_version)
                self._metrics.trainer_version.set(event.trainer_version)
            case events.LoopLag():
                self._metrics.loop_lag_seconds.observe(event.seconds)
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
            case events.EngineChanged() if self._view.present(events.EngineChanged) is event:
                self._metrics.engine_changes.labels(event.engine, event.state).inc()
                if event.state == "lost":
                    # A series that is no longer updated would look like an engine that hangs, so it is removed.
                    self._metrics.process_silent_seconds.remove(event.engine)
            case events.ProcessSilent():
                # When an engine is removed, one last event reports that it is no longer silent. This event must not
                # create the series of the engine again.
                engine = self._view.engines.known.get(event.process)
                if event.seconds or engine is None or engine.state != "lost":
                    self._metrics.process_silent_seconds.labels(event.process).set(event.seconds)
            case events.Evaluated():
                self._record_progress("evaluation", event.time)
            case _:
                self._observe_rare(event)

    def _observe_rare(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._metrics.run.info({"run": event.run, "entry": event.entry})
                self._metrics.process_silent_seconds.clear()
            case events.ClusterReady():
                self._metrics.cluster.info({"weight_transfer": event.weight_transfer})
                self._record_progress("start", event.time)
            case events.GroupFiltered():
                self._metrics.filtered_groups.labels(event.reason).inc()
            case events.SamplesRemoved():
                self._metrics.removed_samples.inc(event.samples)
            case events.AgentSessionExpired():
                self._metrics.expired_agent_sessions.inc()
            case events.DataSkipped():
                self._metrics.skipped_data.labels(event.reason).inc()
            case events.DeadLettered():
                self._metrics.dead_letters.inc()
            case events.WriteFailed():
                self._metrics.write_failures.labels(event.then).inc()
            case events.EvaluationSkipped():
                self._metrics.skipped_evaluations.inc()
            case events.Stalled():
                self._metrics.stalls.inc()

    def watch_disks(self, folders: Mapping[str, Path]) -> None:
        """Serve the free space of the disks with these folders, by name; it is read at each scrape."""
        self._metrics.disk_free.clear()
        for name, folder in folders.items():
            self._metrics.disk_free.labels(name).set_function(partial(_free_bytes, folder))

    def _increase_to(self, counter: Counter, total: float) -> None:
        # Events arrive slightly late, so a scrape may count idle seconds that a later event shows to have been busy. A
        # counter must never decrease, so it keeps its value until the true total has caught up.
        if counter not in self._counted:
            [(_, [self._counted[counter]])] = series_of(counter)
        if total > self._counted[counter]:
            counter.inc(total - self._counted[counter])
            self._counted[counter] = total

    def _record_progress(self, what: str, now: float) -> None:
        self._metrics.last_progress_timestamp.labels(what).set(now)

    def _group_moved(self, event: events.GroupMoved) -> None:
        groups = self._view.groups
        if event.after == GroupState.QUEUED:
            self._observe_age("queued", groups.live.get(event.sequence), event.time)
            self._record_progress("queued", event.time)
        elif event.after in ENDED:
            self._metrics.ended_groups.labels(event.after, event.reason or "").inc()
            if event.reason == DropReason.STALE:
                self._metrics.recycled_groups.inc()
                self._observe_age("recycled", groups.ended, event.time)

    def _observe_age(self, which: str, group: Group | None, now: float) -> None:
        if group is not None and group.generated is not None:
            versions, seconds = self._view.staleness.age(group.generated, now)
            self._metrics.staleness_versions.labels(which).observe(versions)
            self._metrics.staleness_seconds.labels(which).observe(seconds)

    def _group_generated(self, event: events.GroupGenerated) -> None:
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

    def _step_started(self, event: events.StepStarted) -> None:
        if not event.adapter:
            self._metrics.trainer_version.set(event.version)
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
            self._record_progress("publish", event.time)


def _free_bytes(folder: Path) -> float:
    """Return the free bytes of the disk with `folder`; NaN if they cannot be read."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return math.nan

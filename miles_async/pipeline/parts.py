"""Composes the parts of one run from its configuration and its ports."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.pipeline.attempt import Attempts
from miles_async.pipeline.checkpoint import Checkpointer
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.devices import SharedDevices
from miles_async.pipeline.evaluate import Evaluator
from miles_async.pipeline.grading import Grading
from miles_async.pipeline.held_prompts import HeldPrompts
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.monitor import RunMonitor, follow_engine_load, follow_learner_work
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.publish import Publisher
from miles_async.pipeline.repair import EngineChecks, Repair
from miles_async.pipeline.restore import Restorer
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_ports import Ports
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.sample_display import SampleDisplay
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.pipeline.training import Training
from miles_async.scheduling.admission import Admission
from miles_async.scheduling.bounds import Bounds, Schedule, StalenessGate
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.window import HeadAction, HeadPolicy

FIRST_ATTEMPTS = 32
"""A run ends if all of its first attempts at a group fail: these many, and at least those of two batches."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """The objects that make up a run. `Service` decides when they work."""

    tasks: TaskSupervisor
    run_state: RunState
    lifecycle: GroupLifecycle
    admission: Admission
    producer: Producer
    collector: BatchCollector
    held: HeldPrompts
    training: Training
    devices: SharedDevices
    publisher: Publisher
    repair: Repair
    watchers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    """The loops of `monitor.py` by name."""
    checkpointer: Checkpointer
    evaluator: Evaluator
    source: RolloutSource
    restorer: Restorer


def compose(config: RunConfig, bounds: Bounds, ports: Ports, schedule: Schedule) -> Parts:
    """Build the parts of one run. None of them does anything yet."""
    tasks, run_state = TaskSupervisor(), RunState(ports.clock, ports.journal, list(config.data.adapter_weights))
    lifecycle = GroupLifecycle(
        run_state,
        ports.data,
        ports.dead_letters,
        max_attempts=config.rollout.max_attempts,
        first_attempts=max(FIRST_ATTEMPTS, 2 * config.rollout.rollout_batch_size),
    )
    gate = StalenessGate(config.rollout.max_weight_staleness)
    adaptive = AdaptiveConcurrency(bounds.generation_batch) if config.engine.adaptive_concurrency else None
    engines = EngineChecks(run_state, ports.fleet)
    producer = _producer(config, bounds, ports, run_state, lifecycle, tasks, engines)
    admission = Admission(
        max_in_flight=bounds.generation_batch, room=bounds.room, slots=bounds.slots, adaptive=adaptive
    )
    collector = BatchCollector(
        run_state=run_state, lifecycle=lifecycle, producer=producer, gate=gate, admission=admission
    )
    held = HeldPrompts(
        run_state,
        lifecycle,
        ports.data,
        skip=producer.skip,
        samples_per_group=config.rollout.n_samples_per_prompt,
        limit=bounds.held,
        keeps_groups=ports.keeps_groups,
    )
    devices = SharedDevices(ports.learner, ports.fleet, colocated=config.cluster.colocate)
    publisher = Publisher(
        run_state=run_state,
        lifecycle=lifecycle,
        tasks=tasks,
        channel=ports.channel,
        fleet=ports.fleet,
        pause_mode=config.weights.engine_pause,
        adapters=ports.adapters,
        colocated=config.cluster.colocate,
        queue_depth=lambda: producer.queued,
        on_live=collector.sweep_queue,
    )
    evaluator = Evaluator(
        run_state,
        ports.rewarder,
        ports.eval_sets,
        lambda: ports.fleet.serving() and not lifecycle.quarantine.has_engines_alone,
        max_attempts=config.rollout.max_attempts,
    )
    monitor = RunMonitor(
        run_state=run_state,
        lifecycle=lifecycle,
        producer=producer,
        collector=collector,
        held=held,
        generator=ports.generator,
        config=config,
        processors=ports.processors,
        adapters=ports.adapters,
    )
    training = Training(run_state, lifecycle, ports.learner, ports.dead_letters, gate, config)

    def may_answer() -> bool:
        """Whether the engines may be answering requests of this run."""
        return bool(producer.attempts.at_engines_since or ports.generator.in_flight or held.taken)

    return Parts(
        tasks=tasks,
        run_state=run_state,
        lifecycle=lifecycle,
        admission=admission,
        producer=producer,
        collector=collector,
        held=held,
        training=training,
        devices=devices,
        publisher=publisher,
        repair=Repair(
            run_state=run_state,
            tasks=tasks,
            fleet=ports.fleet,
            checks=engines,
            publisher=publisher,
            interval_seconds=config.engine.engine_health_interval_seconds,
            devices=devices.engine_start(),
        ),
        watchers={
            "monitor": monitor.run,
            "work": partial(follow_learner_work, run_state, ports.learner),
            "load": partial(
                follow_engine_load,
                run_state,
                lifecycle.ledger,
                ports.fleet,
                may_answer,
                config.engine.sglang_router_request_timeout_secs,
                adaptive,
            ),
        },
        checkpointer=Checkpointer(
            run_state=run_state,
            lifecycle=lifecycle,
            snapshot=held.snapshot,
            learner=ports.learner,
            tasks=tasks,
            asynchronous=config.learner.async_save,
        ),
        evaluator=evaluator,
        source=RolloutSource(
            data=ports.data,
            run_state=run_state,
            held=held,
            collector=collector,
            evaluator=evaluator,
            schedule=schedule,
        ),
        restorer=Restorer(
            run_state,
            lifecycle,
            producer,
            training,
            ports,
            trains_off_lineage=config.rollout.off_lineage == "train",
        ),
    )


def _producer(
    config: RunConfig,
    bounds: Bounds,
    ports: Ports,
    run_state: RunState,
    lifecycle: GroupLifecycle,
    tasks: TaskSupervisor,
    engines: EngineChecks,
) -> Producer:
    head_policy = HeadPolicy(config.rollout.head_deadline_seconds, HeadAction(config.rollout.head_deadline_action))
    attempts = Attempts(
        run_state=run_state,
        lifecycle=lifecycle,
        tasks=tasks,
        generator=ports.generator,
        engines=engines,
        grading=Grading(
            run_state,
            ports.rewarder,
            ports.dynamic_filter,
            ports.limits,
            min_samples=config.rollout.smallest_group,
            max_attempts=config.rollout.max_attempts,
        ),
        head_policy=head_policy,
        partial_rollout=config.rollout.partial_rollout,
        sample_display=SampleDisplay(
            ports.clock, ports.journal, config.observability.sample_interval_seconds, ports.text_of
        ),
    )
    return Producer(
        run_state=run_state,
        lifecycle=lifecycle,
        tasks=tasks,
        attempts=attempts,
        engines=engines,
        head_policy=head_policy,
        window_size=bounds.window,
        queue_capacity=config.rollout.queue_capacity,
        weights=config.data.adapter_weights,
    )

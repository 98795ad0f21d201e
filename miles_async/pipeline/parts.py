"""Composes the parts of one run from its configuration and its ports."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
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


class Parts:
    """The objects that make up a run. `Service` decides when they work."""

    def __init__(self, config: RunConfig, bounds: Bounds, ports: Ports, schedule: Schedule) -> None:
        self._config, self._bounds, self._ports = config, bounds, ports
        self.tasks = TaskSupervisor()
        self.run_state = RunState(ports.clock, ports.journal, list(config.data.adapter_weights))
        self.lifecycle = GroupLifecycle(
            self.run_state,
            ports.data,
            ports.dead_letters,
            max_attempts=config.rollout.max_attempts,
            first_attempts=max(FIRST_ATTEMPTS, 2 * config.rollout.rollout_batch_size),
        )
        self._engines = EngineChecks(self.run_state, ports.fleet)
        self.producer = self._create_producer()
        adaptive = AdaptiveConcurrency(bounds.in_flight) if config.engine.adaptive_concurrency else None
        self.admission = Admission(
            max_in_flight=bounds.in_flight, room=bounds.room, slots=bounds.slots, adaptive=adaptive
        )
        gate = StalenessGate(config.rollout.max_weight_staleness)
        self.collector = BatchCollector(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            producer=self.producer,
            gate=gate,
            admission=self.admission,
        )
        self.held = HeldPrompts(
            self.run_state,
            self.lifecycle,
            ports.data,
            skip=self.producer.skip,
            samples_per_group=config.rollout.n_samples_per_prompt,
            limit=bounds.held,
            keeps_groups=ports.keeps_groups,
        )
        self.evaluator = Evaluator(
            self.run_state,
            ports.rewarder,
            ports.eval_sets,
            lambda: ports.fleet.serving() and not self.lifecycle.quarantine.has_engines_alone,
            max_attempts=config.rollout.max_attempts,
        )
        self.source = RolloutSource(
            data=ports.data,
            run_state=self.run_state,
            held=self.held,
            collector=self.collector,
            evaluator=self.evaluator,
            schedule=schedule,
        )
        self.training = Training(self.run_state, self.lifecycle, ports.learner, ports.dead_letters, gate, config)
        self.checkpointer = Checkpointer(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            snapshot=self.held.snapshot,
            learner=ports.learner,
            tasks=self.tasks,
            asynchronous=config.learner.async_save,
        )
        self.devices = SharedDevices(ports.learner, ports.fleet, colocated=config.cluster.colocate)
        self.publisher = self._create_publisher()
        self.repair = Repair(
            run_state=self.run_state,
            tasks=self.tasks,
            fleet=ports.fleet,
            checks=self._engines,
            publisher=self.publisher,
            interval_seconds=config.engine.engine_health_interval_seconds,
            devices=self.devices.engine_start(),
        )
        self.restorer = Restorer(
            self.run_state,
            self.lifecycle,
            self.producer,
            self.training,
            ports,
            trains_off_lineage=config.rollout.off_lineage == "train",
        )
        self.watchers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "monitor": self._create_monitor().run,
            "work": partial(follow_learner_work, self.run_state, ports.learner),
            "load": partial(
                follow_engine_load,
                self.run_state,
                self.lifecycle.ledger,
                ports.fleet,
                self._may_answer,
                config.engine.sglang_router_request_timeout_secs,
                adaptive,
            ),
        }
        """The loops of `monitor.py` by name."""

    def _create_producer(self) -> Producer:
        rollout, ports = self._config.rollout, self._ports
        head_policy = HeadPolicy(rollout.head_deadline_seconds, HeadAction(rollout.head_deadline_action))
        attempts = Attempts(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            tasks=self.tasks,
            generator=ports.generator,
            engines=self._engines,
            grading=Grading(
                self.run_state,
                ports.rewarder,
                ports.dynamic_filter,
                ports.limits,
                min_samples=rollout.smallest_group,
                max_attempts=rollout.max_attempts,
            ),
            head_policy=head_policy,
            partial_rollout=rollout.partial_rollout,
            sample_display=SampleDisplay(
                ports.clock, ports.journal, self._config.observability.sample_interval_seconds, ports.text_of
            ),
        )
        return Producer(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            tasks=self.tasks,
            attempts=attempts,
            engines=self._engines,
            head_policy=head_policy,
            window_size=self._bounds.window,
            queue_capacity=rollout.queue_capacity,
            weights=self._config.data.adapter_weights,
        )

    def _create_publisher(self) -> Publisher:
        return Publisher(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            tasks=self.tasks,
            channel=self._ports.channel,
            fleet=self._ports.fleet,
            pause_mode=self._config.weights.engine_pause,
            request_seconds=max(
                self._config.weights.update_weight_timeout_seconds, self._config.engine.engine_health_timeout_seconds
            ),
            adapters=self._ports.adapters,
            colocated=self._config.cluster.colocate,
            queue_depth=lambda: self.producer.queued,
            on_live=self.collector.sweep_queue,
        )

    def _create_monitor(self) -> RunMonitor:
        return RunMonitor(
            run_state=self.run_state,
            lifecycle=self.lifecycle,
            producer=self.producer,
            collector=self.collector,
            held=self.held,
            generator=self._ports.generator,
            config=self._config,
            processors=self._ports.processors,
            adapters=self._ports.adapters,
        )

    def _may_answer(self) -> bool:
        """Whether the engines may be answering requests of this run."""
        # Evaluations have requests of their own, and a user's function may send others.
        return bool(
            self.producer.attempts.at_engines_since
            or self._ports.generator.requests.in_flight
            or self.held.taken
            or self.run_state.evaluates
        )

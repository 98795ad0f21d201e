"""The one fold of a run: everything that is derived from its events and shown to users.

The live page, the report, the metrics, the lines on the terminal, the summary, the verdict and the trace are
projections of a `RunView`: they read it and do not count events again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import inf
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from miles_async import events
from miles_async.observability.diagnosis.throughput import Model
from miles_async.observability.diagnosis.verdict import Bottleneck, Finding, advice, find, what_a_batch_waits_for
from miles_async.observability.state.charts import Charts
from miles_async.observability.state.contributions import Contributions
from miles_async.observability.state.engines import Engines, EngineUse
from miles_async.observability.state.groups import Groups, Seconds
from miles_async.observability.state.learner import LearnerTime, Step, Steps
from miles_async.observability.state.notices import Notices
from miles_async.observability.state.publishes import Publishes
from miles_async.observability.state.samples import SampleLog
from miles_async.observability.state.staleness import Staleness
from miles_async.observability.state.tokens import Tokens
from miles_async.observability.state.uptime import Interruption, Uptime
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

E = TypeVar("E", bound=events.Event)
ADVICE_SECONDS = 20.0
RECENT_PULSES = 40
"""Those of 20 seconds."""
FILTERED_GROUPS = 64
"""Number of recent groups for which the fraction that filters dropped is computed."""


class Queue(NamedTuple):
    depth: int
    """Number of queued groups."""
    blocked: int
    """Number of finished groups outside the window."""


class Idle(NamedTuple):
    """The training phase up to the end of the last step, without interruptions."""

    served_seconds: float
    learner_seconds: float
    """Seconds in which the learner ran no optimizer step."""


class Progress(NamedTuple):
    """What the rollout worker reported last about progress."""

    idle_seconds: float
    """Seconds since the last progress."""
    time: float
    """When it was reported."""


class RunView:
    """Pass every event to `apply`, in order. Memory does not grow with the length of the run.

    One thread applies events. Other threads hold `lock` while they read, so that they see no event half applied.
    """

    def __init__(self, *, recent: bool = True) -> None:
        """`recent` selects whether the charts also keep the last minutes at a finer resolution."""
        self.lock = Lock()
        self.time = 0.0
        """The newest time stamp of an event."""
        self.run: events.RunStarted | None = None
        """The first start of the run. A driver that continues the run emits the event again."""
        self.cluster: events.ClusterReady | None = None
        """The first start of the cluster."""
        self.warm_start: events.ClusterReady | None = None
        """The first start that made the warm-started model; the first start if every one found it in the cache."""
        self.uptime = Uptime()
        self.ended: events.RunEnded | None = None
        self.lost_driver_replaced: float | None = None
        """When the last driver began that continues a run whose driver was lost; None if every driver ended the run."""
        self.past = -inf
        """While a driver that continues the run waits for its rollout worker: when it started. Events with earlier
        times are then late ones of processes that have ended."""
        self.groups = Groups()
        self.datasets, self.adapters = Contributions(), Contributions()
        self.tokens = Tokens()
        self.staleness = Staleness()
        self.queue: Queue | None = None
        self.blocked_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds in which admission was blocked, by cause, without the time for which it is blocked now."""
        self.steps = Steps()
        self.idle: Idle | None = None
        """None before the first step has ended."""
        self.learner = LearnerTime()
        self.verdict_seconds: dict[Bottleneck, float] = {}
        """Seconds for which each verdict has held since the first batch was requested, without interruptions."""
        self.engines = Engines()
        self.engine_use = EngineUse()
        self.publishes = Publishes()
        self.progress: Progress | None = None
        self.silent: dict[str, float] = {}
        """Processes that do not answer, and for how many seconds."""
        self.evaluations: dict[str, list[events.Evaluated]] = {}
        """First and last evaluation, by data set."""
        self.before_training: events.Evaluated | None = None
        """The last evaluation of the first data set before training, and after some training."""
        self.after_training: events.Evaluated | None = None
        self.collapse: events.CollapseRiskChanged | None = None
        """The first announcement of a collapse."""
        self.notices = Notices()
        self.samples = SampleLog()
        self.charts = Charts(self.groups, recent=recent)
        self._last: dict[type[events.Event], events.Event] = {}
        self._present: dict[type[events.Event], events.Event] = {}
        """The last event of each type that is not a late one of a process that has ended."""
        self._filtered: deque[bool] = deque(maxlen=FILTERED_GROUPS)
        """For each of the last generated groups, whether a filter dropped it."""
        self._advised = 0.0, "", ""
        """When there was advice last, for which setting, and the advice."""
        self._processors: deque[float] = deque(maxlen=RECENT_PULSES)
        """The use of the processors in the last pulses."""

    def __getstate__(self) -> dict[str, Any]:
        """Return all that was derived, for a snapshot."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = Lock()

    def last(self, kind: type[E]) -> E | None:
        """Return the last event of a type, and None if there was none."""
        event = self._last.get(kind)
        assert event is None or isinstance(event, kind)
        return event

    def present(self, kind: type[E]) -> E | None:
        """Return the last event of a type that a process of the current driver has sent; None if there was none."""
        event = self._present.get(kind)
        assert event is None or isinstance(event, kind)
        return event

    def apply(self, event: events.Event) -> None:
        with self.lock:
            self.time = max(self.time, event.time)
            self._apply(event)
            self._last[type(event)] = event
            if event.time >= self.past:
                self._present[type(event)] = event
            self.samples.observe(event)
            self.charts.observe(event)
            self.notices.observe(event)

    def _apply(self, event: events.Event) -> None:
        match event:
            case events.GroupMoved():
                self._group_moved(event)
            case events.GroupGenerated():
                self.groups.generate(event)
                self.datasets.observe(event.dataset, event)
                self.adapters.observe(event.adapter, event)
                self.tokens.generate(event)
            case events.QueueChanged():
                self.queue = Queue(event.depth, event.blocked)
            case events.Pulse():
                self._pulse(event)
            case events.EngineBusy():
                self.engine_use.report(event)
            case events.SampleDiscarded():
                self.tokens.discard(event)
            case events.GroupFiltered():
                self.groups.filter(event)
            case events.AdmissionBlocked():
                self.blocked_seconds[event.cause] += event.seconds
            case events.BatchDrained():
                self.queue = Queue(event.depth, self.queue.blocked if self.queue is not None else 0)
            case events.TrainerPhaseChanged():
                self._phase_changed(event)
            case events.StepStarted():
                self._step_started(event)
            case events.StepEnded():
                self._step_ended(event)
            case events.PublishStarted():
                self._account(event.time)
                self.publishes.start(event)
                self.staleness.record_version(event.version, event.time, event.adapter)
            case events.PublishEnded():
                self._account(event.time)
                self.publishes.end(event)
                self.adapters.observe(event.adapter, event)
                self.engines.publish(event)
            case events.ProcessSilent():
                self.silent.pop(event.process, None)
                if event.seconds:
                    self.silent[event.process] = event.seconds
            case events.EngineChanged() if event.time >= self.past:
                self.engines.change(event)
            case events.Evaluated():
                self._evaluated(event)
            case _:
                self._apply_rare(event)

    def _apply_rare(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._run_started(event)
            case events.ClusterReady():
                self.cluster = self.cluster or event
                if self.warm_start is None or (self.warm_start.warm_start_cached and not event.warm_start_cached):
                    self.warm_start = event
                # Starting the cluster may take long, so a lack of progress counts as a stall only from here on.
                self.progress = Progress(0.0, event.time)
            case events.RunContinued():
                self._interrupt(Interruption.ROLLOUT_WORKER)
            case events.CollapseRiskChanged():
                self.collapse = self.collapse or event
            case events.LearnerRestored():
                self._interrupt(Interruption.LEARNER)
                self._undo(self.steps.restore(event))
            case events.CheckpointWritten():
                self.steps.saved = event.rollout
            case events.SamplesRemoved():
                self.tokens.remove(event)
            case events.EventsMissing():
                self.groups.forget()
            case events.RunEnded():
                self.ended = event
                self.tokens.end_run(event.time, self.groups.live.values())
                # A driver that ends before its rollout worker reports says nothing about the learner.
                if not self.uptime.is_of_next_driver(event.time):
                    self._enter_phase(None, event.time)

    def _run_started(self, event: events.RunStarted) -> None:
        if self.run is not None:
            self.uptime.restart_driver(event.time, self.learner.accounted_until)
            if self.ended is None:
                self.lost_driver_replaced = event.time
        # The processes of an earlier driver have ended.
        self.past, self.engines = event.time, Engines()
        self.progress = self.queue = None
        self._present.clear()
        self.silent.clear()
        self.run, self.ended = self.run or event, None
        self.tokens.start_run(event)
        self.engine_use.start_run(event.time)

    def _group_moved(self, event: events.GroupMoved) -> None:
        if event.after == GroupState.DROPPED:
            self.tokens.drop(event, self.groups.live.get(event.sequence))
        if event.after == GroupState.FINISHED or event.reason == DropReason.FILTERED:
            self._filtered.append(event.reason == DropReason.FILTERED)
        self.groups.move(event)
        self.datasets.observe(event.dataset, event)
        self.adapters.observe(event.adapter, event)

    def _pulse(self, event: events.Pulse) -> None:
        self._account(event.time)
        self.queue = Queue(event.queue, event.blocked)
        if event.time >= self.past:
            self.past = -inf  # from now on, earlier times mean that the clock was set
            self.progress = Progress(event.idle_seconds, event.time)
        self._processors.append(event.processors)
        self.staleness.record_version(event.trainer_version, event.time)
        if event.generating:
            self.tokens.generating_at(event.time)

    def _enter_phase(self, phase: str | None, time: float) -> None:
        self._account(time)
        self.learner.phase = phase

    def _phase_changed(self, event: events.TrainerPhaseChanged) -> None:
        self._account(event.time)
        if self.uptime.interrupted:
            self.charts.interrupt(self.uptime.resume(event.time), event.time)
            self.engine_use.resume(event.time)
        self.learner.phase = event.to

    def _step_started(self, event: events.StepStarted) -> None:
        self._enter_phase("step", event.time)
        self.tokens.start_step(event.time)
        self._undo(self.steps.start(event))
        self.uptime.start_training(event.time)
        self.engine_use.start_step(event.time)
        self.staleness.record_version(event.version, event.time, event.adapter)
        self.adapters.observe(event.adapter, event)

    def _step_ended(self, event: events.StepEnded) -> None:
        self.learner.end_step(event.time)
        started = self.last(events.StepStarted)
        step = self.steps.end(event, started.staleness if started is not None else ())
        self.engine_use.end_step(event.time)
        self.staleness.count(step)
        self.uptime.start_training(event.started)  # if the start is not known
        self.idle = Idle(self.uptime.training_seconds(event.time), self.learner_idle_seconds(event.time))

    def _undo(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.staleness.undo(step)
            self.charts.undo(step)

    def _interrupt(self, cause: Interruption) -> None:
        """The rollout worker was lost, and its last report has arrived. What follows is of another one."""
        last_report = self.learner.accounted_until
        if not last_report:
            return  # an earlier run is continued as this one
        if not self.uptime.interrupted:
            self.engine_use.interrupt()
        self.uptime.interrupt(last_report, cause)
        self.steps.interrupt(last_report)
        self.learner.interrupt()
        self.publishes.running = None

    def _evaluated(self, event: events.Evaluated) -> None:
        self.evaluations[event.name] = [*self.evaluations.get(event.name, [])[:1], event]
        if event.name != next(iter(self.evaluations)):
            return
        if event.rollout < 0:
            self.before_training = event
        else:
            self.after_training = event

    def _account(self, now: float) -> None:
        """Assign the time since the previous report to what the learner did in it, and to the verdict on it.

        `now` is the time of a report of the rollout worker, or the end of the run.
        """
        if self.uptime.is_of_next_driver(now):
            self._interrupt(Interruption.DRIVER_START)
        seconds, phase = self.learner.unaccounted(now), self.learner.phase
        if seconds and phase is not None:
            pulse = self.last(events.Pulse)
            held_back = pulse is not None and pulse.waits_for in ("slots", "queue")
            self.learner.add(now, seconds, self._awaited() if phase == "batch" else phase, held_back=held_back)
            verdict = self.finding.verdict
            self.verdict_seconds[verdict] = self.verdict_seconds.get(verdict, 0.0) + seconds
            self.charts.account(phase, verdict, now - seconds, now)

    def _awaited(self) -> str:
        """Return what the learner waits for while it waits for a batch."""
        return what_a_batch_waits_for(
            self.last(events.Pulse),
            self.last(events.EngineBusy),
            publishing=self.publishes.running is not None,
            finished=self.groups.counts.get(GroupState.FINISHED, 0),
            filtered=sum(self._filtered) / max(len(self._filtered), 1),
            wasted=self.tokens.recent(self.learner.recently).share,
            synchronous=self._synchronous,
        )

    @property
    def _synchronous(self) -> bool:
        return self.run is not None and self.run.entry == "train.py"

    @property
    def finding(self) -> Finding:
        processors = sum(self._processors) / max(len(self._processors), 1)
        return find(self.learner, self.tokens, self.silent, synchronous=self._synchronous, processors=processors)

    @property
    def model(self) -> Model | None:
        """What a change is estimated from; None if the last batches say too little."""
        run, learner = self.run, self.learner.per_batch
        seconds = sum(learner.values())
        if run is None or not seconds or not self.groups.recent:
            return None
        # In a synchronous run, the groups of a batch are admitted when the weights of the batch before it are live.
        slots = run.groups_per_rollout if self._synchronous else run.slots
        kept = 1.0 - sum(self._filtered) / max(len(self._filtered), 1)
        # A run may publish after every second batch only, and so on.
        share = min(1.0, self.publishes.version / max(self.steps.batches, 1)) / max(len(self.publishes.recent), 1)
        stage = share * sum(publish.staged_seconds for publish in self.publishes.recent)
        write = share * sum(publish.paused_seconds for publish in self.publishes.recent)
        decoding = max(0.0, 1.0 - write / seconds)
        return Model(
            in_flight=run.in_flight,
            window=run.window,
            slots=slots,
            room=run.queue_capacity,
            batch=run.groups_per_rollout,
            groups=[Seconds(each.generation * decoding, each.reward) for each in self.groups.recent],
            kept=max(kept, 1 / FILTERED_GROUPS),
            step=learner.get("step", 0.0),
            stage=stage,
            write=write,
            save=learner.get("save", 0.0),
            evaluate=learner.get("evaluate", 0.0),
            batch_seconds=seconds,
        )

    def advise(self, finding: Finding) -> str:
        """Return what to change, and what that would bring. It is estimated again after `ADVICE_SECONDS`."""
        if finding.silent is not None:
            return finding.knob
        at, knob, advised = self._advised
        if knob != finding.knob or self.time - at > ADVICE_SECONDS:
            advised = "; or ".join(map(str, advice(finding.verdict, finding.knob, self.model)))
            self._advised = self.time, finding.knob, advised
        return advised

    @property
    def verdict(self) -> Bottleneck | None:
        """The verdict that held longest; None before the first batch is requested."""
        return max(self.verdict_seconds, key=lambda kind: self.verdict_seconds[kind], default=None)

    def learner_idle_seconds(self, now: float) -> float:
        """Return the seconds without an optimizer step from the first step until `now`, without interruptions."""
        return max(0.0, self.uptime.training_seconds(now) - self.steps.busy_seconds(now))

    def engine_idle_seconds(self, now: float) -> float:
        """Return the seconds without a request at the engines from the first step until `now`, without interruptions.

        After the last report, the engines are busy if it had requests.
        """
        report = self.engine_use.last
        until = report.time if report is not None and report.in_flight else now
        return max(0.0, self.uptime.training_seconds(until) - (self.engine_use.busy_seconds(until) or 0.0))

    def blocked_until_now(self) -> Mapping[str, float]:
        """Return the seconds in which admission was blocked, by cause, with the time for which it is blocked now."""
        pulse, ended = self.present(events.Pulse), self.last(events.AdmissionBlocked)
        if pulse is None or pulse.waits_for is None or (ended is not None and ended.time >= pulse.time):
            return self.blocked_seconds
        waiting = self.blocked_seconds.get(pulse.waits_for, 0.0) + pulse.waits_seconds
        return {**self.blocked_seconds, pulse.waits_for: waiting}

    def until(self, now: float) -> float:
        """Return `now`, or the time at which the run ended if it has ended."""
        return self.ended.time if self.ended is not None else now

"""Loops that watch the run.

The monitor reports the state of the run and detects stalls. It never waits for another loop, so that it still reports
when the other loops are stuck. The work loop counts the learner's work as progress, and the load loop the tokens of
the engines; it also adapts concurrency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.events import EngineBusy, LoopLag, Pulse, Stalled
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.held_prompts import HeldPrompts
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.run_state import RunState
from miles_async.ports import Fleet, Generator, Learner
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import Ledger
from miles_async.scheduling.stall import StallClock

TICK_SECONDS = 0.5
"""Time between two reports."""
LOAD_POLL_SECONDS = 0.5
"""Time between two requests for the engines' loads with adaptive concurrency."""
WORK_POLL_SECONDS = 5.0
"""Time between two requests for the learner's seconds of work, and for the engines' loads without adaptive
concurrency."""
MIN_WORK_SECONDS = 0.05
"""Less work than this between two requests does not count: waiting for another rank takes some CPU time too."""
SUSPENDED_SECONDS = 5.0
"""Lag of the event loop above which this process was suspended or blocked, so that no loop could make progress."""


@dataclass(kw_only=True, eq=False, repr=False)
class RunMonitor:
    """Emits the state of the run every tick; warns of stalls, and ends a run that is stalled for too long."""

    run_state: RunState
    lifecycle: GroupLifecycle
    producer: Producer
    collector: BatchCollector
    held: HeldPrompts
    generator: Generator
    config: RunConfig
    processors: Callable[[], float]
    adapters: AdapterVersions | None

    def __post_init__(self) -> None:
        self._stall = StallClock()
        self._head = 0, self.run_state.clock.monotonic()
        """Head of the window, and when it was first seen as the head."""

    async def run(self) -> None:
        """Run until cancelled.

        Raises FatalError after `no_progress_abort_seconds` without progress, and after as much more as a group may
        need: the limits of the stages in which groups are now, because what a user's function does there is unknown
        until it ends.
        """
        run_state, abort_seconds = self.run_state, self.config.observability.no_progress_abort_seconds
        while True:
            asleep_at = run_state.clock.monotonic()
            await run_state.clock.sleep(TICK_SECONDS)
            lag = max(0.0, run_state.clock.monotonic() - asleep_at - TICK_SECONDS)
            if lag > SUSPENDED_SECONDS:
                run_state.exclude_pause(lag)
            now, idle_seconds = run_state.clock.time(), run_state.idle_seconds
            run_state.journal.emit(LoopLag(time=now, seconds=lag))
            sent = self.generator.requests
            run_state.journal.emit(
                EngineBusy(time=now, busy=sent.busy_seconds, in_flight=sent.in_flight, in_line=sent.in_line)
            )
            run_state.durations.pass_head(self.producer.head)
            run_state.journal.emit(self._pulse(idle_seconds))
            if self._stall.due(idle_seconds, self._warn_after):
                self._warn(idle_seconds)
            if idle_seconds >= abort_seconds + max(self._stage_seconds, self._slow_seconds or 0.0):
                raise FatalError(self._stall_sentence(idle_seconds))

    @property
    def _warn_after(self) -> float:
        """Seconds without progress after which something may be wrong: no less than a slow group takes."""
        slow = self._slow_seconds
        return max(self.config.observability.no_progress_warn_seconds, self._stage_seconds if slow is None else slow)

    @property
    def _slow_seconds(self) -> float | None:
        """Almost no group of this run takes longer; 0 while the run does not wait for groups.

        None before enough groups have ended.
        """
        return self.run_state.durations.slow_seconds if self.run_state.waits_for_groups else 0.0

    @property
    def _stage_seconds(self) -> float:
        """The longest limit of the stages in which groups are now."""
        if not self.run_state.waits_for_groups:
            return 0.0
        rollout, attempts = self.config.rollout, self.producer.attempts
        # A user's generate function may wait for a tool or for another model, and nothing else shows its work.
        generates = rollout.custom_generate_function_path and attempts.at_engines_since
        return max(
            rollout.generate_timeout_seconds if generates else 0.0,
            # A plain reward function scores the samples of a group one after the other.
            rollout.reward_timeout_seconds * rollout.n_samples_per_prompt if attempts.rewarding else 0.0,
        )

    def _stall_sentence(self, idle_seconds: float) -> str:
        run_state, producer = self.run_state, self.producer
        drops = self.lifecycle.ledger.dropped.items()
        dropped = ", ".join(f"{count} {reason}" for reason, count in drops if count) or "none"
        return (
            f"no progress for {idle_seconds:.0f}s (--no-progress-abort-seconds; see the line `stall` in the log): "
            f"{producer.queued} groups queued, {self.generator.requests.in_flight} requests in flight, "
            f"{producer.attempts.rewarding} groups waiting for rewards, trainer version {run_state.trainer_version}, "
            f"live version {run_state.live_version}; dropped: {dropped}{self._waits_sentence()}"
        )

    def _waits_sentence(self) -> str:
        """Names what the run may be waiting for beside its groups."""
        taken = len(self.held.taken)
        holds = f"; the rollout function holds {taken} prompts that it has not returned" if taken else ""
        return holds + ("; an evaluation runs" if self.run_state.evaluates else "")

    def _pulse(self, idle_seconds: float) -> Pulse:
        run_state, producer = self.run_state, self.producer
        now = run_state.clock.monotonic()
        head = producer.head
        if head != self._head[0]:
            self._head = head, now
        oldest, sent_at = next(iter(producer.attempts.at_engines_since.items()), (None, now))
        cause, blocked_since = producer.waits_for or (None, now)
        return Pulse(
            time=run_state.clock.time(),
            generating=len(producer.attempts.at_engines_since),
            rewarding=producer.attempts.rewarding,
            oldest=oldest,
            oldest_seconds=round(now - sent_at, 3),
            waits_for=cause,
            waits_seconds=round(now - blocked_since, 3),
            head=head,
            head_state=self.lifecycle.ledger.state(head),
            head_seconds=round(now - self._head[1], 3),
            queue=producer.queued,
            blocked=producer.blocked,
            collected=self.collector.collected,
            wanted=self.collector.wanted,
            trainer_version=run_state.trainer_version,
            live_version=run_state.live_version,
            idle_seconds=round(idle_seconds, 3),
            warn_seconds=round(self._warn_after, 3),
            slow_group_seconds=round(run_state.durations.slow_seconds or 0.0, 3),
            processors=round(self.processors(), 3),
            adapters={} if self.adapters is None else {str(v): n for v, n in self.adapters.requests().items()},
        )

    def _warn(self, idle_seconds: float) -> None:
        self.run_state.journal.emit(
            Stalled(
                time=self.run_state.clock.time(),
                seconds=idle_seconds,
                queue=self.producer.queued,
                collected=self.collector.collected,
                wanted=self.collector.wanted,
            )
        )


async def follow_learner_work(run_state: RunState, learner: Learner) -> None:
    """Count the work of the learner as progress, such as a long step or checkpoint. Runs until cancelled.

    A learner that is frozen does not answer, so its calls end in a stall. Raises FatalError if a rank is lost.
    """
    worked = await learner.work_seconds()
    while True:
        await run_state.clock.sleep(WORK_POLL_SECONDS)
        before, worked = worked, await learner.work_seconds()
        if worked - before > MIN_WORK_SECONDS:
            run_state.mark_progress()


async def follow_engine_load(
    run_state: RunState,
    ledger: Ledger,
    fleet: Fleet,
    asks_engines: Callable[[], bool],
    request_seconds: float,
    limit: AdaptiveConcurrency | None,
) -> None:
    """Count the tokens of the engines as progress, and adapt the limit on groups in flight. Runs until cancelled.

    Tokens are progress only while the trainer waits for groups and `asks_engines` holds, because the engines may have
    other clients, and for at most `request_seconds`, the limit of a request. An engine that hangs reports the same
    numbers again or nothing, so its requests end in a stall. A group that an external generator has posted is progress,
    too. `limit` is None without `--adaptive-concurrency`.
    """
    tokens: dict[str, tuple[int, int]] = {}
    posted = run_state.journal.posted
    while True:
        await run_state.clock.sleep(WORK_POLL_SECONDS if limit is None else LOAD_POLL_SECONDS)
        loads = await fleet.loads()
        grew = False
        for load in loads:
            # An engine that does not answer this time keeps its numbers.
            generated, held = tokens.get(load.source, (0, 0))
            tokens[load.source] = load.generated, load.held
            grew = grew or load.generated > generated or load.held > held
        if grew and run_state.waits_for_groups and asks_engines():
            run_state.mark_tokens(request_seconds)
        before, posted = posted, run_state.journal.posted
        if posted > before:
            run_state.mark_progress()
        if limit is not None:
            # A group that left the engines made room there, whatever its outcome.
            limit.observe(loads, ledger.in_flight, ended=ledger.fed - ledger.in_flight)
            # A higher limit may unblock the feed.
            run_state.changed.notify()

"""Everything that happens in a run, as typed events.

The pipeline emits them; the trace file, the metrics, the three log lines, the progress bar and the summary are folds
over the one stream. Nobody who only looks on is asked anything by the pipeline, so looking on cannot slow it down.

`time` is wall-clock seconds (`time.time`), so that events of several processes compare. On disk an event is one JSON
object per line with its `type` (`events.jsonl`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    time: float


class RunStarted(Event, frozen=True):
    run: str
    entry: str
    """`train_async.py` or `train.py`."""
    rollouts: int
    groups_per_rollout: int
    samples_per_group: int
    queue_capacity: int
    window: int
    slots: int | None
    """B, or None where no staleness limit is set."""
    staleness_limit: int | None = None
    """`--max-weight-staleness`."""


class ClusterReady(Event, frozen=True):
    """Engines, router and learner are up and connected; the first request comes next."""

    weight_transfer: str
    """The way weights travel, chosen where the configuration says `auto`."""
    warm_start_seconds: float
    warm_start_cached: bool


class GroupMoved(Event, frozen=True):
    """A ledger transition. `counts` are the groups in each state after it, by state name."""

    sequence: int
    feed_index: str
    attempt: int
    before: str | None
    after: str
    reason: str | None
    counts: dict[str, int]
    """Live states only (fed, in_flight, finished, queued, leased, trained)."""


class GroupGenerated(Event, frozen=True):
    """A group's generation and reward are done."""

    sequence: int
    started: float
    generated: float
    """When the last sample ended; `time` is when its reward was there too."""
    versions: tuple[int, int]
    """Oldest and newest weight version of its tokens."""
    response_tokens: int
    reward: float
    truncated: int


class GroupReplayed(Event, frozen=True):
    """A group was given what an earlier run recorded: its tokens may be older than its admission."""

    sequence: int
    recorded: str
    """The feed index that it was recorded under."""


class SampleDisplayed(Event, frozen=True):
    """A sample for people to read, of a group that was just generated; one every few seconds."""

    sequence: int
    feed_index: str
    prompt: str
    """Shortened, and without control characters, like `response`."""
    response: str
    label: str
    reward: float
    rewards: list[float]
    """Of all samples of its group."""
    tokens: int
    """Of the response."""
    versions: tuple[int, int]
    """Oldest and newest weight version of its tokens."""
    truncated: bool


class RequestEnded(Event, frozen=True):
    """Samples came back from the engines. Told with `--trace` only."""

    sequence: int | None
    """The group's; None in evaluations and single turns."""
    started: float
    samples: int
    response_tokens: int


class GroupFiltered(Event, frozen=True):
    """A filter decided against a finished group."""

    sequence: int
    reason: str
    """In the filter's own words, such as `all_0` or `over_sampling`."""


class SamplesRemoved(Event, frozen=True):
    """A sample filter took samples of a batch out of the loss."""

    rollout: int
    samples: int


class DataSkipped(Event, frozen=True):
    """The data source passed something over: a broken row, or what a buffer filter did that it must not do."""

    reason: str
    """`bad_row`, `buffer_filter_raised`, `buffer_filter_unknown` or `buffer_filter_removed`."""
    sentence: str


class AdmissionBlocked(Event, frozen=True):
    """Admission could not go on for `seconds`, because of `cause` (`core.admission.Blocked`)."""

    cause: str
    seconds: float


class QueueChanged(Event, frozen=True):
    """The queue after a put, a get or a sweep."""

    depth: int
    blocked: int
    """Finished groups that the window holds back."""


class BatchDrained(Event, frozen=True):
    """A batch left the queue for the trainer."""

    rollout: int
    depth: int
    """Groups still queued."""
    waited: float
    """Seconds the trainer waited for it."""
    recycled: int
    """Groups recycled as stale since the drain before."""


class StepStarted(Event, frozen=True):
    rollout: int
    version: int
    """Trainer version when the batch entered the step."""
    staleness: list[int]
    """One entry per group of the batch, in versions."""
    groups: list[int]
    """Their sequence numbers."""


class StepEnded(Event, frozen=True):
    rollout: int
    started: float
    ended: float
    tokens: int
    finite: bool
    """False where the step was skipped."""
    reward: float
    """Mean over the batch's samples, those left out whose reward is not finite."""
    response_length: float
    metrics: dict[str, float]
    """The finite ones."""


class PublishStarted(Event, frozen=True):
    version: int
    queue: int
    """Queue depth at that moment."""


class PublishEnded(Event, frozen=True):
    version: int
    live: bool
    """False when no engine took it."""
    staged_seconds: float
    paused_seconds: float
    """From the first pause request until every engine decodes again; see `pause`."""
    stopping_seconds: float
    """Until every engine stood still."""
    write_seconds: float
    resuming_seconds: float
    """Until every engine decoded again."""
    bytes: int
    queue: int
    fenced: list[str]

    @property
    def pause(self) -> dict[str, float]:
        """Its parts, in seconds. `commit`: old prefixes are dropped and the version is announced."""
        known = {"stopping": self.stopping_seconds, "write": self.write_seconds, "resuming": self.resuming_seconds}
        return {**known, "commit": max(0.0, self.paused_seconds - sum(known.values()))}


class WriteFailed(Event, frozen=True):
    """A weight write did not arrive whole at an engine, or was not taken there."""

    version: int
    engine: str
    error: str
    then: str
    """What is done about it: `retry`, `fall_back` to another way, or `fence`, after which the engine is replaced."""
    transport: str | None
    """The way that is fallen back to."""


class Evaluated(Event, frozen=True):
    name: str
    rollout: int
    """-1 before training."""
    accuracy: float
    """Share of samples with the full reward."""
    reward: float
    """Mean over the samples."""
    problems: int
    seconds: float
    truncated: float


class EngineChanged(Event, frozen=True):
    engine: str
    state: str
    """`routed`, `fenced` or `lost`."""
    version: int | None
    reason: str | None


class RouterChanged(Event, frozen=True):
    """What the router knows has changed, or whether it answers."""

    up: bool
    engines: int
    """That it lists, those of other runs among them where it is shared."""
    healthy: int
    """Of these, that it finds healthy."""


class EngineBusy(Event, frozen=True):
    """Seconds in which at least one request was at the engines, since the run began."""

    busy: float
    in_flight: int
    """Requests at the engines now."""


class Stalled(Event, frozen=True):
    """No group was collected for `seconds` while the trainer waited."""

    seconds: float
    queue: int
    collected: int
    wanted: int


class LoopLag(Event, frozen=True):
    seconds: float


class TrainerPhaseChanged(Event, frozen=True):
    """The trainer turns to something else."""

    to: str
    """`batch` (waits for one), `step`, `publish` (waits for or makes one), `save` or `evaluate`."""


class Pulse(Event, frozen=True):
    """Where the rollout side stands, twice a second, whether anything happens or not."""

    generating: int
    """Groups at the engines."""
    rewarding: int
    """Groups that are generated and wait for their reward."""
    oldest: int | None
    """Sequence number of the group that is at the engines for longest."""
    oldest_seconds: float
    waits_for: str | None
    """What admission waits for now (`core.admission.Blocked`)."""
    waits_seconds: float
    head: int
    """Head of the window: its sequence number."""
    head_state: str | None
    """None where it is not admitted yet."""
    head_seconds: float
    """How long it has been the head."""
    queue: int
    blocked: int
    """Finished groups that the window holds back."""
    collected: int
    wanted: int
    """Groups the trainer waits for now; 0 while it does not wait."""
    trainer_version: int
    live_version: int


class ProcessSilent(Event, frozen=True):
    """A process of the run leaves the question whether it is there unanswered; 0 seconds: it answers again."""

    process: str
    """Such as `learner-0`, `engine-1`, `router` or `rollout`."""
    seconds: float


class VerdictChanged(Event, frozen=True):
    """The verdict (`verdict.py`) is another one."""

    verdict: str
    why: str
    knob: str
    shares: dict[str, float]
    """Of the trainer's recent time, by what it did or waited for."""


class WarningRaised(Event, frozen=True):
    """Something the user should know, after which the run goes on."""

    text: str


class RunEnded(Event, frozen=True):
    reason: str
    """`done`, `interrupted` or the sentence that says what broke."""


AnyEvent = (
    RunStarted
    | ClusterReady
    | GroupMoved
    | GroupGenerated
    | SampleDisplayed
    | RequestEnded
    | GroupFiltered
    | GroupReplayed
    | SamplesRemoved
    | DataSkipped
    | AdmissionBlocked
    | QueueChanged
    | BatchDrained
    | StepStarted
    | StepEnded
    | PublishStarted
    | PublishEnded
    | WriteFailed
    | Evaluated
    | EngineChanged
    | RouterChanged
    | EngineBusy
    | Stalled
    | LoopLag
    | TrainerPhaseChanged
    | Pulse
    | ProcessSilent
    | VerdictChanged
    | WarningRaised
    | RunEnded
)


class EventSink(Protocol):
    def emit(self, event: Event) -> None:
        """Take note of an event. Never blocks and never raises."""
        ...


encode = msgspec.json.Encoder().encode
"""An event as one line of JSON, without the newline."""
decode = msgspec.json.Decoder(AnyEvent).decode

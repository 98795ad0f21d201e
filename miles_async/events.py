"""The typed events of a run.

The pipeline emits events; the trace file, the metrics, the log lines, the progress bar, the status page and the summary
are computed from this one stream. The pipeline never waits for a subscriber, so observing a run cannot slow it down.

On disk (`observability/trace/event_log.py`) an event is one JSON object per line with its class name as `type`.
Durations are in seconds.
"""

from __future__ import annotations

from functools import reduce
from math import sqrt
from operator import or_
from typing import Any, Protocol

import msgspec

from miles_async.json_values import json_value
from miles_async.visible_text import visible_json


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True, omit_defaults=True):
    """The base class of all events.

    A field that has its default value is left out on disk. So a default never changes: older logs would change with it.
    """

    time: float
    """Wall-clock seconds (`time.time`), so that events of several processes can be compared.

    The system may set this clock during a run, so the durations of events are measured with a monotonic clock.
    """


class RunStarted(Event, frozen=True):
    """The run begins; its sizes follow from the configuration (`scheduling/bounds.py`)."""

    run: str
    """Name of the run folder."""
    entry: str
    """`train.py` if the schedule is synchronous, else `train_async.py`."""
    rollouts: int
    """Number of batches to train."""
    groups_per_rollout: int
    samples_per_group: int
    queue_capacity: int
    window: int
    """W, in groups."""
    slots: int | None
    """B, in groups; None without a staleness limit."""
    in_flight: int
    """N, in groups."""
    longest_response: int
    """`--rollout-max-response-len`."""
    model: str
    """Name of the model, for people."""
    configuration: str
    """Identifies the configuration without its seeds and names (`observability/page/earlier.py`)."""
    staleness_limit: int | None = None
    """`--max-weight-staleness`."""
    max_kv_staleness: int = 0
    """`--max-kv-staleness`."""
    untested: tuple[str, ...] = ()
    """Flags of SGLang that were never tried and that the user has allowed."""
    save_interval: int | None = None
    """Rollouts between two checkpoints; None if none are written at intervals."""

    @property
    def longest_group(self) -> int:
        """The most response tokens that a group can have."""
        return self.samples_per_group * self.longest_response


class StartupChanged(Event, frozen=True):
    """A part of the run is being started, or is ready.

    Worry if a part has begun and is not ready after minutes: its log is `logs/<part>.log` in the run folder.
    """

    part: str
    """What is started, such as `Ray`, `learner`, `router` or `engine-0`."""
    seconds: float | None
    """How long the start took; None when it begins."""


class ClusterReady(Event, frozen=True):
    """Engines, router and learner are connected; the first request follows."""

    weight_transfer: str
    """The transport of the weights; the chosen one if the configuration sets `auto`."""
    warm_start_seconds: float
    warm_start_cached: bool
    """Whether the warm-started model came from the cache."""


class GroupMoved(Event, frozen=True, kw_only=True):
    """A group changed its state in the ledger (`scheduling/ledger.py`)."""

    sequence: int
    feed_index: str
    attempt: int
    before: str | None = None
    """None for a group that was just fed."""
    after: str
    reason: str | None = None
    """A `DropReason` if the group was dropped."""
    counts: dict[str, int]
    """Number of groups in each live state after the transition (fed, in_flight, finished, queued, leased, trained). A
    state without groups is left out."""
    discarded_tokens: int = 0
    """Response tokens of a dropped group that no further attempt continues, as far as they are known: those of requests
    that were lost with a rollout worker, an engine or the router are not."""
    kept_tokens: int = 0
    """Response tokens of a dropped group that the next attempt has from the beginning, or those with which a group was
    fed."""
    dataset: str = ""
    """Name of the data set that the prompt is from; empty in a run with one data set."""
    adapter: str = ""
    """Name of the adapter that the group trains; empty unless the run trains several."""

    @property
    def was_lost_in_flight(self) -> bool:
        """Whether the group was lost with a process that generated it, together with an unknown number of tokens."""
        return self.reason in ("worker_lost", "engine_lost", "router_lost") and self.before == "in_flight"


class GroupGenerated(Event, frozen=True):
    """Generation and reward of a group are complete."""

    sequence: int
    generation_seconds: float
    """From the first request until the last sample ended."""
    reward_seconds: float
    """From then until the rewards were complete, at `time`."""
    versions: tuple[int, int]
    """Oldest and newest of `Group.versions`."""
    response_tokens: int
    """Sum over the samples."""
    reward: float
    """Mean over the trajectories with a finite reward; 0 if there are none."""
    truncated: int
    """Number of trajectories that reached the length limit, in any of their segments."""
    missing: int = 0
    """Number of trajectories that failed and without which the group is trained."""
    unfinished_rewards: int = 0
    """Number of trajectories that count as wrong because their reward exceeded its limits of time or memory."""
    adapter: str = ""
    """Name of the adapter that the group trains; empty unless the run trains several."""
    by_worker: bool = False
    """Whether the worker of a rollout function generated the group, which is then admitted when it is returned.

    The seconds of generation begin when the worker took the prompt, and include its reward."""
    dataset: str = ""
    """Name of the data set that the prompt is from; empty in a run with one data set."""
    epochs: float = 0.0
    """How often the data set had been used up before the prompt was taken, with the fraction of the current epoch."""
    reused_tokens: int = 0
    """Tokens whose keys and values of older weights were not computed again; see `VersionSpan.reused`."""
    key_age: int = 0
    """Versions by which the oldest keys and values were older than the weights that sampled with them."""

    @property
    def generated(self) -> float:
        """When the last sample ended."""
        return self.time - self.reward_seconds

    @property
    def started(self) -> float:
        """When generation began."""
        return self.generated - self.generation_seconds


class SampleDiscarded(Event, frozen=True):
    """The response of one sample was discarded, while the other samples of its group were kept.

    Worry if many have the same `error`: repair the tool, function or server that it names.
    """

    sequence: int | None
    """Sequence number of the group; None for a group of a rollout function."""
    sample: int | None
    """Index of the sample in the data, if it has one."""
    reason: str
    """A `DropReason`, or `publish` if a publish aborted the request."""
    tokens: int
    """Response tokens of the sample, without those of a request that the engines did not answer."""
    error: str


class GroupReplayed(Event, frozen=True):
    """A group was replayed from a recording of an earlier run, so its tokens may be older than its admission."""

    sequence: int
    recorded: str
    """The feed index under which the group was recorded."""


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens of a displayed response."""

    version: int | None
    """The weight version that sampled the tokens; None if no model sampled them, as with the output of a tool."""
    tokens: int
    """Number of tokens; 0 for the note that stands for tokens that are not displayed."""
    characters: int
    """Length of their text in the displayed response, in Unicode code points."""


class SampleDisplayed(Event, frozen=True):
    """One sample of a group that was just generated, to be displayed; emitted every few seconds."""

    sequence: int
    feed_index: str
    prompt: str
    """Shortened and without control characters; `response` likewise."""
    response: str
    """The text of the response tokens, including special tokens."""
    label: str
    reward: float
    rewards: list[float]
    """Rewards of all samples of the group."""
    tokens: int
    """Number of response tokens."""
    versions: tuple[int, int]
    """Oldest and newest weight version of the sample's tokens."""
    truncated: bool
    segments: list[Segment] = []
    """The parts of `response`, in order."""


class RequestEnded(Event, frozen=True):
    """The engines answered a request. Emitted only with `--trace`."""

    sequence: int | None
    """Sequence number of the group; None in evaluations and for single chat turns."""
    seconds: float
    """Time from the request to the answer."""
    samples: int
    response_tokens: int

    @property
    def started(self) -> float:
        """When the request was sent."""
        return self.time - self.seconds


class GroupFiltered(Event, frozen=True):
    """A filter rejected a finished group.

    Worry if most groups have this event: the prompts are too easy or too hard for the filter.
    """

    sequence: int
    reason: str
    """The reason that the filter gave, such as `all_0.0` or `over_sampling`."""


class SamplesRemoved(Event, frozen=True):
    """A sample filter excluded samples of a batch from the loss."""

    rollout: int
    samples: int
    """Number of excluded samples."""
    tokens: int
    """Their response tokens."""


class DataSkipped(Event, frozen=True):
    """The data source skipped a broken row, or ignored an invalid result of a buffer filter.

    Worry if there are more than a few: `sentence` says what is wrong with the row or with the filter.
    """

    reason: str
    """`bad_row`, `buffer_filter_raised`, `buffer_filter_unknown` or `buffer_filter_removed`."""
    sentence: str


class AgentSessionExpired(Event, frozen=True):
    """An external generator opened a session, but has neither posted it nor sent a request for a long time.

    Worry if it happens often: the generator crashes, or forgets to post its groups.
    """


class AdmissionBlocked(Event, frozen=True):
    """Admission was blocked for `seconds` by `cause` (`scheduling.admission.Blocked`).

    Worry if the sum of `seconds` is large while engines are idle: the verdict names the setting to change.
    """

    cause: str
    seconds: float


class QueueChanged(Event, frozen=True):
    """The state of queue and window after a group ended or a batch was collected."""

    depth: int
    """Number of queued groups."""
    blocked: int
    """Number of finished groups outside the window."""


class BatchDrained(Event, frozen=True):
    """The trainer took a batch out of the queue."""

    rollout: int
    depth: int
    """Number of groups that remain in the queue."""
    waited: float
    """Seconds that the trainer waited for the batch."""
    recycled: int
    """Number of groups recycled as stale since the previous batch."""


class StepStarted(Event, frozen=True):
    """The optimizer steps of one batch begin."""

    rollout: int
    version: int
    """Trainer version of the weights that are trained."""
    staleness: list[int]
    """Staleness of each group of the batch, in versions."""
    groups: list[int]
    """Sequence numbers of the groups."""
    adapter: str = ""
    """Name of the adapter that is trained; empty unless the run trains several."""


class StepEnded(Event, frozen=True):
    """The optimizer steps of one batch ended.

    Worry if `finite` is false in several batches in a row: the loss is not a number, and the FAQ has the causes.
    """

    rollout: int
    seconds: float
    """From the beginning of the first optimizer step to the end of the last one, on the slowest rank."""
    tokens: int
    """Prompt and response tokens of the batch, including samples that need no pass because they have no gradient."""
    finite: bool
    """False if a loss or gradient was not finite and the batch was skipped."""
    reward: float
    """Mean over the samples with a finite reward."""
    response_length: float
    """Mean over the trajectories, all segments together, in tokens."""
    metrics: dict[str, float]
    """The learner's metrics that are finite, by name."""

    @property
    def started(self) -> float:
        """When the first optimizer step began. The last one ended at `time`."""
        return self.time - self.seconds


class PublishStarted(Event, frozen=True):
    """The staged weights are about to be written to the engines."""

    version: int
    queue: int
    """Queue depth at this moment."""
    adapter: str = ""
    """Name of the adapter whose weights they are; empty unless the run trains several."""


class PublishEnded(Event, frozen=True):
    """The staged weights were written, and the engines decode again.

    Worry if `live` is false, or if `fenced` names engines: the event `WriteFailed` before it has the error.
    """

    version: int
    live: bool
    """False if no engine received the version."""
    staged_seconds: float
    """Duration of staging, before the pause."""
    paused_seconds: float
    """From the first pause request until every engine decodes again; `pause` lists its parts. 0 for an adapter, which
    engines load while they generate."""
    stopping_seconds: float
    """Until every engine had stopped."""
    write_seconds: float
    """The slowest engine's write."""
    resuming_seconds: float
    """From the resume request until every engine decoded again."""
    bytes: int
    """Sum over the engines."""
    queue: int
    """Queue depth at the end."""
    fenced: list[str]
    """Engines that did not receive the version and were removed from the router."""
    adapter: str = ""
    """Name of the adapter whose weights they are; empty unless the run trains several."""

    @property
    def pause(self) -> dict[str, float]:
        """The parts of the pause in seconds. `commit` covers flushing old prefixes and announcing the version."""
        known = {"stopping": self.stopping_seconds, "write": self.write_seconds, "resuming": self.resuming_seconds}
        return {**known, "commit": max(0.0, self.paused_seconds - sum(known.values()))}


class WriteFailed(Event, frozen=True):
    """A weight write to an engine failed or could not be verified.

    Worry if it repeats: `error` names the cause. Check the network, or choose another `--weight-transfer`.
    """

    version: int
    engine: str
    error: str
    then: str
    """The reaction: `retry`, `fall_back` to another transport, or `fence`, after which the engine is replaced."""
    transport: str | None
    """The transport that is used next after `fall_back`, else None."""


class Evaluated(Event, frozen=True):
    """One data set was evaluated.

    Worry if `missing` is not 0, or if `accuracy` falls while the reward of training rises.
    """

    name: str
    rollout: int
    """The last rollout before the evaluation; -1 before training."""
    accuracy: float
    """Fraction of samples with the full reward."""
    reward: float
    """Mean over the trajectories with a finite reward; 0 if there are none."""
    problems: int
    """Number of samples with a score, at least 1."""
    seconds: float
    truncated: float
    """Fraction of samples that reached the length limit."""
    versions: tuple[int, int]
    """Oldest and newest weight version of the tokens and of the keys that they used (`max_kv_staleness`). If a user's
    function evaluated and reports no versions: the live versions at its start and its end."""
    missing: int = 0
    """Number of samples without a score, which no other figure includes."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy, from the lowest to the highest value (Wilson 1927).

        It covers the choice of the problems, under the assumption that the samples are independent.
        """
        z, n, p = 1.959964, self.problems, self.accuracy
        center = (p + z * z / (2 * n)) / (1 + z * z / n)
        half_width = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, center - half_width), min(1.0, center + half_width)


class EvaluationSkipped(Event, frozen=True):
    """An evaluation was not made, because a newer one was due before it could start.

    Worry if it repeats: evaluations take longer than `--eval-interval` batches. Raise it, or lower `--eval-size`.
    """

    rollout: int
    """The rollout after which it was due."""
    overtaken_by: int
    """The rollout after which the newer one was due."""


class EngineChanged(Event, frozen=True):
    """An engine was added to the router or removed from it, or was lost.

    Worry if `state` is `lost` or `fenced` more than once: `reason`, and the log of the engine, name the cause.
    """

    engine: str
    state: str
    """`routed`, `fenced` or `lost`."""
    version: int | None
    """The weight version of the engine, if known."""
    reason: str | None


class RouterChanged(Event, frozen=True):
    """The router started or stopped answering, or its list of engines changed.

    Worry if `up` stays false: the run restarts its own router, but it cannot restart that of `--sglang-router-ip`.
    """

    up: bool
    engines: int
    """Engines that the router lists; a shared router also lists those of other runs."""
    healthy: int
    """Listed engines that the router considers healthy."""


class EngineBusy(Event, frozen=True):
    """The use of the engines so far."""

    busy: float
    """Seconds since the start in which the engines had at least one request."""
    in_flight: int
    """Requests at the engines now."""
    in_line: int = 0
    """Requests that wait for a free place at the engines."""


class Stalled(Event, frozen=True):
    """The run made no progress for `seconds`.

    Worry each time: the log line `stall` says what each part of the run waits for.
    """

    seconds: float
    queue: int
    """Queue depth."""
    collected: int
    """Groups of the current batch that the trainer has."""
    wanted: int
    """Groups that the trainer waits for; 0 while it does not wait."""


class LoopLag(Event, frozen=True):
    """How late the event loop of the rollout worker woke a task.

    Worry if it often exceeds 0.25 seconds: a function of yours blocks the event loop, or the processors are
    overloaded.
    """

    seconds: float


class TrainerPhaseChanged(Event, frozen=True):
    """The training loop entered another phase."""

    to: str
    """`batch` (waits for a batch), `step`, `publish` (waits for or performs a publish), `save` or `evaluate`."""


class Pulse(Event, frozen=True, kw_only=True):
    """The state of the rollout side, emitted twice a second whether it changed or not.

    Seconds are rounded to milliseconds.
    """

    generating: int
    """Groups at the engines."""
    rewarding: int = 0
    """Groups that are generated and wait for their reward."""
    oldest: int | None = None
    """Sequence number of the group that has been at the engines longest."""
    oldest_seconds: float
    """How long this group has been at the engines."""
    waits_for: str | None = None
    """The limit that blocks admission now (`scheduling.admission.Blocked`), or None."""
    waits_seconds: float = 0.0
    """How long admission has been blocked."""
    head: int
    """Sequence number of the window's head."""
    head_state: str | None = None
    """State of the head; None if it is not admitted yet."""
    head_seconds: float
    """How long it has been the head."""
    queue: int
    """Queue depth."""
    blocked: int = 0
    """Finished groups outside the window."""
    collected: int = 0
    """Groups of the current batch that the trainer has."""
    wanted: int = 0
    """Groups that the trainer waits for; 0 while it does not wait."""
    trainer_version: int
    live_version: int
    idle_seconds: float
    """Seconds since the last progress. An evaluation that runs is progress for a limited time (`run_state.py`)."""
    warn_seconds: float
    """Seconds without progress after which a warning follows."""
    slow_group_seconds: float = 0.0
    """Almost no group of the run takes longer (`scheduling/durations.py`); 0 before enough groups have ended."""
    processors: float = 0.0
    """Fraction of the processors' time on the node of the rollout worker that was used since the last pulse."""
    adapters: dict[str, int] = {}
    """Requests in flight by the version of the adapter that they name, for all versions that requests may name."""


class ProcessSilent(Event, frozen=True):
    """A process of the run does not answer heartbeats; `seconds` is 0 when it answers again.

    Worry if `seconds` grows: the process is stopped, swapped out or dead. Look at its log and its machine.
    """

    process: str
    """Name of the process, such as `learner-0`, `engine-1`, `router` or `rollout`."""
    seconds: float


class VerdictChanged(Event, frozen=True):
    """The verdict on what limits the run's speed changed (`observability/diagnosis/verdict.py`).

    Worry if it is neither `balanced` nor `trainer-bound`: change `knob`.
    """

    verdict: str
    why: str
    """The evidence for the verdict."""
    knob: str
    """The setting to change."""
    shares: dict[str, float]
    """Fractions of the trainer's recent time, by phase."""


class CollapseRiskChanged(Event, frozen=True):
    """Signs that the policy may collapse soon appeared or are gone (`observability/diagnosis/collapse.py`).

    The signs of a collapse last until the reward is back, or the learner continues from a checkpoint.

    Worry if `high` is true: lower `--max-weight-staleness` or `--lr`, and resume from an earlier checkpoint.
    """

    rollout: int
    """The rollout after whose training the risk changed."""
    high: bool
    why: str
    """The metrics that show it."""
    knob: str
    """The setting to change; empty if the signs are gone."""


class EventsReceived(Event, frozen=True):
    """The driver has received the events of the rollout worker up to batch `number`; they come before this event."""

    number: int


class RunContinued(Event, frozen=True):
    """Another rollout worker begins to restore the run. All events of its predecessors come before this one.

    Worry if it happens repeatedly: the warning before it says how the rollout worker ended.
    """


class LearnerRestored(Event, frozen=True):
    """Another learner continues with the weights of a checkpoint (`scheduling/lineage.py`).

    Worry each time: the batches after `rollout` are trained again. The logs of the learner ranks have the cause.
    """

    rollout: int
    """The last rollout that the weights were trained on."""
    kept_version: int
    """The weight version of the checkpoint. The versions between it and `version` are rolled back."""
    version: int
    """The next weight version."""
    updates: int
    """Weight updates between `kept_version` and `version`: 0, or 1 if the checkpoint was written between two
    versions."""
    groups: int
    """Number of groups of later rollouts, which return to the queue or are generated again."""
    adapter: str = ""
    """Name of the adapter; empty unless the run trains several. There is one event for each that has later versions."""


class WarningRaised(Event, frozen=True):
    """A problem that the user should know about; the run continues.

    Worry each time: `text` says what happened and, where there is a choice, what to do.
    """

    text: str


class DeadLettersUnwritten(Event, frozen=True):
    """The number of dead letters that could not be written to `dead_letters.jsonl` changed. They are in memory.

    Worry if `letters` is not 0: free space on the disk of the run folder, or repair it, before the run ends.
    """

    letters: int
    """Number of letters in memory; 0 if all are written."""
    prompts: list[str]
    """Feed indices of the oldest of these letters."""
    error: str | None
    """Why the last write failed; None if it did not fail."""


class DeadLettered(Event, frozen=True):
    """A prompt got no further attempt; `dead_letters.jsonl` has its samples and errors.

    Worry if more than 1 % of the groups end so: `dead_letters.jsonl` has the errors. Repair what they name.
    """

    feed_index: str
    reason: str
    """A `DropReason`."""


class CheckpointWritten(Event, frozen=True):
    """A checkpoint is complete on disk."""

    rollout: int
    """The last rollout that its weights were trained on."""


class EventsMissing(Event, frozen=True):
    """Parts of the event log were deleted because it reached its maximum size. Only readers of the log emit it.

    Worry if you need the deleted events: raise `--event-log-max-bytes` in the next run.
    """

    parts: int
    """Number of deleted parts."""


class RunDrained(Event, frozen=True):
    """The run ends early, as requested. What did not end in time is in the store, and a resumed run continues it.

    Worry if `unsaved` is not 0 with `--save`: raise `--drain-seconds`, or save more often (`--save-interval`).
    """

    seconds: float
    """Time from the request to this event."""
    finished: int
    """Groups in flight at the request that finished."""
    interrupted: int
    """Groups in flight at the request that did not finish; they have to be generated again."""
    abandoned: int
    """Groups of the training step that did not end in time; 0 if no step was abandoned."""
    kept: int
    """Finished groups that are not trained, including those of an abandoned step."""
    unsaved: int
    """Trained batches that no checkpoint contains."""


class RunEnded(Event, frozen=True):
    """The run ended.

    Worry if `reason` is a sentence: it names the cause.
    """

    reason: str
    """`done`, `interrupted` or a sentence with the cause of the failure."""


AnyEvent: Any = reduce(or_, Event.__subclasses__())
"""The union of all events, for decoders: a new event needs no entry in a list."""


class EventSink(Protocol):
    """Receives the events of a run."""

    def emit(self, event: Event) -> None:
        """Accept an event. Never blocks and never raises."""
        ...


_encode = msgspec.json.Encoder().encode


def encode(event: Event) -> bytes:
    """Return an event as one line of JSON without the newline. A terminal can show it (see `visible_json`)."""
    return visible_json(encode_json(event))


def encode_json(value: Any) -> bytes:
    """Return an event, or a value made of events, as JSON. Half surrogate pairs become question marks."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(json_value(msgspec.to_builtins(value)))


decode = msgspec.json.Decoder(AnyEvent).decode

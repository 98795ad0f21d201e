"""The summary of a run: `summary.json` for scripts, and a block of text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec

from miles_async.atomic_files import write_atomically
from miles_async.events import ClusterReady, DeadLettersUnwritten, RunEnded
from miles_async.observability.diagnosis.verdict import Finding
from miles_async.observability.state.tokens import CAUSES, Tokens
from miles_async.observability.view import RunView
from miles_async.types import DropReason


class TrainingPhase(TypedDict):
    """Figures of the training phase, from the start of the first step to the end of the last one."""

    training_seconds: float | None
    """Duration of the training phase."""
    groups_per_second: float | None
    """Groups that were trained and kept, per second of the training phase. Worry if it is below that of earlier runs
    of the same configuration: the report compares them, and `knob` names the setting to change."""
    tokens_per_second: float | None
    """Prompt and response tokens that were trained and kept, per second of the training phase."""
    groups_per_second_gross: float | None
    """The same as `groups_per_second`, also with the steps that were undone because the learner was restored from a
    checkpoint."""
    tokens_per_second_gross: float | None
    """The same as `tokens_per_second`, also with the steps that were undone."""
    learner_idle_share: float | None
    """Fraction of the training phase, without interruptions, in which no optimizer step ran. Worry if it exceeds 0.2:
    `verdict` says what the learner waited for."""
    engine_idle_share: float | None
    """Fraction of the training phase, without interruptions, in which no engine had a request. Worry if it exceeds 0.2
    while the learner is busy: use fewer engines, or more learner ranks (`--actor-num-gpus-per-node`)."""


class Waste(TypedDict):
    """What was generated and not trained."""

    generated_tokens: int
    """Response tokens that were generated, trained or not."""
    wasted_share: float | None
    """Fraction of `generated_tokens` that was not trained. Worry if it exceeds 0.2: `wasted_knob` names the setting to
    change."""
    wasted_tokens: dict[str, int]
    """Response tokens that were generated and not trained, by reason. Tokens of groups that were being generated when a
    rollout worker, an engine or the router was lost, and that are generated twice, are estimated. `publish` are
    requests that a publish aborted, `removed` samples that a sample filter excluded from the loss, and `leftover` what
    was not yet trained when the run ended."""
    wasted_mainly: str | None
    """The reason for most of the waste, in words."""
    wasted_knob: str | None
    """The setting that reduces this waste."""


class Summary(TrainingPhase, Waste):
    """The contents of `summary.json`. Values without an event are None."""

    run: str | None
    """Name of the run folder."""
    entry: str | None
    """`train.py` if the schedule is synchronous, else `train_async.py`."""
    started: str | None
    """When the run began, in UTC (ISO 8601)."""
    ended: str | None
    """When the run ended, in UTC (ISO 8601)."""
    reason: str | None
    """`done`, `interrupted` or a sentence with the cause of the failure. Worry if it is such a sentence: it says what
    to do, and `logs/` has more."""
    wall_seconds: float | None
    """Duration of the whole run, also the time between two drivers."""
    warm_start_seconds: float | None
    """Duration of the warm start; near 0 if it was cached."""
    rollouts: int
    """Batches that the weights were trained on in this run, without those that were undone."""
    accuracy_before: float | None
    """Fraction of samples with the full reward before training, on the first evaluated data set."""
    accuracy_before_interval: list[float] | None
    """The 95 % confidence interval of `accuracy_before` (Wilson 1927)."""
    accuracy_before_samples: int | None
    """Number of samples from which `accuracy_before` was computed."""
    accuracy_after: float | None
    """Fraction of samples with the full reward in the last evaluation. Worry if its interval does not lie above
    `accuracy_before_interval`: the run has not shown that the model learned. Train longer, or look at the reward."""
    accuracy_after_interval: list[float] | None
    """The 95 % confidence interval of `accuracy_after`."""
    accuracy_after_samples: int | None
    """Number of samples from which `accuracy_after` was computed."""
    scores: dict[str, float]
    """The last scores of every evaluated data set, under the names that slime uses. Worry if a value that ends in
    `-missing_samples` is not 0: these samples could not be scored, and a warning in the log has the error."""
    reward_first: float | None
    """Mean reward of the first `reward_batches` batches."""
    reward_last: float | None
    """Mean reward of the last `reward_batches` batches. Worry if it is not above `reward_first`: read samples in the
    report, and see the FAQ."""
    reward_batches: int | None
    """Number of batches in `reward_first` and in `reward_last`."""
    collapse_announced_after_rollout: int | None
    """The rollout after which the signs of a collapse first appeared. Worry if it is not null: resume from a checkpoint
    before it, with a lower `--max-weight-staleness` or `--lr`."""
    undone_batches: int
    """Batches whose training was lost, because the learner continued from a checkpoint. Worry if it is a large part of
    `rollouts`: save more often (`--save-interval`)."""
    undone_groups: int
    """Groups of these batches."""
    undone_tokens: int
    """Prompt and response tokens of these batches."""
    lost_learner_seconds: float
    """Time of steps that were undone, and of those that did not end."""
    restarts: dict[str, int]
    """How often `driver`, `rollout_worker` and `learner` were replaced. Worry if a process is listed: its log in the
    run folder says how it ended."""
    interrupted_seconds: dict[str, float]
    """Time without a rollout worker, by cause: `no_driver` until the next driver starts, `driver_start` until its
    training loop begins, `rollout_worker` and `learner` from the last report of the lost one until training goes on. No
    verdict and no idle share covers it."""
    weight_transfer: str | None
    """The transport of the weights."""
    versions: int
    """The newest weight version that was published."""
    adapters: dict[str, dict[str, float | None]]
    """Each adapter of a run that trains several: its newest `version`, the groups that have `trained` it and their
    `share`, and the mean `reward` of its last groups. Worry if a share is far below the weight of its adapter."""
    publish_ms_median: float | None
    """Median time of a publish in milliseconds, from the start of staging until every engine decodes again. The initial
    weights are not counted."""
    publish_ms_max: float | None
    """The longest publish in milliseconds."""
    pause_ms_median: float | None
    """The part of `publish_ms_median` in which engines were paused. Worry if it is a large part of the time of a batch:
    use a faster `--weight-transfer`, or raise `--update-weights-interval`."""
    pause_ms_max: float | None
    """The longest pause in milliseconds."""
    publish_bytes: int
    """Bytes that all publishes wrote to the engines."""
    staleness_max: int | None
    """Highest staleness of a trained group, in weight versions."""
    staleness_histogram: dict[str, int]
    """Number of trained groups by staleness, in weight versions."""
    recycled: int
    """Groups that were too stale to train and were generated again. Worry if it exceeds a tenth of the trained groups:
    lower `--over-sampling-batch-size`, or raise `--max-weight-staleness`."""
    dropped: dict[str, int]
    """Number of dropped groups by reason."""
    left_out_samples: int
    """Samples that failed and without which their group was trained. Worry if there are many: `SampleDiscarded` in
    `events.jsonl` has their errors."""
    lost_tokens_at_most: int
    """Upper bound of the response tokens that were lost with a process while they were generated."""
    unwritten_dead_letters: int
    """Dead letters that could not be written to `dead_letters.jsonl`. Worry if it is not 0: the disk was full or
    failed, and `unwritten_prompts` is all that is left of them."""
    unwritten_prompts: list[str]
    """Feed indices of the oldest of these dead letters."""
    verdict: str | None
    """What limited the speed for most of the time. Worry if it is not `balanced` or `trainer-bound`: change `knob`."""
    verdict_share: float | None
    """Fraction of the time of all verdicts in which `verdict` held."""
    knob: str | None
    """The setting to change, and what that would bring."""
    verdict_seconds: dict[str, float]
    """Time of each verdict. Interruptions are not included."""
    configuration: str
    """Identifies the configuration without its seeds and names. Runs with the same value are comparable."""
    untested: list[str]
    """Flags of SGLang that were never tried and that the user has allowed. Worry if an engine behaves unexpectedly: try
    again without them."""
    batches_per_reward: int
    """Number of batches whose mean is one value of `rewards`."""
    rewards: list[float]
    """Mean reward over the batches of the run, in at most 256 values."""


def summarize(view: RunView, expected_end: RunEnded | None = None) -> Summary:
    """Return the contents of `summary.json`. `expected_end` is the end of a run that has not ended."""
    run, cluster, verdict = view.run, view.last(ClusterReady), view.verdict
    end = view.ended or expected_end
    ended = end.time if end is not None else view.time
    before, after, collapse = view.before_training, view.after_training, view.collapse
    unwritten = view.last(DeadLettersUnwritten)
    rewards, ends = view.charts.rewards(), view.steps.rewards()
    dropped = view.groups.dropped
    return {
        "run": run.run if run is not None else None,
        "entry": run.entry if run is not None else None,
        "started": _timestamp(run.time if run is not None else None),
        "ended": _timestamp(ended),
        "reason": end.reason if end is not None else None,
        "wall_seconds": ended - run.time if run is not None else None,
        "warm_start_seconds": view.warm_start.warm_start_seconds if view.warm_start is not None else None,
        "rollouts": view.steps.batches,
        "accuracy_before": before.accuracy if before is not None else None,
        "accuracy_before_interval": list(before.interval) if before is not None else None,
        "accuracy_before_samples": before.problems if before is not None else None,
        "accuracy_after": after.accuracy if after is not None else None,
        "accuracy_after_interval": list(after.interval) if after is not None else None,
        "accuracy_after_samples": after.problems if after is not None else None,
        "scores": _scores(view),
        "reward_first": ends[0] if ends is not None else None,
        "reward_last": ends[1] if ends is not None else None,
        "reward_batches": ends[2] if ends is not None else None,
        "collapse_announced_after_rollout": collapse.rollout if collapse is not None else None,
        **_training_phase(view),
        "undone_batches": view.steps.undone.batches,
        "undone_groups": view.steps.undone.groups,
        "undone_tokens": view.steps.undone.tokens,
        "lost_learner_seconds": view.steps.lost_seconds,
        "restarts": dict(view.uptime.restarts),
        "interrupted_seconds": {str(cause): seconds for cause, seconds in view.uptime.seconds.items()},
        "weight_transfer": cluster.weight_transfer if cluster is not None else None,
        "versions": view.publishes.version,
        "adapters": {
            name: {
                "version": adapter.version,
                "trained": adapter.trained,
                "share": view.adapters.share(name),
                "reward": adapter.reward,
            }
            for name, adapter in view.adapters.known.items()
        },
        "publish_ms_median": view.publishes.whole.median,
        "publish_ms_max": view.publishes.whole.max,
        "pause_ms_median": view.publishes.pause.median,
        "pause_ms_max": view.publishes.pause.max,
        "publish_bytes": view.publishes.bytes,
        "staleness_max": max(view.staleness.trained, default=None),
        "staleness_histogram": {str(age): count for age, count in sorted(view.staleness.trained.items())},
        "recycled": dropped.get(DropReason.STALE, 0),
        "dropped": dict(sorted(dropped.items())),
        **_waste(view.tokens),
        "left_out_samples": view.groups.left_out_samples,
        "lost_tokens_at_most": view.tokens.lost_at_most,
        "unwritten_dead_letters": unwritten.letters if unwritten is not None else 0,
        "unwritten_prompts": unwritten.prompts if unwritten is not None else [],
        "verdict": verdict,
        "verdict_share": view.verdict_seconds[verdict] / sum(view.verdict_seconds.values()) if verdict else None,
        "knob": view.advise(Finding(verdict, "", {})) if verdict is not None else None,
        "verdict_seconds": {kind: round(seconds, 3) for kind, seconds in view.verdict_seconds.items()},
        "configuration": run.configuration if run is not None else "",
        "untested": list(run.untested) if run is not None else [],
        "batches_per_reward": round(rewards["width"]),
        "rewards": rewards["series"].get("reward", {"mean": []})["mean"],
    }


def _scores(view: RunView) -> dict[str, float]:
    """The last score of every data set, under the names that slime uses."""
    scores: dict[str, float] = {}
    for name, (*_, last) in view.evaluations.items():
        scores[f"eval/{name}"] = last.reward
        scores[f"eval/{name}-truncated_ratio"] = last.truncated
        scores[f"eval/{name}-missing_samples"] = last.missing
    return scores


def _training_phase(view: RunView) -> TrainingPhase:
    steps, idle, began = view.steps, view.idle, view.uptime.training_began
    if steps.last is None or idle is None or began is None or idle.served_seconds <= 0:
        return cast("TrainingPhase", dict.fromkeys(TrainingPhase.__annotations__))
    seconds, busy = steps.last.time - began, view.engine_use.busy_seconds(steps.last.time)
    return {
        "training_seconds": seconds,
        "groups_per_second": steps.kept.groups / seconds,
        "tokens_per_second": steps.kept.tokens / seconds,
        "groups_per_second_gross": steps.trained.groups / seconds,
        "tokens_per_second_gross": steps.trained.tokens / seconds,
        "learner_idle_share": idle.learner_seconds / idle.served_seconds,
        "engine_idle_share": max(0.0, 1 - busy / idle.served_seconds) if busy is not None else None,
    }


def _waste(tokens: Tokens) -> Waste:
    cause = CAUSES[tokens.main_reason] if tokens.main_reason is not None else None
    return {
        "generated_tokens": tokens.generated,
        "wasted_share": tokens.share,
        "wasted_tokens": {reason: wasted for reason, wasted in sorted(tokens.by_reason.items()) if wasted},
        "wasted_mainly": cause.what if cause is not None else None,
        "wasted_knob": cause.knob if cause is not None else None,
    }


def write_summary(view: RunView, path: Path, expected_end: RunEnded | None = None) -> None:
    """Write `summary.json` to `path`. Raises OSError if it cannot be written."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(summarize(view, expected_end)), indent=2) + b"\n")


def summary_text(view: RunView) -> str:
    """Return the summary as lines of text."""
    values = summarize(view)
    width = max(map(len, [*_LINES, *(f"adapter {name}" for name in view.adapters.known)]))
    lines = {name: _line(template, values) for name, template in _LINES.items()}
    if not view.evaluations:
        del lines["accuracy"]
    else:
        lines["accuracy"] += _precision(view)
        if (after := view.after_training) is not None and after.missing:
            lines["accuracy"] += f"; {after.missing} samples without a score are left out"
    if values["wasted_mainly"] is not None:
        lines["wasted"] += f"; mainly because {values['wasted_mainly']}"
    if view.steps.undone.batches:
        lines["trained"] += _line(_UNDONE, values)
    if values["restarts"] or values["interrupted_seconds"]:
        restarts = _named_counts(values["restarts"])
        seconds = _named_counts({name: f"{time:.1f} s" for name, time in values["interrupted_seconds"].items()})
        lines["restarts"] = f"{restarts}; without a rollout worker for {seconds}"
    if (unwritten := view.last(DeadLettersUnwritten)) is not None and unwritten.letters:
        prompts = ", ".join(unwritten.prompts) + (", …" if unwritten.letters > len(unwritten.prompts) else "")
        lines["not written"] = f"dead letters of {unwritten.letters} prompts: {prompts}"
    for name, adapter in view.adapters.known.items():
        reward = "no reward" if adapter.reward is None else f"reward {adapter.reward:.3f}"
        share = f"{adapter.trained} groups trained ({view.adapters.share(name):.0%})"
        lines[f"adapter {name}"] = f"version {adapter.version}, {share}, {reward}"
    if view.run is not None and view.run.untested:
        lines["untested"] = " ".join(view.run.untested)
    if (collapse := view.collapse) is not None:
        lines["collapse"] = f"announced after rollout {collapse.rollout}: {collapse.why}; {collapse.knob}"
    return "\n".join(f"{name:<{width}}  {line}" for name, line in lines.items())


_LINES = {
    "accuracy": "{accuracy_before:.3f} before, {accuracy_after:.3f} after",
    "reward": "{reward_first:.3f} in the first {reward_batches} of {rollouts} batches, {reward_last:.3f} in the last",
    "wall time": "{wall_seconds:.1f} s; warm start {warm_start_seconds:.1f} s, training {training_seconds:.1f} s",
    "trained": "{groups_per_second:.1f} groups/s, {tokens_per_second:.0f} prompt and response tokens/s",
    "idle": "learner {learner_idle_share:.0%}, engines {engine_idle_share:.0%}",
    "publish": "{publish_ms_median:.0f} ms median, {publish_ms_max:.0f} ms max, {weight_transfer}, version {versions}",
    "pause": "{pause_ms_median:.0f} ms median, {pause_ms_max:.0f} ms max",
    "staleness": "max {staleness_max}, groups by age {staleness_histogram}",
    "recycled": "{recycled} groups; dropped {dropped}",
    "wasted": "{wasted_share:.1%} of {generated_tokens} response tokens; {wasted_tokens}",
    "verdict": "{verdict} for {verdict_share:.0%} of the time: {knob}",
    "ended": "{reason}",
}


def _precision(view: RunView) -> str:
    """The 95 % confidence intervals of the accuracies, and from how many samples they are."""
    known = [event for event in (view.before_training, view.after_training) if event is not None]
    intervals = (f"{event.interval[0]:.3f} to {event.interval[1]:.3f} of {event.problems} samples" for event in known)
    return f" (95 %: {', '.join(intervals)})" if known else ""


_UNDONE = (
    "; with the {undone_batches} undone batches: {groups_per_second_gross:.1f} groups/s, "
    "{tokens_per_second_gross:.0f} tokens/s"
)


class _Missing:
    """A missing value, which every format specification renders as a dash."""

    def __format__(self, specification: str) -> str:
        return "-"


def _line(template: str, values: Mapping[str, Any]) -> str:
    shown = {name: _Missing() if value is None else _counts(value) for name, value in values.items()}
    return template.format(**shown)


def _counts(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return value


def _named_counts(counts: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in counts.items()) or "none"


def _timestamp(seconds: float | None) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds is not None else None

"""The summary of a run: `summary.json` for scripts, and a block of text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from miles_async.atomic_files import write_atomically
from miles_async.events import ClusterReady, DeadLettersUnwritten, RunEnded
from miles_async.observability.diagnosis.verdict import Finding
from miles_async.observability.state.tokens import CAUSES, Tokens
from miles_async.observability.view import RunView
from miles_async.types import DropReason


def summarize(view: RunView, expected_end: RunEnded | None = None) -> dict[str, Any]:
    """Return the contents of `summary.json`. Values without an event are None.

    `expected_end` is the end of a run that has not ended.

    - `wall_seconds` covers the whole run, also the time between two drivers. Rates and idle shares cover the training
      phase, which lasts from the start of the first step to the end of the last one (`training_seconds`).
    - `groups_per_second` and `tokens_per_second` count what was trained and kept; the rates with `_gross` also count
      steps that were undone because the learner was restored from a checkpoint. Tokens are prompt and response tokens.
    - `undone_*` counts the steps that were undone, and `lost_learner_seconds` is the time of these steps and of those
      that did not end.
    - `restarts` has the replaced processes, and `interrupted_seconds` the time without a rollout worker, by cause
      (`state/uptime.py`). The idle shares are fractions of the time without interruptions, and no verdict covers an
      interruption.
    - `reward_first` and `reward_last` are means over the first and the last `reward_batches` batches.
    - `wasted_tokens` are the response tokens that were generated and not trained, by reason, and `wasted_share` is
      their share of all generated tokens. The tokens of groups that were being generated when a rollout worker, an
      engine or the router was lost, and that are generated twice, are estimated; `lost_tokens_at_most` is an upper
      bound. What was generated and not yet trained when the run ended is `leftover`.
    - `left_out_samples` is the number of samples that failed and without which their group was trained.
    - `publish_ms_*` lasts from the start of staging until every engine decodes again. `pause_ms_*` is the part of it in
      which the engines were paused. Version 0, the initial weights, is not counted as a publish.
    """
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
        "restarts": {process: count for process, count in view.uptime.restarts.items() if count},
        "interrupted_seconds": dict(view.uptime.seconds),
        "weight_transfer": cluster.weight_transfer if cluster is not None else None,
        "versions": view.publishes.version,
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


def _training_phase(view: RunView) -> dict[str, float | None]:
    steps, idle, began = view.steps, view.idle, view.uptime.training_began
    names = ("groups_per_second", "tokens_per_second", "groups_per_second_gross", "tokens_per_second_gross")
    if steps.last is None or idle is None or began is None or idle.served_seconds <= 0:
        return dict.fromkeys(("training_seconds", *names, "learner_idle_share", "engine_idle_share"))
    seconds, kept, trained = steps.last.time - began, steps.kept, steps.trained
    work = (kept.groups, kept.tokens, trained.groups, trained.tokens)
    busy = view.engine_use.busy_seconds(steps.last.time)
    return {
        "training_seconds": seconds,
        **{name: amount / seconds for name, amount in zip(names, work, strict=True)},
        "learner_idle_share": idle.learner_seconds / idle.served_seconds,
        "engine_idle_share": max(0.0, 1 - busy / idle.served_seconds) if busy is not None else None,
    }


def _waste(tokens: Tokens) -> dict[str, Any]:
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
    width = max(len(name) for name in _LINES)
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


def _line(template: str, values: dict[str, Any]) -> str:
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

"""The Prometheus metrics of what the view knows: almost all gauges, and counters of what the view counts.

They are computed at each scrape. Each is declared where its value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import nan
from typing import TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from miles_async import events
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.state.engines import IdleCause, idle_cause
from miles_async.observability.state.tokens import CAUSES
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import LIVE, GroupState
from miles_async.visible_text import visible_text

PREFIX = "miles_async_"
MAX_LABEL_VALUES = 64
MAX_LABEL_CHARACTERS = 80
T = TypeVar("T")
Family = GaugeMetricFamily | CounterMetricFamily


def view_metrics(view: RunView, now: float) -> Iterator[Family]:
    """Compute the metrics. `now` is the time, in wall-clock seconds, for those that grow without events."""
    yield from _run(view, now)
    yield from _queue_and_window(view)
    yield from _groups(view)
    yield from _steps(view, now)
    yield from _adapters(view)
    yield from _data_sets(view)
    yield from _evaluations(view)
    yield from _engines(view, now)


def _run(view: RunView, now: float) -> Iterator[Family]:
    started, pulse = view.warm_start, view.present(events.Pulse)
    yield _gauge(
        "warm_start_seconds",
        "Duration of the warm start; near 0 if it was cached.",
        started.warm_start_seconds if started else 0,
    )
    verdict = view.finding.verdict
    yield _gauges(
        "verdict",
        "1 for the current bottleneck of the run, 0 for all others. Worry if it is neither `balanced` nor "
        "`trainer-bound`: the log line `verdict` names the setting to change.",
        "verdict",
        {kind: kind is verdict for kind in Bottleneck},
    )
    risk = view.last(events.CollapseRiskChanged)
    yield _gauge(
        "collapse_risk",
        "1 while the effective sample size and the reward announce a collapse, else 0.",
        risk.high if risk else 0,
    )
    yield _gauge(
        "training",
        "1 from the first optimizer step after a start or a restart of the driver until the run ends.",
        view.present(events.StepStarted) is not None and view.ended is None,
    )
    yield _counters(
        "trainer_seconds",
        "The learner's time, by what it did or what it waited for. Worry if `step` is not most of it: the verdict "
        "names the setting to change.",
        "doing",
        view.learner.seconds,
    )
    progress = view.progress
    yield _gauge(
        "since_progress_seconds",
        "Seconds since the last progress of any kind.",
        progress.idle_seconds + max(0.0, now - progress.time) if progress else 0,
    )
    yield _gauge(
        "no_progress_warn_seconds",
        "Seconds without progress after which the run warns; no less than a slow group takes while the run waits "
        "for groups. NaN until the first batch is requested.",
        pulse.warn_seconds if pulse else nan,
    )
    yield _gauge(
        "eta_seconds",
        "Seconds that the remaining batches need at the pace so far. Undone batches remain, and their time counts. "
        "NaN before the first batch.",
        _remaining_seconds(view),
    )
    yield _counters(
        "restarts",
        "How often driver, rollout_worker and learner were replaced.",
        "name",
        {**dict.fromkeys(("driver", "rollout_worker", "learner"), 0), **view.uptime.restarts},
    )
    yield _gauge(
        "lost_driver_replaced_timestamp_seconds",
        "When the last driver began that continues a run whose driver was lost. NaN if there is none.",
        view.lost_driver_replaced or nan,
    )


def _queue_and_window(view: RunView) -> Iterator[Family]:
    run, queue, pulse = view.last(events.RunStarted), view.queue, view.present(events.Pulse)
    yield _gauge("queue_depth_groups", "Finished groups that wait for the learner.", queue.depth if queue else 0)
    yield _gauge("queue_capacity_groups", "Most groups that the queue holds.", run.queue_capacity if run else 0)
    yield _gauge(
        "window_groups", "Window size W: how far past the head a group may be collected.", run.window if run else 0
    )
    yield _gauge(
        "slots_groups",
        "Most groups between admission and publish (B); NaN if unlimited.",
        run.slots if run and run.slots is not None else nan,
    )
    yield _gauge(
        "staleness_limit_versions",
        "--max-weight-staleness; NaN if unset.",
        run.staleness_limit if run and run.staleness_limit is not None else nan,
    )
    yield _gauge(
        "held_slots_groups",
        "Groups between admission and publish. Worry if it equals `slots_groups` while engines are idle: raise "
        "--max-weight-staleness, or train faster.",
        sum(view.groups.counts.values()),
    )
    yield _gauge(
        "head_age_seconds",
        "Seconds for which the same group has been the window's head.",
        pulse.head_seconds if pulse else 0,
    )
    yield _gauge("blocked_groups", "Finished groups that the window holds back.", queue.blocked if queue else 0)
    yield _counters(
        "admission_blocked_seconds",
        "Seconds in which no group could be admitted, by cause.",
        "cause",
        view.blocked_until_now(),
    )


def _groups(view: RunView) -> Iterator[Family]:
    counts, pulse = view.groups.counts, view.present(events.Pulse)
    busy, unwritten = view.present(events.EngineBusy), view.last(events.DeadLettersUnwritten)
    yield _gauges(
        "groups", "Live groups in each state of the ledger.", "state", {state: counts.get(state, 0) for state in LIVE}
    )
    yield _gauge(
        "in_flight_groups",
        "Groups that are being generated, rewarded or filtered.",
        counts.get(GroupState.IN_FLIGHT, 0),
    )
    yield _gauge("in_flight_requests", "Requests at the engines.", busy.in_flight if busy else 0)
    yield _gauge(
        "oldest_request_seconds",
        "Seconds for which the oldest group has been at the engines. Worry if it exceeds `slow_group_seconds`: "
        "`make groups` names the group. Look at the tool or the engine that it waits for.",
        pulse.oldest_seconds if pulse else 0,
    )
    yield _gauge(
        "slow_group_seconds",
        "Twice the 99th percentile of the seconds from first request to reward of the last 1000 groups: almost no "
        "group takes longer. NaN before 50 groups have ended.",
        (pulse.slow_group_seconds if pulse else 0) or nan,
    )
    yield _gauge(
        "rewarding_groups",
        "Groups that wait for their reward. Worry if it is most of `in_flight_groups`: make the reward faster, or "
        "set --reward-timeout-seconds.",
        pulse.rewarding if pulse else 0,
    )
    yield _counter("generated_tokens", "Response tokens that were generated, trained or not.", view.tokens.generated)
    yield _counters(
        "wasted_tokens",
        "Response tokens that were generated and not trained, by reason. Those of lost processes are estimated. "
        "Worry if it grows by more than a fifth of `generated_tokens`: `wasted_knob` in summary.json names the "
        "setting.",
        "reason",
        # A rate is 0, and not unknown, before the first group is dropped.
        {**dict.fromkeys(CAUSES, 0), **view.tokens.by_reason},
    )
    yield _gauge(
        "unwritten_dead_letters",
        "Dead letters that could not be written and are kept in memory.",
        unwritten.letters if unwritten else 0,
    )


def _steps(view: RunView, now: float) -> Iterator[Family]:
    steps = view.steps
    run, written = view.last(events.RunStarted), view.last(events.CheckpointWritten)
    yield _gauge(
        "step_reward",
        "Mean reward of the last trained batch. Worry if it falls over tens of batches, or stays at 0: read "
        "samples on the live page. The FAQ has the causes.",
        steps.last.reward if steps.last else 0,
    )
    yield _gauge(
        "step_response_tokens",
        "Mean response length of the last trained batch. Worry if it approaches --rollout-max-response-len, or "
        "falls to a few tokens: look at what the reward pays for.",
        steps.last.response_length if steps.last else 0,
    )
    yield _gauge("rollout_batches", "Batches that were trained.", steps.next_rollout)
    yield _counter(
        "undone_batches",
        "Batches whose training was lost, because the learner continued from a checkpoint.",
        steps.undone.batches,
    )
    yield _gauge(
        "unsaved_batches",
        "Batches trained after the newest checkpoint, which are undone if the learner is lost.",
        steps.unsaved_batches,
    )
    yield _gauge(
        "save_interval_batches",
        "--save-interval; NaN if no checkpoints are written at intervals.",
        (run.save_interval if run else None) or nan,
    )
    yield _gauge(
        "last_checkpoint_timestamp_seconds",
        "When the newest checkpoint was complete. NaN before the first. Worry if it is older than --save-interval "
        "batches take: a checkpoint is slow, or hangs. See the alert CheckpointOld.",
        written.time if written else nan,
    )
    yield _counter(
        "learner_idle_seconds",
        "Seconds in which the learner ran no optimizer step, from the first step on, without interruptions.",
        view.learner_idle_seconds(now),
    )


def _engines(view: RunView, now: float) -> Iterator[Family]:
    engines, use = view.engines, view.engine_use.last
    pulse, router = view.present(events.Pulse), view.present(events.RouterChanged)
    yield _gauges(
        "engine_weight_version",
        "Weight version that an engine holds.",
        "engine",
        {name: version for name, version in engines.versions.items() if version is not None},
    )
    yield _gauges(
        "adapter_requests",
        "Requests at the engines, by the version of the adapter (--lora-rank).",
        "version",
        pulse.adapters if pulse else {},
    )
    yield _gauges(
        "engine_routed",
        "1 while the engine receives requests, 0 while it is fenced.",
        "engine",
        {name: engines.known[name].state == "routed" for name in engines.versions},
    )
    yield _counter(
        "engine_idle_seconds",
        "Seconds without any request at the engines, from the first step on, without interruptions.",
        view.engine_idle_seconds(now),
    )
    idle = use is None or not use.in_flight
    publishing = view.publishes.running is not None
    cause = idle_cause(None if view.uptime.interrupted else pulse, engines.routed, publishing=publishing)
    yield _gauges(
        "engines_idle",
        "1 for the reason why no engine has a request (start, no_engine, publish, window, learner, reward or "
        "other), 0 for all others and while one has.",
        "cause",
        {each: idle and cause is each for each in IdleCause},
    )
    yield _gauge(
        "router_up",
        "1 while the router answers, 0 while it does not, NaN while the run starts.",
        router.up if router else nan,
    )
    yield _gauges(
        "router_engines",
        "Engines that the router lists, by their health as seen by the router. Worry if some stay unhealthy: their "
        "logs in the run folder have the cause.",
        "health",
        {"healthy": router.healthy, "unhealthy": router.engines - router.healthy} if router else {},
    )


def _adapters(view: RunView) -> Iterator[Family]:
    known = view.adapters.known
    gauges = _gauges_of("adapter", "adapter", known)
    yield gauges(
        "live_version",
        "Newest version of an adapter that is live, if the run trains several.",
        lambda adapter: adapter.version,
    )
    yield gauges(
        "reward",
        "Mean reward of the last groups of an adapter, if the run trains several. Worry if it is 0 or full for a long "
        "time: its data sets teach nothing. Lower its weight, or change its prompts.",
        lambda adapter: adapter.reward or 0.0,
    )
    yield gauges(
        "trained_groups",
        "Groups that have trained an adapter, if the run trains several.",
        lambda adapter: adapter.trained,
    )
    yield _gauges(
        "adapter_share_ratio",
        "Fraction of all trained groups that have trained an adapter, if the run trains several. Worry if it is below "
        "the share of its weight in --adapters: its groups take longer than those of others.",
        "adapter",
        {name: view.adapters.share(name) for name in known},
    )
    yield gauges(
        "staleness_versions",
        "Mean staleness of the last batch of an adapter, if the run trains several.",
        lambda adapter: adapter.age or 0.0,
    )
    yield gauges(
        "queue_groups", "Groups in the queue of an adapter, if the run trains several.", lambda adapter: adapter.queue
    )


def _data_sets(view: RunView) -> Iterator[Family]:
    known = view.datasets.known
    gauges = _gauges_of("dataset", "dataset", known)
    yield gauges(
        "reward",
        "Mean reward of the last groups of a data set. Worry if it is 0 or full for a long time: the data set teaches "
        "nothing. Lower its weight, or change its prompts.",
        lambda dataset: dataset.reward or 0.0,
    )
    yield gauges("trained_groups", "Groups of a data set that were trained.", lambda dataset: dataset.trained)
    yield gauges(
        "filtered_groups",
        "Groups of a data set that a filter dropped. Worry if it grows faster than `dataset_trained_groups`: the "
        "prompts are too easy or too hard.",
        lambda dataset: dataset.filtered,
    )
    yield _gauges(
        "dataset_share_ratio",
        "Fraction of all trained groups that are from a data set. Worry if it differs from the weights of --datasets: "
        "filters or slow answers remove its groups.",
        "dataset",
        {name: view.datasets.share(name) for name in known},
    )
    yield gauges(
        "epochs",
        "Number of times that the prompts of a data set were used. Worry if it is large while `eval_reward` falls: the "
        "policy memorizes. Add data.",
        lambda dataset: dataset.epochs,
    )


def _evaluations(view: RunView) -> Iterator[Family]:
    newest = {name: last for name, (*_, last) in view.evaluations.items()}
    gauges = _gauges_of("eval", "name", newest)
    yield gauges(
        "accuracy_ratio",
        "Fraction of samples with the full reward on a data set. Worry if it falls while `step_reward` rises: the "
        "policy exploits the reward. Read samples.",
        lambda last: last.accuracy,
    )
    yield gauges(
        "reward",
        "Mean reward on a data set. Worry if it falls while `step_reward` rises: the policy exploits the reward. Read "
        "samples.",
        lambda last: last.reward,
    )
    yield gauges(
        "truncated_ratio",
        "Fraction of truncated samples on a data set. Worry if it rises: answers reach --rollout-max-response-len, and "
        "truncated ones rarely score.",
        lambda last: last.truncated,
    )
    yield gauges(
        "missing_samples",
        "Samples without a score in the last evaluation of a data set. Worry if it is not 0: the warning about this "
        "evaluation has the error. The other figures leave these samples out.",
        lambda last: last.missing,
    )
    yield gauges(
        "oldest_weight_version",
        "Oldest weight version of the last evaluation of a data set.",
        lambda last: last.versions[0],
    )
    yield gauges(
        "newest_weight_version",
        "Newest weight version of the last evaluation of a data set.",
        lambda last: last.versions[1],
    )


def _counter(name: str, text: str, total: float) -> Family:
    return CounterMetricFamily(PREFIX + name, text, float(total))


def _counters(name: str, text: str, label: str, totals: Mapping[str, float]) -> Family:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, total in totals.items():
        family.add_metric([str(value)], float(total))
    return family


def _gauge(name: str, text: str, value: float) -> Family:
    """Return a gauge. It is NaN if its value is not known, so that no alert takes an unknown value for 0."""
    return GaugeMetricFamily(PREFIX + name, text, float(value))


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    """Return a gauge with one label."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    bounded = {
        shown_label(value) if index < MAX_LABEL_VALUES else "other": number
        for index, (value, number) in enumerate(values.items())
    }
    for value, number in bounded.items():
        family.add_metric([value], float(number))
    return family


def _gauges_of(prefix: str, label: str, known: Mapping[str, T]) -> Callable[[str, str, Callable[[T], float]], Family]:
    """Return a function that returns a gauge with one series for each entry of `known`."""
    return lambda name, text, read: _gauges(
        f"{prefix}_{name}", text, label, {value: read(one) for value, one in known.items()}
    )


def _remaining_seconds(view: RunView) -> float:
    steps = view.steps
    if view.run is None or steps.last is None or not steps.kept.batches:
        return nan
    seconds = view.uptime.training_seconds(steps.last.time) / steps.kept.batches
    return max(0, view.run.rollouts - steps.next_rollout) * seconds


def shown_label(value: str) -> str:
    return visible_text(value[:MAX_LABEL_CHARACTERS])

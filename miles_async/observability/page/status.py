"""The current status of a run, for the live page and the report."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from miles_async import events
from miles_async.observability.state.contributions import Contributions
from miles_async.observability.state.groups import Group
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import GroupState
from miles_async.visible_text import visible_text

SLOTS_SHOWN = 480
"""Most live groups that are listed; further groups are only counted."""


def status(view: RunView, now: float) -> dict[str, Any]:
    """Return the status at `now` as plain values for JSON.

    Times are in seconds since the run began. Ages are in seconds until `now` or until the end of the run.
    """
    began = view.run.time if view.run is not None else now
    now = view.until(now)
    cluster, pulse, step = view.last(events.ClusterReady), view.last(events.Pulse), view.last(events.StepEnded)
    phase, collapse = view.last(events.TrainerPhaseChanged), view.last(events.CollapseRiskChanged)
    busy, publishing = view.engine_use.last, view.publishes.running
    return {
        "run": _with_defaults(view.run),
        "cluster": _with_defaults(cluster),
        "ended": view.ended.reason if view.ended is not None else None,
        "began": began,
        "elapsed": now - began,
        "training_began": view.cluster.time - began if view.cluster is not None else None,
        "verdict": _verdict(view),
        "collapse": collapse if collapse is not None and collapse.high else None,
        "trainer": phase and {"does": phase.to, "for": max(0.0, now - phase.time)},
        "rollouts_done": view.steps.next_rollout,
        "fed": view.groups.fed,
        "requests": busy.in_flight if busy is not None else 0,
        "queue": view.queue._asdict() if view.queue is not None else None,
        "staleness_limit": view.run.staleness_limit if view.run is not None else None,
        "pulse": _with_defaults(pulse),
        "pulse_age": max(0.0, now - pulse.time) if pulse is not None else None,
        "outcomes": _outcomes(view),
        "datasets": _contributions(view.datasets),
        "adapters": _contributions(view.adapters),
        "staleness": {str(age): count for age, count in sorted(view.staleness.trained.items())},
        "step": _with_defaults(step),
        "undone": msgspec.to_builtins(view.steps.undone),
        "restarts": dict(view.uptime.restarts),
        "interrupted": dict(view.uptime.seconds),
        "publish": _with_defaults(view.last(events.PublishEnded)),
        "publishing": publishing and publishing.version,
        "router": _with_defaults(view.last(events.RouterChanged)),
        "engines": [engine for _, engine in sorted(view.engines.known.items())],
        "silent": dict(view.silent),
        "scores": {name: [_score(event) for event in evaluated] for name, evaluated in view.evaluations.items()},
        "slots": _window(list(view.groups.live.values()), now),
        "notices": [
            *({"at": at - began, "text": visible_text(text)} for at, text in reversed(view.notices.newest)),
            *_untested(view.run),
        ],
    }


def _with_defaults(event: events.Event | None) -> dict[str, Any] | None:
    """Return all fields of an event; JSON made of the event itself lacks those that have their default value."""
    return msgspec.structs.asdict(event) if event is not None else None


def _verdict(view: RunView) -> events.VerdictChanged | None:
    """The last verdict that was announced, with what its change would bring now."""
    announced, finding = view.last(events.VerdictChanged), view.finding
    if announced is None or announced.verdict != finding.verdict:
        return announced
    return msgspec.structs.replace(announced, knob=view.advise(finding))


def _contributions(parts: Contributions) -> dict[str, dict[str, Any]]:
    """What data sets or adapters have contributed, by name. The page shows what each of them has."""
    return {
        name: {
            "version": part.version,
            "reward": part.reward,
            "trained": part.trained,
            "share": parts.share(name),
            "filtered": part.filtered,
            "epochs": part.epochs,
            "age": part.age,
            "queue": part.queue,
        }
        for name, part in parts.known.items()
    }


def _outcomes(view: RunView) -> dict[str, int]:
    """The number of groups by outcome, with the reasons of filters, the most frequent one first."""
    filtered = {f"filtered: {reason}": count for reason, count in view.groups.filtered.items()}
    return dict(Counter({**view.groups.outcomes, **filtered}).most_common())


def _untested(run: events.RunStarted | None) -> list[dict[str, Any]]:
    """The oldest notice: arguments that were never tried."""
    if run is None or not run.untested:
        return []
    return [{"at": 0.0, "text": f"SGLang's arguments {' '.join(run.untested)} were never tried"}]


def _window(live: list[Group], now: float) -> dict[str, Any]:
    """Return the head of the window, the live groups by state, and the oldest SLOTS_SHOWN live groups."""
    waiting = (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED)
    return {
        "head": next((group.sequence for group in live if group.state in waiting), None),
        "counts": Counter(group.state for group in live),
        "live": [
            [group.sequence, group.state, round(max(0.0, now - group.since), 1), group.attempt, group.feed_index]
            for group in live[:SLOTS_SHOWN]
        ],
    }


def _score(event: events.Evaluated) -> dict[str, Any]:
    return {**msgspec.structs.asdict(event), "interval": event.interval}

"""The line of a step: how fast it went, what it took, what came of it."""

from __future__ import annotations

from miles_async.observability.events import StepEnded

_SHOWN = ("tokens_per_second", "mfu", "memory_gib", "loss", "value_loss", "grad_norm", "lr")
"""Metrics that a line tells of, where the learner reports them."""


def step_facts(event: StepEnded) -> dict[str, float | int | bool]:
    facts: dict[str, float | int | bool] = {"rollout": event.rollout, "seconds": round(event.ended - event.started, 2)}
    facts |= {name: float(f"{event.metrics[name]:.4g}") for name in _SHOWN if name in event.metrics}
    facts["reward"] = float(f"{event.reward:.4g}")
    if not event.finite:
        facts["finite"] = False
    return facts

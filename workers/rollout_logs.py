"""Functions of users that log batches and evaluations. Settings and arguments are those of slime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.pipeline.evaluate import Scores
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_ports import EvaluationFunction
from miles_async.rollout.contract import Arguments
from miles_async.types import Group
from miles_async.user_code import call_in_thread

BATCHES = "custom_rollout_log_function_path"
EVALUATIONS = "custom_eval_rollout_log_function_path"


class RolloutLogs:
    """Calls the functions. What they return has no effect: the metrics of a run are always complete."""

    def __init__(self, config: RunConfig, args: Arguments) -> None:
        """Raises UserError if a function cannot be imported."""
        self._args = args
        self._began: dict[int, float] = {}
        """When the collection of each batch began (`time.monotonic`)."""
        self.metrics: dict[int, dict[str, Any]] = {}
        """By rollout, the metrics that the rollout function has returned with a batch that is not logged yet."""
        self.eval_metrics: dict[int, dict[str, Any]] = {}
        """The same for evaluations."""
        self._batches = _loaded(BATCHES, config.rollout.custom_rollout_log_function_path)
        self._evaluations = _loaded(EVALUATIONS, config.rollout.custom_eval_rollout_log_function_path)

    def begin(self, rollout_id: int) -> None:
        """Note when the collection of a batch begins."""
        self._began[rollout_id] = time.monotonic()

    async def batch(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Log a batch. Raises UserError if the function raises."""
        seconds = time.monotonic() - self._began.pop(rollout_id, time.monotonic())
        samples, metrics = list(chain.from_iterable(groups)), self.metrics.pop(rollout_id, None) or None
        await _call(self._batches, rollout_id, self._args, samples, metrics, seconds)

    def after(self, evaluate: EvaluationFunction | None) -> EvaluationFunction | None:
        """The evaluation of a run, whose scores are then logged. `evaluate` is the user's; None without either."""
        if evaluate is None and self._evaluations is None:
            return None

        async def logged(rollout_id: int, source: RolloutSource) -> Scores:
            scores = await (source.evaluate(rollout_id) if evaluate is None else evaluate(rollout_id, source))
            metrics = self.eval_metrics.pop(rollout_id, None) or None
            await _call(self._evaluations, rollout_id, self._args, dict(scores), metrics)
            return scores

        return logged


def _loaded(setting: str, path: str | None) -> tuple[str, Callable[..., Any]] | None:
    return None if path is None else (f"{setting} {path}", load_function(path, setting=setting))


async def _call(named: tuple[str, Callable[..., Any]] | None, *arguments: Any) -> None:
    if named is not None:
        await call_in_thread(*named, *arguments)

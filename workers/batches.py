"""What lies between a rollout function and the learner: where batches come from, and what is done to each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from miles_async.adapters.storage.rollout_file import load_groups, rollout_path, save_groups
from miles_async.config.derived import rollout_file, trains_only
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import FatalError, UserError
from miles_async.events import EventSink, SamplesRemoved
from miles_async.pipeline.source import RolloutSource
from miles_async.rollout.contract import Arguments, as_groups, call_rollout_function, complete
from miles_async.skip.generator import SkippingGenerator
from miles_async.types import Group, Sample


class Batches:
    """`await batches(rollout_id, source)`: the groups to train, from the rollout function or from disk."""

    def __init__(
        self,
        config: RunConfig,
        function: Callable[..., Any],
        args: Arguments,
        events: EventSink,
        *,
        trainer_version: Callable[[], int],
        rate: Callable[[Sample], Awaitable[None]],
        skipping: SkippingGenerator | None = None,
    ) -> None:
        """`rate` asks the engines for log-probabilities that a function did not keep; lessons need none.

        Raises UserError when the sample filter cannot be imported.
        """
        self._skipping = skipping
        self._config = config
        self._function = function
        self._args = args
        self._events = events
        self._trainer_version = trainer_version
        self._rate = _unrated if config.learner.loss_type == "sft_loss" else rate
        self._save_to = rollout_file(config)
        path = config.rollout.rollout_sample_filter_path
        self._filter = None if path is None else load_function(path, setting="rollout_sample_filter_path")

    async def __call__(self, rollout_id: int, source: RolloutSource) -> list[Group]:
        """Raises UserError for what a user's function or file has wrong, Fatal when a batch cannot be saved."""
        if trains_only(self._config):
            groups = await asyncio.to_thread(saved_batch, self._config, rollout_id)
            _bring_back(groups, self._trainer_version())
            return groups
        born = self._trainer_version()
        collect = partial(call_rollout_function, self._function, self._args, rollout_id, source, evaluation=False)
        result = await (collect() if self._skipping is None else self._skipping.batch(rollout_id, collect))
        groups = as_groups(result, self._config.rollout.n_samples_per_prompt)
        if len(groups) != (size := self._config.rollout.rollout_batch_size):
            raise UserError(f"the rollout function returned {len(groups)} groups: rollout_batch_size is {size}")
        bare = [sample for group in groups for sample in group if not (sample.rollout_log_probs and sample.spans)]
        await asyncio.gather(*(complete(sample, born, self._rate) for sample in bare))
        for group in groups:
            for sample in group:
                if isinstance(sample.reward, dict) and sample.reward_key is None:
                    sample.reward_key = self._config.rollout.reward_key
        await asyncio.to_thread(self._filter_samples, rollout_id, groups)
        if self._save_to is not None:
            await asyncio.to_thread(self._save, rollout_path(self._save_to, rollout_id), rollout_id, groups)
        return groups

    def _filter_samples(self, rollout_id: int, groups: list[Group]) -> None:
        if self._filter is None:
            return
        try:
            self._filter(self._args, groups)
        except Exception as error:
            # The user's code may raise anything; without its verdict the batch is not what was asked for.
            path = self._config.rollout.rollout_sample_filter_path
            raise UserError(f"rollout_sample_filter_path {path} raised {error!r} at rollout {rollout_id}") from error
        removed = sum(sample.remove_sample for group in groups for sample in group)
        self._events.emit(SamplesRemoved(time=time.time(), rollout=rollout_id, samples=removed))

    def _save(self, path: Any, rollout_id: int, groups: list[Group]) -> None:
        try:
            save_groups(path, rollout_id, groups)
        except OSError as error:
            raise FatalError(f"rollout data cannot be written to {path}: {error} (save_debug_rollout_data)") from error


async def _unrated(sample: Sample) -> None:
    sample.rollout_log_probs = [0.0] * sample.response_length


def saved_batch(config: RunConfig, rollout_id: int) -> list[Group]:
    """A batch that an earlier run saved. Raises UserError where it is not there, or of another size."""
    template = config.debug.load_debug_rollout_data
    if template is None:
        raise UserError("debug_train_only has nothing to train on: set load_debug_rollout_data to what a run saved")
    path, rollout = rollout_path(template, rollout_id), config.rollout
    _, groups = load_groups(path)
    if len(groups) != rollout.rollout_batch_size:
        raise UserError(f"rollout data {path} holds {len(groups)} groups: set rollout_batch_size to {len(groups)}")
    return as_groups(groups, rollout.n_samples_per_prompt)


def _bring_back(groups: list[Group], version: int) -> None:
    """Tokens of versions that this run has not reached are moved back together, so that their ages among them stay."""
    newest = max((span.version for group in groups for sample in group for span in sample.spans), default=version)
    if newest <= version:
        return
    for group in groups:
        for sample in group:
            sample.spans = [replace(s, version=max(0, s.version - newest + version)) for s in sample.spans]

"""The functions of a run: those that its settings name, and those that take their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.adapters.storage.rollout_file import load_groups, rollout_path, save_groups
from miles_async.batching.advantages import PostProcess
from miles_async.columns.column import NO_LIMITS, SampleLimits
from miles_async.config.generation import rollout_mode, takes_from_queue, trains_only
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.events import EventSink, SamplesRemoved, WarningRaised
from miles_async.json_values import shown
from miles_async.pipeline.evaluate import Scores
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.pipeline.run_ports import EvaluationFunction, RunFunctions, leave_unchanged
from miles_async.recording import shift_versions
from miles_async.rollout.contract import Arguments, RolloutFunctionAdapter, as_groups, call_rollout_function
from miles_async.rollout.recording_generator import RecordingGenerator
from miles_async.sample_schema import accept_group, check_columns, check_stored, user_function
from miles_async.types import Group, Sample, Verdict, VersionSpan

from .rollout_logs import RolloutLogs

if TYPE_CHECKING:
    from .generators import GeneratorFactory


def run_functions(
    config: RunConfig,
    entry: str,
    generators: GeneratorFactory,
    recording: RecordingGenerator | None,
    journal: Journal,
    logs: RolloutLogs,
) -> RunFunctions:
    """Return what replaces or extends the pipeline. Raises UserError if a function cannot be imported."""
    args = generators.args
    change = leave_unchanged if trains_only(config) else BatchPreparation(config, args, journal)

    async def prepare(rollout_id: int, groups: list[Group]) -> None:
        await change(rollout_id, groups)
        await logs.batch(rollout_id, groups)

    return RunFunctions(
        rollout=_rollout_function(config, entry, generators, recording, logs.metrics),
        prepare=prepare,
        evaluate=logs.after(evaluation_function(config, args, logs.eval_metrics)),
    )


def packs_ahead(config: RunConfig, entry: str) -> bool:
    """See `Ports.packs_ahead`."""
    rollout = config.rollout
    changes = rollout.rollout_sample_filter_path is not None or rollout.reward_key is not None
    changes = changes or rollout.shuffle_rewards or rollout.custom_reward_post_process_path is not None
    changes = changes or rollout.custom_convert_samples_to_train_data_path is not None
    return takes_from_queue(config, entry) and not changes


def _rollout_function(
    config: RunConfig,
    entry: str,
    generators: GeneratorFactory,
    recording: RecordingGenerator | None,
    metrics: dict[int, dict[str, Any]],
) -> RolloutFunction | None:
    """The rollout function; None if the service takes its batches directly from the queue."""
    if trains_only(config):
        return SavedBatches(config, generators.limits)
    if takes_from_queue(config, entry):
        return None
    keeps_groups = rollout_mode(config).keeps_groups
    return RolloutFunctionAdapter(
        load_function(config.rollout.rollout_function_path, setting="rollout_function_path"),
        generators.args,
        config,
        score_tokens=generators.engine_client.score_logprobs,
        recording=None if keeps_groups else recording,
        limits=generators.limits,
        keeps_groups=keeps_groups,
        metrics=metrics,
    )


def data_source(config: RunConfig, args: Arguments) -> Callable[[], Any] | None:
    """Return a function that creates the user's data source; None if the run reads its data itself.

    Raises UserError if the class cannot be imported.
    """
    path = config.data.data_source_path
    return None if path is None else partial(load_function(path, setting="data_source_path"), args)


def evaluation_function(
    config: RunConfig, args: Arguments, metrics: dict[int, dict[str, Any]] | None = None
) -> EvaluationFunction | None:
    """Return the user's evaluation function; None if the run has none. `metrics` receives its metrics, by rollout."""
    path = config.rollout.eval_function_path
    if path is None:
        return None
    function = load_function(path, setting="eval_function_path")

    async def evaluate(rollout_id: int, source: RolloutSource) -> Scores:
        found = None if metrics is None else metrics.setdefault(rollout_id, {})
        scores: Scores = await call_rollout_function(function, args, rollout_id, source, evaluation=True, metrics=found)
        if not isinstance(scores, Mapping) or not all(isinstance(of_set, Mapping) for of_set in scores.values()):
            raise UserError(
                f"eval_function_path {path} returned {shown(scores)}: return "
                '{name: {"rewards": [...], "truncated": [...]}}'
            )
        return scores

    return evaluate


def dynamic_filter(
    config: RunConfig, args: Arguments, observe: Callable[[Group], None] = lambda group: None
) -> Callable[[Group], Verdict]:
    """Return the dynamic sampling filter; without one, every generated group is kept.

    Data sets may have their own. `observe` is called with each group first. Raises UserError if a filter cannot be
    imported. The returned function raises TrajectoryError if the filter raises, returns neither a bool nor a verdict,
    or sets a field of a sample to an invalid value.
    """
    of_run = _filter(config.rollout.dynamic_sampling_filter_path, args)
    of_datasets = {
        name: _filter(dataset.dynamic_sampling_filter_path, args)
        for name, dataset in config.data.datasets.items()
        if dataset.dynamic_sampling_filter_path is not None
    }

    def keep(group: Group) -> Verdict:
        observe(group)
        return of_datasets.get(group.dataset, of_run)(group)

    return keep


def _filter(path: str | None, args: Arguments) -> Callable[[Group], Verdict]:
    if path is None:
        return lambda group: Verdict(True)
    function = load_function(path, setting="dynamic_sampling_filter_path")

    def keep(group: Group) -> Verdict:
        # A copy, because the filter may change the list.
        shown_group = Group(group, feed_index=group.feed_index, attempt=group.attempt, sequence=group.sequence)
        with user_function(f"group {group.feed_index}: filter {path}", group, ends_run=False):
            returned = function(args, shown_group)
        try:
            return Verdict.of(returned)
        except TypeError as error:
            raise TrajectoryError(
                f"dynamic_sampling_filter_path {path} returned {error}: return True to keep the group or False to drop "
                "it, or Verdict(keep, reason) of miles_async.types"
            ) from None

    return keep


def reward_post_process(config: RunConfig, args: Arguments) -> PostProcess | None:
    """Return the user's function for the rewards of a batch; None if the run has none or needs no rewards.

    The returned function sets `raw_reward` in the metadata of the samples, which the metrics of the step contain. It
    raises UserError if the user's function raises or returns something else.
    """
    path = config.rollout.custom_reward_post_process_path
    if path is None or config.learner.loss_type == "sft_loss":
        return None
    function = load_function(path, setting="custom_reward_post_process_path")
    name = f"custom_reward_post_process_path {path}"

    def post_process(samples: list[Sample]) -> Sequence[float]:
        with user_function(name, samples):
            returned = function(args, list(samples))
        try:
            raw, rewards = (list(map(float, values)) for values in returned)
        except (TypeError, ValueError):
            raw, rewards = [], []
        if not len(raw) == len(rewards) == len(samples):
            raise UserError(
                f"{name} returned {shown(returned)}: return raw_rewards and rewards, lists of {len(samples)} numbers"
            )
        for sample, value in zip(samples, raw, strict=True):
            sample.metadata["raw_reward"] = value
        return rewards

    return post_process


def conversion(config: RunConfig, args: Arguments) -> PostProcess | None:
    """Return the user's conversion of samples to slime's training data; None if the run has none.

    The returned function takes masks, log-probabilities and rewards from slime's dictionary. It raises UserError if the
    user's function raises, returns something else or changes tokens.
    """
    path = config.rollout.custom_convert_samples_to_train_data_path
    if path is None:
        return None
    function = load_function(path, setting="custom_convert_samples_to_train_data_path")
    name = f"custom_convert_samples_to_train_data_path {path}"

    def convert(samples: list[Sample]) -> Sequence[float]:
        with user_function(name, samples, "return a dictionary with rewards, and lists of numbers"):
            data = function(args, list(samples))
            # Lists of other objects, such as tensors, may raise anything, too.
            columns = {key: list(data[key]) for key in (*_CONVERTED, "tokens", "raw_reward") if key in data}
            rewards = list(map(float, data["rewards"]))
            tokens = [list(map(int, of_sample)) for of_sample in columns.get("tokens", ())]
        if any(len(entries) != len(samples) for entries in (rewards, *columns.values())):
            raise UserError(f"{name} returned lists of other lengths: return {len(samples)} entries, one per sample")
        for number, sample in enumerate(samples):
            if tokens and tokens[number] != list(sample.tokens):
                raise UserError(
                    f"{name} changed the tokens of sample {sample.index}: do that in rollout_sample_hook_path"
                )
            for key, field in _CONVERTED.items():
                if key in columns:
                    setattr(sample, field, columns[key][number])
            if "raw_reward" in columns:
                sample.metadata["raw_reward"] = columns["raw_reward"][number]
        try:
            accept_group(samples)
            for sample in samples:
                check_columns(sample, NO_LIMITS, None)
        except TrajectoryError as error:
            raise UserError(f"{name} returned an invalid value: {error}") from error
        return rewards

    return convert


_CONVERTED = {"loss_masks": "loss_mask", "rollout_log_probs": "rollout_log_probs"}
"""Keys of slime's training data, and the fields of samples that they change."""


class BatchPreparation:
    """Implements `pipeline.run_ports.PrepareBatch`: the steps between a collected batch and the learner.

    A batch is prepared once, after its stale groups were replaced, so the filter and the saved file see the groups that
    are trained. The steps are: select the entry of dictionary rewards, apply the sample filter, save the batch.
    """

    def __init__(self, config: RunConfig, args: Arguments, events: EventSink) -> None:
        """Raises UserError if the sample filter cannot be imported."""
        self._args = args
        self._events = events
        self._reward_key_of = config.reward_key_of
        self._template = config.debug.rollout_file
        self._save_has_failed = False
        self._filter_path = config.rollout.rollout_sample_filter_path
        self._filter: Callable[..., Any] | None = None
        if self._filter_path is not None:
            self._filter = load_function(self._filter_path, setting="rollout_sample_filter_path")

    async def __call__(self, rollout_id: int, groups: list[Group]) -> None:
        """Prepare the groups in place.

        Raises UserError if the sample filter raises or returns another batch. A batch that cannot be saved is trained
        all the same.
        """
        for group in groups:
            for sample in group:
                if isinstance(sample.reward, dict) and sample.reward_key is None:
                    sample.reward_key = self._reward_key_of(sample.dataset)
        # In threads, because the filter is a user's code and large files take long: other loops must not wait for them.
        if self._filter is not None:
            await asyncio.to_thread(self._filter_samples, self._filter, rollout_id, groups)
        if self._template is not None:
            await asyncio.to_thread(self._save, rollout_path(self._template, rollout_id), rollout_id, groups)

    def _filter_samples(self, sample_filter: Callable[..., Any], rollout_id: int, groups: list[Group]) -> None:
        name = f"rollout_sample_filter_path {self._filter_path}"
        # Training the unfiltered batch after an error would not be what the user wants.
        with user_function(name, chain.from_iterable(groups), f"correct the function, called at rollout {rollout_id}"):
            returned = sample_filter(self._args, groups)
        if returned is not None and returned is not groups:
            raise UserError(
                f"{name} returned a {type(returned).__name__}, which is not used: set sample.remove_sample on the "
                "samples to exclude, and return nothing"
            )
        removed = [sample for group in groups for sample in group if sample.remove_sample]
        tokens = sum(sample.response_length for sample in removed)
        self._events.emit(SamplesRemoved(time=time.time(), rollout=rollout_id, samples=len(removed), tokens=tokens))

    def _save(self, path: Path, rollout_id: int, groups: list[Group]) -> None:
        try:
            save_groups(path, rollout_id, groups)
        except OSError as error:
            if not self._save_has_failed:
                self._save_has_failed = True
                text = f"rollout data cannot be written to {path} ({error}); the run continues without it"
                self._events.emit(WarningRaised(time=time.time(), text=text))


class SavedBatches:
    """Implements `pipeline.rollout_source.RolloutFunction` with the batches that an earlier run saved."""

    def __init__(self, config: RunConfig, limits: SampleLimits) -> None:
        self._config = config
        self._limits = limits

    async def __call__(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        """Load the batch of `rollout_id`. Raises UserError if it is missing or has another size."""
        groups = await asyncio.to_thread(saved_batch, self._config, rollout_id, self._limits)
        version = source.trainer_version
        for sample in (sample for group in groups for sample in group if not sample.spans):
            # Older versions of slime saved no weight version.
            sample.spans = [VersionSpan(version, 0, sample.response_length)]
        limit_versions(groups, version)
        return groups


def saved_batch(config: RunConfig, rollout_id: int, limits: SampleLimits) -> list[Group]:
    """Load a batch that an earlier run saved.

    Raises UserError if it is missing, has another size or has a sample that cannot be trained.
    """
    template = config.debug.load_debug_rollout_data
    if template is None:
        raise UserError("debug_train_only has no batches: set load_debug_rollout_data to the files that a run saved")
    path, rollout = rollout_path(template, rollout_id), config.rollout
    try:
        _, groups = load_groups(path)
    except UserError as error:
        raise UserError(f"load_debug_rollout_data: {error}; name files that a run saved") from error
    if len(groups) != rollout.rollout_batch_size:
        raise UserError(f"rollout data {path} holds {len(groups)} groups: set rollout_batch_size to {len(groups)}")
    try:
        for group in groups:
            check_stored(group, limits, None)
            _check_log_probs(group)
    except TrajectoryError as error:
        raise UserError(f"rollout data {path} cannot be trained: {error}") from error
    return as_groups(groups, rollout.n_samples_per_prompt, config.rollout.smallest_group)


def _check_log_probs(group: Group) -> None:
    for sample in group:
        if sample.response_length and not sample.rollout_log_probs:
            raise TrajectoryError(
                f"sample {sample.index} has no rollout_log_probs, which the loss needs: save the batch with a version "
                "of slime that records them"
            )


def limit_versions(groups: list[Group], version: int) -> None:
    """Shift all spans by the same number of versions, in place, so that the newest is at most `version`.

    Another run may have saved tokens of versions that this run has not reached. The shift keeps the differences in age
    between tokens; versions below 0 become 0.
    """
    newest = max((span.version for group in groups for sample in group for span in sample.spans), default=version)
    if newest <= version:
        return
    for group in groups:
        for sample in group:
            sample.spans = shift_versions(sample.spans, version - newest)

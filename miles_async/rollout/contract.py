"""The contract of rollout functions: what they are called with, and what they may return.

`fn(args, rollout_id, data_source, evaluation=False)`, plain or async, in slime's and Miles' shape, so that a user's own
function works. The only place where configuration is flattened; everything inside takes typed sections.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from miles_async.config.schema import RunConfig, Section
from miles_async.errors import UserError
from miles_async.ports import DataSource
from miles_async.types import Group, Sample, VersionSpan


class Arguments:
    """Every setting of the run as an attribute, and what the run adds (the router's address). Read-only."""

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        near = get_close_matches(name, values, n=1)
        raise AttributeError(f"args has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name} is read-only: set it in the configuration")

    def adding(self, **runtime: Any) -> Arguments:
        """The same and `runtime` beside it."""
        return Arguments(object.__getattribute__(self, "_values") | runtime)

    def __reduce__(self) -> tuple[type[Arguments], tuple[dict[str, Any]]]:
        return Arguments, (object.__getattribute__(self, "_values"),)


def flat_args(config: RunConfig, **runtime: Any) -> Arguments:
    """Each leaf field of the configuration by its name, what slime's functions ask for, and `runtime` beside them."""
    slime = {"rollout_global_dataset": not config.data.disable_rollout_global_dataset}
    return Arguments(dict(_leaves(config)) | slime | runtime)


def _leaves(section: Section) -> Iterator[tuple[str, Any]]:
    for name, value in section:
        if isinstance(value, Section):
            yield from _leaves(value)
        else:
            yield section.flag_prefix + name, value


async def call_rollout_function(
    function: Callable[..., Any], args: Arguments, rollout_id: int, data_source: DataSource, *, evaluation: bool
) -> Any:
    """Await an async function here; run a plain one in a thread, so that it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(args, rollout_id, data_source, evaluation=evaluation)
    result = await asyncio.to_thread(function, args, rollout_id, data_source, evaluation=evaluation)
    return await result if inspect.isawaitable(result) else result


def as_groups(result: Any, n_samples_per_prompt: int) -> list[Group]:
    """What a rollout function returned, as groups: a list of groups, of lists of samples, or of samples.

    A flat list is regrouped by sample index where every sample has one, else in order. Raises UserError that names the
    sample when a group has the wrong size, or a loss mask or log-probabilities the wrong length.
    """
    if not isinstance(result, Sequence):
        raise UserError(f"the rollout function returned a {type(result).__name__}: return a list of groups")
    if all(isinstance(item, Sample) for item in result):
        groups = _regroup(result, n_samples_per_prompt)
    else:
        groups = [_group(item, position) for position, item in enumerate(result)]
    for group in groups:
        if len(group) != n_samples_per_prompt:
            raise UserError(
                f"the rollout function returned {len(group)} samples in the group of sample {group[0].index} "
                f"({group.feed_index}): n_samples_per_prompt is {n_samples_per_prompt}"
            )
        for sample in group:
            check_lengths(sample, "the rollout function returned")
    return groups


def _regroup(samples: Sequence[Sample], size: int) -> list[Group]:
    # The data source counts indices up by group, so index // size names the prompt whatever order they came back in.
    pairs = [(sample.index, sample) for sample in samples if sample.index is not None]
    if len(pairs) < len(samples):
        pairs = list(enumerate(samples))
    pairs.sort(key=lambda pair: pair[0])
    return [Group.of(sample for _, sample in part) for _, part in groupby(pairs, key=lambda pair: pair[0] // size)]


def _group(item: Any, position: int) -> Group:
    if not isinstance(item, list) or not item or not all(isinstance(sample, Sample) for sample in item):
        kind = type(item).__name__
        raise UserError(f"the rollout function returned, at place {position}, a {kind}: a list of samples is expected")
    return Group.of(item)


async def complete(sample: Sample, born: int, rate: Callable[[Sample], Awaitable[None]]) -> None:
    """Add what functions in slime's shape do not record: log-probabilities, which `rate` sets, and versions.

    `born` is the version that was live when the sample was begun.
    """
    if sample.response_length and not sample.rollout_log_probs:
        await rate(sample)
    if sample.response_length and not sample.spans:
        sample.spans = [VersionSpan(born, 0, sample.response_length)]


def check_lengths(sample: Sample, who_returned: str) -> None:
    """Raises UserError that names the sample when its columns do not fit together; log-probabilities may be absent."""
    name, tokens = f"{who_returned} sample {sample.index} with", sample.response_length
    if len(sample.tokens) < tokens:
        raise UserError(f"{name} {len(sample.tokens)} tokens, fewer than its response_length {tokens}")
    if sample.loss_mask is not None and len(sample.loss_mask) != tokens:
        raise UserError(f"{name} a loss_mask of {len(sample.loss_mask)} entries: response_length is {tokens}")
    if sample.rollout_log_probs and len(sample.rollout_log_probs) != tokens:
        raise UserError(f"{name} {len(sample.rollout_log_probs)} rollout_log_probs: response_length is {tokens}")

"""The batch rollout function, with and without a window: each call generates the groups of one batch."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from miles_async.config.user_functions import load_function
from miles_async.modes.shipped import Batch, Windowed
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.sample_schema import keep_origins
from miles_async.types import Group
from miles_async.user_code import call_in_thread


@Batch()
async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """Return `rollout_batch_size` groups out of `over_sampling_batch_size`, and abort the surplus.

    With `evaluation`, return rewards and truncation flags of the held-out data sets instead. Raises UserError under the
    schedule `fully_async`.
    """
    if evaluation:
        return await data_source.evaluate(rollout_id)
    over_sampling = args.over_sampling_batch_size or args.rollout_batch_size
    choose = None
    if args.over_sampling_filter_path is not None:
        choose = partial(load_function(args.over_sampling_filter_path, setting="over_sampling_filter_path"), args)
    setting, path = "rollout_all_samples_process_path", args.rollout_all_samples_process_path
    if path is None:
        return await data_source.collect_batch(rollout_id, args.rollout_batch_size, over_sampling, choose)
    process, rejected = load_function(path, setting=setting), list[Group]()
    groups = await data_source.collect_batch(rollout_id, args.rollout_batch_size, over_sampling, choose, rejected)
    all_groups = sorted([*groups, *rejected], key=lambda group: group[0].index or 0)
    with keep_origins(chain.from_iterable(all_groups)):
        await call_in_thread(f"{setting} {path}", process, args, all_groups, data_source)
    return groups


@Windowed()
async def generate_windowed_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """As `generate_rollout`. The window, which the pipeline applies, keeps the batch close to the order of prompts."""
    return await generate_rollout(args, rollout_id, data_source, evaluation)

"""The debug settings: runs without a learner or without engines, and runs that keep details on disk."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from miles_async.adapters.datasets.factory import save_tokenizer
from miles_async.adapters.null import NullEngines, NullLearner
from miles_async.config.fields import with_settings
from miles_async.config.generation import generates, trains_only
from miles_async.config.schema import RunConfig
from miles_async.pipeline.run_ports import Ports


def replace_unused_ports(config: RunConfig, ports: Ports) -> Ports:
    """Replace the learner under `debug_rollout_only`, and the engines if the run generates nothing, by null objects."""
    if config.debug.debug_rollout_only:
        return replace(ports, learner=NullLearner(), channel=NullLearner())
    if not generates(config):
        engines = NullEngines()
        return replace(
            ports,
            channel=NullLearner(),
            fleet=engines,
            generator=engines,
            rewarder=engines,
            eval_sets=(),
            functions=replace(ports.functions, evaluate=None),
        )
    return ports


def without_staleness_limit(config: RunConfig) -> RunConfig:
    """Remove the staleness limit if the run trains saved batches, because stale groups could not be regenerated."""
    if not trains_only(config):
        return config
    return with_settings(config, max_weight_staleness=None)


async def dump_tokenizer(config: RunConfig, checkpoint: str) -> None:
    """Under `dump_details`, save the tokenizer next to the batches, so that their tokens can be decoded anywhere."""
    if config.debug.dump_details is not None:
        await asyncio.to_thread(save_tokenizer, checkpoint, config.debug.dump_details)

"""Runs of which half is left out, or whose details are kept: what the debug settings make of a run's parts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from miles_async.adapters.datasets.factory import save_tokenizer
from miles_async.adapters.null import NullEngines, NullLearner
from miles_async.config.derived import generates, trains_only
from miles_async.config.schema import RunConfig
from miles_async.pipeline.service import Ports


def half_of(config: RunConfig, ports: Ports) -> Ports:
    """The ports without the half that is left out: the learner, or the engines where nothing is generated."""
    if config.debug.debug_rollout_only:
        return replace(ports, learner=NullLearner(), channel=NullLearner())
    if not generates(config):
        absent = NullEngines()
        return replace(
            ports,
            channel=NullLearner(),
            fleet=absent,
            generator=absent,
            evaluator=absent,
            rewarder=absent,
            problems=(),
            eval_sets=(),
            evaluate=None,
        )
    return ports


def without_gate(config: RunConfig) -> RunConfig:
    """Saved batches are trained whatever their age: there is nobody who could generate them anew."""
    if not trains_only(config):
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_weight_staleness": None})})


async def dump_tokenizer(config: RunConfig, checkpoint: str) -> None:
    """With `dump_details`: the tokenizer beside the batches, so that their tokens can be read anywhere."""
    if config.debug.dump_details is not None:
        await asyncio.to_thread(save_tokenizer, checkpoint, config.debug.dump_details)

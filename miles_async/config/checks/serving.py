"""Engines, their servers' own arguments, and devices that they share."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.derived import learner_ranks
from miles_async.config.schema import RunConfig
from miles_async.config.server_args import misfits


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.rollout_num_gpus % engine.rollout_num_gpus_per_engine:
        yield (
            f"rollout_num_gpus {engine.rollout_num_gpus} is not divisible by rollout_num_gpus_per_engine "
            f"{engine.rollout_num_gpus_per_engine}; set it to a multiple"
        )


def _servers(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    yield from misfits(engine.sglang_server_args)
    if (engine.sglang_router_ip is None) is not (engine.sglang_router_port is None):
        yield (
            "sglang_router_ip and sglang_router_port name a router of yours together: set both, or neither to have one "
            "started"
        )


def _colocated(config: RunConfig) -> Iterator[str]:
    devices, ranks = config.engine.rollout_num_gpus, learner_ranks(config)
    if config.cluster.colocate and devices > ranks:
        yield (
            f"colocate gives the engines the learner's {ranks} devices, but rollout_num_gpus is {devices}; set it to "
            f"{ranks} or less"
        )


CHECKS = (_engines, _servers, _colocated)

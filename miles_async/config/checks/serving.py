"""Checks of the engines: sizes, SGLang arguments, the router and shared devices."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.derived import learner_ranks
from miles_async.config.schema import RunConfig
from miles_async.config.server_args import invalid_arguments, invalid_router_arguments


def _engines(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.rollout_num_gpus % engine.rollout_num_gpus_per_engine:
        yield (
            f"rollout_num_gpus {engine.rollout_num_gpus} is not divisible by rollout_num_gpus_per_engine "
            f"{engine.rollout_num_gpus_per_engine}; set rollout_num_gpus to a multiple"
        )


def _sglang(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    yield from invalid_arguments(engine.sglang_server_args)
    yield from invalid_router_arguments(engine.sglang_router_args)
    if engine.sglang_router_args and engine.sglang_router_ip is not None:
        yield (
            "sglang_router_args has no effect on the existing router at sglang_router_ip: start that router with these "
            "arguments, and unset sglang_router_args"
        )
    if (engine.sglang_router_ip is None) is not (engine.sglang_router_port is None):
        yield (
            "sglang_router_ip and sglang_router_port must be set together: set both to use an existing router, or "
            "neither to start one"
        )


def _colocated(config: RunConfig) -> Iterator[str]:
    devices, ranks = config.engine.rollout_num_gpus, learner_ranks(config)
    if config.cluster.colocate and devices > ranks:
        yield (
            f"colocate runs the engines on the learner's {ranks} devices, but rollout_num_gpus is {devices}; set "
            f"rollout_num_gpus to {ranks} or less"
        )


def _faults(config: RunConfig) -> Iterator[str]:
    others = {fault.process for fault in config.faults.inject_faults if fault.process != "rollout_worker"}
    if others and config.cluster.ray_address is not None:
        yield (
            f"inject_faults sends signals to {', '.join(sorted(others))}, and a run finds no such process on a Ray "
            "cluster that it joins: unset ray_address, or set process to rollout_worker"
        )


CHECKS = (_engines, _sglang, _colocated, _faults)

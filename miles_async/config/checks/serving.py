"""Checks of the engines: sizes, SGLang arguments, the router and shared devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

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
    if engine.sglang_router_ip is not None and engine.sglang_router_port is None:
        yield (
            f"sglang_router_ip {engine.sglang_router_ip} names an existing router without its port: set "
            "sglang_router_port to its port, or unset sglang_router_ip to start a router"
        )


def _addresses(config: RunConfig) -> Iterator[str]:
    ray, router = config.cluster.ray_address, config.engine.sglang_router_ip
    if ray is not None and ray not in ("auto", "local") and not _is_address(ray.removeprefix("ray://")):
        yield f"ray_address {ray} has no host or no port: set it to host:port, such as 10.0.0.1:6379, or to auto"
    if router is not None and not _is_host(router):
        yield f"sglang_router_ip {router} is not an IP address: set it to one, such as 10.0.0.1, and sglang_router_port"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return _is_host(host.removeprefix("[").removesuffix("]")) and port.isdecimal() and 0 < int(port[:6]) < 65536


def _is_host(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.]+(%\w+)?", text) is not None


def _cores(config: RunConfig) -> Iterator[str]:
    """Other machines of a cluster may have more cores than this one."""
    found = os.cpu_count() if config.cluster.ray_address is None else None
    for name, cores in (("engine_cpus", config.engine.engine_cpus), ("learner_cpus", config.learner.learner_cpus)):
        if cores is None:
            continue
        known = f"from 0 to {found - 1}" if found else "of 0 or more"
        if not cores or (found is not None and max(cores) >= found) or min(cores) < 0:
            yield f"{name} {cores} does not name CPU cores of this machine: set it to numbers {known}, or unset it"


def _colocated(config: RunConfig) -> Iterator[str]:
    devices, ranks = config.engine.rollout_num_gpus, config.learner.ranks
    if config.cluster.colocate and devices > ranks:
        yield (
            f"colocate runs the engines on the learner's {ranks} devices, but rollout_num_gpus is {devices}; set "
            f"rollout_num_gpus to {ranks} or less"
        )


def _transport(config: RunConfig) -> Iterator[str]:
    nodes = config.learner.actor_num_nodes
    if config.weights.weight_transfer == "ipc" and nodes > 1:
        yield (
            f"weight_transfer ipc reaches engines on the learner's node only, but actor_num_nodes is {nodes}: set "
            "weight_transfer to p2p or broadcast"
        )


def _key_versions(config: RunConfig) -> Iterator[str]:
    keys, mode = config.weights.max_kv_staleness, config.weights.pause_generation_mode
    if keys and config.cluster.colocate:
        yield (
            f"max_kv_staleness {keys} has no effect with colocate, because engines release their keys and values "
            "before each step: set max_kv_staleness to 0"
        )
    elif keys and mode != "retract":
        kept = "keeps all requests in flight" if mode == "in_place" else "ends all requests in flight"
        yield (
            f"pause_generation_mode {mode} {kept}, and max_kv_staleness {keys} would choose among them: set "
            "pause_generation_mode to retract, or max_kv_staleness to 0"
        )


def _published_adapters(config: RunConfig) -> Iterator[str]:
    if not config.learner.lora_rank:
        return
    if config.weights.max_kv_staleness:
        yield (
            f"max_kv_staleness {config.weights.max_kv_staleness} has no effect with lora_rank, because every request "
            "keeps its version of the adapter to its end: set max_kv_staleness to 0"
        )
    if config.weights.weight_transfer is not None:
        yield (
            f"weight_transfer {config.weights.weight_transfer} sends whole weights, and with lora_rank engines load "
            "adapters from files: unset weight_transfer"
        )


def _faults(config: RunConfig) -> Iterator[str]:
    others = {fault.process for fault in config.faults.inject_faults if fault.process != "rollout_worker"}
    if others and config.cluster.ray_address is not None:
        yield (
            f"inject_faults sends signals to {', '.join(sorted(others))}, and a run finds no such process on a Ray "
            "cluster that it joins: unset ray_address, or set process to rollout_worker"
        )


CHECKS = (_engines, _sglang, _addresses, _cores, _colocated, _transport, _key_versions, _published_adapters, _faults)

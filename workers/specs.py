"""What the configuration makes of each process: pure functions, so that every setting can be seen to arrive."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.launch import EngineSpec
from miles_async.adapters.sglang.router import RouterSpec
from miles_async.config.derived import evaluation_concurrency
from miles_async.config.schema import EvalDataset, RunConfig

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of every process: nothing may look outside this machine."""
ACTORS_AT_MOST = 64
"""Our actors ask Ray for no cores of their own; this is what its own workers may count on."""


def ray_arguments(config: RunConfig) -> dict[str, Any]:
    """Of `ray.init`: join the cluster that is named, or start one that lives and dies with the run."""
    quiet = {"include_dashboard": False, "configure_logging": False, "log_to_driver": False}
    if config.cluster.ray_address is not None:
        # That Ray's processes were started by somebody else, elsewhere: not our environment, not our folder.
        ours = {"env_vars": dict(ENVIRONMENT), "worker_process_setup_hook": _in_our_folder(Path.cwd())}
        return {"address": config.cluster.ray_address, "runtime_env": ours, **quiet}
    # Without an address Ray would join any cluster that RAY_ADDRESS or a file of Ray's own points to.
    local = {"address": "local", "_node_ip_address": "127.0.0.1", "num_cpus": ACTORS_AT_MOST}
    # Ray starts its workers at nice 15 by default: they would starve beside any other program on the machine.
    return {**local, "_system_config": {"worker_niceness": 0}, **quiet}


def _in_our_folder(folder: Path) -> Callable[[], None]:
    """Relative paths mean the same to every process of the run; a node without that folder keeps its own."""

    def enter() -> None:
        with suppress(FileNotFoundError):
            os.chdir(folder)

    return enter


def engine_spec(
    config: RunConfig,
    name: str,
    checkpoint: str,
    logs: Path,
    *,
    host: str = "127.0.0.1",
    devices: tuple[int, ...] = (),
    nodes: int = 1,
    node_rank: int = 0,
) -> EngineSpec:
    """Of the server on the engine's node number `node_rank`."""
    engine = config.engine
    return EngineSpec(
        name=name,
        model_path=checkpoint,
        log_path=logs / (f"{name}.log" if node_rank == 0 else f"{name}-node{node_rank}.log"),
        host=host,
        devices=devices,
        nodes=nodes,
        node_rank=node_rank,
        tp=engine.rollout_num_gpus_per_engine,
        cpus=tuple(engine.engine_cpus) if engine.engine_cpus else None,
        concurrency=engine.sglang_server_concurrency,
        evaluation_concurrency=evaluation_concurrency(config),
        seed=config.data.rollout_seed,
        # Weights of the learner's bfloat16 may be too large, or too small, for the float16 of a float32 checkpoint.
        dtype="bfloat16" if config.learner.precision == "bf16" else "auto",
        colocated=config.cluster.colocate,
        p2p=config.weights.weight_transfer in ("auto", "p2p"),
        server_args=engine.sglang_server_args,
        env_vars=engine.engine_env_vars,
        start_timeout=engine.engine_start_timeout_seconds,
        health_timeout=engine.engine_health_timeout_seconds,
    )


def external_router(config: RunConfig) -> str | None:
    """The url of a router of the user's own; None where the run starts one."""
    ip, port = config.engine.sglang_router_ip, config.engine.sglang_router_port
    return None if ip is None else f"http://{ip}:{port}"


def router_spec(config: RunConfig, logs: Path) -> RouterSpec:
    return RouterSpec(
        log_path=logs / "router.log",
        policy=config.engine.sglang_router_policy,
        request_timeout=config.engine.sglang_router_request_timeout_secs,
    )


def sampling_of(config: RunConfig) -> SamplingParams:
    """How training samples are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def greedy_of(config: RunConfig) -> SamplingParams:
    """How held-out problems are answered."""
    return replace(sampling_of(config), temperature=0, top_p=1.0, top_k=-1)


def eval_sampling_of(config: RunConfig, dataset: EvalDataset) -> SamplingParams:
    """How one of the `eval_datasets` is answered."""
    return replace(
        sampling_of(config),
        max_new_tokens=dataset.max_response_len or config.rollout.rollout_max_response_len,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
    )

"""Derives the arguments of each process from the configuration.

The functions have no side effects, so unit tests can check that every setting reaches its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miles_async.adapters.sglang.answer_parser_process import Choice
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.launch import EngineInfo, EngineSpec
from miles_async.adapters.sglang.router import RouterSpec
from miles_async.adapters.sglang.server_key import new_key
from miles_async.adapters.storage.checkpoints import LoadedCheckpoint
from miles_async.batching.layout import longest_sequence
from miles_async.columns.column import SampleLimits
from miles_async.config.adapter_arguments import arguments_of_engines
from miles_async.config.generation import adapter_versions_of
from miles_async.config.model_shape import adapter_of_engines, shape_of
from miles_async.config.redaction import read_secret
from miles_async.config.schema import EvalDataset, Model, RunConfig
from miles_async.config.untested import weight_transport
from miles_async.observability.run_folder import RunFolder
from miles_async.transports import TRANSPORTS

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of every process: no telemetry, and no downloads from the Hugging Face Hub."""
ROUTER_GRACE_SECONDS = 60.0
"""The router's time limit for a request exceeds that of the client by so much."""
ACTORS_AT_MOST = 64
"""The number of cores that a local Ray schedules with. It may exceed the real number: placement reserves one core per
learner rank and engine device, and these processes share the cores of the machine."""


@dataclass(frozen=True, kw_only=True)
class ClusterHandles:
    """The processes of a run that are up before the rollout worker starts."""

    checkpoint: str
    """The model folder that learner and engines were started from."""
    router_url: str
    """Empty if the run generates nothing."""
    router_key: str = field(repr=False)
    """API key of the router; empty if it has none."""
    engines: Sequence[EngineInfo]
    engine_urls: Collection[str]
    """URLs of all engines that the run has or had and that the driver knows."""
    engine_actors: Mapping[str, Sequence[Any]]
    """Handles of the engines' actors, by engine name: one per node that the engine spans."""
    router_actor: Any
    """Handle of the router's actor; None for an external router."""
    learner_ranks: Sequence[Any]
    """Handles of the learner's actors, by rank."""
    weight_transports: Sequence[str]
    """The usable weight transports, best first."""
    began_with: LoadedCheckpoint | None
    """The checkpoint of another run that this run began with; None if it began with the model."""
    learner_checkpoint: LoadedCheckpoint | None
    """The checkpoint that the current learner was started from: `began_with`, or a later one of this run."""


def sample_limits(config: RunConfig, checkpoint: str) -> SampleLimits:
    """Return the limits that the model in `checkpoint` and the learner's batches set to samples."""
    shape = shape_of(config.model.model_copy(update={"hf_checkpoint": checkpoint}))
    longest = longest_sequence(config.learner)
    if config.keeps_reference:
        longest = min(longest, longest_sequence(config.learner.reference_batching))
    return SampleLimits(
        vocabulary=(shape.vocabulary or None) if shape is not None else None,
        longest=None if config.debug.debug_rollout_only else longest,
        sampling_masks=config.trains_on_sampling_masks,
        # Log-probabilities at temperature 0 are those at 1, and supervised losses use none.
        scores_missing=config.rollout.rollout_temperature in (0, 1) or config.learner.loss_type == "sft_loss",
    )


def answer_parsers(config: RunConfig, checkpoint: str) -> Choice:
    """Return the parsers of the answers to agents."""
    return Choice(checkpoint, config.rollout.tool_call_parser, config.rollout.reasoning_parser)


def ray_arguments(config: RunConfig, folder: Path | None = None) -> dict[str, Any]:
    """Return the arguments of `ray.init`: join the cluster at `ray_address`, or start one that ends with the run.

    The Ray that is started has its sockets and logs in the private `folder`.
    """
    quiet = {"include_dashboard": False, "configure_logging": False, "log_to_driver": False}
    if config.cluster.ray_address is not None:
        # The processes of an existing cluster have neither the environment nor the working directory of this process.
        ours = {"env_vars": dict(ENVIRONMENT), "worker_process_setup_hook": _change_folder(Path.cwd())}
        return {"address": config.cluster.ray_address, "runtime_env": ours, **quiet}
    # Without an address Ray would join any cluster that RAY_ADDRESS or a file of Ray's own points to.
    local = {"address": "local", "_node_ip_address": "127.0.0.1", "num_cpus": ACTORS_AT_MOST}
    # Ray starts its workers at nice 15 by default: they would starve beside any other program on the machine.
    temporary = {} if folder is None else {"_temp_dir": str(folder / "ray")}
    return {**local, **temporary, "_system_config": {"worker_niceness": 0}, **quiet}


def _change_folder(folder: Path) -> Callable[[], None]:
    """Return a function that changes the working directory, so that relative paths work in every process of the run.

    A node without this folder keeps its working directory.
    """

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
    number: int = 0,
    key: str | None = None,
) -> EngineSpec:
    """Return the specification of one server of an engine; an engine has one server per node.

    `checkpoint` is the folder of the Hugging Face checkpoint, and `devices` are the GPU numbers on the node. `number`
    is that of the engine in the run. `key` is the API key of the server; by default a random one.
    """
    engine, adapters = config.engine, adapter_versions_of(config)
    rank, modules = (0, ()) if adapters is None else adapter_of_engines(config.learner, Model(hf_checkpoint=checkpoint))
    arguments = dict(arguments_of_engines(config))
    seed = arguments.pop("random_seed", None)
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
        evaluation_concurrency=config.evaluation_concurrency,
        # Engines with one seed that get equal requests in equal batches would draw equal samples.
        seed=(config.data.rollout_seed if seed is None else int(seed)) + number,
        # With `auto`, SGLang serves a float32 checkpoint in float16, which cannot represent all bfloat16 weights.
        # Engines on CPUs compute in float32, whatever this says.
        dtype="auto" if config.learner.precision == "fp32" else "bfloat16",
        colocated=config.cluster.colocate,
        p2p=TRANSPORTS.needs_transfer_engine(weight_transport(config, on_gpus=bool(devices))),
        max_kv_staleness=config.weights.max_kv_staleness,
        lora_rank=rank,
        lora_modules=modules,
        lora_versions=0 if adapters is None else adapters.capacity,
        server_args=arguments,
        env_vars=engine.engine_env_vars,
        start_timeout=engine.engine_start_timeout_seconds,
        health_timeout=engine.engine_health_timeout_seconds,
        key=key or new_key(),
    )


def seed_of_requests(config: RunConfig) -> int | None:
    """Return the seed of the run if engines sample with a seed per request, else None; see `sampling_seed`."""
    arguments = config.engine.sglang_server_args
    # SGLang turns the first argument on if the second one is set.
    by_request = arguments.get("enable_deterministic_inference") or arguments.get("rl_on_policy_target")
    return config.data.rollout_seed if by_request else None


def external_router(config: RunConfig) -> str | None:
    """Return the URL of an external router, or None if the run starts its own."""
    ip, port = config.engine.sglang_router_ip, config.engine.sglang_router_port
    return None if ip is None else f"http://{ip}:{port}"


def external_router_key(config: RunConfig) -> str:
    """Return the API key of an external router; empty if it has none. Raises UserError like `read_secret`."""
    return read_secret("sglang_router_api_key", config.engine.sglang_router_api_key) or ""


def router_spec(config: RunConfig, logs: Path, key: str | None = None) -> RouterSpec:
    """Return the specification of the router. `key` is its API key; by default a random one."""
    return RouterSpec(
        key=key or new_key(),
        log_path=logs / "router.log",
        policy=config.engine.sglang_router_policy,
        port=config.engine.sglang_router_port,
        further=config.engine.sglang_router_args,
        # The router answers a request that it gives up as if the engine had failed, so the client must give up first.
        request_timeout=config.engine.sglang_router_request_timeout_secs + ROUTER_GRACE_SECONDS,
    )


def sampling_of(config: RunConfig) -> SamplingParams:
    """Return the sampling parameters for training."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=config.sampling_top_k,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def greedy_of(config: RunConfig) -> SamplingParams:
    """Return the sampling parameters for held-out problems: greedy decoding."""
    return replace(sampling_of(config), temperature=0, top_p=1.0, top_k=-1)


def eval_sampling_of(config: RunConfig, dataset: EvalDataset) -> SamplingParams:
    """Return the sampling parameters for one of the `eval_datasets`."""
    rollout = config.rollout
    return replace(
        sampling_of(config),
        max_new_tokens=dataset.max_response_len or rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature if dataset.temperature is None else dataset.temperature,
        top_p=dataset.top_p or rollout.rollout_top_p,
        top_k=dataset.top_k or rollout.rollout_top_k,
    )


def store_folder(config: RunConfig, folder: RunFolder) -> Path:
    """The folder of the store: that of `--store-dir`, with one folder per run, or one in the folder of the run."""
    store_dir = config.cluster.store_dir
    return folder.store if store_dir is None else Path(store_dir).expanduser().absolute() / folder.path.name

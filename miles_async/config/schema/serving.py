"""Weight transfer, engines and the Ray cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from miles_async.section import LONGEST_SECONDS, Section
from miles_async.transports import TRANSPORTS

SAMPLING_MASK_MAX_TOKENS = 4096
"""SGLang's default of its argument `--sampling-mask-max-tokens`."""


class Weights(Section):
    """How the learner's weights reach the engines."""

    weight_transfer: Annotated[str, TRANSPORTS] | None = None
    """How weights reach the engines: a transport of this project or of an installed package, or module.Class of your
    own. If unset, p2p, or with colocate on the GPUs of one node ipc, or broadcast for engines whose layout was never
    tried, such as with expert parallelism."""
    update_weight_buffer_size: int = Field(512 << 20, ge=1)
    """Amount of weights sent at a time, in bytes. With weight_transfer broadcast, an engine needs this much memory
    beside its own weights; with ipc, a learner rank."""
    check_weight_update_equal: bool = False
    """Compare all bytes of an engine's weights after each write. If off, only samples of each tensor are compared. Use
    this to debug weight transfers."""
    update_weight_timeout_seconds: float = Field(30.0, gt=0, le=LONGEST_SECONDS)
    """Time limit in seconds for writing the weights to an engine. A write that exceeds the limit counts as incomplete;
    the engine is taken out of service and restarted."""
    update_weights_interval: int = Field(1, ge=1)
    """Number of training batches between two publishes of the weights to the engines."""
    pause_generation_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests while weights are written: retract recomputes their keys and values under the
    new weights and continues, in_place continues with the keys and values of the old weights, abort ends the requests
    and sends them again, from the first token unless partial_rollout is set."""
    max_kv_staleness: int = Field(0, ge=-1)
    """Largest age, in weight versions, of keys and values that engines keep using after a publish. Older ones of
    requests and cached prefixes are recomputed. 0 recomputes everything, -1 nothing. Values other than 0 need
    pause_generation_mode retract. max_weight_staleness counts the age of the keys, so -1 needs a run without this
    limit."""

    lora_newest_each_turn: bool = False
    """Let each turn of an agent use the newest version of the adapter that lora_rank trains. If off, all turns of a
    group use the version of its first turn."""

    @property
    def engine_pause(self) -> str:
        """How a publish pauses the engines (`Fleet.pause`): with max_kv_staleness, an engine itself removes requests
        when it gets the version."""
        return "in_place" if self.max_kv_staleness else self.pause_generation_mode


class Engine(Section):
    """The SGLang engines and the router in front of them."""

    rollout_num_gpus: int = Field(1, ge=1)
    """Number of GPUs for all engines together; on a CPU machine, number of engine ranks. If unset, 1, or with colocate
    all devices of the learner."""
    rollout_num_gpus_per_engine: int = Field(1, ge=1)
    """Number of GPUs per engine (tensor parallelism). It must divide rollout_num_gpus."""
    sglang_server_concurrency: int = Field(512, ge=1)
    """Maximum number of samples that an engine generates at the same time."""
    adaptive_concurrency: bool = False
    """Lower the number of groups in flight while an engine reports a nearly full KV cache or a long queue of requests,
    and raise the number again later."""
    sglang_server_args: dict[str, Any] = {}
    """Any other argument of the SGLang server, under SGLang's own name. The flag `--sglang-mem-fraction-static 0.8`
    sets a single argument."""
    allow_untested: list[str] = []
    """Names of groups of SGLang arguments that were never tried with this project and that the run uses nevertheless,
    such as quantization or lora. A refusal prints the names that a run needs. Without them, engines might sample from
    another policy than the one that trains, unnoticed."""
    engine_env_vars: dict[str, str] = {}
    """Environment variables of the engine processes. They override the variables that the run sets itself."""
    sglang_router_policy: Literal[
        "cache_aware", "round_robin", "power_of_two", "random", "consistent_hashing", "prefix_hash"
    ] = "cache_aware"
    """How the router chooses an engine for a request. consistent_hashing and prefix_hash ignore the load and may send
    most requests to one engine."""
    sglang_router_ip: str | None = None
    """IP address of an existing sglang-router that can reach the engines. If unset, the run starts its own router."""
    sglang_router_port: int | None = Field(None, ge=1, le=65535)
    """Port of the existing sglang-router at sglang_router_ip. Without sglang_router_ip, the run starts its own router
    at this port of 127.0.0.1. If unset, it starts the router at any free port."""
    sglang_router_api_key: str | None = None
    """API key of the existing sglang-router at sglang_router_ip. env:NAME reads the key from an environment variable,
    file:PATH from a file; neither shows it on the command line. If unset, requests to that router carry no key."""
    sglang_router_args: dict[str, Any] = {}
    """Any other argument of the router that the run starts, under sglang-router's own name. The flag
    `--sglang-router-balance-abs-threshold 0`, or slime's `--router-balance-abs-threshold 0`, sets a single argument."""
    sglang_router_request_timeout_secs: float = Field(14400.0, gt=0, le=LONGEST_SECONDS)
    """Time limit in seconds for the answer to one request to an engine. A request that exceeds the limit counts as a
    failed attempt of its group. Health checks find engines that hang, so the limit only has to exceed the time of the
    longest response. An existing sglang-router needs a limit that is at least as long."""
    engine_cpus: list[int] | None = None
    """CPU cores that the engines are pinned to. If unset, engines are not pinned."""
    engine_start_timeout_seconds: float = Field(300.0, gt=0, le=LONGEST_SECONDS)
    """Seconds that an engine may take to start. If an engine is not healthy by then, the run stops and shows the end of
    the engine's log."""
    engine_health_interval_seconds: float = Field(1.0, gt=0, le=LONGEST_SECONDS)
    """Seconds between two health checks of the router and of each engine in service."""
    engine_health_timeout_seconds: float = Field(30.0, ge=2, le=LONGEST_SECONDS)  # SGLang itself checks once a second
    """Seconds after which an engine is considered hung and restarted: without a generated token while it has work,
    without an answer to a health check, or without an answer to the pause or the commit of a publish."""

    @field_validator("sglang_server_args", "sglang_router_args")
    @classmethod
    def _names_in_python(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Accept names with hyphens too."""
        return {name.replace("-", "_"): value for name, value in arguments.items()}

    @property
    def count(self) -> int:
        """Number of engines."""
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def sampling_mask_limit(self) -> int:
        """The most kept tokens that an engine can return for a token."""
        limit = self.sglang_server_args.get("sampling_mask_max_tokens", SAMPLING_MASK_MAX_TOKENS)
        # `config/checks` reports any other value.
        return limit if isinstance(limit, int) else SAMPLING_MASK_MAX_TOKENS


class Cluster(Section):
    """The Ray cluster, and whether learner and engines share devices."""

    ray_address: str | None = None
    """Address of an existing Ray cluster, such as 10.0.0.1:6379. If unset, a cluster is started on this machine and
    shut down with the run."""
    max_restarts: int = Field(3, ge=0)
    """Maximum number of restarts of a lost rollout worker or learner in a row, without a trained batch in between. A
    learner needs save_interval. With 0, and with --colocate, the loss of either ends the run."""
    drain_seconds: float = Field(10.0, ge=0, le=LONGEST_SECONDS)
    """Time limit in seconds, after Ctrl-C or SIGTERM, for groups in flight, the current step and its checkpoint
    together; what is left is abandoned. Raise this for models whose step and checkpoint take longer. The sender of
    SIGTERM must wait at least 15 seconds longer than this before it sends SIGKILL."""
    store_dir: str | None = None
    """Folder on a local disk for the state of the run that survives the rollout worker: unfinished prompts and finished
    groups. If unset, it is in the folder of the run."""
    gpu_memory_gib: float | None = Field(None, ge=1, le=10_000)
    """Memory of each GPU in GiB (2^30 bytes), such as 80 or 141; if GPUs differ, that of the smallest. A job that does
    not fit is then refused before it starts, and --check-config prints what fills the memory. If unset, a job is
    started without this check."""
    host_memory_gib: float | None = Field(None, ge=1, le=1_000_000)
    """Main memory of each node in GiB (2^30 bytes), for the same check of what the learner copies to it. If unset, it
    is not checked."""
    colocate: bool = False
    """Run the engines on the learner's devices (train.py only). Learner and engines take turns: each releases its
    device memory while the other one works."""

"""Starts SGLang servers: their command lines, their environment, their ports."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from miles_async.adapters.sglang import key_versions
from miles_async.adapters.sglang.process import ServerProcess, release, start_on_free_ports
from miles_async.adapters.sglang.server_key import new_key
from miles_async.adapters.system import rdma
from miles_async.adapters.system.listeners import LOOPBACK, interface_variables
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.errors import UserError
from miles_async.models.lora_layers import FEED_FORWARD, HEAD

KV_CACHE_BYTES_ON_CPU = 1 << 30
"""Upper limit of the KV cache of an engine without a GPU, whose memory SGLang would otherwise measure."""
WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment variables that turn `torch.compile` off. Set them before the process imports torch.

SGLang and Megatron decorate functions with `torch.compile` at module level, and the first decorator imports
TorchInductor, which has 500 modules. Without CUDA the functions are small, and compiling them would need a C++
compiler.
"""
ARGUMENTS_THAT_CHOOSE_MODELS = ("speculative-", "model-impl", "json-model-override-args")
"""Starts of the arguments of SGLang that let an engine use models other than that of its checkpoint's architecture."""
ENGINE_MODULE = "miles_async.adapters.sglang.engine_process"


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that defines one server of an engine."""

    name: str
    model_path: str
    log_path: Path
    tp: int = 1
    """Tensor-parallel ranks."""
    cpus: tuple[int, ...] | None = None
    """CPU cores that the engine may use; None means all."""
    concurrency: int = 512
    """Maximum number of requests that run at once."""
    evaluation_concurrency: int = 0
    """Maximum number of evaluation requests that run in addition to `concurrency`, at a lower priority."""
    seed: int = 42
    dtype: str = "auto"
    """Dtype of weights and activations on a GPU. `auto` is the dtype of the checkpoint, or float16 if that is float32.
    On a CPU the dtype is always float32."""
    p2p: bool = True
    """Register the weights for one-sided writes by Mooncake."""
    max_kv_staleness: int = 0
    """See the setting of this name."""
    lora_rank: int = 0
    """Rank of the adapters that the engine serves; 0 means that it serves none."""
    lora_modules: tuple[str, ...] = ()
    """The linear layers that they change."""
    lora_versions: int = 0
    """The most versions of an adapter that the engine holds."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `sglang.launch_server`, with dashes or underscores. They override all arguments set here, but
    not the back-end of adapters on CPUs."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server. They override all variables set here."""
    start_timeout: float = 300.0
    """Seconds after which a server that is not healthy has failed to start."""
    health_timeout: float = 30.0
    """Seconds without a generated token after which SGLang's health check fails."""
    host: str = "127.0.0.1"
    """Address that the server listens on."""
    devices: tuple[int, ...] = ()
    """GPU numbers on this node. If empty, SGLang chooses."""
    colocated: bool = False
    """The learner shares the engine's devices, so the engine must be able to release its memory."""
    nodes: int = 1
    """Number of servers that make up the engine, one per node."""
    node_rank: int = 0
    """Index of this server's node. Requests go to the server of node 0 only."""
    key: str = field(default_factory=new_key, repr=False)
    """API key that every request to the server has to carry."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A running engine: the address and process id of its first server, and its tensor-parallel size."""

    name: str
    url: str
    pid: int
    tp: int
    key: str = field(default="", repr=False)
    """API key of the server; empty if it has none."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the servers of an engine find each other: host and ports on the first node."""

    host: str
    port: int
    bootstrap_port: int
    """Each rank registers its Mooncake session here. SGLang uses the same port number on all nodes."""


class EngineServer:
    """One SGLang server process. It listens on loopback unless the engine spans machines."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._name = f"engine {spec.name}"
        self._process: ServerProcess | None = None
        self._ports: list[ClaimedPort] = []
        self._shared_ports: list[ClaimedPort] = []
        """Ports of the rendezvous that other nodes use too."""
        self._info: EngineInfo

    def rendezvous(self) -> Rendezvous:
        """Claim ports for a new rendezvous. Only on the first server of an engine that spans nodes."""
        release(self._shared_ports)
        return self._rendezvous(self._shared_ports)

    def start(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Start the server and wait until it is healthy.

        `rendezvous` is required if the engine spans nodes. Raises UserError if `model_path` is no checkpoint, and
        FatalError with the cause from the log if the server dies or is not healthy in time.
        """
        _require_checkpoint(self.spec.model_path)
        self._info = start_on_free_ports(self._name, self.spec.log_path, lambda: self._start(rendezvous))
        return self._info

    def _start(self, rendezvous: Rendezvous | None) -> EngineInfo:
        release(self._ports)
        port = self._claim(self._ports)
        url = f"http://{self.spec.host}:{port}"
        arguments = command(self.spec, port, rendezvous or self._rendezvous(self._ports))
        self._process = ServerProcess(self._name, ENGINE_MODULE, arguments, f"{url}/health", self.spec.log_path)
        self._process.start(environment(self.spec), self.spec.cpus, self.spec.start_timeout, self.spec.key)
        return EngineInfo(self.spec.name, url, self._process.pid, self.spec.tp, self.spec.key)

    def info(self) -> EngineInfo:
        """Return the address of the server that was started last; only after `start`."""
        return self._info

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def end(self) -> str | None:
        """See `ServerProcess.end`."""
        return None if self._process is None else self._process.end()

    def answers(self) -> str | Literal[False] | None:
        """Return the host and port of the server's metrics, or False if the server does not answer.

        Returns None if it answers but another node of the engine serves the metrics.
        """
        if self._process is None or not self._process.answers():
            return False
        return None if self.spec.node_rank else urlsplit(self._process.health_url).netloc

    def restart(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Stop the server if it still runs and start it at another URL. Raises what `start` raises."""
        self.stop()
        return self.start(rendezvous)

    def stop(self) -> None:
        if self._process is not None:
            # On SIGTERM, SGLang would spend seconds on requests whose clients have given up.
            self._process.stop(grace=0.0)
        release(self._ports)

    def _rendezvous(self, ports: list[ClaimedPort]) -> Rendezvous:
        return Rendezvous(self.spec.host, self._claim(ports), self._claim(ports))

    def _claim(self, ports: list[ClaimedPort]) -> int:
        ports.append(claim_port(self.spec.host))
        return ports[-1].number


def command(spec: EngineSpec, port: int, rendezvous: Rendezvous) -> list[str]:
    """Return the command line of the server: the arguments of SGLang, without the key."""
    arguments: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": spec.host,
        "port": port,
        "tp-size": spec.tp,
        "dtype": spec.dtype,
        "max-running-requests": spec.concurrency + spec.evaluation_concurrency,
        "random-seed": spec.seed,
        "enable-metrics": True,
        # The first request serves as warm-up.
        "skip-server-warmup": True,
        "log-level": "warning",
        # Otherwise an idle scheduler busy-waits on a core that the learner could use.
        "sleep-on-idle": True,
    }
    if spec.evaluation_concurrency:
        # Training and evaluation requests have separate limits, so neither waits for the other. If memory is short,
        # evaluation requests are retracted first.
        arguments |= {"enable-priority-scheduling": True, "default-priority-value": 0, "retraction-policy": "priority"}
    if spec.nodes > 1:
        arguments |= {"nnodes": spec.nodes, "node-rank": spec.node_rank}
    if spec.nodes > 1 or spec.host != LOOPBACK:
        # Without this address, SGLang's ranks look for the servers of this engine on loopback.
        arguments["dist-init-addr"] = f"{rendezvous.host}:{rendezvous.port}"
    else:
        arguments["nccl-port"] = rendezvous.port
    if spec.p2p:
        arguments["remote-instance-weight-loader-start-seed-via-transfer-engine"] = True
        arguments["engine-info-bootstrap-port"] = rendezvous.bootstrap_port
    if spec.colocated and has_cuda():
        arguments["enable-memory-saver"] = True
        # Without a copy in host memory, an engine that resumes has no weights until the next publish. No version is due
        # after a batch without gradients, or between two publishes with update_weights_interval.
        arguments["enable-weights-cpu-backup"] = True
    if spec.lora_rank:
        # One more than the versions of the run, so that SGLang never has to choose which one to drop: it counts the
        # model without an adapter too, which health checks use.
        most = spec.lora_versions + 1
        arguments |= {
            "enable-lora": True,
            "max-lora-rank": spec.lora_rank,
            "lora-target-modules": spec.lora_modules,
            "max-loras-per-batch": most,
            "max-loaded-loras": most,
        }
        if has_cuda() and {*FEED_FORWARD} <= {*spec.lora_modules}:
            # The kernels that SGLang 0.5.20 prefers for the experts of gpt-oss leave out their adapters.
            arguments["moe-runner-backend"] = "triton"
    if not has_cuda():
        arguments |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "dtype": "float32",
            "disable-overlap-schedule": True,
            "max-total-tokens": _kv_tokens(spec),
            # SGLang counts what other processes allocate while it loads the model as its weights, and refuses to start
            # if these take more than this share of the free memory. `max-total-tokens` already limits the cache.
            "mem-fraction-static": 0.9,
        }
    arguments |= {key.replace("_", "-"): value for key, value in spec.server_args.items()}
    if spec.lora_rank and not has_cuda():
        arguments["lora-backend"] = "torch_native"  # the others need Triton
    return [word for key, value in arguments.items() for word in _flag(key, value)]


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables of the server, in addition to those of this process."""
    values = {
        "SGLANG_HOST_IP": spec.host,
        "HOST_IP": spec.host,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": f"127.0.0.1,{spec.host}",
        # A health check that generates a token would hang during the pause of a publish.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # Longer than the router keeps idle connections: else it could send a request on a connection that is closing.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(spec.health_timeout)),
        # Both dumps would delay the exit after a crash by five seconds, in which requests are not answered.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
        "PYTHONUNBUFFERED": "1",
        key_versions.VARIABLE: str(spec.max_kv_staleness),
        "MOONCAKE_PROTOCOL": mooncake_protocol(),
        **interface_variables(spec.host),
    }
    if spec.devices:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))
    if has_cuda() and _dtype(spec) == "float32":
        # SGLang's CUDA kernel for RMSNorm has no float32.
        values["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    if not has_cuda():
        cores, ranks = spec.cpus or tuple(sorted(os.sched_getaffinity(0))), spec.tp // spec.nodes
        values |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # torch's CUDA build brings NCCL, which several ranks would use although there is no device.
            "SGLANG_NCCL_SO_PATH": os.devnull,
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
            # More OpenMP threads than free cores spin against each other and the learner: up to 50 times slower.
            "OMP_NUM_THREADS": str(max(1, len(cores) // ranks // (1 if spec.cpus else 2))),
            "OMP_WAIT_POLICY": "PASSIVE",
            **WITHOUT_COMPILER,
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_models(spec)),
        }
        if HEAD in spec.lora_modules:
            # The adapters of the output layer are applied to the logits of a whole batch (`cpu_lora.py`).
            values["SGLANG_ENABLE_LOGPROB_CHUNK"] = "false"
    return {**values, **spec.env_vars}


def mooncake_protocol() -> str:
    """Return how Mooncake transfers weights, in learner and engines: `MOONCAKE_PROTOCOL`, or else what this node can.

    What Mooncake does with the protocol rdma on a node without RDMA depends on its version.
    """
    return os.environ.get("MOONCAKE_PROTOCOL", "rdma" if rdma.has_active_port() and has_cuda() else "tcp")


@cache
def has_cuda() -> bool:
    """Return whether torch can use a CUDA device.

    Importing torch takes two seconds and 200 MiB. The actor of an engine needs nothing else from torch, so it imports
    torch only if the machine has NVIDIA's driver.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _flag(key: str, value: Any) -> Iterator[str]:
    if value is None or value is False:
        return
    yield f"--{key}"
    if isinstance(value, list | tuple):
        yield from map(str, value)
    elif isinstance(value, dict):
        yield json.dumps(value)
    elif value is not True:
        yield str(value)


def _require_checkpoint(path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path} is not a Hugging Face checkpoint: it has no config.json; set hf_checkpoint to a checkpoint folder"
        )


def unused_models(spec: EngineSpec) -> list[str]:
    """Return the names of the modules in `sglang.srt.models` that the engine does not need.

    SGLang's scheduler imports more than 200 modules, one per model architecture, which takes most of its start. The
    module of the checkpoint's architecture is enough, unless the arguments name a draft model or choose another
    implementation.
    """
    names = [key.replace("_", "-") for key in spec.server_args]
    if any(name.startswith(ARGUMENTS_THAT_CHOOSE_MODELS) for name in names):
        return []
    if "SGLANG_EXTERNAL_MODEL_PACKAGE" in {**os.environ, **spec.env_vars}:
        return []
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None, "an engine needs SGLang"
    assert sglang.origin is not None, "SGLang is a package with an __init__.py"
    architectures = json.loads((Path(spec.model_path) / "config.json").read_text()).get("architectures", [])
    definitions = [f"class {architecture}(" for architecture in architectures]
    modules = {path.stem: path.read_text() for path in sorted(Path(sglang.origin).parent.glob("srt/models/*.py"))}
    unused = [name for name, text in modules.items() if not any(definition in text for definition in definitions)]
    # If no module defines the architecture, SGLang decides what to use instead.
    return unused if len(unused) < len(modules) else []


def _dtype(spec: EngineSpec) -> str:
    return str(spec.server_args.get("dtype", spec.dtype))


def _kv_tokens(spec: EngineSpec) -> int:
    """Return the KV cache size in tokens: enough for all requests at full length, up to `KV_CACHE_BYTES_ON_CPU`."""
    model = json.loads((Path(spec.model_path) / "config.json").read_text())
    if "text_config" in model:
        # Published checkpoints leave out dimensions of the text part that transformers has by default. Importing
        # transformers takes seconds, so the engine of another model does without.
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(spec.model_path).get_text_config().to_dict()
    heads = model.get("num_key_value_heads", model["num_attention_heads"])
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    # Nemotron-H has a list of layers.
    layers = model.get("num_hidden_layers") or len(model["layers_block_type"])
    # Keys and values, in float32.
    bytes_per_token = 2 * 4 * layers * heads * width
    requests = spec.concurrency + spec.evaluation_concurrency
    return int(min(requests * model["max_position_embeddings"], KV_CACHE_BYTES_ON_CPU // bytes_per_token))

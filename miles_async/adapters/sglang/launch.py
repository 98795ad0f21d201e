"""A real SGLang server: its command line, its environment, its start."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from miles_async.adapters.sglang.process import PortTakenError, ServerProcess
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.errors import FatalError, UserError

KV_CACHE_BYTES_ON_CPU = 1 << 30
"""Upper bound of the KV cache where there is no device memory to measure."""
PORT_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What one engine is to be."""

    name: str
    model_path: str
    log_path: Path
    tp: int = 1
    """Tensor-parallel ranks."""
    cpus: tuple[int, ...] | None = None
    """CPU cores the engine may use; None: any."""
    concurrency: int = 512
    """Requests it runs at once at most."""
    evaluation_places: int = 0
    """Requests of evaluations that it runs beside those, and that make way for them."""
    seed: int = 42
    dtype: str = "auto"
    """Of weights and arithmetic on a GPU, where `auto` is the checkpoint's, or float16 for one in float32; on a CPU it
    is float32."""
    p2p: bool = True
    """Open its weights to Mooncake's one-sided writes."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Any other argument of `sglang.launch_server` by its own name, dashes or underscores; these win."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes; these win, too."""
    start_timeout: float = 300.0
    """Seconds until it must be healthy."""
    health_timeout: float = 30.0
    """Seconds without a token after which it says itself, when asked, that it is not well."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    devices: tuple[int, ...] = ()
    """The GPUs of this node that it uses; none leaves them to SGLang."""
    colocated: bool = False
    """A learner shares its devices: it can give its memory up and take it back."""
    nodes: int = 1
    """Servers that make up the engine, one per node."""
    node_rank: int = 0
    """Which of them this is; requests go to the first alone."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the others need to know of a running engine."""

    name: str
    url: str
    pid: int
    tp: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of an engine find each other, on the node of the first."""

    host: str
    port: int
    bootstrap_port: int
    """Each rank tells here where its weights lie; SGLang takes it for the same on all nodes."""


class EngineServer:
    """One SGLang server process, on loopback unless its engine spans machines."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._process: ServerProcess | None = None
        self._ports: list[ClaimedPort] = []
        self._shared_ports: list[ClaimedPort] = []
        """Those of a rendezvous that other nodes were told of."""
        self.info: EngineInfo
        """Of the server that was started last."""

    def rendezvous(self) -> Rendezvous:
        """A fresh one for the servers of an engine that spans nodes; this is the first of them."""
        _release(self._shared_ports)
        return self._rendezvous(self._shared_ports)

    def start(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Start it and wait until it is healthy.

        Raises UserError for a model folder that is none, Fatal with the last cause in the log when it dies or is late.
        """
        _require_checkpoint(self.spec.model_path)
        for _ in range(PORT_ATTEMPTS):
            _release(self._ports)
            port = self._claim(self._ports)
            url = f"http://{self.spec.host}:{port}"
            arguments = command(self.spec, port, rendezvous or self._rendezvous(self._ports))
            self._process = ServerProcess(
                f"engine {self.spec.name}", "sglang.launch_server", arguments, f"{url}/health", self.spec.log_path
            )
            try:
                self._process.start(environment(self.spec), self.spec.cpus, self.spec.start_timeout)
            except PortTakenError:
                continue
            self.info = EngineInfo(self.spec.name, url, self._process.pid, self.spec.tp)
            return self.info
        raise FatalError(
            f"engine {self.spec.name} found no free port in {PORT_ATTEMPTS} attempts (log: {self.spec.log_path})"
        )

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def answers(self) -> str | Literal[False] | None:
        """Where it serves its metrics, None where another node does; False where it does not answer."""
        if self._process is None or not self._process.answers():
            return False
        return None if self.spec.node_rank else urlsplit(self._process.health_url).netloc

    def restart(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """End what is left of it and start it anew, at another url. Raises as `start` does."""
        self.stop()
        return self.start(rendezvous)

    def stop(self) -> None:
        if self._process is not None:
            # Asked politely, SGLang drains for seconds what nobody waits for any more, and then kills its own children.
            self._process.stop(grace=0.0)
        _release(self._ports)

    def _rendezvous(self, ports: list[ClaimedPort]) -> Rendezvous:
        return Rendezvous(self.spec.host, self._claim(ports), self._claim(ports))

    def _claim(self, ports: list[ClaimedPort]) -> int:
        ports.append(claim_port(self.spec.host))
        return ports[-1].number


def command(spec: EngineSpec, port: int, rendezvous: Rendezvous) -> list[str]:
    """Arguments of `sglang.launch_server`."""
    arguments: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": spec.host,
        "port": port,
        "tp-size": spec.tp,
        "dtype": spec.dtype,
        "max-running-requests": spec.concurrency + spec.evaluation_places,
        "random-seed": spec.seed,
        "enable-metrics": True,
        # The first request warms it up as well as a warm-up would, and counts.
        "skip-server-warmup": True,
        "log-level": "warning",
        # An idle scheduler polls without pause otherwise: a whole core that the learner could use.
        "sleep-on-idle": True,
    }
    if spec.evaluation_places:
        # Places of their own, so that neither waits for the other; where memory is short, evaluations make room.
        arguments |= {"enable-priority-scheduling": True, "default-priority-value": 0, "retraction-policy": "priority"}
    if spec.nodes > 1:
        address = f"{rendezvous.host}:{rendezvous.port}"
        arguments |= {"nnodes": spec.nodes, "node-rank": spec.node_rank, "dist-init-addr": address}
    else:
        arguments["nccl-port"] = rendezvous.port
    if spec.p2p:
        arguments["remote-instance-weight-loader-start-seed-via-transfer-engine"] = True
        arguments["engine-info-bootstrap-port"] = rendezvous.bootstrap_port
    if spec.colocated and has_cuda():
        arguments["enable-memory-saver"] = True
    if not has_cuda():
        arguments |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "dtype": "float32",
            "disable-overlap-schedule": True,
            "mem-fraction-static": 0.1,
            "max-total-tokens": _kv_tokens(spec),
        }
    arguments |= {key.replace("_", "-"): value for key, value in spec.server_args.items()}
    return [word for key, value in arguments.items() for word in _flag(key, value)]


def environment(spec: EngineSpec) -> dict[str, str]:
    """What the server needs beside our own environment."""
    values = {
        "SGLANG_HOST_IP": spec.host,
        "HOST_IP": spec.host,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": f"127.0.0.1,{spec.host}",
        # A health check that generates a token would hang while the engine is paused for a publish.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # Longer than the router keeps an idle connection, or it sends a request into one that is being closed.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(spec.health_timeout)),
        # Where a scheduler has died, its server would keep the requests for five seconds more, to look at the dead.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.devices:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))
    if not has_cuda():
        cores, ranks = spec.cpus or tuple(sorted(os.sched_getaffinity(0))), spec.tp // spec.nodes
        values |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "MOONCAKE_PROTOCOL": "tcp",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
            # More threads than free cores spin against each other and against the learner: 50 times slower was seen.
            "OMP_NUM_THREADS": str(max(1, len(cores) // ranks // (1 if spec.cpus else 2))),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return {**values, **spec.env_vars}


@cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _release(ports: list[ClaimedPort]) -> None:
    while ports:
        ports.pop().release()


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
            f"{path} is no Hugging Face checkpoint: it has no config.json; set hf_checkpoint to such a folder"
        )


def _kv_tokens(spec: EngineSpec) -> int:
    """Tokens of KV cache: enough for all requests at full length, bounded in bytes."""
    model = json.loads((Path(spec.model_path) / "config.json").read_text())
    heads = model.get("num_key_value_heads", model["num_attention_heads"])
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    bytes_per_token = 2 * 4 * model["num_hidden_layers"] * heads * width
    requests = spec.concurrency + spec.evaluation_places
    return int(min(requests * model["max_position_embeddings"], KV_CACHE_BYTES_ON_CPU // bytes_per_token))

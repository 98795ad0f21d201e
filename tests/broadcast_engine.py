"""An engine that has SGLang's side of weight groups and little else, in a process that tests can kill.

It handles one request after the other, as SGLang's scheduler does, with the calls of torch that SGLang makes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from miles_async.adapters.sglang.engine_weights import (
    CHECKSUMS,
    PLACEMENTS,
    RECEIVED,
    REGIONS,
    WATCH,
    RankLayout,
    checksum_of,
    machine_id,
)
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import call_engine
from tests.forked import forked_from
from tests.waiting import PATIENCE_SECONDS

_processes = forked_from(__name__)
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag")


class BroadcastEngine:
    """A running engine with one rank. SGLang's loader loads its weights."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.asked = _processes.Event()
        """Set when the engine is asked to take part in a broadcast."""
        self.may_join, self.may_load = _processes.Event(), _processes.Event()
        """If cleared, the engine waits before it takes part, or before it answers that it has loaded the bucket."""
        self.may_join.set()
        self.may_load.set()
        ours, theirs = _processes.Pipe()
        signals = (self.asked, self.may_join, self.may_load)
        self.process = _processes.Process(target=_serve, args=(theirs, *signals, torch.device(device)), daemon=True)
        self.process.start()
        assert ours.poll(PATIENCE_SECONDS), f"engine {name} did not start"
        self.info = EngineInfo(name, f"http://127.0.0.1:{ours.recv()}", self.process.pid or 0, tp=1)

    def refuse_next(self) -> None:
        """Let the engine refuse the next broadcast instead of taking part in it."""
        self._ask("/refuse_next")

    def times(self) -> dict[str, float]:
        """When the engine was asked to take part in a broadcast, and when it did; by the system's clock."""
        found: dict[str, float] = self._ask("/times")
        return found

    def held(self) -> dict[str, int]:
        """See `held_here`."""
        found: dict[str, int] = self._ask("/held")
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def _ask(self, path: str) -> Any:
        return call_engine(self.info, path, {}, timeout=PATIENCE_SECONDS)


@contextmanager
def broadcast_engines(*names: str, device: str = "cpu") -> Iterator[list[BroadcastEngine]]:
    engines = [BroadcastEngine(name, device) for name in names]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def held_here() -> dict[str, int]:
    """What groups may leave in this process: threads, descriptors, and entries in the tables of torch.distributed."""
    tables = {name: len(vars(distributed_c10d)[name]) for name in _TABLES}
    # torch itself leaves an empty list for each group that it has destroyed.
    tagged = sum(len(groups) for groups in distributed_c10d._world.tags_to_pg.values())
    process = psutil.Process()
    return {"threads": process.num_threads(), "descriptors": process.num_fds(), **tables, "tagged": tagged}


@dataclass
class _Engine:
    """The state of an engine, in its process. The methods handle requests."""

    asked: Event
    may_join: Event
    may_load: Event
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    refuses: bool = False

    def init_weights_update_group(self, body: dict[str, Any]) -> object:
        """As SGLang's `init_custom_process_group`."""
        timeout, name, rank, size = timedelta(minutes=30), body["group_name"], body["rank_offset"], body["world_size"]
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, _, _ = next(dist.rendezvous(address, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        keys, backend = dist.PrefixStore(name, store), dist.Backend(body["backend"])
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], backend, keys, group_name=name, timeout=timeout
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group
        return {}

    def destroy_weights_update_group(self, body: dict[str, Any]) -> object:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return {}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> object:
        if self.refuses:
            self.refuses = False
            raise ValueError("refused")
        self.times["asked"] = time.monotonic()
        self.asked.set()
        self.may_join.wait()
        self.times["joined"] = time.monotonic()
        described = zip(body["shapes"], body["dtypes"], strict=True)
        sizes = [prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in described]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        parts = flat.cpu().split(sizes)
        self.received |= {name: checksum_of(part, whole=True) for name, part in zip(body["names"], parts, strict=True)}
        self.may_load.wait()
        return {}

    def weights_checker(self, body: dict[str, Any]) -> object:
        """As this project's `engine_weights.handle_check`."""
        action: str = body["action"]
        answer: dict[str, Any] = {}
        if action == REGIONS:
            answer = {"pid": psutil.Process().pid, "machine": machine_id(), "parameters": {}}
        elif action.startswith(PLACEMENTS):
            answer = {"layout": msgspec.to_builtins(RankLayout(unknown="the engine holds no weights"))}
        elif action.startswith(CHECKSUMS):
            answer = {"checksums": []}
        elif action.startswith(RECEIVED):
            names = json.loads(action.removeprefix(RECEIVED))
            answer = {"received": {name: self.received.pop(name, None) for name in names}}
        else:
            assert action.startswith(WATCH)
        return {"ranks": [{"checksums": {name: json.dumps(value) for name, value in answer.items()}}]}

    def refuse_next(self, _: dict[str, Any]) -> object:
        self.refuses = True
        return {}


def _serve(connection: Connection, asked: Event, may_join: Event, may_load: Event, device: torch.device) -> None:
    torch.set_num_threads(1)
    engine = _Engine(asked, may_join, may_load, device)
    answers: dict[str, Callable[[dict[str, Any]], object]] = {
        "/init_weights_update_group": engine.init_weights_update_group,
        "/update_weights_from_distributed": engine.update_weights_from_distributed,
        "/destroy_weights_update_group": engine.destroy_weights_update_group,
        "/weights_checker": engine.weights_checker,
        "/refuse_next": engine.refuse_next,
        "/times": lambda _: engine.times,
        "/held": lambda _: held_here(),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                status, answer = 200, answers[self.path](body)
            except Exception as error:
                status, answer = 400, {"message": repr(error)}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()

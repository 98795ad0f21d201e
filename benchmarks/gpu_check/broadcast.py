"""Weights by broadcast while the GPU is busy, and to engines that take no part or die: NCCL on a GPU, gloo on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import torch

from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import ON_GPU, Surroundings, require_gpu
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import EngineMemory
from miles_async.adapters.weights.layout import plans_by_name
from miles_async.adapters.weights.staging import Staging, describe
from miles_async.adapters.weights.transports.broadcast import BroadcastTransport
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError
from miles_async.transports import SourceOptions
from tests.broadcast_engine import broadcast_engines

SECONDS = 20.0 if ON_GPU else 3.0
"""The time limit of a send."""
ABORT_SECONDS = SECONDS + 5.0
"""NCCL cannot be interrupted while it forms a communicator, so aborting takes the time limit again."""
BUSY_CYCLES = 10_000_000_000
"""Of a kernel that runs for some seconds."""
TENSORS = [(f"layer.{i}", torch.randn(2**22)) for i in range(4)]
"""16 MiB each."""


def check(report: Report, surroundings: Surroundings) -> None:
    with sending(surroundings) as (transport, staging):
        with report.part("send beside a kernel"):
            beside_a_kernel(report, transport, staging)
        with report.part("an engine takes no part"):
            takes_no_part(report, transport, staging)
        with report.part("an engine dies"):
            dies(report, transport, staging)


@contextmanager
def sending(surroundings: Surroundings) -> Iterator[tuple[BroadcastTransport, Staging]]:
    staging = Staging(plans_by_name(describe(TENSORS)))
    staging.fill(1, TENSORS)
    settings = Weights(update_weight_timeout_seconds=SECONDS)
    transport = BroadcastTransport()
    transport.open(SourceOptions(0, surroundings.folder, settings.update_weight_buffer_size, SECONDS, settings))
    try:
        yield transport, staging
    finally:
        transport.close()


def beside_a_kernel(report: Report, transport: BroadcastTransport, staging: Staging) -> None:
    """The group has no engine, so one GPU is enough."""
    require_gpu("a kernel")
    with answering() as url:
        alone = EngineMemory(EngineInfo("alone", url, 0, tp=0), ())
        transport.connect(alone)
        transport.send(staging, alone)  # forms the communicator
        torch.cuda._sleep(BUSY_CYCLES)
        kernel = torch.cuda.Event()
        kernel.record()
        began = time.perf_counter()
        transport.send(staging, alone)
        seconds = time.perf_counter() - began
        if kernel.query():
            raise RuntimeError(f"the send took {seconds:.1f} s, as long as the kernel on the default stream")
        torch.cuda.synchronize()
    report.figure("send beside a kernel", seconds, "s")


def takes_no_part(report: Report, transport: BroadcastTransport, staging: Staging) -> None:
    """The engine answers that it has joined, but it forms no communicator. The time includes that of aborting."""
    began = time.perf_counter()
    with answering(hold="/update_weights_from_distributed") as url:
        engine = EngineMemory(EngineInfo("silent", url, 0, tp=1), ())
        try:
            transport.connect(engine)
            transport.send(staging, engine)
        except EngineLostError:
            seconds = time.perf_counter() - began
        else:
            raise RuntimeError("the send did not fail")
        report.figure("an engine takes no part", seconds, "s", at_most=SECONDS + ABORT_SECONDS)
        transport.disconnect("silent")
        time.sleep(SECONDS)  # a watchdog would end this process now


def dies(report: Report, transport: BroadcastTransport, staging: Staging) -> None:
    """The engine has received once, and dies before it takes part for a second time."""
    if ON_GPU and torch.cuda.device_count() == 1:
        raise NotPossibleError("one GPU cannot run NCCL between two ranks: the learner and the engines need one each")
    with broadcast_engines("dying", "other", device="cuda:1" if ON_GPU else "cpu") as (dying, other):
        there = [EngineMemory(engine.info, ()) for engine in (dying, other)]
        for engine in there:
            transport.connect(engine)
            transport.send(staging, engine)
        dying.may_join.clear()
        dying.asked.clear()
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(transport.send, staging, there[0])
            if not dying.asked.wait(SECONDS):
                raise RuntimeError("the engine was not asked to take part")
            began = time.perf_counter()
            dying.kill()
            if not isinstance(failure := lost.exception(), EngineLostError):
                raise RuntimeError(f"the send ended with {failure!r}")
        report.figure("an engine dies", time.perf_counter() - began, "s", at_most=SECONDS)
        transport.send(staging, there[1])
        for engine in there:
            transport.disconnect(engine.name)


@contextmanager
def answering(*, hold: str = "") -> Iterator[str]:
    """A server that answers every request with {}; requests to the path `hold` at the end of the context only."""
    released = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path == hold:
                released.wait()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        released.set()
        server.shutdown()
        server.server_close()

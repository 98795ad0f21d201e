"""Weights that engines read from the learner's memory: nothing stays behind, and engines that die harm no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.weights.engine import call_engine
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.adapters.weights.transports.ipc import Call, IPCTransport, serialized
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError
from tests.stack.engine_stack import Stack
from tests.waiting import PATIENCE_SECONDS, wait_until

pytest_plugins = ["tests.stack.engine_fixtures"]

PUBLISHES = 100
MIB = 1 << 20


@pytest.fixture
def source(serving: Stack, tmp_path: Path) -> Iterator[WeightSource]:
    settings = Weights(
        update_weight_buffer_size=2 * MIB,
        check_weight_update_equal=True,
        update_weight_timeout_seconds=PATIENCE_SECONDS,
    )
    made = WeightSource(describe(serving.named_tensors()), tmp_path, settings)
    made.connect([serving.engine], {"e0": "ipc"})
    made.stage(1, serving.named_tensors(), ["ipc"])
    yield made
    made.close()


def test_many_publishes_leave_no_memory_and_no_file(serving: Stack, source: WeightSource) -> None:
    processes = [psutil.Process(), psutil.Process(source._engines["e0"].ranks[0].pid)]

    def held() -> list[int]:
        """Descriptors, mapped windows, and torch's files in /dev/shm, which have the number of the process."""
        files = os.listdir("/dev/shm")
        return [
            count
            for one in processes
            for count in (
                one.num_fds(),
                sum("/memfd:weights" in mapped.path for mapped in one.memory_maps(grouped=False)),
                sum(f"torch_{one.pid}_" in file for file in files),
            )
        ]

    def publish(times: int) -> int:
        size = 0
        for _ in range(times):
            source.stage(1, serving.named_tensors(), ["ipc"])
            outcome = source.send(1, "e0", "ipc")
            assert outcome.error is None
            size += outcome.bytes
        return size

    publish(5)
    before, memory = held(), sum(one.memory_full_info().uss for one in processes)
    size = publish(PUBLISHES)
    # SGLang opens a few descriptors at some time.
    grown = [now - then for now, then in zip(held(), before, strict=True)]
    assert max(grown) < PUBLISHES / 10, grown
    assert sum(one.memory_full_info().uss for one in processes) - memory < size / 10


def test_an_engine_that_dies_ends_its_own_send_only_and_receives_again_after_a_restart(
    serving: Stack, source: WeightSource, tmp_path: Path
) -> None:
    spec = EngineSpec(name="e1", model_path=str(serving.checkpoint), log_path=tmp_path / "log")
    engine = EngineServer(spec)
    try:
        dying = engine.start()
        source.connect([serving.engine, dying], {"e0": "ipc", "e1": "ipc"})
        os.kill(source._engines["e1"].ranks[0].pid, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            lost = pool.submit(source.send, 1, "e1", "ipc")
            transport = source._transports["ipc"]
            assert isinstance(transport, IPCTransport)
            wait_until(lambda: transport._turn.locked(), "the engine is asked to load a bucket")
            sent = pool.submit(source.send, 1, "e0", "ipc")
            os.killpg(dying.pid, signal.SIGKILL)
            assert (lost.result().error is not None, lost.result().final) == (True, True)
            assert sent.result().error is None
        restarted = engine.restart()
        source.connect([serving.engine, restarted], {"e0": "ipc", "e1": "ipc"})
        assert source.send(1, "e1", "ipc").error is None
    finally:
        engine.stop()


def test_an_engine_that_cannot_open_the_memory_refuses_it_and_goes_on(serving: Stack, source: WeightSource) -> None:
    gone = Call(torch.from_file, "/proc/self/fd/99999", False, 4)
    request = {
        "serialized_named_tensors": [serialized({"flattened_tensor": gone, "metadata": []})],
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    with pytest.raises(EngineLostError, match=r"400: .*the weights could not be loaded from memory: .*No such file"):
        call_engine(serving.engine, "/update_weights_from_tensor", request, timeout=PATIENCE_SECONDS)
    assert source.send(1, "e0", "ipc").error is None

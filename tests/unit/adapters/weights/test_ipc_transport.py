"""Engines that cannot read the learner's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.sglang.engine_weights import machine_id
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import EngineMemory, RankMemory, Region
from miles_async.adapters.weights.transports.ipc import IPCTransport
from miles_async.errors import EngineLostError
from miles_async.transports import SourceOptions


def engine_on(*machines: str, device: str = "cpu") -> EngineMemory:
    regions = {"weight": Region(0, (1,), "float32", device)}
    ranks = tuple(RankMemory(1, machine, regions) for machine in machines)
    return EngineMemory(EngineInfo("e", "http://e", 1, len(ranks)), ranks)


@pytest.fixture
def transport(tmp_path: Path) -> IPCTransport:
    opened = IPCTransport()
    opened.open(SourceOptions(rank=0, folder=tmp_path, bucket=1, timeout=1.0))
    return opened


def test_an_engine_that_is_partly_on_another_node_is_refused_with_transports_that_reach_it(
    transport: IPCTransport,
) -> None:
    transport.connect(engine_on(machine_id(), machine_id()))
    with pytest.raises(EngineLostError, match=r"on another node .*; use --weight-transfer p2p or broadcast$"):
        transport.connect(engine_on(machine_id(), "another boot of another machine"))


def test_an_engine_on_a_device_that_the_learner_does_not_have_is_refused(transport: IPCTransport) -> None:
    with pytest.raises(EngineLostError, match="its weights are on cuda:0, and the learner's on cpu"):
        transport.connect(engine_on(machine_id(), device="cuda:0"))

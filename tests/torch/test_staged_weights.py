"""Where weights are staged, and which engines can read them there."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_async.adapters.sglang.engine_weights import RankLayout, machine_id
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights import adapters as adapter_weights
from miles_async.adapters.weights import engine as weights_engine
from miles_async.adapters.weights import source as weights_source
from miles_async.adapters.weights.adapters import AdapterSource, loaded_versions
from miles_async.adapters.weights.engine import EngineMemory, RankMemory, Region
from miles_async.adapters.weights.layout import Piece, TensorPlan, plans_by_name
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import Staging, describe
from miles_async.adapters.weights.transports.disk import DiskTransport
from miles_async.adapters.weights.transports.ipc import IPCTransport
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError, FatalError
from miles_async.models.lora import AdapterConfig, adapter_checksum, tensor_names
from miles_async.transports import ADAPTER, SourceOptions, Transport
from tests.disks import files_at_most

TENSORS = [("model.norm.weight", torch.arange(6.0)), ("model.embed.weight", torch.arange(12.0).view(3, 4))]


class OnGPU(Transport):
    device = "cuda"


class InMainMemory(Transport): ...


@pytest.mark.parametrize(
    "in_use, device",
    [(["gpu"], "cuda"), (["host"], "cpu"), (["gpu", "host"], "cpu"), ([], "cpu"), (["not opened yet"], "cpu")],
)
def test_weights_are_staged_on_the_gpu_if_all_transports_in_use_read_them_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_use: Sequence[str], device: str
) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Staging, "move", lambda staging, device: moved.append(device))
    source = WeightSource(describe(TENSORS), tmp_path, Weights())
    source._staging = Staging(plans_by_name(describe(TENSORS)))
    source._transports = {"gpu": OnGPU(), "host": InMainMemory()}
    source.stage(1, TENSORS, in_use)
    assert moved[0] == device
    source._prepare("host")
    assert moved[-1] == "cpu", "a fallback finds the version in main memory"


def test_a_bucket_is_written_to_given_memory_as_it_is_returned_without() -> None:
    """The second tensor is staged in two pieces, column by column, and one column is in no engine."""
    columns = tuple(Piece(column, (3,), (4,)) for column in (0, 2, 3))
    plans = [TensorPlan("a", (6,), "float32"), TensorPlan("b", (3, 4), "float32", (), columns)]
    staging = Staging(plans)
    staging.fill(1, [("a", torch.arange(6.0)), ("b", torch.arange(12.0).view(3, 4))])
    expected = torch.arange(12.0).view(3, 4)
    expected[:, 1] = 0
    window = torch.full((100,), 255, dtype=torch.uint8)
    for bucket in staging.buckets(1 << 20):
        flat = staging.flat(bucket, window)
        assert flat.data_ptr() == window.data_ptr()
        assert torch.equal(flat, staging.flat(bucket))
        assert torch.equal(flat.view(torch.float32)[-12:], expected.view(-1))
    assert window[18 * 4 :].eq(255).all()


def test_weights_that_do_not_fit_on_a_full_disk_are_reported_with_their_folder(tmp_path: Path) -> None:
    """A send fences its engine then (`WeightSource.send`)."""
    transport = DiskTransport()
    transport.open(SourceOptions(rank=0, folder=tmp_path, bucket=1 << 20, timeout=1.0))
    staging = Staging(plans_by_name(describe(TENSORS)))
    staging.fill(1, TENSORS)
    with files_at_most(10), pytest.raises(FatalError, match=f"the weights could not be written to {tmp_path}"):
        transport.prepare(staging)


def test_an_adapter_that_does_not_fit_on_a_full_disk_is_reported_with_its_folder(tmp_path: Path) -> None:
    source = AdapterSource(tmp_path, AdapterConfig(2, 1.0, ("o_proj",)), Weights(), rank=0, resident=3)
    of_a, of_b = tensor_names("model.layers.0.self_attn.o_proj")
    with files_at_most(10), pytest.raises(OSError, match=f"{tmp_path}.*check whether the disk is full"):
        source.stage(1, [(of_a, torch.ones(2, 8)), (of_b, torch.ones(8, 2))], [])


def engine_on(*machines: str, device: str = "cpu") -> EngineMemory:
    regions = {"weight": Region(0, (1,), "float32", device)}
    ranks = tuple(RankMemory(1, machine, regions) for machine in machines)
    return EngineMemory(EngineInfo("e", "http://e", 1, len(ranks)), ranks)


@pytest.fixture
def transport(tmp_path: Path) -> IPCTransport:
    opened = IPCTransport()
    opened.open(SourceOptions(rank=0, folder=tmp_path, bucket=1, timeout=1.0))
    opened.device = "cpu"  # on a machine with a GPU, too
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


def test_ranks_that_several_groups_of_an_engine_answer_for_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data-parallel attention, each group of SGLang's ranks answers for all of them."""
    ranks = [{"checksums": {"received": json.dumps({"w": rank})}} for rank in (0, 1)]
    monkeypatch.setattr(weights_engine, "call_engine", lambda *_, **__: {"ranks": ranks * 2})
    engine = engine_on("here", "here")
    assert weights_engine.read_received(engine, ["w"], timeout=1.0) == [{"w": 0}, {"w": 1}]


@pytest.mark.parametrize("by_name", [None, "how --sglang-ep-size divides it was never tried"])
def test_an_engine_whose_layout_was_never_tried_loads_each_version_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: str | None
) -> None:
    watched: list[str] = []
    monkeypatch.setattr(weights_source, "read_engine_memory", lambda info, **_: engine_on("here"))
    monkeypatch.setattr(weights_source, "read_layouts", lambda *_, **__: [RankLayout()])
    monkeypatch.setattr(weights_source, "watch_loader", lambda engine, **_: watched.append(engine.name))
    monkeypatch.setattr(weights_source, "plan_tensors", lambda *_: plans_by_name(describe(TENSORS)))
    source = WeightSource(describe(TENSORS), tmp_path, Weights(), by_name=by_name)
    source.connect([engine_on("here").info], {})
    source.stage(1, TENSORS, [])
    source.stage(2, TENSORS, [])
    assert source.compared is (by_name is not None), "later versions, too"
    assert watched == (["e"] if by_name else [])
    if by_name:
        with pytest.raises(EngineLostError, match=f"it writes into the engine's memory, but {by_name}"):
            source.connect([engine_on("here").info], {"e": "disk_delta"})


def test_an_engine_that_never_answers_is_reported_with_the_time_that_it_had() -> None:
    """As an engine whose scheduler hangs while it loads an adapter: its server still takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = EngineInfo("e", f"http://127.0.0.1:{server.getsockname()[1]}", 0, 1)
        with pytest.raises(EngineLostError, match=r":\d+/load_lora_adapter did not answer within 0\.1 s$"):
            weights_engine.call_engine(engine, "/load_lora_adapter", {"lora_name": "v1"}, timeout=0.1)


def test_a_base_model_that_is_called_like_a_version_is_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"id": "v3", "parent": None}, {"id": "v4", "parent": "v3"}, {"id": "of-another-program", "parent": "v3"}]
    monkeypatch.setattr(adapter_weights, "call_engine", lambda *_, **__: {"data": models})
    assert loaded_versions(engine_on("here").info, timeout=1.0) == {4}


@pytest.mark.parametrize("listens", [True, False])
def test_a_load_of_an_adapter_that_timed_out_is_not_repeated_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """SGLang still holds its lock for a load that timed out, and may end it during a second one."""
    monkeypatch.setattr(adapter_weights, "loaded_versions", lambda *_, **__: set())
    settings = Weights(update_weight_timeout_seconds=0.1)
    source = AdapterSource(tmp_path, AdapterConfig(2, 1.0, ("o_proj",)), settings, rank=0, resident=3)
    of_a, of_b = tensor_names("model.layers.0.self_attn.o_proj")
    source.stage(1, [(of_a, torch.ones(2, 8)), (of_b, torch.ones(8, 2))], [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        source.connect([EngineInfo("e", f"http://127.0.0.1:{port}", 0, 1)], {})
        outcome = source.send(1, "e", ADAPTER)
    assert outcome.error is not None
    assert outcome.error.startswith(f"engine e: http://127.0.0.1:{port}/load_lora_adapter")
    assert outcome.error.endswith(" did not answer within 0.1 s") is listens
    assert outcome.final is listens


def test_an_engine_joins_a_run_that_trains_an_adapter_although_another_engine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(adapter_weights, "loaded_versions", lambda engine, **_: asked.append(engine.url))
    source = AdapterSource(tmp_path, AdapterConfig(2, 1.0, ("o_proj",)), Weights(), rank=0, resident=3)
    lost, joins, restarted = (EngineInfo(name, f"http://{url}", 0, 1) for name, url in ("ax", "by", "az"))
    for engines in ([lost], [lost, joins], [restarted, joins]):
        source.connect(engines, {})
    assert asked == ["http://x", "http://y", "http://z"], "each of them once"


def test_all_ranks_compare_the_same_versions_of_an_adapter_with_engines(tmp_path: Path) -> None:
    """They compute the log-probabilities together, so a rank that computes them alone waits forever."""
    config = AdapterConfig(2, 1.0, ("o_proj",))
    ranks = [AdapterSource(tmp_path, config, Weights(), rank=rank, resident=3) for rank in range(2)]
    of_a, of_b = tensor_names("model.layers.0.self_attn.o_proj")
    compared = []
    for version, value in enumerate((0.0, 0.0, 0.1, 0.2)):
        for source in ranks:
            source.stage(version, [(of_a, torch.ones(2, 8)), (of_b, torch.full((8, 2), value))], [])
        compared.append([source.compared for source in ranks])
    assert compared == [[True, True], [True, True], [True, True], [False, False]]


@pytest.mark.parametrize("columns", [7, 64])
def test_the_checksum_of_an_adapter_notices_any_changed_bit_and_not_how_an_engine_joins_rows(columns: int) -> None:
    numbers = np.random.default_rng(1).standard_normal((3, columns)).astype(np.float32)
    checksum = adapter_checksum([torch.from_numpy(numbers)])
    bits = numbers.view(np.uint32)
    for row, column, bit in itertools.product(range(3), range(columns), range(32)):
        bits[row, column] ^= np.uint32(1 << bit)
        assert adapter_checksum([torch.from_numpy(numbers)]) != checksum, (row, column, bit)
        bits[row, column] ^= np.uint32(1 << bit)
    first, *others = torch.from_numpy(numbers).split(1)
    assert adapter_checksum([torch.cat([*others, torch.zeros(2, columns)]), first]) == checksum

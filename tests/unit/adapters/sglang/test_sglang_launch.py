"""An engine's settings become the server's command line, and its log explains why it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.sglang import launch
from miles_async.adapters.sglang.launch import EngineSpec, Rendezvous
from miles_async.adapters.sglang.process import cause
from miles_async.adapters.system import rdma
from miles_async.observability.redacted_log import RedactedLog
from tests.waiting import PATIENCE_SECONDS

ALONE = Rendezvous("127.0.0.1", 30002, 30001)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return EngineSpec(
        name="e0",
        model_path=str(tmp_path),
        log_path=tmp_path / "log",
        tp=2,
        cpus=(4, 5, 6, 7),
        concurrency=64,
        server_args={"mem_fraction_static": 0.8, "disable-radix-cache": True, "skip_server_warmup": False},
    )


@pytest.fixture(params=[True, False], ids=["cuda", "cpu"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(launch, "has_cuda", lambda: request.param)
    present: bool = request.param
    return present


def test_configured_server_arguments_override_the_defaults(spec: EngineSpec, cuda: bool) -> None:
    words = launch.command(spec, 30000, ALONE)
    assert words[words.index("--mem-fraction-static") + 1] == "0.8"
    assert words.count("--mem-fraction-static") == 1
    assert "--disable-radix-cache" in words
    assert "--skip-server-warmup" not in words
    assert words[words.index("--tp-size") + 1] == "2"
    assert words[words.index("--max-running-requests") + 1] == "64"


def test_cpu_settings_appear_only_without_cuda(spec: EngineSpec, cuda: bool) -> None:
    words, values = launch.command(spec, 30000, ALONE), launch.environment(spec)
    assert ("torch_native" in words) is not cuda
    assert ("SGLANG_USE_CPU_ENGINE" in values) is not cuda


@pytest.mark.parametrize("arguments", [{"dtype": "float32"}, {"server_args": {"dtype": "float32"}}])
def test_an_engine_in_float32_on_a_gpu_normalizes_with_torch(
    spec: EngineSpec, cuda: bool, arguments: dict[str, Any]
) -> None:
    forced = launch.environment(replace(spec, **arguments)).get("SGLANG_FORCE_FUSED_OP_BACKEND")
    assert forced == ("torch" if cuda else None)
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in launch.environment(spec)


def test_mooncake_uses_rdma_only_on_a_gpu_node_with_an_active_port(
    spec: EngineSpec, cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    monkeypatch.setattr(rdma, "DEVICES", tmp_path / "infiniband")
    assert launch.environment(spec)["MOONCAKE_PROTOCOL"] == "tcp"
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert launch.environment(spec)["MOONCAKE_PROTOCOL"] == "tcp"
    (port / "state").write_text("4: ACTIVE\n")
    assert launch.environment(spec)["MOONCAKE_PROTOCOL"] == ("rdma" if cuda else "tcp")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    assert launch.environment(spec)["MOONCAKE_PROTOCOL"] == "rdma"


def test_cores_are_divided_among_the_ranks(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    values = launch.environment(spec)
    assert values["OMP_NUM_THREADS"] == "2"
    assert values["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"


def test_the_kv_cache_holds_every_request_at_full_length(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    words = launch.command(spec, 30000, ALONE)
    assert words[words.index("--max-total-tokens") + 1] == str(64 * 512)


def test_the_kv_cache_of_a_model_that_also_takes_images_is_that_of_its_text_part(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Published checkpoints leave out what transformers has by default, such as the number of heads.
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 512}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (Path(spec.model_path) / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    words = launch.command(spec, 30000, ALONE)
    assert words[words.index("--max-total-tokens") + 1] == str(64 * 512)


def test_the_cause_is_the_last_exception_of_the_log() -> None:
    log = "loading\nTraceback (most recent call last):\n  File x\nValueError: bad model\nkilling children\n"
    assert cause(log) == "ValueError: bad model"
    assert cause("only words\nthe last word\n\n") == "the last word"
    assert cause("") == "its log is empty"


def test_a_failed_assertion_is_explained_by_its_statement() -> None:
    log = 'Traceback\n  File "x.py", line 1\n    assert x1.is_cuda\n           ^^^^^^^^^^\nAssertionError\nkilled\n'
    assert cause(log) == "AssertionError: assert x1.is_cuda"


def test_the_servers_of_an_engine_that_spans_nodes_connect_to_the_first_node_and_use_separate_devices(
    spec: EngineSpec, cuda: bool
) -> None:
    second = replace(spec, host="10.0.0.2", nodes=2, node_rank=1, devices=(4, 5))
    words = " ".join(launch.command(second, 30000, Rendezvous("10.0.0.1", 30002, 30001)))
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:30002" in words
    assert "--engine-info-bootstrap-port 30001" in words
    assert "--host 10.0.0.2" in words
    assert "--nccl-port" not in words
    alone = " ".join(launch.command(replace(spec, host="10.0.0.2"), 30000, Rendezvous("10.0.0.2", 30002, 30001)))
    assert "--dist-init-addr 10.0.0.2:30002" in alone
    assert launch.environment(second)["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.parametrize("flag", ["--enable-memory-saver", "--enable-weights-cpu-backup"])
def test_an_engine_that_shares_its_gpus_can_release_its_memory_and_keep_its_weights(
    spec: EngineSpec, cuda: bool, flag: str
) -> None:
    assert (flag in launch.command(replace(spec, colocated=True), 1, ALONE)) is cuda
    assert flag not in launch.command(spec, 1, ALONE)


def test_a_server_continues_without_its_log_if_the_disk_is_full(tmp_path: Path) -> None:
    log = RedactedLog(FileIO("/dev/full", "ab"))
    with open(log.descriptor, "wb", closefd=False) as output:
        output.write(b"a line\n" * 20_000)
    log.close_writer()
    log.finish(within=PATIENCE_SECONDS)

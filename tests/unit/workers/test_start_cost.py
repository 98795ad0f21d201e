"""The start of a run imports and starts only what the run needs."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray._private.node import Node

from miles_async.adapters.ray.isolation import isolated_ray
from miles_async.adapters.sglang import launch
from miles_async.adapters.sglang.launch import EngineSpec, unused_models
from miles_async.adapters.system.memory import uncollected_imports
from tests.configuration import run_config
from workers.learner import LearnerRank


@pytest.fixture
def qwen3(tmp_path: Path) -> EngineSpec:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return EngineSpec(name="e0", model_path=str(tmp_path), log_path=tmp_path / "log")


def test_without_nvidias_driver_the_actor_of_an_engine_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    launch.has_cuda.cache_clear()
    try:
        assert launch.has_cuda() is False
    finally:
        launch.has_cuda.cache_clear()


def test_an_engine_imports_only_the_module_of_its_models_architecture(qwen3: EngineSpec) -> None:
    assert "qwen3" not in unused_models(qwen3)
    assert {"llama", "deepseek_v2", "qwen3_moe"} <= set(unused_models(qwen3))


def test_an_engine_imports_all_models_if_sglang_may_use_another_architecture(
    qwen3: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for argument in ("speculative_algorithm", "model-impl", "json_model_override_args"):
        assert unused_models(replace(qwen3, server_args={argument: "x"})) == []
    assert unused_models(replace(qwen3, env_vars={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"})) == []
    (Path(qwen3.model_path) / "config.json").write_text(json.dumps({"architectures": ["NobodysModel"]}))
    assert unused_models(qwen3) == []


@pytest.mark.parametrize("cuda", [True, False])
def test_torch_compile_is_off_in_learner_and_engine_only_without_cuda(
    qwen3: EngineSpec, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: cuda)
    monkeypatch.setattr("workers.learner.has_cuda", lambda: cuda)
    monkeypatch.setattr(os, "environ", {})
    assert ("TORCHDYNAMO_DISABLE" in launch.environment(qwen3)) is not cuda
    assert ("SGLANG_DISABLED_MODEL_ARCHS" in launch.environment(qwen3)) is not cuda
    LearnerRank(run_config(), 0, 1, Path("run"))
    assert ("TORCHDYNAMO_DISABLE" in os.environ) is not cuda


def test_a_user_can_turn_torch_compile_on_in_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.learner.has_cuda", lambda: False)
    monkeypatch.setattr(os, "environ", {})
    LearnerRank(run_config(train_env_vars={"TORCHDYNAMO_DISABLE": "0"}), 0, 1, Path("run"))
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_imports_are_not_interrupted_by_garbage_collection_and_are_excluded_from_later_ones() -> None:
    frozen = gc.get_freeze_count()
    try:
        with uncollected_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_local_ray_starts_no_log_monitor_and_no_autoscaler() -> None:
    reaper: Any = None
    node: Any = None
    originals = Node.start_log_monitor, Node.start_monitor
    with isolated_ray(reaper):
        Node.start_log_monitor(node)
        Node.start_monitor(node)
    assert (Node.start_log_monitor, Node.start_monitor) == originals

"""One engine behind one router for all tests of the adapters, and the Hugging Face model it must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.config.schema import TinyModel
from tests.stack.engine_stack import Stack


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    create_tiny_model(TinyModel(), path, seed=1)
    return path


@pytest.fixture(scope="session")
def serving(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs = tmp_path_factory.mktemp("logs")
    own = {"SGLANG_TIMEOUT_KEEP_ALIVE": "601", "OF_THE_ENGINE": "yes"}
    verbose = {"log-level": "info"}  # SGLang logs its arguments
    spec = EngineSpec(
        name="e0", model_path=str(checkpoint), log_path=logs / "engine.log", env_vars=own, server_args=verbose
    )
    engine = EngineServer(spec)
    router = RouterServer(RouterSpec(log_path=logs / "router.log"))
    try:
        with ThreadPoolExecutor() as pool:
            starting = pool.submit(engine.start)
            router_url = router.start()
            model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
            yield Stack(starting.result(), router_url, router.spec.key, logs, checkpoint, model)
    finally:
        router.stop()
        engine.stop()

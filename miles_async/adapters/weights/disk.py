"""Weights through a folder that learner and engines share: the slowest way, and the one that needs nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.writer import NamedTensors, call_engine
from miles_async.errors import EngineLost, Fatal
from miles_async.types import WriteOutcome


class DiskWriter:
    """Implements `WeightWriter`. `folder` must be the same path for the learner and every engine."""

    name = "disk"

    def __init__(self, folder: Path, *, timeout: float = 600.0) -> None:
        self._folder = folder
        self._timeout = timeout
        self._engines: dict[str, EngineInfo] = {}

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        self._engines = {engine.name: engine for engine in engines}

    def stage(self, version: int, named_tensors: NamedTensors) -> None:
        """Write the whole version under a temporary name, then rename it; older versions are removed.

        Raises Fatal when the folder cannot be written.
        """
        tensors = {name: _own(tensor) for name, tensor in named_tensors}
        final, draft = self._path(version), self._folder / f".{version}.draft"
        try:
            for leftover in self._folder.glob("version_*"):
                shutil.rmtree(leftover)
            draft.mkdir(parents=True, exist_ok=True)
            save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
            os.replace(draft, final)
        except OSError as error:
            raise Fatal(f"the weights could not be written to {self._folder}: {error}") from error

    def write(self, version: int, engine: str) -> WriteOutcome:
        """Verified by the engine's own answer; a safetensors file cut short does not load."""
        started = time.perf_counter()
        path = self._path(version)
        size, error = 0, None
        request = {
            "model_path": str(path),
            "load_format": "safetensors",
            # The fleet's commit flushes; SGLang ends its scheduler where a flush inside this call is refused.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        try:
            call_engine(self._engines[engine].url, "/update_weights_from_disk", request, timeout=self._timeout)
            size = (path / "model.safetensors").stat().st_size
        except (EngineLost, OSError) as failure:
            error = f"engine {engine}: {failure}"
        return WriteOutcome(engine=engine, seconds=time.perf_counter() - started, bytes=size, error=error)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"version_{version}"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own on the CPU: safetensors refuses tensors that share memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()

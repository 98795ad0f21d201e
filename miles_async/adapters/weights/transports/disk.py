"""Sends weights through a folder that learner and engines share: the slowest transport, and the least demanding one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles_async.adapters.weights.engine import EngineMemory, call_engine
from miles_async.adapters.weights.staging import Staging
from miles_async.atomic_files import atomic_folder
from miles_async.errors import FatalError

File = tuple[str, dict[str, torch.Tensor], dict[str, str]]
"""File name, tensors and metadata of a safetensors file."""


class DiskTransport:
    """Implements `Transport` with safetensors files that SGLang loads.

    `folder` belongs to this source alone and has the same path on every engine. `bucket` is the number of bytes per
    file, `timeout` is in seconds per load.
    """

    def __init__(self, folder: Path, *, bucket: int, timeout: float) -> None:
        self._folder = folder
        self._bucket = bucket
        self._timeout = timeout

    def connect(self, engine: EngineMemory) -> None: ...

    def disconnect(self, name: str) -> None: ...

    def prepare(self, staging: Staging) -> None:
        """Write the staged version to disk and remove older versions."""
        self._save(staging, "whole", self._files(staging))

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Let the engine load the files. A safetensors file that is cut short does not load."""
        return self._load(engine, self._path(staging, "whole"), "safetensors")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, staging: Staging, form: str) -> Path:
        return self._folder / f"{staging.fill_count}_version_{staging.version}_{form}"

    def _files(self, staging: Staging) -> Iterator[File]:
        """Yield one file per bucket: tensors that are staged in column blocks are copied, one bucket at a time."""
        for number, bucket in enumerate(staging.buckets(self._bucket)):
            tensors = {plan.name: staging.tensor(plan.name) for plan in bucket}
            yield f"model-{number:05}.safetensors", tensors, {"format": "pt"}

    def _save(self, staging: Staging, form: str, files: Iterator[File]) -> None:
        try:
            # The files need not survive a power failure: the next version replaces them.
            with atomic_folder(self._path(staging, form), durable=False) as draft:
                for file, tensors, metadata in files:
                    save_file(tensors, draft / file, metadata=metadata)
            for leftover in self._folder.glob("*_version_*"):
                if not leftover.name.startswith(f"{staging.fill_count}_"):
                    shutil.rmtree(leftover)
        except OSError as error:
            raise FatalError(f"the weights could not be written to {self._folder}: {error}") from error

    def _load(self, engine: EngineMemory, path: Path, load_format: str) -> int:
        request = {
            "model_path": str(path),
            "load_format": load_format,
            # `SGLangFleet.commit` flushes. SGLang's scheduler exits if a flush inside this call is refused.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        call_engine(engine.info, "/update_weights_from_disk", request, timeout=self._timeout)
        return sum(file.stat().st_size for file in path.iterdir())

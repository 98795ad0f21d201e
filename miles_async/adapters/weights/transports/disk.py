"""Sends weights through a folder that learner and engines share: the slowest transport, and the least demanding one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from miles_async.atomic_files import atomic_folder
from miles_async.errors import FatalError
from miles_async.transports import LOAD_ONLY, Transport

if TYPE_CHECKING:
    import torch

    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.staging import Staging

    File = tuple[str, dict[str, torch.Tensor], dict[str, str]]
    """File name, tensors and metadata of a safetensors file."""


class DiskTransport(Transport):
    """Sends the weights through a shared folder, as safetensors files that SGLang loads.

    A file has `bucket` bytes, and `timeout` is for each load.
    """

    name = "disk"
    fallback: ClassVar[int | None] = 3
    uses_loader: ClassVar[bool] = True

    def prepare(self, staging: Staging) -> None:
        """Write the staged version to disk and remove older versions."""
        self._save(staging, "whole", self._files(staging))

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        """Let the engine load the files. A safetensors file that is cut short does not load."""
        return self._load(engine, self._path(staging, "whole"), "safetensors")

    def close(self) -> None:
        shutil.rmtree(self.source.folder, ignore_errors=True)

    def _path(self, staging: Staging, form: str) -> Path:
        return self.source.folder / f"{staging.fill_count}_version_{staging.version}_{form}"

    def _files(self, staging: Staging) -> Iterator[File]:
        """Yield one file per bucket: tensors that are staged in column blocks are copied, one bucket at a time."""
        for number, bucket in enumerate(staging.buckets(self.source.bucket)):
            tensors = {plan.name: staging.tensor(plan.name) for plan in bucket}
            yield f"model-{number:05}.safetensors", tensors, {"format": "pt"}

    def _save(self, staging: Staging, form: str, files: Iterator[File]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            # The files need not survive a power failure: the next version replaces them.
            with atomic_folder(self._path(staging, form), durable=False) as draft:
                for file, tensors, metadata in files:
                    save_file(tensors, draft / file, metadata=metadata)
            for leftover in self.source.folder.glob("*_version_*"):
                if not leftover.name.startswith(f"{staging.fill_count}_"):
                    shutil.rmtree(leftover)
        except (SafetensorError, OSError) as error:
            raise FatalError(f"the weights could not be written to {self.source.folder}: {error}") from error

    def _load(self, engine: EngineMemory, path: Path, load_format: str) -> int:
        from miles_async.adapters.weights.engine import call_engine

        request = {"model_path": str(path), "load_format": load_format, **LOAD_ONLY}
        call_engine(engine.info, "/update_weights_from_disk", request, timeout=self.source.timeout)
        return sum(file.stat().st_size for file in path.iterdir())

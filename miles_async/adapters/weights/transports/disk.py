"""Weights through a folder that learner and engines share: the slowest way, and the one that needs nothing.

Whole, as safetensors that SGLang loads; or as changes against the version before, with the sum that every region of
the engine's memory must have afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import torch
from safetensors.torch import save_file

from miles_async.adapters.sglang.engine_weights import DELTA_FILE, DELTA_FORMAT
from miles_async.adapters.weights.engine import Engine, call_engine
from miles_async.adapters.weights.staging import Staging
from miles_async.adapters.weights.transports.delta import Base, changes
from miles_async.atomic_files import atomic_folder
from miles_async.errors import FatalError

File = tuple[str, dict[str, torch.Tensor], dict[str, str]]
"""Name, tensors and notes."""


class DiskTransport:
    """Implements `Transport`. `folder` must be this source's own, and the same path for it and every engine."""

    def __init__(self, folder: Path, *, bucket: int, timeout: float) -> None:
        self._folder = folder
        self._bucket = bucket
        self._timeout = timeout

    def connect(self, engine: Engine) -> None: ...

    def forget(self, name: str) -> None: ...

    def stage(self, staging: Staging) -> None:
        """Write the whole version under a temporary name, then rename it; older versions are removed."""
        self._save(staging, "whole", self._whole(staging))

    def write(self, staging: Staging, engine: Engine) -> int:
        """Checked by the engine's own answer; a safetensors file cut short does not load."""
        return self._load(engine, self._path(staging, "whole"), "safetensors")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, staging: Staging, form: str) -> Path:
        return self._folder / f"{staging.fills}_version_{staging.version}_{form}"

    def _whole(self, staging: Staging) -> Iterator[File]:
        """One file per bucket, so that tensors that are staged in parts need room for a bucket and no more."""
        for number, bucket in enumerate(staging.buckets(self._bucket)):
            tensors = {placement.name: staging.tensor(placement.name) for placement in bucket}
            yield f"model-{number:05}.safetensors", tensors, {"format": "pt"}

    def _save(self, staging: Staging, form: str, files: Iterator[File]) -> None:
        try:
            # The files need not survive a power failure: the next version replaces them.
            with atomic_folder(self._path(staging, form), durable=False) as draft:
                for file, tensors, notes in files:
                    save_file(tensors, draft / file, metadata=notes)
            for leftover in self._folder.glob("*_version_*"):
                if not leftover.name.startswith(f"{staging.fills}_"):
                    shutil.rmtree(leftover)
        except OSError as error:
            raise FatalError(f"the weights could not be written to {self._folder}: {error}") from error

    def _load(self, engine: Engine, path: Path, load_format: str) -> int:
        request = {
            "model_path": str(path),
            "load_format": load_format,
            # The fleet's commit flushes; SGLang ends its scheduler where a flush inside this call is refused.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        call_engine(engine.info.url, "/update_weights_from_disk", request, timeout=self._timeout)
        return sum(file.stat().st_size for file in path.iterdir())


class DeltaTransport(DiskTransport):
    """Carries the bytes that changed since what was staged before; whole weights to an engine that does not hold that.

    Keeps what was staged before: a second copy of this source's share.
    """

    def __init__(self, folder: Path, *, bucket: int, timeout: float) -> None:
        super().__init__(folder, bucket=bucket, timeout=timeout)
        self._saving = Lock()
        """Engines are written at once, and the first that needs whole weights saves them for all."""
        self._before: Base | None = None
        self._now: Base | None = None
        self._holds: dict[str, int] = {}
        """What each engine has, by the fill of the staging."""

    def forget(self, name: str) -> None:
        self._holds.pop(name, None)

    def stage(self, staging: Staging) -> None:
        assert staging.version is not None, "a version is staged"
        self._before, self._now = self._now, Base(staging.fills, staging.version, staging.buffer.clone())
        if self._before is not None and self._before.fill in self._holds.values():
            self._save(staging, "delta", iter([(DELTA_FILE, *changes(staging, self._before))]))

    def write(self, staging: Staging, engine: Engine) -> int:
        held = self._holds.pop(engine.name, None)
        if self._before is not None and held == self._before.fill:
            size = self._load(engine, self._path(staging, "delta"), DELTA_FORMAT)
        else:
            with self._saving:
                if not self._path(staging, "whole").is_dir():
                    super().stage(staging)
            size = super().write(staging, engine)
        self._holds[engine.name] = staging.fills
        return size

"""Publishes LoRA adapters: one folder per version, which engines load under a new name.

An engine loads a version while it generates. Nothing is written over, so nothing has to stop.

An engine that shares its devices with the learner releases their memory before each step. Whenever it has allocated the
memory again, `send` verifies that it has restored the base model, and that it still holds its adapters.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_async.adapters.sglang.engine_weights import SAMPLE_BYTES
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.engine import (
    EngineMemory,
    Region,
    Window,
    call_engine,
    compare_logprobs,
    read_adapter_checksums,
    read_checksums,
    read_engine_memory,
    verify_checksums,
)
from miles_async.adapters.weights.engine_adapter import for_engines
from miles_async.adapters.weights.staging import NamedTensors
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError
from miles_async.models.lora import TENSORS, AdapterConfig, read_checksum, write_adapter
from miles_async.scheduling.adapters import name_of, version_of
from miles_async.types import SendOutcome


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model of an engine, as it was at the first send."""

    memory: EngineMemory
    windows: Sequence[Sequence[Window]]
    checksums: Sequence[Sequence[int]]
    """Of the windows, on each rank."""


class AdapterSource:
    """Sends adapters as `source.WeightSource` sends weights. Only rank 0 of the learner sends something."""

    def __init__(
        self,
        folder: Path,
        config: AdapterConfig,
        settings: Weights,
        *,
        rank: int,
        resident: int,
        colocated: bool = False,
    ) -> None:
        """Versions are written to `folder`, which engines must see under the same path; it keeps `resident` of them for
        each adapter. If the run trains several adapters, each has its own folder in it.

        `colocated` engines release their memory between two sends.
        """
        self._folder = folder
        self._config = config
        self._rank = rank
        self._resident = resident
        self._colocated = colocated
        self._timeout, self._verify_all = settings.update_weight_timeout_seconds, settings.check_weight_update_equal
        self._engines: dict[str, EngineInfo] = {}
        self._bases: dict[EngineInfo, _Base] = {}
        self.compared = True
        """Whether the log-probabilities of engines and learner are to be compared for the staged version: up to the
        first version of its adapter that changes the model. The checksums of later ones suffice."""
        self._changing: set[str] = set()
        """Adapters with a staged version that changes the model. The first version of a new adapter changes nothing."""

    def connect(self, engines: Sequence[EngineInfo], transports: Mapping[str, str]) -> None:
        """Remember the engines. Raises EngineLostError if a new one does not answer."""
        for info in engines:
            # The loss of another engine must not keep a new one from joining.
            if self._rank == 0 and self._engines.get(info.name) != info:
                loaded_versions(info, timeout=self._timeout)
        self._engines = {info.name: info for info in engines}
        self._bases = {info: base for info, base in self._bases.items() if info in engines}

    def stage(self, version: int, named_tensors: NamedTensors, transports: Sequence[str], adapter: str = "") -> None:
        """Write the adapter as `version`, and remove the files of its versions that no engine may load any more."""
        changes = adapter in self._changing
        tensors: dict[str, torch.Tensor] = {}
        # On all ranks: they export the tensors together, and compute the log-probabilities to compare together.
        for name, tensor in named_tensors:
            changes = changes or ("lora_B" in name and bool(tensor.any()))
            if self._rank == 0:
                tensors[name] = tensor.to("cpu")  # the file is the copy that outlasts the next step
        self.compared = adapter not in self._changing
        if changes:
            self._changing.add(adapter)
        if self._rank:
            return
        folder = self._folder / adapter
        kept = [old for old in _versions_in(folder) if old < version][1 - self._resident :]
        for old in _versions_in(folder):
            if old not in kept:
                shutil.rmtree(folder / name_of(old))
        unfinished = self._folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_adapter(unfinished, *for_engines(tensors, self._config), base=None, hash_of_base=None)
        folder.mkdir(exist_ok=True)
        unfinished.rename(folder / name_of(version))

    def send(self, version: int, name: str, transport: str) -> SendOutcome:
        """Let an engine load all versions in the folder that it lacks, and drop the others.

        The engine verifies what it loads. A failure is in the outcome.
        """
        started, size, error, final = time.perf_counter(), 0, None, False
        if self._rank == 0:
            try:
                size = self._update(version, self._engines[name])
            except EngineLostError as failure:
                error = f"engine {name}: {failure}"
                # SGLang goes on with a request that timed out. A repeated load waits for it, and then finds the version
                # loaded, which SGLang refuses.
                final = isinstance(failure.__cause__, TimeoutError)
        return SendOutcome(engine=name, seconds=time.perf_counter() - started, bytes=size, error=error, final=final)

    def compare(self, name: str, logprobs: Sequence[float]) -> float:
        """See `WeightSource.compare`."""
        return compare_logprobs(
            self._engines[name], logprobs, adapter=name_of(max(self._versions())), timeout=self._timeout
        )

    def drop(self, name: str) -> None:
        """Let an engine drop the versions that no request may name, now that the newest one is live.

        Raises EngineLostError if it does not answer.
        """
        if self._rank == 0:
            engine = self._engines[name]
            kept = {version for folder in self._folders() for version in _versions_in(folder)[1 - self._resident :]}
            self._unload(engine, loaded_versions(engine, timeout=self._timeout) - kept)

    def close(self) -> None: ...

    def _update(self, version: int, engine: EngineInfo) -> int:
        """Returns the bytes of the versions that the engine has loaded."""
        if self._colocated:
            self._verify_base(engine)
        wanted, loaded = self._versions(), loaded_versions(engine, timeout=self._timeout)
        # Before anything is loaded, so that the engine never holds more than its bound.
        self._unload(engine, loaded - set(wanted))
        # An engine that an earlier run has used may hold another adapter of this name.
        verified = wanted if self._colocated else [version]
        lost = {one for one in verified if one in loaded and not self._holds(engine, one)}
        self._unload(engine, lost)
        loaded -= lost
        size = 0
        for one in wanted:
            if one not in loaded:
                self._call(engine, "/load_lora_adapter", one, lora_path=str(self._path(one)))
                size += (self._path(one) / TENSORS).stat().st_size
        return size

    def _verify_base(self, engine: EngineInfo) -> None:
        """Raise EngineLostError if the base model is not what it was at the first send to the engine.

        After the first send, log-probabilities are compared with the learner.
        """
        if (base := self._bases.get(engine)) is None:
            memory = read_engine_memory(engine, timeout=self._timeout)
            windows = [
                [window for name, region in rank.regions.items() for window in self._windows(name, region)]
                for rank in memory.ranks
            ]
            self._bases[engine] = _Base(memory, windows, read_checksums(memory, windows, timeout=self._timeout))
            return
        complaint = "changed while the learner had the devices, and it is a weight of the base model"
        verify_checksums(base.memory, base.windows, base.checksums, complaint=complaint, timeout=self._timeout)

    def _windows(self, name: str, region: Region) -> Sequence[Window]:
        """What is verified of a parameter: all bytes with `check_weight_update_equal`, else both of its ends."""
        dtype: torch.dtype = getattr(torch, region.dtype)
        size = math.prod(region.shape) * dtype.itemsize
        if self._verify_all or size <= 2 * SAMPLE_BYTES:
            return [(name, 0, size)]
        return [(name, 0, SAMPLE_BYTES), (name, size - SAMPLE_BYTES, SAMPLE_BYTES)]

    def _holds(self, engine: EngineInfo, version: int) -> bool:
        """Whether every rank of an engine holds what the file of a version contains."""
        written = read_checksum(self._path(version))
        found = read_adapter_checksums(engine, name_of(version), timeout=self._timeout)
        return all(one == written for one in found)

    def _unload(self, engine: EngineInfo, versions: set[int]) -> None:
        for version in versions:
            self._call(engine, "/unload_lora_adapter", version)

    def _call(self, engine: EngineInfo, path: str, version: int, **body: str) -> None:
        call_engine(engine, path, {"lora_name": name_of(version), **body}, timeout=self._timeout)

    def _path(self, version: int) -> Path:
        paths = (folder / name_of(version) for folder in self._folders())
        return next(path for path in paths if path.is_dir())

    def _folders(self) -> list[Path]:
        """The folder of each adapter."""
        folders = [path for path in self._folder.glob("*") if path.is_dir() and version_of(path.name) is None]
        return [self._folder, *folders]

    def _versions(self) -> list[int]:
        """The versions of all adapters, oldest first."""
        return sorted(version for folder in self._folders() for version in _versions_in(folder))


def loaded_versions(engine: EngineInfo, *, timeout: float) -> set[int]:
    """The versions that an engine has loaded. Raises EngineLostError if it does not answer."""
    models = call_engine(engine, "/v1/models", timeout=timeout)["data"]
    # Without a parent, it is the base model, whose folder may be called like a version.
    adapters = (model["id"] for model in models if model["parent"] is not None)
    return {version for name in adapters if (version := version_of(name)) is not None}


def _versions_in(folder: Path) -> list[int]:
    """The versions in the folder of an adapter, oldest first."""
    return sorted(version for path in folder.glob("*") if (version := version_of(path.name)) is not None)

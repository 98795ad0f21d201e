"""Sends the bytes that changed since the previously staged version, through a folder that learner and engines share.

A training step at a small learning rate leaves the high bytes of most weights alone, and in bfloat16 it leaves most
weights alone altogether. A delta file has, for each region of an engine's memory, a compressed mask of the bytes that
changed and those bytes. `engine_weights.apply_delta` applies it inside the engine.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from miles_async.adapters.sglang.engine_weights import DELTA_FILE, DELTA_FORMAT
from miles_async.adapters.weights.transports.disk import DiskTransport
from miles_async.transports import SourceOptions

if TYPE_CHECKING:
    import torch

    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.staging import Staging


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the staging buffer."""

    fill_count: int
    version: int
    bytes: torch.Tensor
    """uint8, in the order of the staging buffer."""


class DiskDeltaTransport(DiskTransport):
    """Sends only the changed bytes through a shared folder. Needs memory for a second copy of the weights.

    An engine that does not hold the previously staged version gets the whole weights. The second copy is that version,
    of this source's part.
    """

    name = "disk_delta"
    fallback = None
    uses_loader = False

    def open(self, source: SourceOptions) -> None:
        super().open(source)
        self._whole_lock = Lock()
        """Sends to several engines run at once; the first that needs the whole weights writes them for all."""
        self._previous: Snapshot | None = None
        self._current: Snapshot | None = None
        self._held: dict[str, int] = {}
        """By engine: the fill of the staging buffer that it holds."""

    def disconnect(self, name: str) -> None:
        self._held.pop(name, None)

    def prepare(self, staging: Staging) -> None:
        """Write the delta file if an engine can use it. The whole weights are written only if an engine needs them."""
        assert staging.version is not None, "stage() comes first"
        self._previous = self._current
        self._current = Snapshot(staging.fill_count, staging.version, staging.buffer.clone())
        if self._previous is not None and self._previous.fill_count in self._held.values():
            self._save(staging, "delta", iter([(DELTA_FILE, *make_delta(staging, self._previous))]))

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        # An engine whose load fails holds an unknown version: the entry returns only after success.
        held = self._held.pop(engine.name, None)
        if self._previous is not None and held == self._previous.fill_count:
            size = self._load(engine, self._path(staging, "delta"), DELTA_FORMAT)
        else:
            with self._whole_lock:
                if not self._path(staging, "whole").is_dir():
                    super().prepare(staging)
            size = super().send(staging, engine)
        self._held[engine.name] = staging.fill_count
        return size


def make_delta(staging: Staging, base: Snapshot) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and metadata of a delta file from `base` to the staged version, which has the same layout.

    Region `i` has the tensors `i.mask` (zlib-compressed bits, one per byte, lowest bit first) and `i.bytes` (the
    changed bytes). The metadata `regions` is JSON: for each region the rank, parameter, first byte, bytes, and the
    CRC-32 of its new bytes.
    """
    import numpy as np
    import torch

    tensors: dict[str, torch.Tensor] = {}
    regions: list[tuple[int, str, int, int, int]] = []
    for plan in staging.plans:
        width, base_offset = staging.element_size(plan.name), staging.offset(plan.name)
        for copy in plan.copies:
            first, size = base_offset + copy.source * width, copy.numel * width
            old, new = base.bytes[first : first + size], staging.buffer[first : first + size]
            changed = old != new
            mask = zlib.compress(np.packbits(changed.numpy(), bitorder="little").data, level=1)
            tensors[f"{len(regions)}.mask"] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            tensors[f"{len(regions)}.bytes"] = new[changed]
            # The checksum covers the unchanged bytes too, so that a wrong base is detected.
            regions.append((copy.rank, copy.parameter, copy.target * width, size, zlib.crc32(new.numpy().data)))
    return tensors, {"base": str(base.version), "version": str(staging.version), "regions": json.dumps(regions)}

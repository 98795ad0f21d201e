"""What changed between two staged versions, byte by byte, in the layout of the engine's ranks.

A training step at a small learning rate leaves the high bytes of most weights alone, and in bfloat16 most weights
altogether. Of each region a file has a mask of the bytes that changed, compressed, and those bytes.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

import torch

from miles_async.adapters.weights.staging import Staging


@dataclass(frozen=True, slots=True)
class Base:
    """What was staged once."""

    fill: int
    version: int
    bytes: torch.Tensor
    """As they lay in the staging buffer."""


def changes(staging: Staging, base: Base) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and notes of a delta file from `base` to what is staged now, which has the same layout."""
    tensors: dict[str, torch.Tensor] = {}
    regions: list[tuple[int, str, int, int, int]] = []
    for placement in staging.placements:
        width, start = staging.width(placement.name), staging.start(placement.name)
        for copy in placement.copies:
            first, size = start + copy.source * width, copy.numel * width
            old, new = base.bytes[first : first + size], staging.buffer[first : first + size]
            changed = old != new
            mask = zlib.compress(pack(changed).numpy().data, level=1)
            tensors[f"{len(regions)}.mask"] = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            tensors[f"{len(regions)}.bytes"] = new[changed]
            regions.append((copy.rank, copy.parameter, copy.target * width, size, zlib.crc32(new.numpy().data)))
    return tensors, {"base": str(base.version), "version": str(staging.version), "regions": json.dumps(regions)}


def pack(bits: torch.Tensor) -> torch.Tensor:
    """Booleans, eight to a byte, lowest bit first; see `engine_weights.unpack`."""
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8)
    padded[: len(bits)] = bits
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)

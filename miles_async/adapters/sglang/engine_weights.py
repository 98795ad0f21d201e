"""What an engine tells of its own weights, and how it takes changes from disk. Runs inside SGLang's schedulers.

SGLang hands `/weights_checker` to every tensor-parallel rank and collects one answer of each. Two questions of our own
go that way: where the parameters lie, and what stands there now. They are asked by `miles_async.adapters.weights`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

REGIONS = "miles_async.regions"
SUMS = "miles_async.sums:"
"""Followed by JSON: for each rank its windows, `[parameter, first byte, bytes]`."""
DELTA_FORMAT = "miles_async_delta"
"""The `load_format` of a folder that holds changes only."""
DELTA_FILE = "delta.safetensors"

Model = Any
"""The `torch.nn.Module` that SGLang runs."""


def answer(
    original: Callable[..., Any], checker: Any, action: str, allow_quant_error: bool = False
) -> dict[str, Any] | None:
    """Around SGLang's `WeightChecker.handle`; its own questions stay its own."""
    if action == REGIONS:
        allow_neighbours()
        told = {"parameters": regions(checker._get_model()), "pid": os.getpid(), "machine": machine()}
    elif action.startswith(SUMS):
        windows = json.loads(action.removeprefix(SUMS))[checker._parallelism_info().tp_rank]
        told = {"sums": sums(checker._get_model(), windows)}
    else:
        native: dict[str, Any] | None = original(checker, action, allow_quant_error)
        return native
    # The answer has SGLang's own form: one text per name and rank.
    return {
        "checksums": {name: json.dumps(value) for name, value in told.items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info().model_dump(),
    }


def regions(model: Model) -> dict[str, dict[str, Any]]:
    """Of each parameter: address, shape, dtype and device."""
    return {
        name: {
            "address": parameter.data_ptr(),
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
        }
        for name, parameter in model.named_parameters()
    }


def sums(model: Model, windows: list[tuple[str, int, int]]) -> list[int]:
    """The CRC-32 of each window of bytes."""
    parameters = dict(model.named_parameters())
    return [zlib.crc32(_bytes(parameters[name], start, size).cpu().numpy()) for name, start, size in windows]


def load_changes(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, load_format: str, **others: Any
) -> tuple[bool, str]:
    """Around SGLang's `WeightUpdater.update_weights_from_disk`: whole weights by SGLang, changes by ourselves.

    Returns success and a sentence, as SGLang does.
    """
    if load_format != DELTA_FORMAT:
        return original(updater, model_path, load_format, **others)
    try:
        apply_delta(updater.get_model(), Path(model_path) / DELTA_FILE, updater.tp_rank)
    except (OSError, ValueError) as error:
        return False, str(error)
    return True, "Succeeded to update model weights."


def apply_delta(model: Model, path: Path, rank: int) -> None:
    """Put the changed bytes in place.

    Raises ValueError when the sum of a region is not what it must be afterwards: the base was another one, or the file
    is torn.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            notes = file.metadata()
            for number, (_, name, start, size, expected) in _own(json.loads(notes["regions"]), rank):
                region = _bytes(parameters[name], start, size)
                mask = zlib.decompress(file.get_tensor(f"{number}.mask").numpy().tobytes())
                changed = unpack(torch.frombuffer(bytearray(mask), dtype=torch.uint8), size)
                region[changed.to(region.device)] = file.get_tensor(f"{number}.bytes").to(region.device)
                if zlib.crc32(region.cpu().numpy()) != expected:
                    raise ValueError(f"{name} is not what it was in version {notes['base']}, or {path} is torn")
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error


def unpack(mask: Any, size: int) -> Any:
    """A tensor of `size` booleans from one of packed bits, lowest bit first."""
    import torch

    bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:size].bool()


def machine() -> str:
    """Processes that say the same can reach each other's memory, by their numbers.

    It names this boot of this machine and its process numbers: containers on one machine have each their own.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def allow_neighbours() -> None:
    """Let other processes of this user write into this one's memory, also where Yama forbids it unless told."""
    import ctypes

    set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(set_ptracer, anyone, 0, 0, 0)


def _own(entries: list[list[Any]], rank: int) -> list[tuple[int, list[Any]]]:
    return [(number, entry) for number, entry in enumerate(entries) if entry[0] == rank]


def _bytes(parameter: Any, start: int, size: int) -> Any:
    import torch

    return parameter.data.view(-1).view(torch.uint8)[start : start + size]

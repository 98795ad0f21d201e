"""Access to an engine's weights from outside. Runs inside SGLang's scheduler processes, hooked in by `plugin.py`.

SGLang passes `/weights_checker` to every tensor-parallel rank and collects one answer per rank. This module adds
actions to it: the addresses of all parameters, where the loader puts the tensors of a checkpoint, and checksums of the
parameters and of what the loader received. `miles_async.adapters.weights` calls them. It also adds a load format for
files that hold only the changed bytes of the weights, and an answer if memory of another process cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from miles_async.models.mtp_heads import is_of_heads

REGIONS = "miles_async.regions"
"""The action that returns the memory of all parameters, the process id and the machine."""
CHECKSUMS = "miles_async.sums:"
"""The action that returns checksums. JSON follows: for each rank its windows, `[parameter, first byte, bytes]`."""
PLACEMENTS = "miles_async.placements:"
"""The action that returns `weight_placement.find_placements`. JSON follows: names and shapes of the tensors."""
WATCH = "miles_async.watch:"
"""The action after which the checksums of loaded tensors are kept. JSON follows: whether they cover all bytes."""
RECEIVED = "miles_async.received:"
"""The action that returns these checksums. JSON follows: the names of the tensors."""
ADAPTER_SUM = "miles_async.adapter:"
"""The action that returns the checksum of an adapter. Its name follows."""
SAMPLE_BYTES = 4096
"""Bytes that a checksum covers, unless it covers all of a tensor or of a copy."""
DELTA_FORMAT = "miles_async_delta"
"""The `load_format` of a folder with a delta file."""
DELTA_FILE = "delta.safetensors"

Model = Any
"""The `torch.nn.Module` that SGLang runs."""
Shape = tuple[int, ...]


class Placement(Struct, array_like=True, frozen=True):
    """A strided part of a checkpoint's tensor, and the strided part of a parameter that holds it."""

    tensor: int
    """Number of the tensor."""
    source: int
    """The first element in the flat tensor."""
    shape: Shape
    strides: Shape
    parameter: str
    target: int
    """The first element in the flat parameter."""
    target_strides: Shape
    offset: float
    """SGLang's loader adds this number to each element."""


class RankLayout(Struct, frozen=True):
    """What SGLang's loader does with the tensors of a checkpoint on one rank of an engine."""

    placements: list[Placement] = []
    unfilled: list[str] = []
    """The parameters that the tensors do not fill completely."""
    unknown: str | None = None
    """Why the loader's work cannot be described by placements; None if it can."""
    refused: str | None = None
    """The error with which the loader refused the tensors."""
    quantized: str | None = None
    """A parameter that SGLang quantizes, and its type; None if there is none."""


def handle_check(original: Callable[..., Any], checker: Any, action: str, **options: Any) -> dict[str, Any] | None:
    """Wrap SGLang's `WeightChecker.handle`: answer the actions of this module, pass all others on."""
    # Since SGLang 0.5.21 the caller also says whether it asks about the model or about a draft model.
    role = {name: value for name, value in options.items() if name == "role"}
    if action == REGIONS:
        allow_writes_by_other_processes()
        answer = {"parameters": regions(checker._get_model()), "pid": os.getpid(), "machine": machine_id()}
    elif action.startswith(CHECKSUMS):
        windows = json.loads(action.removeprefix(CHECKSUMS))[checker._parallelism_info(**role).tp_rank]
        answer = {"checksums": checksums(checker._get_model(), windows)}
    elif action.startswith(PLACEMENTS):
        answer = {"layout": msgspec.to_builtins(_layout(checker, action.removeprefix(PLACEMENTS)))}
    elif action.startswith(WATCH):
        watch_loader(checker._get_model(), whole=json.loads(action.removeprefix(WATCH)))
        answer = {}
    elif action.startswith(RECEIVED):
        received = checker._get_model().miles_received
        answer = {"received": {name: received.pop(name, None) for name in json.loads(action.removeprefix(RECEIVED))}}
    elif action.startswith(ADAPTER_SUM):
        (manager,) = checker._get_model().miles_adapters
        names = {reference.lora_name: key for key, reference in manager.lora_refs.items()}
        answer = {"adapter": _checksum_of_adapter(manager, names[action.removeprefix(ADAPTER_SUM)])}
    else:
        native: dict[str, Any] | None = original(checker, action, **options)
        return native
    # SGLang accepts only this form: one string per name under `checksums`.
    return {
        "checksums": {name: json.dumps(value) for name, value in answer.items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(**role).model_dump(),
    }


def leave_out_draft(draft_worker: Any) -> None:
    """Replace SGLang's `_get_draft_model_runner`, so that a draft model is not also asked for its weights.

    It does not have the parameters that a publish writes and verifies.
    """


def find_own_draft(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap SGLang's `SchedulerWeightUpdaterManager.check_weights`: let the model know the draft model of its MTP heads.

    The draft model of another checkpoint has other weights.
    """
    target = manager.tp_worker.model_runner
    inner = None if manager.draft_worker is None else vars(manager.draft_worker).get("_draft_worker")
    draft = None if inner is None else vars(inner).get("draft_runner")
    if draft is not None and draft.model_config.model_path == target.model_config.model_path:
        # In a tuple, so that torch does not take it for a part of the model.
        target.model.miles_draft = (draft.model, target.model_config.hf_text_config.num_hidden_layers)
    return original(manager, request)


def _layout(checker: Any, tensors: str) -> RankLayout:
    """The layout of `tensors`, for which every rank of the learner asks; it is found once."""
    from miles_async.adapters.sglang.weight_placement import find_placements

    known: dict[str, RankLayout] = checker.__dict__.setdefault("miles_layouts", {})
    if tensors not in known:
        known.clear()
        known[tensors] = find_placements(checker._get_model(), json.loads(tensors))
    return known[tensors]


def watch_loader(model: Model, *, whole: bool) -> None:
    """Keep the checksum of each tensor that the model's loader receives, until it is asked for.

    A draft model of the model's MTP heads gets the tensors of the heads.
    """
    load, received = type(model).load_weights, model.__dict__.setdefault("miles_received", {})

    draft, layers = model.__dict__.get("miles_draft", (None, 0))
    further = range(layers, sys.maxsize)

    def watched(weights: Iterable[tuple[str, Any]], *arguments: Any, **options: Any) -> Any:
        of_heads = []

        def seen() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                received[name] = checksum_of(tensor, whole=whole)
                if draft is not None and is_of_heads(name, further):
                    of_heads.append((name, tensor))
                yield name, tensor

        result = load(model, seen(), *arguments, **options)
        if of_heads:
            draft.load_weights(of_heads)
        return result

    model.load_weights = watched


def checksum_of(tensor: Any, *, whole: bool) -> int:
    """The CRC-32 of a tensor's bytes, or of `SAMPLE_BYTES` of them at equal distances."""
    import torch

    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    distance = 1 if whole else max(1, len(data) // SAMPLE_BYTES)
    return zlib.crc32(data[::distance].contiguous().cpu().numpy())


def remember_adapters(_: None, manager: Any, *__: Any, **___: Any) -> None:
    """Let the model know SGLang's `LoRAManager`, so that the actions of this module find adapters."""
    manager.base_model.miles_adapters = (manager,)  # in a tuple, so that torch does not look for modules in it


def sizes_of_adapter(
    original: Callable[..., tuple[int, int]], module: str, config: Any, model: Model, *arguments: Any
) -> tuple[int, int]:
    """Wrap SGLang's `get_hidden_dim`: inputs and outputs of a linear layer, for the buffers of adapters.

    In SGLang 0.5.20, only the body of the text part of Qwen3.5 knows those of its gated queries and linear attention.
    """
    body = model._modules.get("model")
    knows_sizes = hasattr(body, "get_hidden_dim") and not hasattr(model, "get_hidden_dim")
    return original(module, config, body if knows_sizes else model, *arguments)


def load_adapter(manager: Any, reference: Any) -> Any:
    """Replace SGLang's `LoRAManager.load_lora_adapter`: refuse an adapter whose tensors differ from those written.

    An adapter that another library wrote has no checksum, and is not verified. Unlike SGLang, this function does not
    log the free memory: for that, SGLang empties the allocator's cache on GPUs and starts the program lscpu on CPUs,
    while all requests wait.
    """
    from miles_async.models.lora import read_checksum

    result = manager._load_lora_adapter(reference)
    if not result.success or (written := read_checksum(Path(reference.lora_path))) is None:
        return result
    if _checksum_of_adapter(manager, reference.lora_id) == written:
        return result
    manager._unload_lora_adapter(reference)
    return manager.create_lora_update_result(success=False, error_message="the adapter differs from what was written")


def unload_adapter(manager: Any, reference: Any) -> Any:
    """Replace SGLang's `LoRAManager.unload_lora_adapter`, which logs the free memory as `load_lora_adapter` does."""
    return manager._unload_lora_adapter(reference)


def copy_adapters_again(_: Any, updater: Any, *__: Any) -> None:
    """Let SGLang copy adapters from host memory to the device when a batch needs them next.

    SGLang calls this when it has allocated the memory that it had released. SGLang 0.5.20 does not release the memory
    of its device copies of adapters. This function does not rely on that.
    """
    manager = updater.tp_worker.model_runner.lora_manager
    if manager is not None:
        for key in list(manager.memory_pool.uid_to_buffer_id):
            manager.memory_pool.remove_lora(key)


def _checksum_of_adapter(manager: Any, key: str) -> int:
    """The checksum of an adapter as SGLang keeps it: the tensors of some modules are joined."""
    from miles_async.models.lora import adapter_checksum

    adapter = manager.loras[key]
    of_layers = (tensor for layer in adapter.layers for tensor in layer.weights.values())
    return adapter_checksum([*of_layers, *adapter.embedding_layers.values()])


def regions(model: Model) -> dict[str, dict[str, Any]]:
    """Return address, shape, dtype and device of each parameter and buffer."""
    return {
        name: {
            "address": parameter.data_ptr(),
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
        }
        for name, parameter in tensors_of(model).items()
    }


def checksums(model: Model, windows: list[tuple[str, int, int]]) -> list[int]:
    """Return the CRC-32 of each window: parameter, first byte, number of bytes."""
    parameters = tensors_of(model)
    return [zlib.crc32(_bytes(parameters[name], start, size).cpu().numpy()) for name, start, size in windows]


def load_from_memory(original: Callable[..., tuple[bool, str]], worker: Any, request: Any) -> tuple[bool, str]:
    """Wrap SGLang's `BaseTpWorker.update_weights_from_tensor`, for weights in memory of another process.

    SGLang would end if that memory cannot be opened, and answers before the GPU has read it. Returns success and a
    sentence, as SGLang does.
    """
    import torch

    try:
        outcome = original(worker, request)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (RuntimeError, OSError) as error:
        return False, f"the weights could not be loaded from memory: {error}"
    return outcome


def load_from_disk(
    original: Callable[..., tuple[bool, str]], updater: Any, model_path: str, load_format: str, **others: Any
) -> tuple[bool, str]:
    """Wrap SGLang's `WeightUpdater.update_weights_from_disk`: apply delta files, let SGLang load all other formats.

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
    """Write the changed bytes of a delta file into this rank's parameters; see `weights.transports.disk_delta`.

    Raises ValueError if the checksum of a region is wrong afterwards: the parameters did not hold the base version, or
    the file is damaged.
    """
    import numpy as np
    import torch
    from safetensors import SafetensorError, safe_open

    parameters = tensors_of(model)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for number, (region_rank, name, start, size, expected) in enumerate(json.loads(metadata["regions"])):
                if region_rank != rank:
                    continue
                region = _bytes(parameters[name], start, size)
                packed = file.get_tensor(f"{number}.mask").numpy().tobytes()
                mask = zlib.decompressobj().decompress(packed, max_length=(size + 7) // 8)
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little")
                changed = torch.from_numpy(bits).bool()
                region[changed.to(region.device)] = file.get_tensor(f"{number}.bytes").to(region.device)
                if zlib.crc32(region.cpu().numpy()) != expected:
                    raise ValueError(f"{name} did not hold version {metadata['base']}, or {path} is damaged")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def machine_id() -> str:
    """Identify this boot of this machine and its process id namespace.

    Two processes with the same id can address each other by process id. Containers on one machine have different ids,
    because each container has its own process id namespace.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def allow_writes_by_other_processes() -> None:
    """Let other processes of this user write this process's memory, even if Yama's `ptrace_scope` restricts it."""
    import ctypes

    set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(set_ptracer, any_process, 0, 0, 0)


def tensors_of(model: Model) -> dict[str, Any]:
    """The parameters and buffers of a model, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _bytes(parameter: Any, start: int, size: int) -> Any:
    import torch

    return parameter.data.view(-1).view(torch.uint8)[start : start + size]

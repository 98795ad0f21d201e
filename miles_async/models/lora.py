"""LoRA adapters in the format of the library PEFT: names of tensors, `adapter_config.json` and folders.

An adapter adds `scale * B(A(x))` to the output of a linear layer, with A [rank, inputs] and B [outputs, rank] (arXiv
2106.09685). Folders always state the scale as `lora_alpha / r`, because SGLang does not read `use_rslora`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from miles_async.errors import UserError
from miles_async.models.lora_layers import FEED_FORWARD, HEAD, LINEAR_ATTENTION, adapted, kinds_of, select_modules
from miles_async.models.packed_experts import pack, packed_shapes, peft_entries
from miles_async.models.text_part import text_config

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_WEIGHT, _TIED_WEIGHT = f"{HEAD}.weight", "embed_tokens.weight"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_CHECKSUM = "checksum_of_rows"
_OUTER = re.compile(r"\.experts\.\d+\.((?:gate|up)_proj\.lora_A|down_proj\.lora_B)\.")
_PACKED = ".experts.gate_up_proj"
_NOT_CONVERTED_BY_PEFT = ("gpt_oss", "qwen3_5_moe_text")
_EXPERT_LAYER = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
_HASHED_TENSORS, _HASHED_BYTES, _LARGEST_HEADER = 64, 4096, 1 << 28
_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of `config.json` that do not determine what a model computes."""
_IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "revision", "task_type", "use_rslora"),
    *("r", "lora_alpha", "target_modules", "init_lora_weights", "bias", "layers_to_transform", "layers_pattern"),
}
"""Entries of `adapter_config.json` that `read_config` checks, or that have no effect on a trained adapter."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What `adapter_config.json` says of an adapter."""

    rank: int
    scale: float
    modules: tuple[str, ...]
    """The entries of `target_modules`: each is the end of the names of one or more layers, see `Targets.of_model`."""
    dropout: float = 0.0
    alternates: bool = False
    """See `LinearLayers`."""
    packs_experts: bool = False
    """Whether the adapters of all experts of a layer are packed, as described in `packed_experts.py`."""


def scale_of(rank: int, alpha: float, kind: str) -> float:
    """The factor of an adapter's output. `kind` is `lora` or `rslora`."""
    return alpha / (math.sqrt(rank) if kind == "rslora" else rank)


def untie(weights: dict[str, Tensor]) -> None:
    """Give the output layer its own weight, if it shares the one of the embedding."""
    if _HEAD_WEIGHT not in weights:
        weights[_HEAD_WEIGHT] = next(weight for name, weight in weights.items() if name.endswith(_TIED_WEIGHT)).clone()


def is_untied(weights: Iterable[str], like: Iterable[str]) -> bool:
    """Whether the output layer has its own weight in a checkpoint, and not in another one."""
    return _HEAD_WEIGHT in weights and _HEAD_WEIGHT not in like


def tensor_names(module: str) -> tuple[str, str]:
    """The names of A and B of a module, such as `model.layers.0.self_attn.q_proj`."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def shared_name(name: str) -> str:
    """What the experts of a layer share with `experts_shared_outer_loras`: `name` without the number of the expert.

    A matrix that each expert has for itself keeps its name.
    """
    return _OUTER.sub(r".experts.all.\1.", name)


def for_peft(
    tensors: Mapping[str, Tensor], config: AdapterConfig, base: Path
) -> tuple[Mapping[str, Tensor], AdapterConfig]:
    """An adapter in the form that PEFT loads on the model in the folder `base`. `tensors` have PEFT's names."""
    if not packs_experts(base):
        return tensors, config
    packed = pack(tensors, config)
    if packed.keys() == tensors.keys():
        return tensors, config
    others = [name.rpartition(".lora_")[0] for name in packed.keys() & tensors.keys()]
    modules = tuple(entry for entry in config.modules if adapted(others, [entry]))
    return packed, replace(config, modules=modules, packs_experts=True)


def peft_config(config: AdapterConfig, base: str | None = None) -> dict[str, Any]:
    """The content of `adapter_config.json`; `base` is the folder or the name of the base model."""
    alpha = config.scale * config.rank
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": list(config.modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **(peft_entries(config.rank, alpha) if config.packs_experts else {}),
    }


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], config: AdapterConfig, *, base: str | None, hash_of_base: str | None
) -> None:
    """Write a folder that `peft` and SGLang load into an existing `folder`. `tensors` have PEFT's names.

    `hash_of_base` is what `base_hash` returns. Like the checksum of the tensors, it becomes metadata of their file.
    Raises OSError if the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": "pt", _CHECKSUM: str(adapter_checksum(tensors.values()))}
    if hash_of_base is not None:
        metadata["base"] = hash_of_base
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS, metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write to {folder} ({error}); check whether the disk is full") from error
    (folder / CONFIG).write_text(json.dumps(peft_config(config, base), indent=2) + "\n")


def adapter_checksum(tensors: Iterable[Tensor]) -> int:
    """A checksum of the rows of an adapter's tensors, which are float32.

    SGLang joins the rows of tensors, with rows of zeros for modules without an adapter. Neither changes the checksum.
    """
    import numpy as np

    total = 0
    for tensor in tensors:
        rows = tensor.detach().cpu().contiguous().numpy()
        # Two numbers at once, which is twice as fast.
        rows = rows.view(np.uint32).astype(np.uint64) if rows.shape[1] % 2 else rows.view(np.uint64)
        # An even factor would lose the highest bits of a column, and a square the highest bit of a sum.
        factors = np.arange(1, 2 * rows.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        # Integers wrap around, so the remainders of sums and products do not depend on the order of the rows.
        hashes = rows @ factors
        hashes ^= hashes >> np.uint64(32)
        total += int((hashes * hashes).sum())
    return total % (1 << 64)


def read_checksum(folder: Path) -> int | None:
    """What `write_adapter` stored in a folder. None if it is no folder of `write_adapter`."""
    path = folder / TENSORS
    checksum = _read_header(path).get("__metadata__", {}).get(_CHECKSUM) if path.is_file() else None
    return None if checksum is None else int(checksum)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by their names in PEFT. Call `check_adapter` before."""
    from safetensors.torch import load_file

    return load_file(folder / TENSORS)


def read_config(folder: Path) -> AdapterConfig:
    """Read `adapter_config.json`. Of layers, only the kinds are known before the names of the tensors are read.

    Raises UserError if it is missing, or asks for what is not supported.
    """
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"lora_load {folder} is not a folder in PEFT's format: {CONFIG} cannot be read ({error}); set another"
        ) from error
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG} does not describe a LoRA adapter: use one whose peft_type is LORA")
    rank, alpha = content.get("r"), content.get("lora_alpha")
    targets, excluded = (
        [one] if isinstance(one, str) else one or []
        for one in (content.get("target_modules"), content.get("exclude_modules"))
    )
    known, is_packed = _IGNORED, False
    if isinstance(rank, int) and isinstance(alpha, int | float):
        of_experts = peft_entries(rank, alpha)
        is_packed = all(content.get(name) == value for name, value in of_experts.items())
        if is_packed:
            targets, known = [*targets, *FEED_FORWARD], _IGNORED | of_experts.keys()
    others = [name for name, value in content.items() if value and name not in known]
    # Other initialisations change the weights of the base too.
    if content.get("init_lora_weights", True) not in (True, False, "gaussian"):
        others.append("init_lora_weights")
    if content.get("bias", "none") != "none":
        others.append("bias")
    if others:
        shown = ", ".join(f"{name} {content[name]!r:.80}" for name in others)
        raise UserError(f"{folder / CONFIG}: {shown} is not supported; use a plain LoRA adapter")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not targets:
        raise UserError(f"{folder / CONFIG} lacks r, lora_alpha or target_modules: use a complete adapter")
    try:
        modules = select_modules(targets, excluded)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    scale = scale_of(rank, alpha, "rslora" if content.get("use_rslora") else "lora")
    return AdapterConfig(rank, scale, modules, content.get("lora_dropout", 0.0), packs_experts=is_packed)


def check_adapter(folder: Path, wanted: AdapterConfig, checkpoint: Path) -> None:
    """Raise UserError if the adapter in a folder has another form than `wanted`, or does not fit the checkpoint."""
    found, matrices = read_config(folder), linear_shapes(checkpoint)
    # PEFT's all-linear would choose these, too.
    without = {*LINEAR_ATTENTION} - {*kinds_of(matrices)}
    for what, setting, theirs, ours in (
        ("rank", "lora_rank", str(found.rank), str(wanted.rank)),
        ("scale (lora_alpha / r)", "lora_alpha", f"{found.scale:g}", f"{wanted.scale:g}"),
        (
            "target modules",
            "lora_target_modules",
            ", ".join(kind for kind in found.modules if kind not in without),
            ", ".join(kinds_of(wanted.modules)),
        ),
    ):
        if theirs != ours:
            raise UserError(
                f"the adapter in lora_load {folder} has the {what} {theirs}, but the settings say {ours}: adjust "
                f"{setting}, or set another lora_load"
            )
    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"lora_load {folder} has no {TENSORS}: use a complete adapter in safetensors format")
    header = _read_header(path)
    base = header.get("__metadata__", {}).get("base")
    if base is not None and base != base_hash(checkpoint):
        raise UserError(
            f"the adapter in lora_load {folder} was trained on another model than {checkpoint}: use its own model"
        )
    shapes: dict[str, list[int]] = {}
    for module in adapted(matrices, wanted.modules):
        (of_a, of_b), shape = tensor_names(module), matrices[module]
        shapes |= {of_a: [wanted.rank, shape[1]], of_b: [shape[0], wanted.rank]}
    missing = packed_shapes(shapes) if packs_experts(checkpoint) else shapes
    if found.packs_experts != (missing.keys() != shapes.keys()):
        raise UserError(
            f"the adapter in lora_load {folder} {'has' if found.packs_experts else 'lacks'} target_parameters, unlike "
            f"adapters of {checkpoint}: use one that save_hf has written for this model"
        )
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if missing.pop(name, None) != entry["shape"]:
            shape = entry["shape"]
            raise UserError(
                f"{path}: {name} of the shape {shape} does not fit {checkpoint}; use the adapter's own model"
            )
    if missing:
        raise UserError(f"{path} has no tensor {min(missing)}: use a complete adapter")


def linear_shapes(checkpoint: Path) -> dict[str, list[int]]:
    """The shapes [outputs, inputs] of the linear layers of a checkpoint by their names, with those of each expert."""
    shapes, found = tensor_shapes(checkpoint), {}
    if (embedding := next((name for name in shapes if name.endswith(_TIED_WEIGHT)), None)) is not None:
        shapes.setdefault(_HEAD_WEIGHT, shapes[embedding])
    config = text_config(json.loads((checkpoint / "config.json").read_text()))
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 2:
            found[name.removesuffix(".weight")] = shape
        elif name.endswith(_PACKED):
            # [experts, outputs, inputs], or in gpt-oss [experts, inputs, outputs].
            hidden = config["hidden_size"]
            width = math.prod(shape) // (shape[0] * hidden * 2)
            block = name.removesuffix(_PACKED)
            for expert in range(shape[0]):
                own = f"{block}.experts.{expert}"
                found |= {
                    f"{own}.gate_proj": [width, hidden],
                    f"{own}.up_proj": [width, hidden],
                    f"{own}.down_proj": [hidden, width],
                }
    return found


def packs_experts(checkpoint: Path) -> bool:
    """Whether PEFT 0.21 loads adapters of experts only in the form of `packed_experts.py`.

    The experts of a layer are parameters of transformers 5. PEFT converts adapters of single experts for some models.
    """
    content = json.loads((checkpoint / "config.json").read_text())
    return text_config(content).get("model_type") in _NOT_CONVERTED_BY_PEFT


def base_hash(checkpoint: Path) -> str:
    """A hash of what a checkpoint computes: configuration, names, shapes, and the beginnings of some tensors.

    It takes milliseconds. A copy in another dtype has another hash.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    content = {name: value for name, value in config.items() if name not in _VOLATILE}
    shapes = tensor_shapes(checkpoint)
    digest = hashlib.sha256(json.dumps([content, sorted(shapes.items())], sort_keys=True).encode())
    chosen = set(sorted(shapes)[:: max(1, len(shapes) // _HASHED_TENSORS)])
    beginnings = {}
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header, start = _header(file)
            for name in chosen & header.keys():
                first, last = header[name]["data_offsets"]
                file.seek(start + first)
                beginnings[name] = file.read(min(_HASHED_BYTES, last - first))
    for name in sorted(beginnings):
        digest.update(beginnings[name])
    return digest.hexdigest()


def expert_layers(checkpoint: Path) -> set[str]:
    """The last part of the names of the experts' layers in a checkpoint, such as `gate_proj`."""
    return {match[1] for name in tensor_shapes(checkpoint) if (match := _EXPERT_LAYER.search(name))}


def tensor_shapes(checkpoint: Path) -> dict[str, list[int]]:
    """The shapes of all tensors of a checkpoint."""
    return dict(_named_shapes(checkpoint))


def _named_shapes(checkpoint: Path) -> Iterator[tuple[str, list[int]]]:
    for path in checkpoint.glob("*.safetensors"):
        for name, entry in _read_header(path).items():
            if name != "__metadata__":
                yield name, entry["shape"]


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return _header(file)[0]


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The JSON at the beginning of a safetensors file, and where the data begins.

    Raises UserError if it is not such a file.
    """
    size, header = int.from_bytes(file.read(8), "little"), None
    with suppress(ValueError):
        header = json.loads(file.read(size) if size < _LARGEST_HEADER else b"")
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise UserError(f"{file.name} is not a safetensors file: copy it again")
    if not all({"shape", "data_offsets"} <= entry.keys() for name, entry in header.items() if name != "__metadata__"):
        raise UserError(f"{file.name} is not a safetensors file: copy it again")
    return header, 8 + size

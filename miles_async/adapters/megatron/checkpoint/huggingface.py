"""Checkpoints in Hugging Face format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from miles_async.adapters.megatron.model.hf_weights import open_tensors
from miles_async.atomic_files import atomic_folder, replace_folder, temporary_path
from miles_async.models.lora import CONFIG, AdapterConfig, base_hash, for_peft, is_untied, write_adapter
from miles_async.models.text_part import is_of_images

_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")


def replace_checkpoint(path: Path, tensors: dict[str, Tensor], *, like: Path) -> None:
    """Like `write_checkpoint`, but replace an earlier checkpoint at `path` after the new one is written completely.

    Raises OSError if `path` is something else than a checkpoint, and not an empty folder.
    """
    _replace(path, "config.json", lambda new: write_checkpoint(new, tensors, like=like, notes={}))


def replace_adapter(path: Path, tensors: Mapping[str, Tensor], config: AdapterConfig, *, base: Path) -> None:
    """Write an adapter in PEFT's format; an earlier one at `path` is replaced after the new one is written completely.

    Raises OSError if `path` is something else than an adapter, and not an empty folder.
    """

    def write(new: Path) -> None:
        with atomic_folder(new) as draft:
            write_adapter(draft, *for_peft(tensors, config, base), base=str(base), hash_of_base=base_hash(base))

    _replace(path, CONFIG, write)


def _replace(path: Path, known_by: str, write: Callable[[Path], None]) -> None:
    """Let `write` create the folder `path`, in place of an earlier one that contains the file `known_by`."""
    if not (path / known_by).is_file():
        write(path)
        return
    for leftover in path.parent.glob(f".*{path.name}.*.tmp"):  # from a run that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    new = temporary_path(path)
    write(new)
    replace_folder(new, path)


def _describe(config: Path, tensor: Tensor, *, untied: bool) -> None:
    """Write into `config.json` the dtype of the trained tensors, and whether the output layer has its own weight.

    The model may have been trained in another precision than its original, and loaders rely on the configuration.
    """
    content = json.loads(config.read_text())
    # A model that also takes images describes its text part separately.
    for part in [content, *([content["text_config"]] if "text_config" in content else [])]:
        part["torch_dtype" if "torch_dtype" in part else "dtype"] = str(tensor.dtype).removeprefix("torch.")
        if untied:
            part["tie_word_embeddings"] = False
    config.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(path: Path, tensors: dict[str, Tensor], *, like: Path, notes: Mapping[str, str]) -> None:
    """Write `tensors` as safetensors, with configuration and tokenizer from the checkpoint `like`.

    Tensors outside the text part of a model are copied from `like` too. The dtype in the configuration is that of
    `tensors`. `notes` are the contents of further files by name. Raises OSError if `path` exists and is not empty, and
    if the disk is full.
    """
    with atomic_folder(path) as draft:
        with open_tensors(like) as files:
            of_images = {name: file.get_tensor(name) for name, file in files.items() if is_of_images(name)}
            untied = is_untied(tensors, files)
        try:
            save_torch_state_dict(tensors | of_images, draft)
        except SafetensorError as error:
            raise OSError(f"cannot write to {path} ({error}); check whether the disk is full") from error
        for pattern in _BESIDE_WEIGHTS:
            for file in like.glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):
                    shutil.copy2(file, draft)
        _describe(draft / "config.json", next(iter(tensors.values())), untied=untied)
        for name, text in notes.items():
            (draft / name).write_text(text)

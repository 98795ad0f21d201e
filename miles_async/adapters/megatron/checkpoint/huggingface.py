"""Checkpoints in Hugging Face format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from miles_async.atomic_files import atomic_folder, replace_folder, temporary_path

_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")


def replace_checkpoint(path: Path, tensors: dict[str, Tensor], *, like: Path) -> None:
    """As `write_checkpoint`, but an earlier checkpoint of that name makes room once the new one is written.

    Raises OSError when something else has the name.
    """
    if not (path / "config.json").is_file():
        write_checkpoint(path, tensors, like=like, notes={})
        return
    for leftover in path.parent.glob(f".*{path.name}.*.tmp"):  # from a run that was killed while it wrote
        shutil.rmtree(leftover, ignore_errors=True)
    new = temporary_path(path)
    write_checkpoint(new, tensors, like=like, notes={})
    replace_folder(new, path)


def _say_dtype(config: Path, tensor: Tensor) -> None:
    """Training may have been in another precision than the model came in; loaders believe the configuration."""
    content = json.loads(config.read_text())
    content["torch_dtype" if "torch_dtype" in content else "dtype"] = str(tensor.dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(path: Path, tensors: dict[str, Tensor], *, like: Path, notes: Mapping[str, str]) -> None:
    """Write `tensors` as safetensors; configuration and tokenizer are copied from the checkpoint `like`.

    The configuration then names the dtype of `tensors`.
    `notes` are further files, their text by their names. Raises OSError when `path` exists already.
    """
    with atomic_folder(path) as draft:
        save_torch_state_dict(tensors, draft)
        for pattern in _BESIDE_WEIGHTS:
            for file in like.glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):
                    shutil.copy2(file, draft)
        _say_dtype(draft / "config.json", next(iter(tensors.values())))
        for name, text in notes.items():
            (draft / name).write_text(text)

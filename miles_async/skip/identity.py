"""The identity of a recording: the model, the tokenizer, the sampling settings and the seed it was made with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from miles_async.adapters.storage.checksum import checksum
from miles_async.config.schema import RunConfig
from miles_async.types import Group

_SAMPLE_BYTES = 1 << 20
"""Bytes read from each end of a weight file: reading all of a large checkpoint would take minutes."""


def identity_of(config: RunConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Return the identity by setting name.

    With `checkpoint`, the folder of the checkpoint, model and tokenizer are identified by their contents; without it,
    by the setting `hf_checkpoint`.
    """
    rollout = config.rollout
    folder = None if checkpoint is None else Path(checkpoint)
    return {
        "model": str(config.model.hf_checkpoint)
        if folder is None
        else _fingerprint(folder, "config.json", "*.safetensors"),
        "tokenizer": None if folder is None else _fingerprint(folder, "tokenizer.json"),
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "rollout_max_prompt_len": rollout.rollout_max_prompt_len,
        "rollout_max_response_len": rollout.rollout_max_response_len,
        "rollout_temperature": rollout.rollout_temperature,
        "rollout_top_p": rollout.rollout_top_p,
        "rollout_top_k": rollout.rollout_top_k,
        "rollout_stop": list(rollout.rollout_stop),
        "rollout_stop_token_ids": list(rollout.rollout_stop_token_ids),
        "rollout_skip_special_tokens": rollout.rollout_skip_special_tokens,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "rollout_seed": config.data.rollout_seed,
    }


def prompt_hash(group: Group) -> str:
    """Return the checksum of the prompt of a group."""
    return checksum([orjson.dumps(group[0].prompt)])


def _fingerprint(folder: Path, *patterns: str) -> str:
    files = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return checksum(chunk for path in files for chunk in _excerpts(path))


def _excerpts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{path.name} {size}".encode()
    with path.open("rb") as file:
        yield file.read(_SAMPLE_BYTES)
        file.seek(max(0, size - _SAMPLE_BYTES))
        yield file.read()

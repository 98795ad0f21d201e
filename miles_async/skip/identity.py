"""What a recording depends on beside its prompt: the model, the tokenizer, how tokens were drawn, the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from miles_async.config.schema import RunConfig
from miles_async.types import Group

_SAMPLE_BYTES = 1 << 20
"""Read from either end of each weight file: all of a large checkpoint would take minutes."""


def identity_of(config: RunConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """By the names a person would change. Without a checkpoint at hand, model and tokenizer are known by name only."""
    rollout = config.rollout
    folder = None if checkpoint is None else Path(checkpoint)
    return {
        "model": str(config.model.hf_checkpoint) if folder is None else _digest(folder, "config.json", "*.safetensors"),
        "tokenizer": None if folder is None else _digest(folder, "tokenizer.json"),
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
    return hashlib.blake2b(orjson.dumps(group[0].prompt), digest_size=16).hexdigest()


def _digest(folder: Path, *patterns: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            for part in _parts(path):
                digest.update(part)
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"{path.name} {size}".encode()
    with path.open("rb") as file:
        yield file.read(_SAMPLE_BYTES)
        file.seek(max(0, size - _SAMPLE_BYTES))
        yield file.read()

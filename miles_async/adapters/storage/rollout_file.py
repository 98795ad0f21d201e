"""A batch of groups as one file: safetensors for what is numbers, JSON inside it for what is text. No pickle.

    tokens, rollout_log_probs, loss_masks   all samples' columns, one behind the other
    lengths                                 (samples, 3): tokens, log-probabilities, mask entries (-1: no mask)
    spans                                   (spans, 4): sample, version, start, end
    groups                                  JSON as bytes: what else a group and its samples hold

The header carries the rollout's number and a checksum over all columns. Written under a temporary name, then renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from miles_async.atomic_files import atomic_file
from miles_async.errors import UserError
from miles_async.types import Group, Sample

FORMAT = "miles_async rollout 1"
_COLUMNS = frozenset({"tokens", "rollout_log_probs", "loss_mask", "spans"})
_NO_MASK = -1


def rollout_path(template: str, rollout_id: int) -> Path:
    """`debug/{rollout_id}.safetensors` for one batch. Raises UserError for any other name in braces."""
    try:
        return Path(template.format(rollout_id=rollout_id)).expanduser()
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{template!r} names something else than {{rollout_id}} in braces: {error}") from error


def save_groups(path: Path, rollout_id: int, groups: Sequence[Group]) -> None:
    """Raises OSError when the file cannot be written; what was there before stays whole."""
    samples = [sample for group in groups for sample in group]
    columns: dict[str, NDArray[Any]] = {
        "tokens": _joined([sample.tokens for sample in samples], np.int64),
        "rollout_log_probs": _joined([sample.rollout_log_probs for sample in samples], np.float64),
        "loss_masks": _joined([sample.loss_mask or [] for sample in samples], np.int8),
        "lengths": np.array([_lengths(sample) for sample in samples], np.int64).reshape(-1, 3),
        "spans": np.array(
            [(i, s.version, s.start, s.end) for i, sample in enumerate(samples) for s in sample.spans], np.int64
        ).reshape(-1, 4),
        "groups": np.frombuffer(orjson.dumps([_words(group) for group in groups], default=str), np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": FORMAT, "rollout_id": str(rollout_id), "checksum": _checksum(columns)}
    with atomic_file(path) as temporary:
        save_file(columns, temporary, metadata=header)


def load_groups(path: Path) -> tuple[int, list[Group]]:
    """The rollout's number and its groups. Raises UserError for a file that is missing, cut off or something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"rollout data {path} cannot be read: {error}") from error
    if header.get("format") != FORMAT:
        raise UserError(f"{path} holds no rollout data: it is not a file that save_debug_rollout_data wrote")
    if header["checksum"] != _checksum(columns):
        raise UserError(f"rollout data {path} is damaged: its checksum does not fit; save it anew")
    return int(header["rollout_id"]), _groups(columns)


def _groups(columns: Mapping[str, NDArray[Any]]) -> list[Group]:
    lengths = columns["lengths"]
    spans: dict[int, list[dict[str, int]]] = {}
    for sample, version, start, end in columns["spans"].tolist():
        spans.setdefault(sample, []).append({"version": version, "start": start, "end": end})
    tokens = _parts(columns["tokens"], lengths[:, 0])
    log_probs = _parts(columns["rollout_log_probs"], lengths[:, 1])
    masks = _parts(columns["loss_masks"], np.maximum(lengths[:, 2], 0))
    groups, place = [], 0
    for words in orjson.loads(columns["groups"].tobytes()):
        samples = []
        for values in words["samples"]:
            mask = None if lengths[place, 2] == _NO_MASK else masks[place]
            samples.append(
                Sample.from_dict(
                    {
                        **values,
                        "tokens": tokens[place],
                        "rollout_log_probs": log_probs[place],
                        "loss_mask": mask,
                        "spans": spans.get(place, []),
                    }
                )
            )
            place += 1
        groups.append(Group(samples, feed_index=words["feed_index"], attempt=words["attempt"]))
    return groups


def _words(group: Group) -> dict[str, Any]:
    samples = [{key: value for key, value in sample.to_dict().items() if key not in _COLUMNS} for sample in group]
    return {"feed_index": group.feed_index, "attempt": group.attempt, "samples": samples}


def _lengths(sample: Sample) -> tuple[int, int, int]:
    masked = _NO_MASK if sample.loss_mask is None else len(sample.loss_mask)
    return len(sample.tokens), len(sample.rollout_log_probs), masked


def _joined(lists: Sequence[Sequence[Any]], kind: Any) -> NDArray[Any]:
    return np.array([value for values in lists for value in values], kind)


def _parts(joined: NDArray[Any], lengths: NDArray[Any]) -> list[list[Any]]:
    ends = list(accumulate(lengths.tolist()))
    values = joined.tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _checksum(columns: Mapping[str, NDArray[Any]]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(columns):
        digest.update(name.encode())
        digest.update(columns[name].tobytes())
    return digest.hexdigest()

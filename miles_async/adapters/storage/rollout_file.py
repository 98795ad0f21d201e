"""The rollout file: one batch of groups as a safetensors file, with JSON inside it. No pickle is involved.

    tokens, rollout_log_probs, loss_masks   one array per field, all samples concatenated
    lengths                                 (samples, 3): tokens, log-probabilities, mask entries (-1: no mask)
    spans                                   (spans, 4): sample number, version, start, end
    kept_counts, kept_ids                   the sampling masks of all samples, concatenated
    mask_lengths                            (samples,): entries of kept_counts (-1: no sampling mask)
    groups                                  all other fields of groups and samples, as the bytes of a JSON text

The metadata of the file holds the rollout number and a checksum over all arrays. The file is written atomically.

Files of other projects, such as slime's, can be read if a guest knows them (`Guest.load_batch`), but not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from miles_async.adapters.storage.checksum import checksum
from miles_async.atomic_files import atomic_file
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Group, Sample

FORMAT = "miles_async rollout 1"
_COLUMNS = "tokens", "rollout_log_probs", "loss_mask", "sampling_mask", "spans"
"""Fields of a sample that are stored as arrays."""
_NO_MASK = -1


def rollout_path(template: str, rollout_id: int) -> Path:
    """Fill in a template such as `debug/{rollout_id}.safetensors`. Raises UserError if it has other placeholders."""
    try:
        return Path(template.format(rollout_id=rollout_id)).expanduser()
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{template!r} has a placeholder other than {{rollout_id}}: {error}; remove it") from error


def save_groups(path: Path, rollout_id: int, groups: Sequence[Group]) -> None:
    """Write a batch to `path`; missing folders are created.

    Raises OSError if the file cannot be written; an existing file is then unchanged.
    """
    samples = [sample for group in groups for sample in group]
    mask = SamplingMask.concatenate(sample.sampling_mask for sample in samples if sample.sampling_mask is not None)
    columns: dict[str, NDArray[Any]] = {
        "tokens": _concatenate([sample.tokens for sample in samples], np.int64),
        "rollout_log_probs": _concatenate([sample.rollout_log_probs for sample in samples], np.float64),
        "loss_masks": _concatenate([sample.loss_mask or [] for sample in samples], np.int8),
        "lengths": np.array([_lengths(sample) for sample in samples], np.int64).reshape(-1, 3),
        "spans": np.array(
            [(i, s.version, s.start, s.end) for i, sample in enumerate(samples) for s in sample.spans], np.int64
        ).reshape(-1, 4),
        "kept_counts": mask.counts,
        "kept_ids": mask.token_ids,
        "mask_lengths": np.array(
            [_NO_MASK if sample.sampling_mask is None else len(sample.sampling_mask) for sample in samples], np.int64
        ),
        "groups": np.frombuffer(orjson.dumps([_json_fields(group) for group in groups]), np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": FORMAT, "rollout_id": str(rollout_id), "checksum": _checksum(columns)}
    with atomic_file(path) as temporary:
        try:
            save_file(columns, temporary, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_groups(path: Path) -> tuple[int, list[Group]]:
    """Return the rollout number and the groups of a file that `save_groups` or a guest's project wrote.

    Raises UserError if the file is missing, damaged or another file.
    """
    for batch in GUESTS.ask("load a saved batch", lambda guest: guest.load_batch(path)).values():
        if batch is not None:
            return batch
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"rollout data {path} cannot be read: {error}") from error
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is not a rollout file: name a file that save_debug_rollout_data wrote")
    if header.get("checksum") != _checksum(columns):
        raise UserError(f"rollout data {path} is damaged: the checksum does not match; save the batch again")
    try:
        return int(header["rollout_id"]), _groups(columns)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"rollout data {path} has another structure: {error!r}; save the batch again") from error


def _groups(columns: Mapping[str, NDArray[Any]]) -> list[Group]:
    lengths = columns["lengths"]
    spans: dict[int, list[dict[str, int]]] = {}
    for sample, version, start, end in columns["spans"].tolist():
        spans.setdefault(sample, []).append({"version": version, "start": start, "end": end})
    tokens = _split(columns["tokens"], lengths[:, 0])
    log_probs = _split(columns["rollout_log_probs"], lengths[:, 1])
    masks = _split(columns["loss_masks"], np.maximum(lengths[:, 2], 0))
    groups = orjson.loads(columns["groups"].tobytes())
    # The fields are put back into the JSON values in the order in which `save_groups` took them out.
    for number, sample in enumerate(sample for group in groups for sample in group["samples"]):
        sample["tokens"] = tokens[number]
        sample["rollout_log_probs"] = log_probs[number]
        sample["loss_mask"] = None if lengths[number, 2] == _NO_MASK else masks[number]
        sample["spans"] = spans.get(number, [])
    loaded = [Group.from_dict(group) for group in groups]
    if "mask_lengths" in columns:  # files of older versions have no sampling masks
        _set_masks([sample for group in loaded for sample in group], columns)
    return loaded


def _set_masks(samples: Sequence[Sample], columns: Mapping[str, NDArray[Any]]) -> None:
    start = first_id = 0
    for sample, length in zip(samples, columns["mask_lengths"].tolist(), strict=True):
        if length != _NO_MASK:
            counts = columns["kept_counts"][start : start + length]
            token_ids = columns["kept_ids"][first_id : first_id + int(counts.sum())]
            sample.sampling_mask = SamplingMask(counts, token_ids)
            start, first_id = start + len(counts), first_id + len(token_ids)


def _json_fields(group: Group) -> dict[str, Any]:
    values = group.to_dict()
    for sample in values["samples"]:
        for name in _COLUMNS:
            del sample[name]
    return values


def _lengths(sample: Sample) -> tuple[int, int, int]:
    masked = _NO_MASK if sample.loss_mask is None else len(sample.loss_mask)
    return len(sample.tokens), len(sample.rollout_log_probs), masked


def _concatenate(lists: Sequence[Sequence[Any]], kind: Any) -> NDArray[Any]:
    return np.array([value for values in lists for value in values], kind)


def _split(joined: NDArray[Any], lengths: NDArray[Any]) -> list[list[Any]]:
    ends = list(accumulate(lengths.tolist()))
    values = joined.tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _checksum(columns: Mapping[str, NDArray[Any]]) -> str:
    return checksum(chunk for name in sorted(columns) for chunk in (name.encode(), columns[name].tobytes()))

"""The rollout file: one batch of groups, with all that is needed to train it, in one file.

The samples are arrays of a safetensors file (`sample_arrays.py`). Another array, `:groups`, holds all other fields of
groups and samples as the bytes of a JSON text. The metadata of the file holds the rollout number and a checksum over
all arrays. The file is written atomically.

Files of other projects, such as slime's, can be read if a guest knows them (`Guest.load_batch`), but not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from miles_async.adapters.storage.checksum import checksum
from miles_async.adapters.storage.sample_arrays import SampleArrays, read_samples
from miles_async.atomic_files import atomic_file
from miles_async.errors import TrajectoryError, UserError
from miles_async.guests import GUESTS
from miles_async.types import Group

FORMAT = "miles_async rollout 3"
_GROUPS = ":groups"


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
    parts = SampleArrays.of([sample for group in groups for sample in group])
    headers = iter(parts.headers)
    described = [group.header() | {"samples": [next(headers) for _ in group]} for group in groups]
    parts.arrays[_GROUPS] = [np.frombuffer(orjson.dumps(described), np.uint8)]
    header = {"format": FORMAT, "rollout_id": str(rollout_id), "checksum": _checksum(parts.arrays)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        parts.write(temporary, header)


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
            if header.get("format") != FORMAT:
                raise UserError(
                    f"{path} is not a rollout file of this version of miles_async: name a file that "
                    "save_debug_rollout_data wrote, or save the batch again"
                )
            if header.get("checksum") != _checksum({name: [file.get_tensor(name)] for name in file.keys()}):  # noqa: SIM118
                raise UserError(f"rollout data {path} is damaged: the checksum does not match; save the batch again")
            return int(header["rollout_id"]), _groups(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"rollout data {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, TrajectoryError) as error:
        raise UserError(f"rollout data {path} has another structure: {error!r}; save the batch again") from error


def _groups(file: Any) -> list[Group]:
    described = orjson.loads(file.get_tensor(_GROUPS).tobytes())
    samples = iter(read_samples(file, [header for group in described for header in group["samples"]]))
    groups = []
    for header in described:
        group = Group.of_header(header)
        group += (next(samples) for _ in header["samples"])
        groups.append(group)
    return groups


def _checksum(arrays: Mapping[str, Sequence[NDArray[Any]]]) -> str:
    return checksum(
        chunk for name in sorted(arrays) for chunk in (name.encode(), *(array.tobytes() for array in arrays[name]))
    )

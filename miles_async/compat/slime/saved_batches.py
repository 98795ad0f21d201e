"""Reads the batches that slime saves (`--save-debug-rollout-data`)."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from miles_async.errors import TrajectoryError, UserError
from miles_async.types import Group, Sample


def load_batch(path: Path) -> tuple[int, list[Group]] | None:
    """Return the rollout number and the groups of a file that `torch.save` wrote; None for any other file.

    slime saves a dictionary with `rollout_id` and `samples`, a flat list of `Sample.to_dict()`.

    Samples belong to one group if they have the same `group_index`; older files have none, and consecutive samples with
    the same prompt form a group. Raises UserError if the file is damaged or has other contents.
    """
    if not is_zipfile(path):
        return None
    import torch  # takes seconds, and only these files need it

    try:
        with ZipFile(path) as archive:
            if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
                raise UserError(
                    f"rollout data {path} is compressed, and could need any amount of memory: name the file that "
                    "torch.save wrote"
                )
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, BadZipFile) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        objects = f"pickled objects ({found[1]})" if found else "contents that torch cannot load"
        raise UserError(
            f"rollout data {path} has {objects}; only numbers, texts, lists, dictionaries and tensors are loaded, "
            "because a pickle can run code: save the samples as such values"
        ) from error
    try:
        rows: list[dict[str, Any]] = content["samples"]
        grouped = [list(members) for _, members in groupby(rows, key=_group_of)]
        return int(content["rollout_id"]), [Group.of(map(Sample.from_dict, members)) for members in grouped]
    except TrajectoryError as error:
        raise UserError(f"rollout data {path} cannot be trained: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not a file that slime's save_debug_rollout_data wrote ({error!r}): name such a file, or a "
            "safetensors file that save_debug_rollout_data wrote"
        ) from error


def _group_of(sample: Mapping[str, Any]) -> Any:
    index = sample.get("group_index")
    return sample["prompt"] if index is None else index

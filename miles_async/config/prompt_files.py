"""Files of prompts: the part of a path that names rows, the number of rows, and the settings of each data set."""

from __future__ import annotations

import re
from pathlib import Path

from miles_async.config.fields import SETTINGS, with_settings
from miles_async.config.schema import Dataset, RunConfig
from miles_async.errors import UserError

_SPLIT = "environment:"
_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_LIMITS = {"max_prompt_len": "rollout_max_prompt_len", "max_response_len": "rollout_max_response_len"}
"""Fields of data sets that have another name in the settings of a run."""
_BLOCK_BYTES = 1 << 24


def split_slice(prompt_data: str) -> tuple[str, slice | None]:
    """Split `data.jsonl@[10:20]` into path and slice. Open ends and negative numbers work as in Python."""
    match = _SLICED.fullmatch(prompt_data)
    if match is None:
        return prompt_data, None
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def slice_text(prompt_data: str) -> str:
    """`[10:20]` of `data.jsonl@[10:20]`; empty without a slice."""
    match = _SLICED.fullmatch(prompt_data)
    return "" if match is None else f"[{match['start']}:{match['stop']}]"


def environment_split(prompt_data: str) -> str | None:
    """NAME of `environment:NAME`, also with a slice: the tasks of the run's environment by this name. Else None."""
    path, _ = split_slice(prompt_data)
    return path.removeprefix(_SPLIT) if path.startswith(_SPLIT) else None


def with_dataset(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the configuration of a run that has only this one of its data sets."""
    set_here = {_LIMITS.get(name, name): value for name, value in dataset if value is not None}
    values = {name: value for name, value in set_here.items() if name in SETTINGS}
    if dataset.rm_type is not None or dataset.custom_rm_path is not None:
        values |= {"rm_type": dataset.rm_type, "custom_rm_path": dataset.custom_rm_path}
    template = {**config.data.apply_chat_template_kwargs, **(dataset.apply_chat_template_kwargs or {})}
    return with_settings(config, **values | {"datasets": {}, "apply_chat_template_kwargs": template})


def count_rows(prompt_data: str) -> int:
    """The number of rows of a JSONL or Parquet file, or of a slice of it. A blank line counts as a row.

    Raises UserError if the file cannot be read.
    """
    name, part = split_slice(prompt_data)
    path = Path(name).expanduser()
    try:
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _lines(path)
    except OSError as error:
        raise UserError(f"prompt_data {prompt_data} cannot be read: {error.strerror or error}") from error
    return rows if part is None else len(range(*part.indices(rows)))


def _lines(path: Path) -> int:
    """The number of lines; the last one may lack a line end."""
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def _parquet_rows(path: Path) -> int:
    from pyarrow.lib import ArrowInvalid
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(path).num_rows)
    except ArrowInvalid as error:
        raise UserError(f"prompt_data {path} is not a Parquet file ({error}): copy it again") from error

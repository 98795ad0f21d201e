"""Random access to the rows of a data file: JSONL by byte offset, Parquet by memory map.

Opening a JSONL file parses nothing: it is scanned once for line ends (about 1 GB/s), and memory holds 8 bytes per row,
regardless of the size of a row.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miles_async.adapters.datasets.parquet import ParquetRows
from miles_async.config.prompt_files import split_slice
from miles_async.errors import DataRowError, UserError
from miles_async.parsing import decode_json

_BLOCK_BYTES = 1 << 24
_SHORTEST_ROW = len(b"{}")


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises DataRowError if the row is not valid JSON; the message names file and line."""
        ...

    def where(self, row: int) -> str:
        """Return the position of the row for messages, such as `data.jsonl, line 17`."""
        ...


def open_rows(prompt_data: str, *, cache_dir: str, first: int | None = None) -> Rows:
    """Open a .jsonl or .parquet file.

    `prompt_data` is a path, or `path@[a:b]` for the rows from a up to but excluding b. `cache_dir` stores converted
    Parquet files. `first` opens only so many rows: the rest of the file is not read, and nothing is converted. Raises
    UserError if the file cannot be read or has no rows.
    """
    path, part = split_slice(prompt_data)
    part = part or slice(None)
    end = None if first is None else _end(part, first)
    try:
        rows: Rows = (
            ParquetRows(Path(path).expanduser(), Path(cache_dir).expanduser(), end)
            if path.endswith(".parquet")
            else JsonlRows(Path(path).expanduser(), end)
        )
    except OSError as error:
        raise UserError(f"prompt_data {path} cannot be read: {error.strerror or error}") from error
    chosen = range(*part.indices(len(rows)))[:first]
    if len(chosen) < len(rows):
        rows = _Slice(rows, chosen)
    if not len(rows):
        raise UserError(f"prompt_data {prompt_data} has no rows: name a file with data, or widen the slice")
    return rows


def _end(part: slice, first: int) -> int | None:
    """How many rows at the beginning of a file include the first rows of `part`; None if it counts from the end."""
    start, stop = part.start or 0, part.stop or 0
    return None if min(start, stop) < 0 else start + first


class JsonlRows:
    """Rows of a file with one JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path, end: int | None = None) -> None:
        """`end` ends the index after so many rows, or soon after them."""
        self._path = path
        self._offsets = self._index(end)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> dict[str, Any]:
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[row]))
            line = file.readline()
        try:
            values = decode_json(line, Any)
        except ValueError as error:
            raise DataRowError(f"{self.where(row)}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataRowError(f"{self.where(row)}: a {type(values).__name__} instead of a JSON object")
        return values

    def where(self, row: int) -> str:
        """Return file and line. Counting the lines before the row takes time, so this is for messages only."""
        lines, left = 1, int(self._offsets[row])
        with self._path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
        return f"{self._path}, line {lines}"

    def _index(self, end: int | None) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the byte offset of each line that is not blank."""
        with self._path.open("rb") as file:
            # Files that were written on Windows may start with a byte-order mark, which is not part of the first row.
            first = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
            starts_by_block, offset = [np.array([first], np.uint64)], 0
            file.seek(0)
            while (end is None or sum(map(len, starts_by_block)) <= end) and (block := file.read(_BLOCK_BYTES)):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                starts_by_block.append((ends + (offset + 1)).astype(np.uint64))
                offset += len(block)
            starts = np.concatenate(starts_by_block)
            lengths = np.diff(starts, append=np.uint64(offset))
            # Checking every line would require a second pass over the file. Only short lines are checked: a longer line
            # that is blank is reported as an invalid row.
            for line in np.flatnonzero(lengths <= 2 * _SHORTEST_ROW):
                file.seek(int(starts[line]))
                if not file.read(int(lengths[line])).strip():
                    lengths[line] = 0
        return starts[lengths > 0]


class _Slice:
    """A contiguous part of other rows."""

    def __init__(self, rows: Rows, chosen: range) -> None:
        self._rows = rows
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[self._chosen[row]]

    def where(self, row: int) -> str:
        return self._rows.where(self._chosen[row])

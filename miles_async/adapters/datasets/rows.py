"""The rows of a data file, read one at a time: JSONL by byte offset, Parquet by memory map; `path@[a:b]` is a part.

Nothing is parsed at the start. A JSONL file is searched once for its line ends (about 1 GB/s); memory holds 8 bytes per
row, whatever the rows hold.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from miles_async.adapters.datasets.parquet import ParquetRows
from miles_async.errors import DataRowError, UserError

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_BLOCK_BYTES = 1 << 24
_SHORTEST_ROW = len(b"{}")


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises DataRowError, which names file and line."""
        ...

    def where(self, row: int) -> str:
        """`data.jsonl, line 17`."""
        ...


def open_rows(prompt_data: str, *, cache_dir: str) -> Rows:
    """`prompt_data` is a .jsonl or .parquet file, with `@[a:b]` behind it for rows a up to, not including, b.

    Raises UserError when it cannot be read or holds no rows.
    """
    path, part = split_slice(prompt_data)
    try:
        rows: Rows = (
            ParquetRows(Path(path).expanduser(), Path(cache_dir).expanduser())
            if path.endswith(".parquet")
            else JsonlRows(Path(path).expanduser())
        )
    except OSError as error:
        raise UserError(f"prompt_data {path} cannot be read: {error.strerror or error}") from error
    if part is not None:
        rows = _Part(rows, range(*part.indices(len(rows))))
    if not len(rows):
        raise UserError(f"prompt_data {prompt_data} holds no rows")
    return rows


def split_slice(prompt_data: str) -> tuple[str, slice | None]:
    """`data.jsonl@[10:20]` as path and slice; open ends and negative numbers mean what they mean in Python."""
    match = _SLICED.fullmatch(prompt_data)
    if match is None:
        return prompt_data, None
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


class JsonlRows:
    """One JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = self._index()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> dict[str, Any]:
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[row]))
            line = file.readline()
        try:
            values = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataRowError(f"{self.where(row)}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise DataRowError(f"{self.where(row)}: a {type(values).__name__} where a JSON object is expected")
        return values

    def where(self, row: int) -> str:
        """Counts the lines before the row, so it costs time; only messages need it."""
        lines, left = 1, int(self._offsets[row])
        with self._path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
        return f"{self._path}, line {lines}"

    def _index(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The offset at which each line that is not blank begins."""
        with self._path.open("rb") as file:
            mark = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
            begins, offset = [np.array([mark], np.uint64)], 0
            file.seek(0)
            while block := file.read(_BLOCK_BYTES):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                begins.append((ends + (offset + 1)).astype(np.uint64))
                offset += len(block)
            begun = np.concatenate(begins)
            lengths = np.diff(begun, append=np.uint64(offset))
            # Only lines about as short as the shortest object can be blank: those are looked at.
            for line in np.flatnonzero(lengths <= 2 * _SHORTEST_ROW):
                file.seek(int(begun[line]))
                if not file.read(int(lengths[line])).strip():
                    lengths[line] = 0
        return begun[lengths > 0]


class _Part:
    """Some of the rows."""

    def __init__(self, rows: Rows, chosen: range) -> None:
        self._rows = rows
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[self._chosen[row]]

    def where(self, row: int) -> str:
        return self._rows.where(self._chosen[row])

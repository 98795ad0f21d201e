"""Random access to the rows of a Parquet file in bounded memory.

A Parquet file can only be read in row groups, of a million rows each by default. The file is therefore converted once,
batch by batch, to an Arrow file, which is memory-mapped. The Arrow file is stored in the cache folder; its name is
derived from the path, the size and the modification time of the Parquet file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_async.adapters.storage.checksum import checksum
from miles_async.atomic_files import atomic_file
from miles_async.errors import DataRowError, UserError

MAX_SHARE_OF_FREE_DISK = 0.5
"""Largest size of the Arrow file, as a share of the free space of its disk."""


class ParquetRows:
    """Rows of a Parquet file. Raises UserError if it is not a Parquet file, and OSError if it cannot be opened."""

    def __init__(self, path: Path, cache: Path, end: int | None = None) -> None:
        """`end` reads only so many rows, into memory. Otherwise the file is converted in the folder `cache`."""
        # Importing pyarrow is slow, so only runs that read Parquet files import it.
        import pyarrow as pa

        self._path = path
        if end is not None:
            self._table = _first_rows(path, end)
            return
        stat = path.stat()
        name = checksum([f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()])
        copy = cache / "data" / f"{name}.arrow"
        if not copy.exists():
            _convert_to_arrow(path, copy)
        try:
            self._table = _table(copy)
        except (pa.ArrowException, OSError):
            # A full disk or a lost machine may have damaged the copy.
            _convert_to_arrow(path, copy)
            self._table = _table(copy)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            [values] = self._table.slice(row, 1).to_pylist()
        except (ValueError, OverflowError) as error:  # such as text that is not UTF-8, or a date after the year 9999
            raise DataRowError(f"{self.where(row)}: {error}") from error
        return values  # type: ignore[no-any-return]

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}"


def _table(copy: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(copy))).read_all()


def _first_rows(path: Path, count: int) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    with _valid(path), parquet.ParquetFile(path, memory_map=True) as source:
        batches: list[Any] = []
        for batch in source.iter_batches(batch_size=count):
            batches.append(batch)
            if sum(map(len, batches)) >= count:
                break
        return pa.Table.from_batches(batches, source.schema_arrow)


@contextmanager
def _valid(path: Path) -> Iterator[None]:
    """Raises UserError if the block finds that a file is not a valid Parquet file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # Arrow reports damaged pages as errors of the system, without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"prompt_data {path} is not a valid Parquet file ({error}): copy it again") from error


def _convert_to_arrow(path: Path, copy: Path) -> None:
    """Write the copy, for this user alone. A small Parquet file can have a large copy, which may fill the disk."""
    import pyarrow as pa
    from pyarrow import parquet

    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    most = shutil.disk_usage(copy.parent).free * MAX_SHARE_OF_FREE_DISK
    with _valid(path):
        source = parquet.ParquetFile(path)
        with atomic_file(copy) as temporary:
            temporary.touch(mode=0o600)
            with pa.ipc.new_file(str(temporary), source.schema_arrow) as file:
                for batch in source.iter_batches(batch_size=4096):
                    file.write_batch(batch)
                    if temporary.stat().st_size > most:
                        raise UserError(
                            f"prompt_data {path} has more than {most / 1e9:.3g} GB without its compression, half of "
                            f"the free space at {copy.parent}: set cache_dir to a larger disk, or train on fewer rows"
                        )

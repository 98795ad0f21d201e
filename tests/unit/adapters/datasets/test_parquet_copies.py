"""The copy of a Parquet file in the cache: private, bounded, and made again if it is damaged."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from miles_async.adapters.datasets.parquet import ParquetRows
from miles_async.errors import UserError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["x" * 1000] * 5000}), path, compression="zstd")
    return path


def copy_in(cache: Path) -> Path:
    [copy] = (cache / "data").iterdir()
    return copy


def test_the_copy_is_for_its_user_alone(file: Path, tmp_path: Path) -> None:
    ParquetRows(file, tmp_path / "cache")
    copy = copy_in(tmp_path / "cache")
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("left", [0, 1000, 100_000])
def test_a_damaged_copy_is_made_again(file: Path, tmp_path: Path, left: int) -> None:
    ParquetRows(file, tmp_path / "cache")
    copy = copy_in(tmp_path / "cache")
    copy.write_bytes(copy.read_bytes()[:left])
    rows = ParquetRows(file, tmp_path / "cache")
    assert (len(rows), rows[4999]) == (5000, {"prompt": "x" * 1000})


def test_a_copy_that_would_fill_the_disk_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.adapters.datasets.parquet.MAX_SHARE_OF_FREE_DISK", 1e-9)
    with pytest.raises(UserError, match="without its compression"):
        ParquetRows(file, tmp_path / "cache")
    assert list((tmp_path / "cache" / "data").iterdir()) == []

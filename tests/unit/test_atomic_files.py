"""Files and folders appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_async.atomic_files import atomic_file, atomic_folder, replace_folder, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_no_temporary_file_remains(tmp_path: Path) -> None:
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_old_file_and_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_file_and_folder_are_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        flushed.append((name.partition(".tmp")[1] or name, (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "file", b"data")
    assert flushed == [(".tmp", False), (tmp_path.name, True)]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write_half(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("only half is written")

    with pytest.raises(ValueError, match="half"), atomic_file(tmp_path / "file") as temporary:
        write_half(temporary)
    with pytest.raises(ValueError, match="half"), atomic_folder(tmp_path / "folder") as temporary:
        write_half(temporary / "file")
    assert names(tmp_path) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_folder_appears_with_all_its_files_and_never_replaces_another(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "parent" / "folder"
    with atomic_folder(target, durable=durable) as temporary:
        (temporary / "file").write_bytes(b"first")
        assert not target.exists()
    with pytest.raises(OSError, match="not empty"), atomic_folder(target, durable=durable) as temporary:
        (temporary / "file").write_bytes(b"second")
    assert (target / "file").read_bytes() == b"first"
    assert names(target.parent) == ["folder"]


def test_a_folder_replaces_another_one_and_the_old_one_is_deleted(tmp_path: Path) -> None:
    for content in ("old", "new"):
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / content).touch()
        replace_folder(tmp_path / "draft", tmp_path / "folder")
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["new"]

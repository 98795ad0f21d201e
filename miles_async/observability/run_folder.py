"""The folder of a run, and the link `latest` to the newest one."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from miles_async.config.load import write_config
from miles_async.config.schema import RunConfig
from miles_async.config.schema.observability import LATEST_LINK
from miles_async.errors import UserError
from miles_async.scheduling.adapters import version_of

DRIVER_LOG = "driver.jsonl"
"""Name of the driver's log file in the folder of the logs."""
MAX_DATA_CHARACTERS = 40
"""Length of the name of a data file in the name of a run. File systems limit names to 255 bytes."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run's files."""

    path: Path
    """Absolute."""

    @classmethod
    def create(cls, config: RunConfig) -> Self:
        """Create `<run_dir>/<run_name>/` with the resolved `config.yaml`, and make `latest` point to it.

        Without `run_name`, the name is `<time>-<data>`. Two runs with the same name get different folders. Raises
        UserError if the folder cannot be written.
        """
        root = Path(config.observability.run_dir).expanduser().absolute()
        file = Path(config.data.prompt_data or "run").stem
        data = config.data.reasoning_gym_task or ("several" if config.data.datasets else file[:MAX_DATA_CHARACTERS])
        name = config.observability.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{data}"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = cls(_create_unused(root, name))
            folder.logs.mkdir(mode=0o700)
            write_config(config, folder.path / "config.yaml")
            _point_latest(root, folder.path)
        except OSError as error:
            raise UserError(
                f"run_dir {root} cannot be used ({error.strerror}: {error.filename or root}): "
                "set --run-dir to a folder that can be written"
            ) from error
        return folder

    def reopen(self, config: RunConfig) -> None:
        """Prepare the folder of a run that did not end for a driver that continues it, with the settings `config`.

        Versions of adapters that are left in it are removed, because new engines would load them. Raises UserError if
        the folder cannot be written.
        """
        shutil.rmtree(self.adapters, ignore_errors=True)
        try:
            _set_aside(self.logs / "ray")
            write_config(config, self.path / "config.yaml")
            _point_latest(self.path.parent, self.path)
        except OSError as error:
            raise UserError(
                f"the folder {self.path} of the run cannot be used ({error.strerror}): make it writable"
            ) from error

    def remove_weights(self) -> None:
        """Remove the weights that were written for the engines of a run that has ended.

        The newest version of each adapter stays: the exported adapters of some models are not what engines load.
        """
        shutil.rmtree(self.weights, ignore_errors=True)
        for folder in (self.adapters, *self.adapters.glob("*/")):
            versions = {path: version for path in folder.glob("*/") if (version := version_of(path.name)) is not None}
            for path in sorted(versions, key=versions.__getitem__)[:-1]:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def weights(self) -> Path:
        """Weights for engines that load them from files, see `adapters/weights/transports/disk.py`."""
        return self.path / "weights"

    @property
    def adapters(self) -> Path:
        """Versions of adapters, see `adapters/weights/adapters.py`."""
        return self.path / "adapters"

    @property
    def events(self) -> Path:
        """The newest events; `trace/event_log.py` also reads the earlier parts of the log."""
        return self.path / "events.jsonl"

    @property
    def snapshot(self) -> Path:
        """What was derived from the earlier parts of the event log, see `observability/snapshot.py`."""
        return self.path / "snapshot.bin"

    @property
    def trace(self) -> Path:
        """The trace for ui.perfetto.dev, see `trace/perfetto.py`."""
        return self.path / "trace.json"

    @property
    def dead_letters(self) -> Path:
        """The groups that failed in every attempt, see `adapters/storage/dead_letters.py`."""
        return self.path / "dead_letters.jsonl"

    @property
    def store(self) -> Path:
        """The state of the run that survives the rollout worker, see `adapters/storage/run_store.py`."""
        return self.path / "store"

    @property
    def began_with(self) -> Path:
        """The checkpoint of another run that this run began with; exists only if there is one."""
        return self.path / "began_with.json"

    @property
    def faults(self) -> Path:
        """The faults that were injected, one per line, see `adapters/system/faults.py`."""
        return self.path / "faults.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def agent_key(self) -> Path:
        """The API key of the endpoint for agents; exists only if the run has an external generator."""
        return self.path / "agent_key"

    @property
    def logs(self) -> Path:
        """The folder with one log file per process."""
        return self.path / "logs"

    @property
    def driver_log(self) -> Path:
        """The log of the driver, with every metric of every step."""
        return self.logs / DRIVER_LOG


def _create_unused(root: Path, stem: str) -> Path:
    folder, attempt = root / stem, 1
    while True:
        try:
            folder.mkdir(mode=0o700)  # samples and prompts are for the user alone
        except FileExistsError:
            attempt += 1
            folder = root / f"{stem}-{attempt}"
        else:
            return folder


def _set_aside(logs: Path) -> None:
    """Rename the logs of an earlier Ray of the run. A driver that was killed left a link instead, which is removed."""
    if logs.is_symlink():
        logs.unlink()
    elif logs.is_dir():
        number = next(number for number in count(1) if not logs.with_name(f"{logs.name}-{number}").exists())
        logs.rename(logs.with_name(f"{logs.name}-{number}"))


def _point_latest(root: Path, folder: Path) -> None:
    # A symbolic link cannot be changed in place. Renaming a new link over the old one is atomic, so that a reader
    # always finds one of the two runs.
    link, latest = root / f".{LATEST_LINK}-{os.getpid()}", root / LATEST_LINK
    if latest.is_dir() and not latest.is_symlink():
        raise UserError(f"{latest} is a folder, but must be the link to the newest run: give the folder another name")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(latest)

"""slime's names for the `data_source` of rollout functions, for annotations, `isinstance` and sources of one's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from miles_async.adapters.datasets.factory import open_data
from miles_async.atomic_files import write_atomically
from miles_async.config.fields import SETTINGS, with_settings
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.pipeline.rollout_source import PositionInData, RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Group


class DataSource(ABC):
    """The base class of data sources of users. The `data_source` of the run counts as an instance, too."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return groups."""

    @abstractmethod
    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups, which `get_samples` returns again."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the position in the data."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue from a position that `save` wrote."""


class RolloutDataSource(PositionInData, DataSource):
    """A source of the run's data that belongs to a function of the user.

    It reads the data from the beginning. The run does not know its position and its `metadata`; `save` writes both. The
    `data_source` that a rollout function receives counts as an instance, too (`pipeline/rollout_source.py`).

    Example::

        source = RolloutDataSource(args)
        groups = source.get_samples(8)
    """

    def __init__(self, args: Arguments) -> None:
        """Raises UserError if the data cannot be read."""
        # Settings of the tiny model are in a section of their own, and no data depends on them.
        names = [name for name, setting in SETTINGS.items() if len(setting.path) == 2]
        config = with_settings(RunConfig(), **{name: getattr(args, name) for name in names})
        self.args = args
        self._data = open_data(config, tokenizer=args.tokenizer, args=args)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return groups: those of `add_samples` first, then new ones, epoch after epoch."""
        groups = self._data.get_samples(num_samples)
        for group in groups:
            # The run feeds groups with the same index, and knows them by it.
            group.feed_index = f"own_{group.feed_index.removeprefix('own_')}"
            for sample in group:
                sample.metadata["feed_index"] = group.feed_index
        return groups

    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups. Raises UserError if one is incomplete."""
        self._data.add_samples(samples)

    def save(self, rollout_id: int) -> None:
        """Write the position below the folder `save`, if it is set."""
        if self.args.save is not None:
            path = _file(self.args.save, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting = [group.tracked or group.prompt_dict() for group in self._data.returned()]
            write_atomically(path, json.dumps({**self._data.position(), "buffer": waiting}).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the position below the folder `load`, if there is one. Raises UserError for other data."""
        if self.args.load is not None and (path := _file(self.args.load, rollout_id)).exists():
            state = json.loads(path.read_text())
            try:
                self._data.seek(state)
                self._data.add_samples(list(map(Group.from_prompt_dict, state["buffer"])))
            except KeyError as error:
                raise UserError(f"{path} has no {error}: name in load the folder of a run of this version") from error


def _file(folder: str, rollout_id: int | None) -> Path:
    return Path(folder).expanduser() / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


RolloutDataSource.register(RolloutSource)
RolloutDataSourceWithBuffer = RolloutDataSource

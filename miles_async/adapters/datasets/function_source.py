"""Prompts of a user's data source (`--data-source-path`), which has the methods of slime's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer
from miles_async.adapters.datasets.feed import Feed
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.errors import TrajectoryError, UserError
from miles_async.json_values import shown
from miles_async.sample_schema import accept_group
from miles_async.types import Group, Sample
from miles_async.user_code import USER_CODE_ERRORS

SETTING = "data_source_path"


class FunctionSource(BufferedSource):
    """Feeds groups of an object with `get_samples(num_samples)`; groups that were returned come first.

    The position is the number of groups that were drawn. A restored source draws as many from a new object and discards
    them, so the object must return the same groups in each run.
    """

    def __init__(
        self, create: Callable[[], Any], feeds: Sequence[Feed], *, n_samples_per_prompt: int, buffer: Buffer
    ) -> None:
        """`create` returns the object. `feeds` have the problems for evaluations and for the warm start.

        Raises UserError if `create` raises anything.
        """
        super().__init__(feeds, n_samples_per_prompt=n_samples_per_prompt, buffer=buffer)
        self._create = create
        self._source = _calling(create)
        self._drawn = 0

    def get_samples(self, num_samples: int, adapter: str = "") -> list[Group]:
        """Return up to `num_samples` groups; fewer if the object has no more.

        Raises UserError if the object raises anything, or returns something else than groups.
        """
        with self._lock:
            groups = self._buffer.take(num_samples)
            while len(groups) < num_samples and (samples := self._draw()):
                groups.append(self._group(samples))
            return groups

    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore the result of `position`. Raises UserError if the object returns fewer groups than before."""
        super().seek(position)
        with self._lock:
            if position["drawn"] < self._drawn:
                self._source, self._drawn = _calling(self._create), 0
            while self._drawn < position["drawn"]:
                if not self._draw():
                    raise UserError(
                        f"{SETTING} returned {self._drawn} groups, and {position['drawn']} before the run was stopped: "
                        "return the same groups in each run"
                    )

    def _position(self) -> dict[str, Any]:
        return {**super()._position(), "drawn": self._drawn}

    def _draw(self) -> list[Sample]:
        """The samples of the next group; empty if there is none."""
        drawn = _calling(lambda: [list(group) for group in self._source.get_samples(1)])
        if not drawn:
            return []
        size = self._n_samples_per_prompt
        if [len(group) for group in drawn] != [size] or not all(isinstance(one, Sample) for one in drawn[0]):
            raise UserError(
                f"{SETTING} returned {shown(drawn)} from get_samples(1): return a list with one group of "
                f"n_samples_per_prompt={size} samples"
            )
        self._drawn += 1
        return list(drawn[0])

    def _group(self, samples: list[Sample]) -> Group:
        group = Group(samples, feed_index=f"sample_0_{self._drawn - 1}")
        for sample in group:
            sample.index, self.sample_index = self.sample_index, self.sample_index + 1
            sample.metadata["feed_index"] = group.feed_index
        try:
            accept_group(group)
        except TrajectoryError as error:
            raise UserError(f"{SETTING} returned an invalid value: {error}") from error
        return group


def _calling(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except USER_CODE_ERRORS as error:
        raise UserError(f"{SETTING} raised {shown(error)}: correct the class") from error

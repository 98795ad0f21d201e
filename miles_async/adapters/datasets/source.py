"""The data source of the pipeline: returned groups are fed first, then the data, epoch after epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer
from miles_async.adapters.datasets.feed import Feed, sample_of
from miles_async.adapters.datasets.problems import Problem
from miles_async.errors import UserError
from miles_async.json_values import readable_entries, shown
from miles_async.types import Group, Prompt, Sample
from miles_async.user_code import USER_CODE_ERRORS

Choose = Callable[[Any, Mapping[str, Mapping[str, Any]]], str]
"""`fn(args, datasets)` returns the name of the data set of the next prompt (`Feed.state` by name)."""


class BufferedSource:
    """Implements the `DataSource` port on top of one or more `Feed`s.

    The n-th prompt has the feed index `sample_{epoch}_{n}`, where n continues across epochs and data sets. Each sample
    also carries it in `metadata["feed_index"]`, because rollout functions written for slime return plain lists of
    samples. A problem whose question is held out in one data set is fed from none. The methods are thread-safe, because
    batch rollout functions call them from their own thread.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        *,
        n_samples_per_prompt: int,
        buffer: Buffer,
        choose: Choose | None = None,
        args: Any = None,
    ) -> None:
        """`choose` is the user's function that chooses a data set, and `args` its first argument. Without one, data
        sets take turns in proportion to their weights."""
        self.feeds = {feed.name: feed for feed in feeds}
        excluded = frozenset(chain.from_iterable(feed.excluded for feed in feeds))
        for feed in feeds:
            feed.excluded = excluded
        self._credits = dict.fromkeys(self.feeds, 0.0)
        """By how many prompts each data set is behind its share."""
        self._choose = choose
        self._args = args
        self._n_samples_per_prompt = n_samples_per_prompt
        self._buffer = buffer
        self._lock = threading.Lock()
        self.sample_index = 0
        """Index of the next sample; the numbering continues across epochs."""
        self._metadata: dict[str, Any] = {}
        self._stored_metadata: dict[str, Any] = {}
        """`metadata` as JSON, as it was converted last."""
        self._metadata_is_stored = True
        """Whether `metadata` cannot have changed since its conversion began."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Values that a rollout function keeps with the position. A caller may change the dictionary."""
        self.metadata_changed()
        return self._metadata

    def metadata_changed(self) -> None:
        """See `ports.DataSource.metadata_changed`."""
        self._metadata_is_stored = False

    def get_samples(self, num_samples: int, adapter: str = "") -> list[Group]:
        """Return `num_samples` groups: groups from the buffer first, then new ones.

        If the run trains several adapters, the groups are for `adapter`.

        Raises UserError if every row of a data set is invalid or held out, or the user's function fails.
        """
        with self._lock:
            returned = self._buffer.take_of(adapter, num_samples) if adapter else self._buffer.take(num_samples)
            return returned + [self._next_group(adapter) for _ in range(num_samples - len(returned))]

    def add_samples(self, samples: Sequence[Group]) -> None:
        """Return groups to the buffer, with the samples that they left out.

        Raises UserError if a group is incomplete all the same.
        """
        groups = [Group.of(group) for group in samples]
        for group in groups:
            group.put_back()
            if (count := len(group.trajectories)) != self._n_samples_per_prompt:
                raise UserError(
                    f"group {group.feed_index} was returned with {count} samples: return complete groups of "
                    f"n_samples_per_prompt={self._n_samples_per_prompt} samples"
                )
        with self._lock:
            self._buffer.add(groups)

    def observe(self, group: Group) -> None:
        """Take note of the rewards of a group. Raises TrajectoryError if one has no numeric reward."""
        if (feed := self.feeds.get(group.dataset)) is not None:
            with self._lock:
                feed.observe(group)

    def eval_problems(self) -> list[Group]:
        """Return new groups of one sample each, one for every held-out problem that can be rendered."""
        return list(chain.from_iterable(feed.eval_problems() for feed in self.feeds.values()))

    def warm_start_problems(self) -> Iterator[Sample]:
        """Yield labelled samples of all data sets in turn, without end. The order does not depend on any setting.

        Raises UserError if a problem has no answer.
        """
        return chain.from_iterable(zip(*(feed.warm_start_problems() for feed in self.feeds.values()), strict=False))

    def position(self) -> dict[str, Any]:
        """Return the position in the data, without the groups in the buffer.

        `metadata` is the same object until it is read or a function may have changed it.
        """
        with self._lock:
            return self._position()

    def returned(self) -> list[Group]:
        """Return the groups in the buffer, which stay there."""
        with self._lock:
            return self._buffer.groups()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore the result of `position`, with an empty buffer.

        Raises UserError if the data or its order differ: the saved position would then refer to other rows.
        """
        size = self._n_samples_per_prompt
        saved = position["order"]["n_samples_per_prompt"]
        if saved != size:
            changed = f"n_samples_per_prompt was {saved} and is {size}"
            raise UserError(f"the saved data position is of other data ({changed}): set it to {saved}")
        positions = position.get("datasets", {"": position})
        if positions.keys() != self.feeds.keys():
            raise UserError(
                f"the saved data position is of {_listed(positions)}, and the run has {_listed(self.feeds)}: use the "
                "data sets of the saved run"
            )
        with self._lock:
            for name, feed in self.feeds.items():
                feed.seek(positions[name])
            self._credits.update(position.get("shares", {}))
            self.sample_index = position["sample_index"]
            self._metadata, self._metadata_is_stored = dict(position["metadata"]), False
            self._buffer.clear()

    def _position(self) -> dict[str, Any]:
        positions = {name: feed.position() for name, feed in self.feeds.items()}
        own = {"sample_index": self.sample_index, "metadata": self._json_metadata()}
        size = {"n_samples_per_prompt": self._n_samples_per_prompt}
        if positions.keys() == {""}:
            return {**positions[""], **own, "order": {**positions[""]["order"], **size}}
        # slime's functions read how far the data is: the epochs that all data sets have been through, and the rest.
        of_all = {
            "epoch_id": min(feed.epoch_id for feed in self.feeds.values()),
            "sample_offset": sum(feed.sample_offset for feed in self.feeds.values()),
        }
        return {**of_all, **own, "order": size, "datasets": positions, "shares": dict(self._credits)}

    def _json_metadata(self) -> dict[str, Any]:
        """Convert `metadata` if that is due. Positions are stored several times a second, and it may be large."""
        if not self._metadata_is_stored:
            # Before the conversion, because another thread may change the metadata during it.
            self._metadata_is_stored = True
            self._stored_metadata = readable_entries(self._metadata)
        return self._stored_metadata

    def _next_group(self, adapter: str) -> Group:
        size, first = self._n_samples_per_prompt, self.sample_index
        feed = self.feeds[self._next_dataset(adapter)]

        def group_of(problem: Problem, prompt: Prompt, further: dict[str, Any]) -> Group:
            # The epoch may have begun with this row.
            feed_index = f"sample_{feed.epoch_id}_{first // size}"
            samples = (sample_of(first + i, problem, prompt, feed_index, further) for i in range(size))
            return Group(samples, feed_index=feed_index)

        try:
            group = feed.next_group(group_of)
        except UserError as error:
            raise UserError(f"data set {feed.name}: {error}" if feed.name else str(error)) from error
        self.sample_index += size
        return group

    def _next_dataset(self, adapter: str) -> str:
        if self._choose is not None:
            return self._chosen(self._choose)
        # Each prompt adds the share of each data set to its credit and costs one: so all keep their shares at any time.
        feeds = {name: feed for name, feed in self.feeds.items() if not adapter or feed.adapter == adapter}
        total = sum(feed.weight for feed in feeds.values())
        for name, feed in feeds.items():
            self._credits[name] += feed.weight / total
        name = max(feeds, key=lambda each: self._credits[each])
        self._credits[name] -= 1
        return name

    def _chosen(self, choose: Choose) -> str:
        try:
            name = choose(self._args, {name: feed.state() for name, feed in self.feeds.items()})
        except USER_CODE_ERRORS as error:
            # User code can raise any exception.
            raise UserError(f"dataset_sampling raised {shown(error)}: correct the function") from error
        if not isinstance(name, str) or name not in self.feeds:
            raise UserError(f"dataset_sampling returned {shown(name)}: return one of {', '.join(self.feeds)}")
        return name


def _listed(names: Iterable[str]) -> str:
    return "one data set" if list(names) == [""] else f"the data sets {', '.join(names)}"

"""The prompts of one data set in the order in which they are fed, epoch after epoch, and what earlier groups earned."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from statistics import fmean
from typing import Any

from miles_async.adapters.datasets.buffer import Report
from miles_async.adapters.datasets.permutation import Permutation
from miles_async.adapters.datasets.problems import Problem, Problems
from miles_async.errors import DataRowError, UserError
from miles_async.json_values import UnrepresentableError, json_value, shown
from miles_async.types import FROM_DATASET, Group, Prompt, Sample

Render = Callable[[Problem], Prompt]
"""Makes the prompt of samples from a problem. Raises DataRowError if that fails."""
CHECKED_PROMPTS = 64
"""How many prompts are tried before a run starts until one is found that can be used."""
RECENT_GROUPS = 32
"""How many groups of a data set in a row without different rewards cause a warning, and how many its mean covers."""
_SETTINGS = {
    "rows": "number of rows",
    "part": "slice of prompt_data",
    "shuffle": "rollout_shuffle",
    "seed": "rollout_seed",
    "held_out": "eval_size",
    "adapter": "adapter",
}
"""Names of stored values for people."""


@dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """What the configuration says about a data set."""

    shuffle: bool
    seed: int
    content: str
    """A checksum of the data."""
    part: str = ""
    """The slice of the file that is used, such as `[10:20]`; empty if it is the whole file."""
    weight: float = 1.0
    adapter: str = ""
    """The adapter that the data set trains, if the run trains several."""
    band: tuple[float, float] | None = None
    """The mean rewards between which a prompt is fed in each epoch; None if its rewards do not matter."""


class Feed:
    """One data set of `BufferedSource`, which calls it under a lock.

    An invalid row is skipped and reported. A problem whose question is in `excluded` is never fed. `name` is empty if
    the run has only this data set; otherwise each sample names it (`Sample.dataset`).
    """

    def __init__(
        self,
        name: str,
        problems: Problems,
        *,
        held_out: Sequence[Problem],
        warm_start: Problems,
        settings: FeedSettings,
        render: Render,
        report: Report,
        warn: Callable[[str], None],
    ) -> None:
        self.name = name
        self.weight = settings.weight
        self.adapter = settings.adapter
        self.epoch_id = 0
        self.sample_offset = 0
        """Number of rows of this epoch that were read, in the order of the epoch."""
        self.prompts = 0
        """Number of prompts fed so far."""
        self.excluded: frozenset[str] = frozenset(problem.question for problem in held_out)
        """Questions that are held out for evaluation."""
        self._problems = problems
        self._held_out = held_out
        self._warm_start = warm_start
        self._settings = settings
        self._render = render
        self._report = report
        self._warn = warn
        self._outside: dict[int, int] = {}
        """Rows whose mean reward was outside the band, and the epoch in which they were fed."""
        self._recent: deque[tuple[float, bool]] = deque(maxlen=RECENT_GROUPS)
        """The mean reward of each of the last groups, and whether its samples had the same reward."""
        self._warned = False
        """Whether the user knows that the rewards of the last groups did not differ."""
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._problems)

    def next_group(self, group_of: Callable[[Problem, Prompt, dict[str, Any]], Group]) -> Group:
        """Return the group that `group_of` makes of the next problem, its prompt and further metadata.

        Raises UserError if every row of the data is invalid or held out.
        """
        first: DataRowError | None = None
        # Two epochs visit every row at least once, wherever this epoch began, and a row that is left out in one of them
        # is fed in the next.
        for skipped in range(3 * len(self._order)):
            if skipped == len(self._order) and self._outside:
                self._warn(f"{self._title}: no prompt has a mean reward within difficulty_band, so all are tried again")
            if self.sample_offset == len(self._order):
                self._begin_epoch()
            row, epochs = self._order[self.sample_offset], self.epoch_id + self.sample_offset / len(self._order)
            self.sample_offset += 1
            if self._outside.get(row) == self.epoch_id - 1:
                continue
            try:
                problem = self._problems[row]
                if problem.question not in self.excluded:
                    group = group_of(problem, self._render(problem), self._origin(row=row, epochs=epochs))
                    self.prompts += 1
                    return group
            except DataRowError as error:
                first = first or error
                self._report("bad_row", str(error))
        if first is not None:
            raise UserError(
                f"none of the {len(self._order)} rows of the data can be used; check the first one: {first}"
            )
        raise UserError(
            f"none of the {len(self._order)} rows of the data can be used, because all are held out for evaluation: "
            "lower eval_size or provide more data"
        )

    def observe(self, group: Group) -> None:
        """Take note of the rewards of a group that was fed. Does nothing if one of them is not a number."""
        rewards = group.rewards
        if not rewards or not all(map(isfinite, rewards)):
            return
        mean, origin = fmean(rewards), group[0].origin
        if (band := self._settings.band) is not None and origin:
            row, epoch = origin["row"], int(origin["epochs"])
            if not band[0] <= mean <= band[1]:
                self._outside[row] = epoch
            elif self._outside.get(row, epoch) <= epoch:
                self._outside.pop(row, None)
        same = len(rewards) > 1 and min(rewards) == max(rewards)
        self._recent.append((mean, same))
        if not same:
            self._warned = False
        elif not self._warned and len(self._recent) == RECENT_GROUPS and all(same for _, same in self._recent):
            self._warned = True
            self._warn(
                f"{self._title}: the samples of each of its last {RECENT_GROUPS} prompts had the same reward "
                f"({self.reward:g} on average), so comparing them teaches nothing: {self._remedy}"
            )

    @property
    def reward(self) -> float | None:
        """Mean reward of the last `RECENT_GROUPS` groups; None before the first."""
        return fmean(mean for mean, _ in self._recent) if self._recent else None

    def state(self) -> dict[str, Any]:
        """What a user's function learns about the data set."""
        return {
            "weight": self.weight,
            "rows": len(self),
            "prompts": self.prompts,
            "epoch": self.epoch_id,
            "position": self.sample_offset,
            "reward": self.reward,
        }

    def eval_problems(self) -> list[Group]:
        """Return new groups of one sample each, one for every held-out problem that can be rendered."""
        groups = []
        origin = self._origin(epochs=0.0)
        for index, problem in enumerate(self._held_out):
            feed_index = f"eval_{self.name}_{index}" if self.name else f"eval_{index}"
            try:
                sample = sample_of(index, problem, self._render(problem), feed_index, origin)
            except DataRowError as error:
                self._report("bad_row", str(error))
                continue
            groups.append(Group([sample], feed_index=feed_index))
        return groups

    def warm_start_problems(self) -> Iterator[Sample]:
        """Yield labelled samples without end, none of them held out. The order does not depend on any setting.

        Raises UserError if a problem has no answer.
        """
        # The cache of warm-started checkpoints hashes these samples: the same data must give the same samples.
        rows = random.Random("warm start")
        index = 0
        while True:
            try:
                problem = self._warm_start[rows.randrange(len(self._warm_start))]
                sample = sample_of(index, problem, self._render(problem), f"warm_start_{index}", {})
            except DataRowError:
                # `next_group` reports the row when it is fed.
                continue
            if problem.question in self.excluded:
                continue
            if problem.label is None:
                raise UserError(
                    "the warm start needs answers, and the data has none: set label_key to the key of the answers, or "
                    "warm_start_max_steps to 0"
                )
            yield sample
            index += 1

    def complaint(self, about: Callable[[Sample], str | None]) -> str | None:
        """Look for a prompt that can be used among rows from all parts of the data. Return None if there is one.

        `about` returns what is wrong with a new sample of a row; None if nothing is.
        """
        first = None
        rows = list(islice(Permutation(len(self._problems), "prompts"), CHECKED_PROMPTS))
        for row in rows:
            try:
                problem = self._problems[row]
                found = about(sample_of(row, problem, self._render(problem), "", {}))
            except DataRowError as error:
                found = str(error)
            if found is None:
                return None
            first = first or found
        return (
            f"none of {len(rows)} prompts that were tried can be used; change the prompts, the chat "
            f"template or the limits: {first}"
        )

    def position(self) -> dict[str, Any]:
        """Return the position in the data and what is known about its prompts, ready for JSON.

        The order of the rows is not stored, because it follows from the seed.
        """
        return {
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "order": self._order_of_data,
            "prompts": self.prompts,
            "outside": list(self._outside.items()),
            "recent": list(self._recent),
            "warned": self._warned,
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore the result of `position`. Raises UserError if the data or its order differ."""
        own = self._order_of_data
        changed = [
            f"{_SETTINGS.get(name, name)} was {old} and is {own[name]}"
            for name, old in position["order"].items()
            if name in own and own[name] != old
        ]
        if changed:
            of_set = f" for data set {self.name}" if self.name else ""
            raise UserError(
                f"the saved data position is of other data ({', '.join(changed)}): use the data, rollout_seed, "
                f"rollout_shuffle, eval_size, n_samples_per_prompt and adapter of the saved run{of_set}"
            )
        self.epoch_id, self.sample_offset = position["epoch_id"], position["sample_offset"]
        self._order = self._epoch_order()
        self.prompts, self._warned = position["prompts"], position["warned"]
        self._outside = dict(position["outside"])
        self._recent = deque(((mean, same) for mean, same in position["recent"]), maxlen=RECENT_GROUPS)

    def _origin(self, **position: float) -> dict[str, Any]:
        """The metadata of the samples of a row."""
        if not self._is_traced:
            return {}
        adapter = {"adapter": self.adapter} if self.adapter else {}
        return {FROM_DATASET: {"name": self.name, **adapter, **position}}

    @property
    def _is_traced(self) -> bool:
        """Whether data set and row of a group have to be known when it has its rewards."""
        return bool(self.name) or self._settings.band is not None

    @property
    def _title(self) -> str:
        return f"data set {self.name}" if self.name else "the data set"

    @property
    def _remedy(self) -> str:
        return "lower its weight, or change its prompts" if self.name else "change its prompts"

    @property
    def _order_of_data(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "rows": len(self._problems),
            "part": settings.part,
            "shuffle": settings.shuffle,
            "seed": settings.seed,
            "content": settings.content,
            "held_out": len(self._held_out),
            "adapter": settings.adapter,
        }

    def _begin_epoch(self) -> None:
        if not self.epoch_id:
            self._warn(f"{self._title} is exhausted: its {len(self)} rows were used once, and are used again")
        self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> Sequence[int] | Permutation:
        rows = len(self._problems)
        seed = self._settings.seed
        return Permutation(rows, f"{seed} {self.epoch_id}") if self._settings.shuffle else range(rows)


def sample_of(index: int, problem: Problem, prompt: Prompt, feed_index: str, further: Mapping[str, Any]) -> Sample:
    """Return a new sample of a problem, with `further` metadata. Raises DataRowError if JSON cannot express it."""
    # A Parquet file may hold dates and other values that checkpoints cannot express.
    metadata = {**problem.metadata, "feed_index": feed_index, **further}
    if problem.tools is not None:
        metadata["tools"] = problem.tools
    try:
        return Sample(
            index=index, prompt=json_value(prompt), label=json_value(problem.label), metadata=json_value(metadata)
        )
    except UnrepresentableError as error:
        raise DataRowError(f"the row of {shown(problem.question)} {error}") from error

"""The data source of the pipeline: returned groups are fed first, then the data, epoch after epoch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer, Report
from miles_async.adapters.datasets.permutation import Permutation
from miles_async.adapters.datasets.problems import Problem, Problems
from miles_async.errors import DataRowError, UserError
from miles_async.json_values import UnrepresentableError, json_value, readable_entries, shown
from miles_async.types import Group, Prompt, Sample

Render = Callable[[Problem], Prompt]
"""Makes the prompt of samples from a problem. Raises DataRowError if that fails."""
CHECKED_PROMPTS = 64
"""How many prompts are tried before a run starts until one is found that can be used."""
_SETTINGS = {"rows": "number of rows", "shuffle": "rollout_shuffle", "seed": "rollout_seed", "held_out": "eval_size"}
"""Names of stored values for people."""


class BufferedSource:
    """Implements the `DataSource` port on top of `Problems`.

    The n-th prompt has the feed index `sample_{epoch}_{n}`, where n continues across epochs. Each sample also carries
    it in `metadata["feed_index"]`, because rollout functions written for slime return plain lists of samples. A problem
    whose question is held out is never fed. An invalid row is skipped and reported. The methods are thread-safe,
    because batch rollout functions call them from their own thread.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        held_out: Sequence[Problem],
        warm_start: Problems,
        n_samples_per_prompt: int,
        shuffle: bool,
        seed: int,
        content: str,
        render: Render,
        buffer: Buffer,
        report: Report,
    ) -> None:
        self._problems = problems
        self._held_out = held_out
        self._held_out_questions = frozenset(problem.question for problem in held_out)
        self._warm_start = warm_start
        self._n_samples_per_prompt = n_samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._content = content
        self._render = render
        self._buffer = buffer
        self._report = report
        self._lock = threading.Lock()
        self.epoch_id = 0
        self.sample_offset = 0
        """Number of rows of this epoch that were read, in the order of the epoch."""
        self.sample_index = 0
        """Index of the next sample; the numbering continues across epochs."""
        self._metadata: dict[str, Any] = {}
        self._stored_metadata: dict[str, Any] = {}
        """`metadata` as JSON, as it was converted last."""
        self._metadata_is_stored = True
        """Whether `metadata` cannot have changed since its conversion began."""
        self._order = self._epoch_order()

    @property
    def metadata(self) -> dict[str, Any]:
        """Values that a rollout function keeps with the position. A caller may change the dictionary."""
        self.metadata_changed()
        return self._metadata

    def metadata_changed(self) -> None:
        """See `SeekableSource.metadata_changed`."""
        self._metadata_is_stored = False

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` groups: groups from the buffer first, then new ones.

        Raises UserError if every row of the data is invalid or held out.
        """
        with self._lock:
            returned = self._buffer.take(num_samples)
            return returned + [self._next_group() for _ in range(num_samples - len(returned))]

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

    def eval_problems(self) -> list[Group]:
        """Return new groups of one sample each, one for every held-out problem that can be rendered."""
        groups = []
        for index, problem in enumerate(self._held_out):
            try:
                sample = self._sample(index, problem, self._render(problem), f"eval_{index}")
            except DataRowError as error:
                self._report("bad_row", str(error))
                continue
            groups.append(Group([sample], feed_index=f"eval_{index}"))
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
                sample = self._sample(index, problem, self._render(problem), f"warm_start_{index}")
            except DataRowError:
                # `get_samples` reports the row when it is fed.
                continue
            if problem.question in self._held_out_questions:
                continue
            if problem.label is None:
                raise UserError("the warm start needs answers, and the data has none: set warm_start_max_steps to 0")
            yield sample
            index += 1

    def position(self) -> dict[str, Any]:
        """Return the position in the data, without the buffer.

        The order of the rows is not stored, because it follows from the seed. `metadata` is the same object until it
        is read or a function may have changed it.
        """
        with self._lock:
            return self._position()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Restore the result of `position`, with an empty buffer. Raises what `load_state_dict` raises."""
        self.load_state_dict({**position, "buffer": []})

    def returned(self) -> list[Group]:
        """Return the groups in the buffer, which stay there."""
        with self._lock:
            return self._buffer.groups()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the buffer, as JSON values if the metadata of samples is JSON."""
        with self._lock:
            return {**self._position(), "buffer": self._buffer.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises UserError if the data or its order differ: the saved position would then refer to other rows.
        """
        own = self._order_of_data
        # Checkpoints of earlier versions have only some of the entries.
        changed = [
            f"{_SETTINGS.get(name, name)} was {old} and is {own[name]}"
            for name, old in state["order"].items()
            if own[name] != old
        ]
        if changed:
            raise UserError(
                f"the saved data position is of other data ({', '.join(changed)}): use the data, rollout_seed, "
                "rollout_shuffle, eval_size and n_samples_per_prompt of the saved run"
            )
        with self._lock:
            self.epoch_id, self.sample_offset = state["epoch_id"], state["sample_offset"]
            self.sample_index = state["sample_index"]
            # Checkpoints of earlier versions have no metadata.
            self._metadata, self._metadata_is_stored = dict(state.get("metadata", {})), False
            self._order = self._epoch_order()
            self._buffer.restore(state["buffer"])

    def _position(self) -> dict[str, Any]:
        return {
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "sample_index": self.sample_index,
            "metadata": self._json_metadata(),
            "order": self._order_of_data,
        }

    def _json_metadata(self) -> dict[str, Any]:
        """Convert `metadata` if that is due. Positions are stored several times a second, and it may be large."""
        if not self._metadata_is_stored:
            # Before the conversion, because another thread may change the metadata during it.
            self._metadata_is_stored = True
            self._stored_metadata = readable_entries(self._metadata)
        return self._stored_metadata

    @property
    def _order_of_data(self) -> dict[str, Any]:
        return {
            "rows": len(self._problems),
            "shuffle": self._shuffle,
            "seed": self._seed,
            "content": self._content,
            "held_out": len(self._held_out),
            "n_samples_per_prompt": self._n_samples_per_prompt,
        }

    def _next_group(self) -> Group:
        size, first = self._n_samples_per_prompt, self.sample_index

        def group_of(problem: Problem) -> Group:
            # The epoch may have begun with this row.
            feed_index, prompt = f"sample_{self.epoch_id}_{first // size}", self._render(problem)
            return Group(
                (self._sample(first + i, problem, prompt, feed_index) for i in range(size)), feed_index=feed_index
            )

        group = self._next_valid(group_of)
        self.sample_index += size
        return group

    def _next_valid(self, group_of: Callable[[Problem], Group]) -> Group:
        first: DataRowError | None = None
        # Two epochs visit every row at least once, wherever this epoch began.
        for _ in range(2 * len(self._order)):
            if self.sample_offset == len(self._order):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._order = self._epoch_order()
            row = self._order[self.sample_offset]
            self.sample_offset += 1
            try:
                problem = self._problems[row]
                if problem.question not in self._held_out_questions:
                    return group_of(problem)
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

    def complaint(self, about: Callable[[Prompt, list[dict[str, Any]] | None], str | None]) -> str | None:
        """Look for a prompt that can be used among rows from all parts of the data. Return None if there is one.

        `about` returns what is wrong with a prompt and its tools; None if nothing is.
        """
        first = None
        rows = list(islice(Permutation(len(self._problems), "prompts"), CHECKED_PROMPTS))
        for row in rows:
            try:
                problem = self._problems[row]
                found = about(self._render(problem), problem.tools)
            except DataRowError as error:
                found = str(error)
            if found is None:
                return None
            first = first or found
        return (
            f"none of {len(rows)} prompts that were tried can be used; change the prompts, the chat "
            f"template or the limits: {first}"
        )

    def _sample(self, index: int, problem: Problem, prompt: Prompt, feed_index: str) -> Sample:
        # A Parquet file may hold dates and other values that checkpoints cannot express.
        metadata = {**problem.metadata, "feed_index": feed_index}
        if problem.tools is not None:
            metadata["tools"] = problem.tools
        try:
            return Sample(
                index=index, prompt=json_value(prompt), label=json_value(problem.label), metadata=json_value(metadata)
            )
        except UnrepresentableError as error:
            raise DataRowError(f"the row of {shown(problem.question)} {error}") from error

    def _epoch_order(self) -> Sequence[int] | Permutation:
        rows = len(self._problems)
        return Permutation(rows, f"{self._seed} {self.epoch_id}") if self._shuffle else range(rows)

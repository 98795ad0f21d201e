"""Feeds prompts to the pipeline, whatever the data: returned groups first, then the data, epoch after epoch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from miles_async.adapters.datasets.buffer import Buffer
from miles_async.adapters.datasets.permutation import Permutation
from miles_async.adapters.datasets.problems import Problem, Problems
from miles_async.errors import DataRowError, UserError
from miles_async.types import Group, Sample

Render = Callable[[Problem], Any]
"""A problem's prompt as the text that is generated from. Raises DataRowError where it cannot be rendered."""
Report = Callable[[str, str], None]
"""`(reason, sentence)`: told of everything that is passed over, so that nothing is lost silently."""


class BufferedSource:
    """Implements `ports.DataSource` over any `Problems`.

    The n-th prompt fed has the feed index `sample_{epoch}_{n}`, counted on over epochs; each of its samples carries it
    in `metadata["feed_index"]` too, so that it survives functions which return plain lists. No problem whose question
    is held out is ever fed, and a broken row is passed over and reported. Batch functions call from their own thread,
    hence the lock.
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
        self._render = render
        self._buffer = buffer
        self._report = report
        self._lock = threading.Lock()
        self.epoch_id = 0
        self.sample_offset = 0
        """Rows of this epoch already read, in its order."""
        self.sample_index = 0
        """The index of the next sample; samples are numbered on over epochs."""
        self._order = self._epoch_order()

    def get_samples(self, num_samples: int) -> list[Group]:
        """Raises UserError when no row of the data can be fed."""
        with self._lock:
            again = self._buffer.take(num_samples)
            return again + [self._next_group() for _ in range(num_samples - len(again))]

    def add_samples(self, samples: Sequence[Group]) -> None:
        groups = [Group.of(group) for group in samples]
        for group in groups:
            if len(group) != self._n_samples_per_prompt:
                raise UserError(
                    f"group {group.feed_index} came back with {len(group)} samples: give back whole groups of "
                    f"n_samples_per_prompt={self._n_samples_per_prompt}"
                )
        with self._lock:
            self._buffer.add(groups)

    def eval_problems(self) -> list[Group]:
        """The held-out problems that can be rendered, one sample each; fresh ones at every call."""
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
        """Endless samples with labels, none of them held out, in an order that no setting changes.

        Raises UserError at a problem without an answer, which cannot be learned from.
        """
        rows = random.Random("warm start")
        index = 0
        while True:
            try:
                problem = self._warm_start[rows.randrange(len(self._warm_start))]
                prompt = self._render(problem)
            except DataRowError:
                # It is counted when the feed meets it.
                continue
            if problem.question in self._held_out_questions:
                continue
            if problem.label is None:
                raise UserError("the data names no answers to warm-start on: set warm_start_max_steps to 0")
            yield self._sample(index, problem, prompt, f"warm_start_{index}")
            index += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the feed stands; as JSON-ready as the metadata of returned samples. The order follows from the seed."""
        with self._lock:
            return {
                "epoch_id": self.epoch_id,
                "sample_offset": self.sample_offset,
                "sample_index": self.sample_index,
                "order": self._order_of_data,
                "buffer": self._buffer.state(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError when the state is of other data or another order: places in it would mean other rows."""
        if state["order"] != self._order_of_data:
            raise UserError(
                f"the saved data position is of {_order_words(state['order'])}, this run has "
                f"{_order_words(self._order_of_data)}: set rollout_seed, rollout_shuffle and the data as they were"
            )
        with self._lock:
            self.epoch_id, self.sample_offset = state["epoch_id"], state["sample_offset"]
            self.sample_index = state["sample_index"]
            self._order = self._epoch_order()
            self._buffer.restore(state["buffer"])

    @property
    def _order_of_data(self) -> dict[str, Any]:
        return {"rows": len(self._problems), "shuffle": self._shuffle, "seed": self._seed}

    def _next_group(self) -> Group:
        problem, prompt = self._next_problem()
        size, first = self._n_samples_per_prompt, self.sample_index
        feed_index = f"sample_{self.epoch_id}_{first // size}"
        self.sample_index += size
        samples = (self._sample(first + i, problem, prompt, feed_index) for i in range(size))
        return Group(samples, feed_index=feed_index)

    def _next_problem(self) -> tuple[Problem, Any]:
        for _ in range(2 * len(self._order)):
            if self.sample_offset == len(self._order):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._order = self._epoch_order()
            row = self._order[self.sample_offset]
            self.sample_offset += 1
            try:
                problem = self._problems[row]
                if problem.question not in self._held_out_questions:
                    return problem, self._render(problem)
            except DataRowError as error:
                self._report("bad_row", str(error))
        raise UserError(
            f"none of the {len(self._order)} rows of the data can be fed: all are broken, or held out for evaluation; "
            "lower eval_size or give more data"
        )

    def _sample(self, index: int, problem: Problem, prompt: Any, feed_index: str) -> Sample:
        metadata = {**problem.metadata, "feed_index": feed_index}
        if problem.tools is not None:
            metadata["tools"] = problem.tools
        return Sample(index=index, prompt=prompt, label=problem.label, metadata=metadata)

    def _epoch_order(self) -> Sequence[int] | Permutation:
        rows = len(self._problems)
        return Permutation(rows, f"{self._seed} {self.epoch_id}") if self._shuffle else range(rows)


def _order_words(order: Mapping[str, Any]) -> str:
    return f"{order['rows']} rows " + (f"shuffled by seed {order['seed']}" if order["shuffle"] else "in file order")

"""Feeds prompts to the pipeline, whatever the data: recycled groups first, then the data, epoch after epoch."""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_async.errors import UserError
from miles_async.types import Group, Sample

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data."""

    question: str
    """What tells problems apart: two rows with one question are the same problem."""
    prompt: Prompt
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)


class Problems(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Problem: ...


class BufferedSource:
    """Implements `ports.DataSource` over any `Problems`.

    The n-th prompt fed has the feed index `sample_{epoch}_{n}`, counted on over epochs; each of its samples carries it
    in `metadata["feed_index"]` too, so that it survives functions which return plain lists. No problem whose question
    is held out is ever fed. Batch functions call from their own thread, hence the lock.
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
        render: Callable[[Prompt], str],
    ) -> None:
        """`render` turns a row's prompt into the text that is generated from."""
        self._problems = problems
        self._held_out = held_out
        self._held_out_questions = frozenset(problem.question for problem in held_out)
        self._warm_start = warm_start
        self._n_samples_per_prompt = n_samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._render = render
        self._lock = threading.Lock()
        self._recycled: deque[Group] = deque()
        self._epoch = 0
        self._position = 0
        """Rows of this epoch already read, in its order."""
        self._fed = 0
        self._order = self._epoch_order()

    def get_samples(self, num_samples: int) -> list[Group]:
        """Raises UserError when every row of the data is held out."""
        with self._lock:
            again = [self._recycled.popleft() for _ in range(min(num_samples, len(self._recycled)))]
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
            self._recycled.extend(groups)

    def eval_problems(self) -> list[Group]:
        """The held-out problems, one sample each; fresh ones at every call."""
        return [
            Group([self._sample(index, problem, f"eval_{index}")], feed_index=f"eval_{index}")
            for index, problem in enumerate(self._held_out)
        ]

    def warm_start_problems(self) -> Iterator[Sample]:
        """Endless samples with labels, none of them held out, in an order that no setting changes.

        Raises UserError at a problem without an answer, which cannot be learned from.
        """
        rows = random.Random("warm start")
        index = 0
        while True:
            problem = self._warm_start[rows.randrange(len(self._warm_start))]
            if problem.question in self._held_out_questions:
                continue
            if problem.label is None:
                raise UserError("the data names no answers to warm-start on: set warm_start_max_steps to 0")
            yield self._sample(index, problem, f"warm_start_{index}")
            index += 1

    def state_dict(self) -> dict[str, Any]:
        """Where the feed stands; as JSON-ready as the metadata of recycled samples."""
        with self._lock:
            recycled = [
                {
                    "feed_index": group.feed_index,
                    "attempt": group.attempt,
                    "samples": [sample.to_dict() for sample in group],
                }
                for group in self._recycled
            ]
            return {"epoch": self._epoch, "position": self._position, "fed": self._fed, "recycled": recycled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._epoch, self._position, self._fed = state["epoch"], state["position"], state["fed"]
            self._order = self._epoch_order()
            self._recycled = deque(
                Group(map(Sample.from_dict, group["samples"]), feed_index=group["feed_index"], attempt=group["attempt"])
                for group in state["recycled"]
            )

    def _next_group(self) -> Group:
        problem = self._next_problem()
        feed_index = f"sample_{self._epoch}_{self._fed}"
        first = self._fed * self._n_samples_per_prompt
        self._fed += 1
        return Group(
            (self._sample(first + i, problem, feed_index) for i in range(self._n_samples_per_prompt)),
            feed_index=feed_index,
        )

    def _next_problem(self) -> Problem:
        for _ in range(2 * len(self._order)):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            problem = self._problems[self._order[self._position]]
            self._position += 1
            if problem.question not in self._held_out_questions:
                return problem
        raise UserError(
            f"all {len(self._order)} rows of the data are held out for evaluation: lower eval_size or give more data"
        )

    def _sample(self, index: int, problem: Problem, feed_index: str) -> Sample:
        return Sample(
            index=index,
            prompt=self._render(problem.prompt),
            label=problem.label,
            metadata={**problem.metadata, "feed_index": feed_index},
        )

    def _epoch_order(self) -> array[int]:
        order = array("Q", range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)
        return order

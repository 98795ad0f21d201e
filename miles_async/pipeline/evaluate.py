"""Greedy accuracy on held-out problems, through the engines and the reward that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from miles_async.errors import BadTrajectory
from miles_async.observability.events import Evaluated
from miles_async.pipeline.books import Books
from miles_async.ports import Generator, Rewarder
from miles_async.types import Group, SampleStatus

CORRECT = 0.999
"""A reward from here on counts as correct; below it, partial credit does not."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """`generator` samples greedily; `problems` are groups of one sample, held out from training."""

    books: Books
    generator: Generator
    rewarder: Rewarder
    problems: Sequence[Group]
    name: str = "held_out"

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, list[float]]]:
        """Rewards and truncation flags of every problem, by data set (slime's shape). A failed problem scores 0.

        Without problems nothing is generated and the result is empty.
        """
        if not self.problems:
            return {}
        clock = self.books.clock
        started = clock.now()
        groups = [Group(problem, feed_index=problem.feed_index) for problem in self.problems]
        rewards = await asyncio.gather(*map(self._answer, groups))
        truncated = [float(group[0].status is SampleStatus.TRUNCATED) for group in groups]
        self.books.progressed()
        self.books.events.emit(
            Evaluated(
                time=clock.now(),
                name=self.name,
                rollout=rollout_id,
                accuracy=sum(reward >= CORRECT for reward in rewards) / len(rewards),
                problems=len(groups),
                seconds=clock.now() - started,
                truncated=sum(truncated) / len(truncated),
            )
        )
        return {self.name: {"rewards": rewards, "truncated": truncated}}

    async def _answer(self, group: Group) -> float:
        group.reset()
        try:
            await self.generator.generate(group)
            await self.rewarder.score(group)
        except BadTrajectory:
            return 0.0
        return group[0].scalar_reward

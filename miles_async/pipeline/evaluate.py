"""Scores on held-out data, through the engines and the reward that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from miles_async.errors import EngineLostError, MilesError, TrajectoryError, UserError
from miles_async.events import Evaluated, WarningRaised
from miles_async.pipeline.run_state import RunState
from miles_async.ports import Generator, Rewarder
from miles_async.types import Group, Sample, SampleStatus

CORRECT = 0.999
"""A reward from here on counts as correct; below it, partial credit does not."""
LOSSES = 3
"""How often the engine of a problem may be lost before it is given up."""
INTERRUPTIONS = 300
"""How often it may be aborted under it, as the end of a batch or a publish aborts whatever the engines run."""
RETRY_SECONDS = 1.0

Scores = Mapping[str, Mapping[str, Sequence[Any]]]
"""By data set: `rewards`, and `truncated` (true where the answer was cut), one entry per sample (slime's shape)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """`generator` samples as this data set asks for; `problems` are groups, held out from training."""

    name: str
    problems: Sequence[Group]
    generator: Generator


@dataclass(frozen=True, slots=True)
class Evaluator:
    run_state: RunState
    rewarder: Rewarder
    sets: Sequence[EvalSet]
    serving: Callable[[], bool]
    """Whether any engine takes requests."""

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, list[float]]]:
        """Rewards and truncation flags of every sample, by data set. A failed problem scores 0, with one warning.

        Without problems nothing is generated and the result is empty.
        """
        sets = [each for each in self.sets if each.problems]
        return dict(zip([each.name for each in sets], await asyncio.gather(*map(self._of, sets)), strict=True))

    def report(self, rollout_id: int, scores: Scores, seconds: float) -> None:
        """Tell the event stream. Raises UserError for scores, of a user's own function, that cannot be read."""
        self.run_state.progressed()
        for name, of_set in scores.items():
            rewards = list(of_set.get("rewards", ()))
            if not rewards or not all(isinstance(reward, int | float) and isfinite(reward) for reward in rewards):
                raise UserError(
                    f"eval_function_path returned no list of finite rewards for {name!r}: "
                    'return {name: {"rewards": [...], "truncated": [...]}}'
                )
            truncated = [float(flag) for flag in of_set.get("truncated", ())] or [0.0]
            self.run_state.events.emit(
                Evaluated(
                    time=self.run_state.clock.now(),
                    name=name,
                    rollout=rollout_id,
                    accuracy=sum(reward >= CORRECT for reward in rewards) / len(rewards),
                    reward=sum(rewards) / len(rewards),
                    problems=len(rewards),
                    seconds=seconds,
                    truncated=sum(truncated) / len(truncated),
                )
            )

    async def _of(self, eval_set: EvalSet) -> dict[str, list[float]]:
        # A copy of its own: evaluations may overlap, and the problems are asked again.
        groups = [Group(map(_unanswered, problem), feed_index=problem.feed_index) for problem in eval_set.problems]
        failures = await asyncio.gather(*(self._answer(group, eval_set.generator) for group in groups))
        if failed := [failure for failure in failures if failure is not None]:
            sentence = f"{len(failed)} of {len(groups)} problems of {eval_set.name} failed and score 0: {failed[0]}"
            self.run_state.events.emit(WarningRaised(time=self.run_state.clock.now(), text=sentence))
        samples = [sample for group in groups for sample in group]
        return {
            "rewards": [sample.scalar_reward for sample in samples],
            "truncated": [float(sample.status is SampleStatus.TRUNCATED) for sample in samples],
        }

    async def _answer(self, group: Group, generator: Generator) -> MilesError | None:
        """Generate and score; what was in the way where that could not be done, and all rewards are 0."""
        losses = interruptions = 0
        while True:
            try:
                await generator.generate(group)
                if not _interrupted(group):
                    await self.rewarder.score(group)
                    return None
                failure: MilesError = TrajectoryError(f"problem {group.feed_index} was aborted again and again")
                interruptions += 1
            except TrajectoryError as error:
                failure = error
                if not _interrupted(group):
                    break
                # An agent's conversation that was aborted cannot be continued, only begun again.
                group.reset()
                interruptions += 1
            except EngineLostError as error:
                failure = error
                losses += 1
            if losses == LOSSES or interruptions == INTERRUPTIONS:
                break
            if isinstance(failure, EngineLostError):
                await self.run_state.changed.until(self.serving)
            await self.run_state.clock.sleep(RETRY_SECONDS)
        for sample in group:
            sample.reward = 0.0
        return failure


def _interrupted(group: Group) -> bool:
    """Aborted, with the tokens so far: the next attempt continues it."""
    return any(sample.status is SampleStatus.ABORTED for sample in group)


def _unanswered(problem: Sample) -> Sample:
    return Sample(index=problem.index, prompt=problem.prompt, label=problem.label, metadata=dict(problem.metadata))

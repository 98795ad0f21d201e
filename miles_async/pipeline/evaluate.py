"""Evaluates held-out data sets with the engines and the reward function that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from miles_async.errors import EngineLostError, MilesError, RouterLostError, TrajectoryError, UserError
from miles_async.events import Evaluated, EvaluationSkipped, WarningRaised
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Generator, Rewarder
from miles_async.types import Group, Sample, SampleStatus

CORRECT = 0.999
"""A sample is correct from this reward on; partial credit does not count."""
MAX_ENGINE_LOSSES = 5
"""An evaluation is given up once a problem has lost this many engines. One prompt of the training data that crashes
engines costs its neighbours fewer."""
MAX_INTERRUPTIONS = 300
"""A problem fails after this many aborts. The end of a batch or a publish may abort every running request."""
RETRY_SECONDS = 1.0

Scores = Mapping[str, Mapping[str, Sequence[Any]]]
"""By data set: `rewards` and `truncated` (whether the length limit was reached), one entry per sample, as in slime; and
`versions`, the weight versions of the tokens in ascending order. Functions of users need not return `versions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One data set. `generator` uses its sampling settings; `problems` are groups that are not trained on."""

    name: str
    problems: Sequence[Group]
    generator: Generator


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates all data sets at once."""

    run_state: RunState
    rewarder: Rewarder
    sets: Sequence[EvalSet]
    may_generate: Callable[[], bool]
    """Returns whether requests reach an engine and may be sent now."""

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, list[float]]]:
        """Return rewards and truncation flags of every sample and the versions of their tokens, by data set.

        A problem that fails scores 0; one warning per data set reports failures. Left out are data sets without
        problems, and those with a problem that lost its engine too often: a missing score must not look like a wrong
        answer.
        """
        sets = [eval_set for eval_set in self.sets if eval_set.problems]
        scores = await asyncio.gather(*map(self._evaluate_set, sets))
        return {
            eval_set.name: set_scores
            for eval_set, set_scores in zip(sets, scores, strict=True)
            if set_scores is not None
        }

    def report(self, rollout_id: int, scores: Scores, seconds: float, live_versions: tuple[int, int]) -> None:
        """Emit the scores as events. `live_versions` are those at the start and at the end of the evaluation.

        Raises UserError if a user's evaluation function returned invalid scores.
        """
        self.run_state.mark_progress()
        for name, set_scores in scores.items():
            rewards = list(set_scores.get("rewards", ()))
            if not rewards or not all(isinstance(reward, int | float) and isfinite(reward) for reward in rewards):
                raise UserError(
                    f"eval_function_path returned no list of finite rewards for {name!r}: "
                    'return {name: {"rewards": [...], "truncated": [...]}}'
                )
            versions = set_scores.get("versions") or live_versions
            truncated = [float(flag) for flag in set_scores.get("truncated", ())] or [0.0]
            self.run_state.journal.emit(
                Evaluated(
                    time=self.run_state.clock.time(),
                    name=name,
                    rollout=rollout_id,
                    accuracy=sum(reward >= CORRECT for reward in rewards) / len(rewards),
                    reward=sum(rewards) / len(rewards),
                    problems=len(rewards),
                    seconds=seconds,
                    truncated=sum(truncated) / len(truncated),
                    versions=(min(versions), max(versions)),
                )
            )

    async def _evaluate_set(self, eval_set: EvalSet) -> dict[str, list[float]] | None:
        """Return the scores of one data set, or None if a problem lost its engine too often."""
        # Each evaluation works on copies, because the same problems are evaluated again later.
        groups = [Group(map(_copy_prompt, problem), feed_index=problem.feed_index) for problem in eval_set.problems]
        failures = await asyncio.gather(*(self._answer(group, eval_set.generator) for group in groups))
        failed = [failure for failure in failures if failure is not None]
        if unanswered := [failure for failure in failed if isinstance(failure, EngineLostError)]:
            self._warn(
                f"{eval_set.name} was not evaluated: {len(unanswered)} of {len(groups)} problems lost their engine "
                f"{MAX_ENGINE_LOSSES} times: {unanswered[0]}"
            )
            return None
        if failed:
            self._warn(f"{len(failed)} of {len(groups)} problems of {eval_set.name} failed and score 0: {failed[0]}")
        return {
            "rewards": [reward for group in groups for reward in group.rewards],
            "truncated": [float(truncated) for group in groups for truncated in group.truncated],
            "versions": sorted({span.version for group in groups for sample in group for span in sample.spans}),
        }

    async def _answer(self, group: Group, generator: Generator) -> MilesError | None:
        """Generate and score a problem in place. After a failure, set its rewards to 0 and return the error."""
        losses = interruptions = 0
        while True:
            try:
                await self._generate(group, generator)
                if not _interrupted(group):
                    with self.run_state.working():
                        await self.rewarder.score(group)
                    return None
                failure: MilesError = TrajectoryError(
                    f"problem {group.feed_index} was aborted again and again ({MAX_INTERRUPTIONS} times)"
                )
                interruptions += 1
            except TrajectoryError as error:
                failure = error
                if not _interrupted(group):
                    break
                # The aborted conversation of an agent cannot be continued, only restarted.
                group.reset()
                interruptions += 1
            except EngineLostError as error:
                failure = error
                losses += not isinstance(error, RouterLostError)
            if losses == MAX_ENGINE_LOSSES or interruptions == MAX_INTERRUPTIONS:
                break
            await self.run_state.clock.sleep(RETRY_SECONDS)
        for sample in group:
            sample.reward = 0.0
        return failure

    async def _generate(self, group: Group, generator: Generator) -> None:
        """Generate once requests may be sent."""
        await self.run_state.changed.until(self.may_generate)
        self.run_state.evaluation_requests += 1
        try:
            with self.run_state.working():
                await generator.generate(group)
        finally:
            self.run_state.evaluation_requests -= 1
            self.run_state.changed.notify()

    def _warn(self, text: str) -> None:
        self.run_state.journal.emit(WarningRaised(time=self.run_state.clock.time(), text=text))


class DueEvaluations:
    """Runs evaluations in the background, one at a time.

    Evaluations do not queue up: an evaluation that waits for the previous one, or for engines, is skipped when a newer
    one is due, because it would run on the weights of the newer one.

    Example::

        due = DueEvaluations(run_state, tasks, evaluate, may_start)
        due.add(9)         # starts
        due.add(19)        # waits for the evaluation after rollout 9
        due.add(29)        # takes the place of the evaluation after rollout 19, which is skipped
        await due.add(39)  # waits for both
    """

    def __init__(
        self,
        run_state: RunState,
        tasks: TaskSupervisor,
        evaluate: Callable[[int], Awaitable[None]],
        may_start: Callable[[], bool],
    ) -> None:
        self._run_state = run_state
        self._tasks = tasks
        self._evaluate = evaluate
        self._may_start = may_start
        self._waiting: int | None = None
        """The rollout of the evaluation that waits to start."""
        self._running: asyncio.Task[None] | None = None

    def add(self, rollout_id: int) -> asyncio.Task[None]:
        """Evaluate after `rollout_id` as soon as possible; skip the evaluation that still waits to start.

        The returned task ends when no evaluation runs or waits. If an evaluation fails, the run ends.
        """
        if self._waiting is not None:
            self._run_state.journal.emit(
                EvaluationSkipped(time=self._run_state.clock.time(), rollout=self._waiting, overtaken_by=rollout_id)
            )
        self._waiting = rollout_id
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn("evaluation", self._run())
        return self._running

    async def _run(self) -> None:
        while self._waiting is not None:
            await self._run_state.changed.until(self._may_start)
            rollout_id, self._waiting = self._waiting, None
            await self._evaluate(rollout_id)


def _interrupted(group: Group) -> bool:
    """Whether a sample was aborted; the next attempt then continues its tokens."""
    return any(sample.status is SampleStatus.ABORTED for sample in group)


def _copy_prompt(problem: Sample) -> Sample:
    """The sample without a response."""
    return Sample(index=problem.index, prompt=problem.prompt, label=problem.label, metadata=dict(problem.metadata))

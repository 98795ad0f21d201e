"""Evaluates held-out data sets with the engines and the reward function that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from miles_async.errors import EngineLostError, InfrastructureError, RouterLostError, TrajectoryError, UserError
from miles_async.events import Evaluated, EvaluationSkipped
from miles_async.identity import identity_set
from miles_async.json_values import finite_number, plain_text, shown
from miles_async.pipeline.grading import score
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Generator, Rewarder
from miles_async.types import Group, Sample, SampleStatus, trajectories_of, versions_of

CORRECT = 0.999
"""A sample is correct from this reward on; partial credit does not count."""
MAX_ENGINE_LOSSES = 5
"""An evaluation is given up once a problem has lost this many engines. One prompt of the training data that crashes
engines costs its neighbours fewer."""
MAX_INTERRUPTIONS = 300
"""A problem fails after this many aborts. The end of a batch or a publish may abort every running request."""
RETRY_SECONDS = 1.0

Scores = Mapping[str, Mapping[str, Any]]
"""By data set: `rewards` and `truncated` (whether the length limit was reached), one entry per sample with a score, as
in slime; `missing`, the number of samples without a score; `versions`, the weight versions of the tokens and of their
oldest keys in ascending order; and `samples`, those with a score. Functions of users need not return the last three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One data set. `generator` uses its sampling settings; `problems` are groups that are not trained on."""

    name: str
    problems: Sequence[Group]
    generator: Generator
    rewarder: Rewarder | None = None
    """None scores with the reward of the run."""


@dataclass(slots=True)
class _Failures:
    """The first error of each kind that a problem met."""

    wrong: TrajectoryError | None = None
    """Some samples could not be generated and score 0."""
    missing: TrajectoryError | None = None
    """Some samples could not be scored, or failed for reasons of infrastructure, and have no score."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates all data sets at once."""

    run_state: RunState
    rewarder: Rewarder
    sets: Sequence[EvalSet]
    may_generate: Callable[[], bool]
    """Returns whether requests reach an engine and may be sent now."""
    max_attempts: int = 3
    """How often samples are scored whose reward fails for reasons of infrastructure."""

    async def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Return the scores of all data sets; see `Scores`.

        A sample that the model cannot answer scores 0. A sample without a score is missing: neither an error of the
        reward nor a failure of infrastructure may look like a wrong answer. One warning per data set reports the
        samples of either kind. Left out are data sets without problems, those with a problem that lost its engine too
        often, and those without a single score.
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
            rewards, truncated = _numbers(set_scores, "rewards"), _numbers(set_scores, "truncated")
            if not rewards or truncated is None:
                raise UserError(
                    f"eval_function_path returned no list of finite rewards for {shown(name)}, or another value than "
                    'numbers in "truncated": return {name: {"rewards": [...], "truncated": [...]}}'
                )
            versions = _numbers(set_scores, "versions") or live_versions
            self.run_state.journal.emit(
                Evaluated(
                    time=self.run_state.clock.time(),
                    name=plain_text(str(name)),
                    rollout=rollout_id,
                    accuracy=sum(reward >= CORRECT for reward in rewards) / len(rewards),
                    reward=sum(rewards) / len(rewards),
                    problems=len(rewards),
                    missing=int(finite_number(set_scores.get("missing")) or 0),
                    seconds=seconds,
                    truncated=fmean(truncated or [0.0]),
                    versions=(int(min(versions)), int(max(versions))),
                )
            )

    async def _evaluate_set(self, eval_set: EvalSet) -> dict[str, Any] | None:
        """Return the scores of one data set, or None if it has none."""
        # Each evaluation works on copies, because the same problems are evaluated again later.
        groups = [Group(map(_copy_prompt, problem), feed_index=problem.feed_index) for problem in eval_set.problems]
        outcomes = await asyncio.gather(*(self._answer(group, eval_set) for group in groups))
        name = eval_set.name
        if lost := [outcome for outcome in outcomes if isinstance(outcome, EngineLostError)]:
            self.run_state.journal.warn(
                f"{name} was not evaluated: {len(lost)} of {len(groups)} problems lost their engine "
                f"{MAX_ENGINE_LOSSES} times: {lost[0]}"
            )
            return None
        failures = [outcome for outcome in outcomes if isinstance(outcome, _Failures)]
        missing = sum(len(trajectories_of(group.missing)) for group in groups)
        rewards = [reward for group in groups for reward in group.rewards]
        self._report_failures(name, groups, failures, missing, len(rewards))
        if not rewards:
            return None
        return {
            "rewards": rewards,
            "truncated": [float(truncated) for group in groups for truncated in group.truncated],
            "missing": missing,
            "versions": sorted(versions_of(sample.spans for group in groups for sample in group)),
            "samples": [sample for group in groups for sample in group],
        }

    def _report_failures(
        self, name: str, groups: Sequence[Group], failures: Sequence[_Failures], missing: int, scored: int
    ) -> None:
        wrong = [failure.wrong for failure in failures if failure.wrong is not None]
        unscored = [failure.missing for failure in failures if failure.missing is not None]
        unfinished = [cause for group in groups for cause in group.unfinished_rewards]
        if wrong:
            self.run_state.journal.warn(
                f"{len(wrong)} of {len(groups)} problems of {name} have samples that failed and score 0: {wrong[0]}"
            )
        if unfinished:
            self.run_state.journal.warn(
                f"{len(unfinished)} of {missing + scored} samples of {name} count as wrong, because their reward did "
                f"not finish: {unfinished[0]}"
            )
        if unscored:
            then = "they are missing from its results" if scored else "it was not evaluated"
            self.run_state.journal.warn(
                f"{missing} of {missing + scored} samples of {name} could not be scored, and {then}: {unscored[0]}"
            )

    async def _answer(self, group: Group, eval_set: EvalSet) -> _Failures | EngineLostError:
        """Generate and score a problem in place. The group is left without the samples that have no score.

        Returns the error instead if the problem lost its engine too often.
        """
        failures = _Failures()
        error = await self._generate(group, eval_set.generator)
        if isinstance(error, EngineLostError):
            return error
        failed: Sequence[Sample] = []
        if error is not None:
            failed = error.samples or list(group)
        if isinstance(error, InfrastructureError):
            failures.missing = error
            group.leave_out(failed)
            failed = []
        else:
            failures.wrong = error
        zero = identity_set(failed)
        answered = Group((one for one in group if one not in zero), feed_index=group.feed_index)
        unscored = await self._score(answered, eval_set.rewarder or self.rewarder)
        self.run_state.mark_progress()
        failures.missing = failures.missing or unscored
        group.leave_out(answered.missing)
        for sample in failed:
            sample.reward, sample.reward_key = 0.0, None
        return failures

    async def _score(self, group: Group, rewarder: Rewarder) -> TrajectoryError | None:
        """Score the samples, and leave out those that cannot be scored. Returns the first error."""
        first: TrajectoryError | None = None
        while group:
            error: TrajectoryError | None
            try:
                error = await score(group, rewarder, sleep=self.run_state.clock.sleep, max_attempts=self.max_attempts)
            except TrajectoryError as failure:
                error = failure
            if error is None:
                break
            first = first or error
            group.leave_out(error.samples or list(group))
        return first

    async def _generate(self, group: Group, generator: Generator) -> TrajectoryError | EngineLostError | None:
        """Generate a problem, again after an abort or the loss of an engine. Returns the error that ended it."""
        losses = interruptions = 0
        while True:
            failure: TrajectoryError | EngineLostError
            try:
                await self._request(group, generator)
                if not group.aborted:
                    return None
                failure = InfrastructureError(
                    f"problem {group.feed_index} was aborted {MAX_INTERRUPTIONS} times",
                    [sample for sample in group if sample.status is SampleStatus.ABORTED],
                )
                interruptions += 1
            except TrajectoryError as error:
                if not group.aborted:
                    return error
                # The aborted conversation of an agent cannot be continued, only restarted.
                group.reset()
                failure = InfrastructureError(str(error), list(group))
                interruptions += 1
            except EngineLostError as error:
                failure = error
                losses += not isinstance(error, RouterLostError)
            if losses == MAX_ENGINE_LOSSES or interruptions == MAX_INTERRUPTIONS:
                return failure
            await self.run_state.clock.sleep(RETRY_SECONDS)

    async def _request(self, group: Group, generator: Generator) -> None:
        """Generate once requests may be sent."""
        await self.run_state.changed.until(self.may_generate)
        self.run_state.evaluation_requests += 1
        try:
            await generator.generate(group)
        finally:
            self.run_state.evaluation_requests -= 1
            self.run_state.changed.notify()


@dataclass(eq=False, repr=False)
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

    run_state: RunState
    tasks: TaskSupervisor
    evaluate: Callable[[int], Awaitable[None]]
    may_start: Callable[[], bool]

    def __post_init__(self) -> None:
        self._waiting: int | None = None
        """The rollout of the evaluation that waits to start."""
        self._running: asyncio.Task[None] | None = None

    def add(self, rollout_id: int) -> asyncio.Task[None]:
        """Evaluate after `rollout_id` as soon as possible; skip the evaluation that still waits to start.

        The returned task ends when no evaluation runs or waits. If an evaluation fails, the run ends.
        """
        if self._waiting is not None:
            self.run_state.journal.emit(
                EvaluationSkipped(time=self.run_state.clock.time(), rollout=self._waiting, overtaken_by=rollout_id)
            )
        self._waiting = rollout_id
        if self._running is None or self._running.done():
            self._running = self.tasks.spawn("evaluation", self._run())
        return self._running

    async def _run(self) -> None:
        while self._waiting is not None:
            await self.run_state.changed.until(self.may_start)
            rollout_id, self._waiting = self._waiting, None
            await self.evaluate(rollout_id)


def _numbers(scores: Mapping[str, Any], name: str) -> list[float] | None:
    """The numbers of an entry, as floats; empty without the entry, None if it is not a list of finite numbers."""
    try:
        numbers = [finite_number(value) for value in scores.get(name, ())]
    except TypeError:
        return None
    return None if None in numbers else numbers  # type: ignore[return-value]


def _copy_prompt(problem: Sample) -> Sample:
    return Sample(index=problem.index, prompt=problem.prompt, label=problem.label, metadata=dict(problem.metadata))

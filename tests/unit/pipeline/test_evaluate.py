"""Evaluation waits for engines that come back, and names problems that fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_async.adapters.sglang.permits import Permits
from miles_async.errors import EngineLostError, InfrastructureError, RouterLostError, TrajectoryError
from miles_async.events import Evaluated, EvaluationSkipped, WarningRaised
from miles_async.pipeline.evaluate import DueEvaluations, EvalSet, Evaluator
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Requests
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import DirectJournal, Trace

pytestmark = pytest.mark.virtual_time

Attempt = Callable[[Group], None]


@dataclass
class Scripted:
    """A generator whose calls follow a script and succeed after its end."""

    script: list[Attempt]
    seen: list[int] = field(default_factory=list)
    """Response tokens that the group had at each call."""
    requests: Requests = field(default_factory=lambda: Permits(lambda: 1))

    async def generate(self, group: Group) -> None:
        self.seen.append(group.response_tokens)
        (self.script.pop(0) if self.script else ends)(group)

    async def abort(self, group: Group | None = None) -> None: ...


@dataclass
class Judge:
    async def score(self, group: Group) -> None:
        for sample in group:
            sample.reward = 1.0


def ends(group: Group) -> None:
    for sample in group:
        sample.status = SampleStatus.COMPLETED


def aborted_after_a_token(group: Group) -> None:
    for sample in group:
        sample.tokens.append(7)
        sample.response_length += 1
        sample.status = SampleStatus.ABORTED


def conversation_aborted(group: Group) -> None:
    aborted_after_a_token(group)
    raise TrajectoryError("the run took the sample back")


def engine_lost(group: Group) -> None:
    raise EngineLostError("gone")


def router_lost(group: Group) -> None:
    raise RouterLostError("connection refused")


def refused(group: Group) -> None:
    raise TrajectoryError("prompt of 99 tokens")


def continued_by_version(version: int) -> Attempt:
    def answer(group: Group) -> None:
        for sample in group:
            end = sample.response_length + 1
            sample.spans = [*sample.spans, VersionSpan(version, sample.response_length, end)]
            sample.tokens.append(7)
            sample.response_length = end
            sample.status = SampleStatus.ABORTED if version < 7 else SampleStatus.COMPLETED

    return answer


async def test_the_scores_name_every_weight_version_that_generated_their_tokens() -> None:
    problems = [Group([Sample(index=0, prompt="?")], feed_index="eval_0")]
    generator = Scripted([continued_by_version(3), continued_by_version(7)])
    sets = [EvalSet(name="held_out", problems=problems, generator=generator)]
    scores = await Evaluator(RunState(VirtualClock(), DirectJournal(Trace())), Judge(), sets, lambda: True).evaluate(0)
    assert scores["held_out"]["versions"] == [3, 7]


async def test_the_scores_name_the_version_of_the_oldest_keys_that_their_tokens_used() -> None:
    def answer(group: Group) -> None:
        for sample in group:
            sample.tokens, sample.response_length, sample.status = [7, 7], 1, SampleStatus.COMPLETED
            sample.spans = [VersionSpan(7, 0, 1, oldest_keys=5)]

    problems = [Group([Sample(index=0, prompt="?")], feed_index="eval_0")]
    sets = [EvalSet(name="held_out", problems=problems, generator=Scripted([answer]))]
    scores = await Evaluator(RunState(VirtualClock(), DirectJournal(Trace())), Judge(), sets, lambda: True).evaluate(0)
    assert scores["held_out"]["versions"] == [5, 7]


async def test_an_evaluation_that_waits_for_engines_is_skipped_when_a_newer_one_is_due() -> None:
    trace, made, serving = Trace(), list[int](), list[bool]()
    run_state = RunState(VirtualClock(), DirectJournal(trace))

    async def evaluate(rollout_id: int) -> None:
        made.append(rollout_id)

    async with TaskSupervisor() as tasks:
        due = DueEvaluations(run_state, tasks, evaluate, lambda: bool(serving))
        due.add(4)
        await run_state.clock.sleep(1.0)
        both = due.add(9)
        serving.append(True)
        run_state.changed.notify()
        await both
        await due.add(14)
    assert made == [9, 14]
    assert [(event.rollout, event.overtaken_by) for event in trace.of(EvaluationSkipped)] == [(4, 9)]


async def evaluated(*script: Attempt) -> tuple[list[float], list[int], list[str]]:
    """Rewards, response tokens at each call, warnings."""
    trace, generator = Trace(), Scripted(list(script))
    run_state = RunState(VirtualClock(), DirectJournal(trace))
    problems = [Group([Sample(index=0, prompt="?")], feed_index="eval_0")]
    sets = [EvalSet(name="held_out", problems=problems, generator=generator)]
    scores = await Evaluator(run_state, Judge(), sets, lambda: True).evaluate(0)
    rewards = scores["held_out"]["rewards"] if scores else []
    return rewards, generator.seen, [event.text for event in trace.of(WarningRaised)]


@pytest.mark.parametrize("times", [1, 100])
async def test_an_answer_that_ends_of_batches_abort_is_continued_any_number_of_times(times: int) -> None:
    rewards, seen, warnings = await evaluated(*[aborted_after_a_token] * times)
    assert (rewards, seen, warnings) == ([1.0], list(range(times + 1)), [])


async def test_an_aborted_conversation_of_an_agent_starts_again() -> None:
    rewards, seen, warnings = await evaluated(conversation_aborted, conversation_aborted)
    assert (rewards, seen, warnings) == ([1.0], [0, 0, 0], [])


async def test_a_problem_that_loses_five_engines_ends_the_evaluation_without_a_score() -> None:
    assert (await evaluated(*[engine_lost] * 4))[0] == [1.0]
    rewards, _, [warning] = await evaluated(*[engine_lost] * 5)
    assert rewards == []
    assert warning == "held_out was not evaluated: 1 of 1 problems lost their engine 5 times: gone"


async def test_an_evaluation_waits_for_the_router_without_a_limit() -> None:
    rewards, _, warnings = await evaluated(*[router_lost] * 200)
    assert (rewards, warnings) == ([1.0], [])


async def test_a_problem_that_cannot_be_answered_scores_zero_and_is_reported() -> None:
    rewards, seen, [warning] = await evaluated(refused)
    assert (rewards, seen) == ([0.0], [0])
    assert "prompt of 99 tokens" in warning


async def test_an_answer_that_is_aborted_again_and_again_is_given_up() -> None:
    rewards, seen, [warning] = await evaluated(*[aborted_after_a_token] * 1000)
    assert (rewards, len(seen)) == ([], 300)
    assert "1 of 1 samples of held_out could not be scored, and it was not evaluated" in warning
    assert "was aborted 300 times" in warning


@dataclass
class Evaluation:
    """An evaluation of 16 samples of one problem."""

    scores: dict[str, Any]
    warnings: list[str]
    event: Evaluated | None
    calls: list[int | None]
    """The samples for which the reward was called, in order."""


async def scored_by(reward: Callable[[Sample, int], float], *script: Attempt, own: Any = None) -> Evaluation:
    """Evaluate with `reward(sample, number of its call for this sample)`, or with the data set's rewarder `own`."""
    calls: list[int | None] = []

    async def function(args: Any, sample: Sample) -> float:
        calls.append(sample.index)
        return reward(sample, calls.count(sample.index))

    trace = Trace()
    run_state = RunState(VirtualClock(), DirectJournal(trace))
    rewarder = Rewarder(function, None, name="judge", timeout_seconds=60.0)
    problems = [Group([Sample(index=i, prompt="?") for i in range(16)], feed_index="eval_0")]
    sets = [EvalSet(name="aime", problems=problems, generator=Scripted(list(script)), rewarder=own)]
    evaluator = Evaluator(run_state, rewarder, sets, lambda: True, max_attempts=3)
    scores = await evaluator.evaluate(0)
    evaluator.report(0, scores, 1.0, (0, 0))
    warnings = [event.text for event in trace.of(WarningRaised)]
    return Evaluation(scores.get("aime", {}), warnings, next(iter(trace.of(Evaluated)), None), calls)


async def test_a_sample_whose_reward_server_fails_is_scored_again_alone() -> None:
    def restarts(sample: Sample, call: int) -> float:
        if sample.index == 2 and call < 3:
            raise ConnectionError("reward server restarted")
        return 1.0

    evaluation = await scored_by(restarts)
    assert evaluation.scores["rewards"] == [1.0] * 16
    assert (evaluation.scores["missing"], evaluation.warnings) == (0, [])
    assert evaluation.calls == [*range(16), 2, 2]


def never_judges_the_third(sample: Sample, call: int) -> float:
    if sample.index == 2:
        raise ConnectionError("reward server is gone")
    return 1.0


def has_a_bug(sample: Sample, call: int) -> float:
    return 1.0 if sample.index != 2 else float(sample.metadata["score"])


@pytest.mark.parametrize(
    "reward, cause", [(never_judges_the_third, "ConnectionError: reward server is gone"), (has_a_bug, "KeyError")]
)
async def test_a_sample_that_cannot_be_scored_is_missing_and_not_wrong(reward: Any, cause: str) -> None:
    evaluation = await scored_by(reward)
    assert (evaluation.scores["rewards"], evaluation.scores["missing"]) == ([1.0] * 15, 1)
    assert len(evaluation.scores["truncated"]) == 15
    [warning] = evaluation.warnings
    assert warning.startswith(
        "1 of 16 samples of aime could not be scored, and they are missing from its results: sample 2: reward judge"
    )
    assert cause in warning
    event = evaluation.event
    assert event is not None
    assert (event.accuracy, event.reward, event.problems, event.missing) == (1.0, 1.0, 15, 1)


async def test_a_data_set_without_any_score_is_left_out() -> None:
    def down(sample: Sample, call: int) -> float:
        raise ConnectionError("reward server is gone")

    evaluation = await scored_by(down)
    assert (evaluation.scores, evaluation.event) == ({}, None)
    [warning] = evaluation.warnings
    assert warning.startswith("16 of 16 samples of aime could not be scored, and it was not evaluated")


def failing(error: type[TrajectoryError]) -> Attempt:
    def attempt(group: Group) -> None:
        ends(group)
        raise error("sample 5: the tool failed", [group[5]])

    return attempt


async def test_a_sample_whose_tool_server_fails_is_missing_and_the_others_are_scored() -> None:
    evaluation = await scored_by(lambda sample, call: 1.0, failing(InfrastructureError))
    assert (evaluation.scores["rewards"], evaluation.scores["missing"]) == ([1.0] * 15, 1)
    assert 5 not in evaluation.calls


async def test_a_sample_that_cannot_be_answered_scores_zero_and_the_others_keep_their_scores() -> None:
    evaluation = await scored_by(lambda sample, call: 1.0, failing(TrajectoryError))
    assert evaluation.scores["rewards"] == [1.0] * 5 + [0.0] + [1.0] * 10
    assert evaluation.scores["missing"] == 0
    [warning] = evaluation.warnings
    assert warning.startswith("1 of 1 problems of aime have samples that failed and score 0: sample 5: the tool failed")


async def test_a_data_set_may_have_its_own_reward() -> None:
    async def half(args: Any, sample: Sample) -> float:
        return 0.5

    evaluation = await scored_by(lambda sample, call: 1.0, own=Rewarder(half, None, name="half", timeout_seconds=60.0))
    assert (evaluation.scores["rewards"], evaluation.calls) == ([0.5] * 16, [])

"""Functions of users log batches and evaluations with slime's arguments."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.columns.column import NO_LIMITS
from miles_async.compat.slime.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles_async.errors import UserError
from miles_async.pipeline.run_ports import RunFunctions
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.sim.world import DirectJournal, Trace
from workers.functions import run_functions
from workers.rollout_logs import RolloutLogs

SCORES = {"aime": {"rewards": [1.0, 0.0], "truncated": [False, True]}}


def rollout(args: Arguments, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    if evaluation:
        return RolloutFnEvalOutput(SCORES, {"judge": 0.5})
    return RolloutFnTrainOutput([group()], {"retries": 2})


def log_batch(
    rollout_id: int, args: Arguments, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    args.logged = (rollout_id, [sample.index for sample in samples], rollout_extra_metrics, rollout_time)
    return True


def log_evaluation(rollout_id: int, args: Arguments, data: Any, extra_metrics: Any) -> bool:
    args.logged = (rollout_id, json.dumps(data), extra_metrics)
    return True


def broken(*arguments: Any) -> None:
    raise KeyError("logger")


def group() -> Group:
    def sample(index: int) -> Sample:
        return Sample(
            index=index,
            tokens=[1, 2],
            response_length=1,
            rollout_log_probs=[-1.0],
            reward=float(index),
            status=SampleStatus.COMPLETED,
            spans=[VersionSpan(0, 0, 1)],
        )

    return Group([sample(6), sample(7)], feed_index="sample_0_3")


def run(**settings: Any) -> tuple[RunFunctions, RolloutLogs, Arguments]:
    own = {"rollout_function_path": f"{__name__}.rollout", **settings}
    config = run_config(rollout_batch_size=1, n_samples_per_prompt=2, **own)
    args = flat_args(config)
    logs = RolloutLogs(config, args)
    generators: Any = SimpleNamespace(args=args, limits=NO_LIMITS, engine_client=SimpleNamespace(score_logprobs=None))
    return run_functions(config, "train.py", generators, None, DirectJournal(Trace()), logs), logs, args


async def batch(functions: RunFunctions, logs: RolloutLogs) -> None:
    source: Any = SimpleNamespace(live_version=0, trainer_version=0, version_when_taken=lambda sample: 0)
    logs.begin(3)
    assert functions.rollout is not None
    await functions.prepare(3, await functions.rollout(3, source, 1))


async def test_a_batch_is_logged_with_the_metrics_of_the_rollout_function() -> None:
    functions, logs, args = run(custom_rollout_log_function_path=f"{__name__}.log_batch")
    await batch(functions, logs)
    rollout_id, indices, metrics, seconds = args.logged
    assert (rollout_id, indices, metrics) == (3, [6, 7], {"retries": 2})
    assert seconds > 0


def silent_rollout(args: Arguments, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return [group()]


async def test_without_metrics_of_the_rollout_function_there_are_none() -> None:
    log = f"{__name__}.log_batch"
    functions, logs, args = run(
        rollout_function_path=f"{__name__}.silent_rollout", custom_rollout_log_function_path=log
    )
    await batch(functions, logs)
    assert args.logged[2] is None


async def test_an_evaluation_is_logged_with_the_metrics_of_its_function() -> None:
    own, log = f"{__name__}.rollout", f"{__name__}.log_evaluation"
    functions, _, args = run(eval_function_path=own, custom_eval_rollout_log_function_path=log)
    source: Any = None
    assert functions.evaluate is not None
    assert await functions.evaluate(3, source) == SCORES
    assert args.logged == (3, json.dumps(SCORES), {"judge": 0.5})


class Source:
    """Evaluates the data sets of the run."""

    async def evaluate(self, rollout_id: int) -> Any:
        return SCORES


async def test_an_evaluation_of_the_run_itself_is_logged_too() -> None:
    functions, _, args = run(custom_eval_rollout_log_function_path=f"{__name__}.log_evaluation")
    source: Any = Source()
    assert functions.evaluate is not None
    assert await functions.evaluate(3, source) == SCORES
    assert args.logged == (3, json.dumps(SCORES), None)


@pytest.mark.parametrize("setting", ["custom_rollout_log_function_path", "custom_eval_rollout_log_function_path"])
async def test_a_function_that_raises_ends_the_run_with_its_name(setting: str) -> None:
    functions, _, _ = run(**{setting: f"{__name__}.broken"})
    source: Any = Source()
    work = functions.prepare(3, [group()]) if functions.evaluate is None else functions.evaluate(3, source)
    with pytest.raises(UserError, match=rf"^{setting} {__name__}.broken raised KeyError\('logger'\)"):
        await work

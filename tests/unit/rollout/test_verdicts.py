"""What users' filters, evaluations and rollout functions may return, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from miles_async.errors import TrajectoryError, UserError
from miles_async.events import GroupFiltered
from miles_async.pipeline.run_ports import Ports
from miles_async.rollout.contract import call_rollout_function, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, Sample, Verdict
from tests.configuration import run_config
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Feed, Trace, World
from workers.functions import BatchPreparation, dynamic_filter, evaluation_function
from workers.preflight import preflight


@dataclass
class DynamicFilterOutput:
    """The fields of slime's class (slime/rollout/filter_hub/base_types.py at 624b824a)."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


@dataclass
class OutputOfMiles:
    """The fields of Miles' class (miles/rollout/filter_hub/base_types.py at 31f1ca96)."""

    keep: bool
    reason: str | None = None


def spread(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Returns a tensor in `keep`, as slime's filter does."""
    keep: Any = torch.tensor([sample.get_reward_value(args) for sample in samples]).std() > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{samples[0].reward}")


def spread_with_fallback(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    return replace(spread(args, samples), keep_when_insufficient=True)


def reject(args: Any, samples: Group) -> OutputOfMiles:
    return OutputOfMiles(False, "never")


@dataclass
class UnevenRewards:
    """Rewards the samples of every second group differently, and those of all others equally."""

    async def score(self, group: Group) -> None:
        for position, sample in enumerate(group):
            sample.reward = float(position if int(group.feed_index.rpartition("_")[2]) % 2 else 1)


class UnevenWorld(World):
    def _ports(self, clock: VirtualClock) -> Ports:
        return replace(super()._ports(clock), rewarder=UnevenRewards())


def world(kind: type[World], function: Any, schedule: Schedule, **settings: Any) -> World:
    sizes = {"rollout_batch_size": 4, "num_rollout": 5, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    chosen = run_config(**sizes, **settings, dynamic_sampling_filter_path=f"{__name__}.{function.__name__}")
    return kind(config=chosen, keep=dynamic_filter(chosen, flat_args(chosen)), schedule=schedule).run()


@pytest.mark.parametrize("schedule", Schedule)
def test_a_filter_of_slime_drops_the_groups_without_variance(schedule: Schedule) -> None:
    finished = world(UnevenWorld, spread, schedule, over_sampling_batch_size=8)
    trained = [name for batch in finished.trainer.batches for name in batch]
    assert [len(batch) for batch in finished.trainer.batches] == [4] * 5
    assert {int(name.rpartition("_")[2]) % 2 for name in trained} == {1}
    assert {event.reason for event in finished.trace.of(GroupFiltered)} == {"zero_std_1.0"}


@pytest.mark.parametrize("schedule, dropped", [(Schedule.SYNCHRONOUS, 3), (Schedule.ONE_STEP_OFF, 3)])
def test_rejected_groups_are_kept_if_too_few_candidates_would_be_left(schedule: Schedule, dropped: int) -> None:
    """All rewards are 1. slime drops 3 of 7 groups per batch, because 4 are needed (`should_drop_dynamic_filter_output`
    of slime/rollout/filter_hub/base_types.py at 624b824a)."""
    finished = world(World, spread_with_fallback, schedule, over_sampling_batch_size=7)
    assert [len(batch) for batch in finished.trainer.batches] == [4] * 5
    assert len(finished.trace.of(GroupFiltered)) == dropped * 5


def test_the_stream_drops_rejected_groups_even_if_the_filter_wants_to_fall_back() -> None:
    finished = world(UnevenWorld, spread_with_fallback, Schedule.FULLY_ASYNC)
    trained = [name for batch in finished.trainer.batches for name in batch]
    assert {int(name.rpartition("_")[2]) % 2 for name in trained} == {1}


@pytest.mark.parametrize(
    "returned, verdict",
    [
        (True, Verdict(True)),
        (False, Verdict(False)),
        (np.bool_(False), Verdict(False)),
        (np.asarray(True), Verdict(True)),
        (torch.tensor(False), Verdict(False)),
        (Verdict(False, "odd"), Verdict(False, "odd")),
        (Verdict(np.bool_(False), "odd"), Verdict(False, "odd")),  # type: ignore[arg-type]
        (OutputOfMiles(False), Verdict(False, "filter")),
        (OutputOfMiles(False, "aborted"), Verdict(False, "aborted")),
        (OutputOfMiles(False, 0.5), Verdict(False, "0.5")),  # type: ignore[arg-type]
        (DynamicFilterOutput(True), Verdict(True)),
        (DynamicFilterOutput(False, "a", keep_when_insufficient=True), Verdict(False, "a", True)),
    ],
)
def test_a_verdict_is_a_bool_or_has_keep_and_reason(returned: Any, verdict: Verdict) -> None:
    found = Verdict.of(returned)
    assert found == verdict
    assert [type(found.keep), type(found.keep_when_insufficient)] == [bool, bool]


WRONG: dict[str, Any] = {
    "nothing": None,
    "number": 1,
    "text": "keep",
    "list": [True],
    "dictionary": {"keep": False},
    "vector": np.asarray([True, False]),
    "float": np.float64(0.5),
    "object": OutputOfMiles(None),  # type: ignore[arg-type]
}


def returns(name: str) -> str:
    return f"{__name__}.{name}"


def __getattr__(name: str) -> Any:
    """The filters that return what `WRONG` names."""
    if name not in WRONG:
        raise AttributeError(name)
    return lambda args, group: WRONG[name]


@pytest.mark.parametrize("name", WRONG)
def test_a_filter_that_returns_no_verdict_ends_the_run_and_is_told_what_to_return(name: str) -> None:
    chosen = run_config(dynamic_sampling_filter_path=returns(name), rollout_batch_size=2, num_rollout=1)
    expected = rf"dynamic_sampling_filter_path {re.escape(returns(name))} returned .*: return True to keep the group or"
    with pytest.raises(UserError, match=expected):
        World(config=chosen, keep=dynamic_filter(chosen, flat_args(chosen))).run()


def broken(args: Any, group: Group) -> bool:
    raise TypeError("of the function itself")


def test_a_filter_that_raises_a_type_error_fails_the_group_as_any_other_error_does() -> None:
    chosen = run_config(dynamic_sampling_filter_path=returns("broken"))
    with pytest.raises(TrajectoryError, match="raised TypeError"):
        dynamic_filter(chosen, flat_args(chosen))(Group([Sample()]))


def sort_in_place(groups: list[Group]) -> Any:
    groups.reverse()


def test_an_over_sampling_filter_that_returns_nothing_is_told_what_to_return() -> None:
    chosen = run_config(rollout_batch_size=4, over_sampling_batch_size=6, num_rollout=1, n_samples_per_prompt=2)
    with pytest.raises(UserError, match=r"over_sampling_filter_path raised TypeError.*return the groups it was"):
        World(config=chosen, schedule=Schedule.SYNCHRONOUS, choose=sort_in_place).run()


def shorter(args: Any, groups: list[Group]) -> list[Group]:
    return groups[:1]


def unchanged(args: Any, groups: list[Group]) -> list[Group]:
    return groups


async def test_a_sample_filter_whose_result_would_be_ignored_is_refused() -> None:
    batch = [Group([Sample(reward=1.0)]), Group([Sample(reward=1.0)])]
    for name in ("unchanged", "shorter"):
        chosen = run_config(rollout_sample_filter_path=returns(name))
        prepare = BatchPreparation(chosen, flat_args(chosen), Trace())
        if name == "unchanged":
            await prepare(0, batch)
            continue
        with pytest.raises(UserError, match="shorter returned a list, which is not used: set"):
            await prepare(0, batch)


def one_pair(sample: Sample) -> Any:
    return "ab", "cd"


def test_warm_start_examples_that_are_no_pairs_are_refused() -> None:
    """Without a list around it, one pair was taken for two pairs of letters."""
    chosen = run_config(
        reasoning_gym_task="chain_sum",
        rm_type="reasoning_gym",
        warm_start_max_steps=1,
        warm_start_examples_path=returns("one_pair"),
    )
    with pytest.raises(UserError, match=r"one_pair returned \['ab', 'cd'\]: return a list of pairs \(prompt, answer\)"):
        preflight(chosen)


def mean_accuracy(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    return {"mine": 0.5}


async def test_an_evaluation_that_returns_no_rewards_is_told_what_to_return() -> None:
    chosen = run_config(eval_function_path=returns("mean_accuracy"))
    evaluate = evaluation_function(chosen, flat_args(chosen))
    assert evaluate is not None
    source: Any = None
    with pytest.raises(UserError, match=r"mean_accuracy returned \{'mine': 0.5\}: return \{name: \{\"rewards\":"):
        await evaluate(0, source)


@dataclass
class RolloutFnTrainOutput:
    """The fields of slime's class, which may come from a checkout."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


async def test_the_output_of_slimes_own_class_is_taken() -> None:
    groups = [[Sample(index=0)]]
    args = flat_args(run_config())
    source: Any = Feed()
    result = await call_rollout_function(
        lambda *arguments, evaluation: RolloutFnTrainOutput(groups), args, 0, source, evaluation=False
    )
    assert result is groups

"""A function of the user gets all finished groups of a batch, those that filters reject included, as in slime."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import pytest

from miles_async.errors import UserError
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.rollout.contract import Arguments, RolloutFunctionAdapter, flat_args
from miles_async.rollout.sglang_rollout import generate_rollout
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.sim.world import World


def remember(args: Arguments, all_groups: list[Group], data_source: RolloutSource) -> None:
    data_source.metadata.setdefault("seen", []).append([group.feed_index for group in all_groups])


def youngest_first(args: Arguments, groups: list[Group]) -> list[Group]:
    return groups[::-1]


def broken(args: Arguments, all_groups: list[Group], data_source: RolloutSource) -> None:
    raise ValueError("too many")


async def no_scores(sample: Sample) -> None:
    sample.rollout_log_probs = [-0.5] * sample.response_length


@dataclass(kw_only=True)
class BatchRun(World):
    """A run with the rollout function for batches, in real time, because the function of the user has a thread."""

    def _rollout_function(self) -> RolloutFunction:
        args = flat_args(self.config)
        return RolloutFunctionAdapter(generate_rollout, args, self.config, score_tokens=no_scores)

    def run(self) -> Self:
        asyncio.run(self._run())
        return self


def world(function: str, **settings: Any) -> BatchRun:
    own = {"rollout_all_samples_process_path": f"{__name__}.{function}", **settings}
    sizes = {"rollout_batch_size": 4, "num_rollout": 3, "n_samples_per_prompt": 2}
    return BatchRun(
        config=run_config(**sizes, **own),
        schedule=Schedule.SYNCHRONOUS,
        keep=lambda group: bool(group.sequence),
        latency=lambda group, rng: 0.01,
        train_seconds=0.01,
    )


@pytest.mark.parametrize("chooses", [False, True], ids=["dynamic filter", "over-sampling filter too"])
def test_the_function_gets_the_groups_that_filters_reject_too(chooses: bool) -> None:
    settings: dict[str, Any] = {}
    if chooses:
        settings = {"over_sampling_batch_size": 6, "over_sampling_filter_path": f"{__name__}.youngest_first"}
    run = world("remember", **settings).run()
    [first, second, third] = run.feed.metadata["seen"]
    trained = [set(batch) for batch in run.trainer.batches]
    dropped = {"sample_0_0"} | ({"sample_0_1", "sample_0_2"} if chooses else set())
    assert set(first) == trained[0] | dropped
    assert first == sorted(first, key=lambda name: int(name.rpartition("_")[2]))
    if not chooses:
        assert (set(second), set(third)) == (trained[1], trained[2])
    assert run.audit.violations == []


def test_a_function_that_raises_ends_the_run_with_its_name() -> None:
    with pytest.raises(UserError, match=rf"^rollout_all_samples_process_path {__name__}.broken raised ValueError"):
        world("broken").run()

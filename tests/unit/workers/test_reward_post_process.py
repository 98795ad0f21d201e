"""A function of the user computes what is trained on from the rewards of a whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from miles_async.adapters.ray.learner import RayLearner
from miles_async.batching.batch import TrainStep
from miles_async.errors import UserError
from miles_async.pipeline.training import metadata_means
from miles_async.rollout.contract import flat_args
from miles_async.types import Group, Sample, StepReport
from tests.configuration import run_config
from workers.functions import conversion, packs_ahead, reward_post_process


class OneRank:
    """Keeps the batch that it receives."""

    actors = (None,)

    def __init__(self) -> None:
        self.steps: list[TrainStep] = []

    async def on_first(self, method: str) -> bool:
        return False

    async def give_batch(self, rank: int, rollout_id: int, sequences: Any, part: list[TrainStep]) -> None:
        self.steps = part

    async def on_all(self, method: str, rollout_id: int, adapter: str) -> list[StepReport]:
        return [StepReport(seconds=1.0, tokens=1, finite=True, metrics={"memory_gib": 0.0})]


def best_of_batch(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The rewards less one more than the best one of the batch."""
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [args.custom_scale * (reward - max(raw) - 1) for reward in raw]


def too_few(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [0.0], [0.0]


def broken(args: Any, samples: list[Sample]) -> None:
    raise KeyError("teacher")


def first_sample_masked(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """slime's dictionary, with the squared rewards, and without the tokens of the first sample in the loss."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.scalar_reward**2 for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "loss_masks": [[0 if sample is samples[0] else 1] * sample.response_length for sample in samples],
    }


def without_a_sample(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return first_sample_masked(args, samples[1:])


def other_tokens(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {"tokens": [[9, 9] for _ in samples], "rewards": [0.0] * len(samples)}


def long_masks(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {"loss_masks": [[1] * 5 for _ in samples], "rewards": [0.0] * len(samples)}


def without_rewards(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {"loss_masks": [sample.loss_mask for sample in samples]}


def batch() -> list[Group]:
    def sample(index: int, reward: float) -> Sample:
        return Sample(index=index, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=reward)

    rewards = [[1.0, 2.0], [3.0, 5.0]]
    return [
        Group([sample(2 * number + i, reward) for i, reward in enumerate(of_group)], sequence=number)
        for number, of_group in enumerate(rewards)
    ]


async def trained(monkeypatch: pytest.MonkeyPatch, groups: list[Group], **settings: Any) -> list[float]:
    """The advantages of the samples in order of their index."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    config = run_config(rollout_batch_size=2, n_samples_per_prompt=2, custom_args={"custom_scale": 2.0}, **settings)
    ranks: Any = OneRank()
    args = flat_args(config)
    post_process = conversion(config, args) or reward_post_process(config, args)
    learner = RayLearner(config, ranks, "run", post_process=post_process)
    await learner.train(0, groups)
    return sorted(value for step in ranks.steps for one in step.micro_batches for value in one.advantages.tolist())


@pytest.mark.parametrize("estimator, whitened", [("grpo", False), ("reinforce_plus_plus", True)])
async def test_the_rewards_that_the_function_returns_are_the_advantages(
    monkeypatch: pytest.MonkeyPatch, estimator: str, whitened: bool
) -> None:
    """REINFORCE++ normalizes them over the batch."""
    groups = batch()
    path = f"{__name__}.best_of_batch"
    found = await trained(monkeypatch, groups, advantage_estimator=estimator, custom_reward_post_process_path=path)
    if whitened:
        assert found[0] < -1 < found[1] < 0 < found[2] < 1 < found[3]
        assert sum(found) == pytest.approx(0, abs=1e-5)
    else:
        assert found == [-10.0, -8.0, -6.0, -2.0]
    assert metadata_means([sample for group in groups for sample in group]) == {"raw_reward": 2.75}


@pytest.mark.parametrize(
    "function, failure",
    [
        ("broken", r"raised KeyError\('teacher'\)"),
        ("too_few", "return raw_rewards and rewards, lists of 4 numbers"),
    ],
)
async def test_a_function_that_cannot_be_used_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, function: str, failure: str
) -> None:
    path = f"{__name__}.{function}"
    with pytest.raises(UserError, match=f"^custom_reward_post_process_path {path} .*{failure}"):
        await trained(monkeypatch, batch(), custom_reward_post_process_path=path)


async def test_masks_and_rewards_of_slimes_training_data_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = batch()
    path = f"{__name__}.first_sample_masked"
    found = await trained(monkeypatch, groups, custom_convert_samples_to_train_data_path=path)
    assert found == [4.0, 9.0, 25.0], "one advantage per token that is trained"
    assert metadata_means([sample for group in groups for sample in group]) == {"raw_reward": 2.75}


@pytest.mark.parametrize(
    "function, failure",
    [
        ("broken", r"raised KeyError\('teacher'\)"),
        ("without_rewards", r"raised KeyError\('rewards'\): return a dictionary with rewards, and lists of numbers"),
        ("without_a_sample", "returned lists of other lengths: return 4 entries, one per sample"),
        ("other_tokens", "changed the tokens of sample 0: do that in rollout_sample_hook_path"),
        ("long_masks", "returned an invalid value: sample 0"),
    ],
)
async def test_training_data_that_cannot_be_used_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, function: str, failure: str
) -> None:
    path = f"{__name__}.{function}"
    with pytest.raises(UserError, match=f"^custom_convert_samples_to_train_data_path {path} .*{failure}"):
        await trained(monkeypatch, batch(), custom_convert_samples_to_train_data_path=path)


@pytest.mark.parametrize("setting", ["custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"])
def test_a_batch_that_the_function_sees_is_not_packed_before_it_is_taken(setting: str) -> None:
    config = run_config(rollout_function_path="stream")
    assert packs_ahead(config, "train_async.py")
    changed = run_config(rollout_function_path="stream", **{setting: f"{__name__}.too_few"})
    assert not packs_ahead(changed, "train_async.py")

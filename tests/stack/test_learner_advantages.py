"""Inputs of the loss that one optimizer step or batch has in common, on one rank of the real learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.advantages import discounted_returns, normalize
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import PackedBatch, TrainStep, rank_batches
from miles_async.types import Group, Sample
from tests.stack.learning import TINY, learning
from tests.stack.test_learner_settings import batch, config
from tests.torch.recorded_losses import recorded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in ((1, "tiny"), (2, "reference")):
        create_tiny_model(TINY, root / name, seed=seed)
    return root / "tiny"


def on_policy(learner: MegatronLearner, groups: list[Group]) -> list[Group]:
    """The groups with the log-probabilities that the learner gives their tokens."""
    for sample in (sample for group in groups for sample in group):
        [logprobs] = learner.logprobs([sample.tokens])
        sample.rollout_log_probs = logprobs[-sample.response_length :]
    return groups


def test_m2po_clips_tokens_that_earlier_steps_on_the_batch_have_moved(tiny: Path) -> None:
    run = config(policy_objective="m2po", off_policy_correction="none", lr=0.1)
    with learning(tiny, run) as learner:
        groups = on_policy(learner, batch(0))
        [[one_step]] = rank_batches(groups, config(num_steps_per_rollout=1), 1)
        assert learner.train(0, [one_step]).metrics["clip_fraction"] == 0
    with learning(tiny, run) as learner:
        # The second step trains the same samples, whose ratios the first one has moved away from 1.
        report = learner.train(0, [one_step, one_step])
        assert report.finite
        assert report.metrics["clip_fraction"] > 0.1


def responses(case: dict[str, Any]) -> list[Group]:
    """The recorded responses in groups of three. The first token of each is its number."""
    samples = [
        Sample(
            index=i,
            tokens=[i] * (1 + len(mask)),
            response_length=len(mask),
            loss_mask=mask,
            rollout_log_probs=[-1.0] * len(mask),
            reward=reward,
        )
        for i, (mask, reward) in enumerate(zip(case["masks"], case["rewards"], strict=True))
    ]
    return [Group(samples[:3]), Group(samples[3:])]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    "project, estimator",
    [
        ("slime", "reinforce_plus_plus"),
        ("openrlhf", "reinforce_plus_plus"),
        ("openrlhf", "reinforce_plus_plus_baseline"),
    ],
)
def test_reinforce_plus_plus_normalizes_returns_with_their_kl_penalty_like_other_implementations(
    tiny: Path, project: str, estimator: str, steps: int
) -> None:
    [case] = recorded(project)
    run = config(advantage_estimator=estimator, kl_coef=0.3, num_steps_per_rollout=steps, max_tokens_per_gpu=10)
    with learning(tiny, run):  # for its process groups
        [packed] = rank_batches(responses(case), run, 1)
        assert sum(len(step.micro_batches) for step in packed) > steps
        returns = [discounted_returns(step, penalties(case, step), 1.0, torch.device("cpu")) for step in packed]
        found = normalize(returns, torch.device("cpu"))
    theirs = [
        torch.tensor(
            [advantage for advantage, trained in zip(case[estimator][i], case["masks"][i], strict=True) if trained]
        )
        for step in packed
        for packed_batch in step.micro_batches
        for i in numbers(packed_batch)
    ]
    ours = torch.cat([one for step in found for one in step])
    # slime and we divide by the deviation of a sample (n - 1), OpenRLHF by that of all n tokens.
    factor = ((len(ours) - 1) / len(ours)) ** 0.5 if project == "openrlhf" else 1.0
    assert torch.allclose(ours, torch.cat(theirs) * factor, atol=1e-4)
    assert ours.mean().item() == pytest.approx(0, abs=1e-6)
    assert ours.std().item() == pytest.approx(1, abs=1e-5)


def numbers(packed: PackedBatch) -> list[int]:
    """The numbers of the responses in a micro-batch."""
    return packed.tokens[np.cumsum(packed.lengths) - packed.lengths].tolist()


def penalties(case: dict[str, Any], step: TrainStep) -> list[torch.Tensor]:
    """The recorded divergences of the trained tokens, times the coefficient."""
    return [
        case["kl_coef"] * torch.tensor([
            divergence
            for i in numbers(packed)
            for divergence, trained in zip(case["divergences"][i], case["masks"][i], strict=True)
            if trained
        ])
        for packed in step.micro_batches
    ]  # fmt: skip


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_kl_penalty_is_normalized_with_the_rewards_over_all_steps_of_the_batch(tiny: Path, estimator: str) -> None:
    run = config(
        advantage_estimator=estimator,
        kl_coef=1.0,
        kl_loss_type="k1",
        ref_load=str(tiny.parent / "reference"),
        max_tokens_per_gpu=16,
    )
    groups = [*batch(0), *batch(1)]
    with learning(tiny, run) as learner:
        [steps] = rank_batches(groups, run, 1)
        values = learner._pre_step_values(0, steps)
        found = torch.cat([one for step in values for one in step.advantages or []])
        policy = torch.cat([one for step in values for one in step.old_logprobs or []])
        reference = torch.cat([one for step in values for one in step.reference or []])
        report = learner.train(0, steps)
    rewards = torch.cat([torch.from_numpy(one.advantages) for step in steps for one in step.micro_batches])
    assert not torch.allclose(policy, reference)
    # Four tokens per response: the penalty of a token counts for it and for the earlier ones.
    penalty = (policy - reference).reshape(-1, 4).flip(1).cumsum(1).flip(1).flatten()
    returns = rewards - penalty
    assert torch.allclose(found, (returns - returns.mean()) / returns.std(), atol=1e-4)
    assert report.finite
    assert report.metrics["kl"] != 0


@pytest.mark.parametrize("estimator, discount", [("reinforce_plus_plus", 0.5), ("reinforce_plus_plus_baseline", 1.0)])
def test_gamma_discounts_the_rewards_of_reinforce_plus_plus_before_they_are_normalized(
    tiny: Path, estimator: str, discount: float
) -> None:
    """As in slime, verl and OpenRLHF, none of which discounts with the baseline of the group."""
    run = config(advantage_estimator=estimator, gamma=0.5, max_tokens_per_gpu=16)
    with learning(tiny, run) as learner:
        [steps] = rank_batches([*batch(0), *batch(1)], run, 1)
        values = learner._pre_step_values(0, steps)
        found = [
            torch.from_numpy(one.advantages) if own.advantages is None else own.advantages[number]
            for step, own in zip(steps, values, strict=True)
            for number, one in enumerate(step.micro_batches)
        ]
    # Four tokens per response.
    rewards = torch.tensor([sample.scalar_reward for group in (*batch(0), *batch(1)) for sample in group])
    returns = rewards[:, None] * torch.tensor([discount**3, discount**2, discount, 1])
    expected = (returns - returns.mean()) / returns.std()
    ours = torch.cat(found).reshape(-1, 4)
    # Packing and the division into steps change the order of the samples.
    assert torch.allclose(ours[ours[:, 3].argsort()], expected[expected[:, 3].argsort()], atol=1e-4)


def test_advantages_of_a_critic_are_normalized_over_all_steps_of_the_batch(tiny: Path) -> None:
    run = config(advantage_estimator="ppo", normalize_advantages=True)
    groups = [*batch(0), *batch(1)]
    for number, sample in enumerate(sample for group in groups for sample in group):
        sample.index, sample.reward = number, float(number)
    with learning(tiny, run) as learner:
        [steps] = rank_batches(groups, run, 1)
        found = [torch.cat(values.advantages or []) for values in learner._pre_step_values(0, steps)]
    both = torch.cat(found)
    assert (both.mean().item(), both.std().item()) == pytest.approx((0, 1), abs=1e-5)
    assert found[0].mean().item() < -0.5 < 0.5 < found[1].mean().item()


def test_rewards_that_differ_little_are_normalized_and_one_that_is_not_finite_spoils_all(tiny: Path) -> None:
    device = torch.device("cpu")
    with learning(tiny, config()):
        large = torch.tensor([1e4, 1e4 + 0.125, 1e4, 1e4 + 0.125])
        [[found]] = normalize([[large]], device)
        assert found.tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2, abs=1e-4)
        assert normalize([[torch.full((3,), 0.7)]], device)[0][0].abs().max() < 1e-6
        assert normalize([[]], device) == [[]]
        spoiled = normalize([[torch.tensor([1.0, float("inf")])], [torch.tensor([2.0])]], device)
        assert [one.isnan().all().item() for step in spoiled for one in step] == [True, True]

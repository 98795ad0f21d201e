from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from miles_async.losses.critic import critic_loss, critic_metrics, generalized_advantages, last_token_rewards

LENGTHS = (7, 1, 4)
SEQUENCES = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))


@pytest.mark.parametrize("discount, decay", [(1.0, 0.95), (0.99, 0.0), (0.9, 1.0)])
def test_generalized_advantages_are_discounted_sums_of_temporal_differences(discount: float, decay: float) -> None:
    random = np.random.default_rng(1)
    rewards, values = random.normal(size=12), random.normal(size=12)
    expected = []
    for reward, value in zip(np.split(rewards, (7, 8)), np.split(values, (7, 8)), strict=True):
        surprise = reward + discount * np.append(value[1:], 0) - value
        n = len(reward)
        expected += [sum((discount * decay) ** (k - t) * surprise[k] for k in range(t, n)) for t in range(n)]
    advantages, returns = generalized_advantages(
        torch.from_numpy(rewards), torch.from_numpy(values), SEQUENCES, discount=discount, decay=decay
    )
    assert advantages.tolist() == pytest.approx(expected)
    assert returns.tolist() == pytest.approx(np.array(expected) + values)


def test_an_infinite_reward_stays_in_its_response() -> None:
    rewards = torch.zeros(12)
    rewards[8] = torch.inf
    advantages, _ = generalized_advantages(rewards, torch.zeros(12), SEQUENCES, discount=1.0, decay=0.9)
    assert advantages.isfinite().tolist() == [True] * 8 + [False] + [True] * 3


@pytest.mark.parametrize("discount, decay", [(1.0, 1.0), (1.0, 0.95), (0.999, 0.0), (0.0, 0.9)])
def test_advantages_of_long_responses_are_exact_and_take_few_operations(discount: float, decay: float) -> None:
    lengths = (8192, 1, 3000, 5)
    random = np.random.default_rng(3)
    rewards, values = random.standard_normal((2, sum(lengths)), np.float32)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    expected, advantage = np.zeros(len(rewards)), 0.0
    for i in reversed(range(len(rewards))):
        is_last = i + 1 == len(rewards) or sequences[i + 1] != sequences[i]
        following, later = (0.0, 0.0) if is_last else (float(values[i + 1]), advantage)
        expected[i] = advantage = float(rewards[i]) + discount * following - float(values[i]) + discount * decay * later
    tensors = (torch.from_numpy(rewards), torch.from_numpy(values), torch.from_numpy(sequences))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        advantages, _ = generalized_advantages(*tensors, discount=discount, decay=decay)
    assert np.abs(advantages.numpy() - expected).max() < 1e-6 * np.abs(expected).max()
    assert len(trace.events()) < 500


def test_advantages_need_nothing_back_from_the_device() -> None:
    """A tensor on `meta` has no values that could be read."""
    values = torch.zeros(12, device="meta")
    advantages, _ = generalized_advantages(values, values, SEQUENCES.to("meta"), discount=1.0, decay=0.95)
    assert advantages.shape == (12,)


def test_an_empty_response_has_no_advantages() -> None:
    none = torch.zeros(0)
    advantages, returns = generalized_advantages(none, none, none.long(), discount=1.0, decay=1.0)
    assert len(advantages) == len(returns) == len(last_token_rewards(none, none.long())) == 0


def test_the_reward_belongs_to_the_last_token_of_a_response() -> None:
    assert last_token_rewards(torch.full((12,), 2.0), SEQUENCES).nonzero().flatten().tolist() == [6, 7, 11]


def test_the_critics_loss_is_the_mean_of_the_larger_errors_and_its_gradient_is_right() -> None:
    random = np.random.default_rng(2)
    values, old, returns = (random.normal(size=12) for _ in range(3))
    near = old + np.clip(values - old, -0.2, 0.2)
    expected = np.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / 2 / 20
    tensors = [torch.from_numpy(x) for x in (values, old, returns, np.ones(12))]
    loss, sums = critic_loss(*tensors, total_tokens=20, clip=0.2)
    assert loss.item() == pytest.approx(expected)
    free = tensors[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda v: critic_loss(v, *tensors[1:], total_tokens=20, clip=0.2)[0], (free,))
    metrics = critic_metrics(sums)
    assert metrics["value_clip_fraction"] == pytest.approx(np.mean(np.abs(values - old) > 0.2))
    assert metrics["explained_variance"] == pytest.approx(1 - np.mean((values - returns) ** 2) / returns.var())


def test_the_critics_loss_is_the_mean_over_samples_if_the_weights_are_those_of_this_mean() -> None:
    long, short = torch.full((6,), 1.0), torch.full((2,), 3.0)
    errors, zeros = torch.cat([long, short]), torch.zeros(8)
    weights = torch.cat([torch.full((6,), 8 / (2 * 6)), torch.full((2,), 8 / (2 * 2))])
    loss, sums = critic_loss(errors, errors, zeros, weights, total_tokens=8, clip=0.2)
    assert loss.item() == pytest.approx((1 / 2 + 9 / 2) / 2)
    assert critic_metrics(sums)["value_loss"] == pytest.approx(loss.item())
    assert critic_metrics(sums)["value_mean"] == pytest.approx((6 * 1 + 2 * 3) / 8), "over tokens"


def test_a_perfect_critic_explains_all_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    loss, sums = critic_loss(returns, returns, returns, torch.ones(3), total_tokens=3, clip=0.2)
    assert (loss.item(), critic_metrics(sums)["explained_variance"]) == (0.0, 1.0)

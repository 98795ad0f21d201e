from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_async.losses.logprobs import token_logprobs
from miles_async.losses.policy import (
    SUMS,
    PolicyLossSettings,
    clipped_objective,
    metrics_from,
    policy_loss,
    truncated_importance,
)
from miles_async.losses.supervised import supervised_loss

SETTINGS = PolicyLossSettings(eps_clip=0.2, eps_clip_high=0.3, tis_clip=2.0, entropy_coef=0.01)


def inputs(n: int = 40) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(0)
    columns = {
        "logprobs": -random.exponential(1.0, n),
        "entropy": random.exponential(1.0, n),
        "old_logprobs": -random.exponential(1.0, n),
        "rollout_logprobs": -random.exponential(1.0, n),
        "advantages": random.normal(0.0, 1.0, n),
    }
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def test_the_loss_agrees_with_the_formula_written_out_in_numpy() -> None:
    tensors = inputs()
    loss, _ = policy_loss(**tensors, total_tokens=100, settings=SETTINGS)
    lp, entropy, old, rollout, advantage = (tensor.numpy() for tensor in tensors.values())
    ratio, weight = np.exp(lp - old), np.minimum(np.exp(old - rollout), 2.0)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.3) * advantage)
    assert loss.item() == pytest.approx(-(weight * objective + 0.01 * entropy).sum() / 100, rel=1e-9)


def test_micro_batches_add_up_to_the_loss_and_metrics_of_the_whole() -> None:
    tensors = inputs()
    whole, sums = policy_loss(**tensors, total_tokens=40, settings=SETTINGS)
    parts = [
        policy_loss(**{name: t[cut] for name, t in tensors.items()}, total_tokens=40, settings=SETTINGS)
        for cut in (slice(0, 7), slice(7, 7), slice(7, 40))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-9)
    assert torch.allclose(torch.stack([part.sums for _, part in parts]).sum(0), sums.sums)
    assert torch.stack([part.maximum for _, part in parts]).amax(0) == sums.maximum


def test_gradients_flow_through_logprobs_and_entropy_as_finite_differences_say() -> None:
    tensors = inputs(12)
    tensors["logprobs"].requires_grad_()
    tensors["entropy"].requires_grad_()

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        free = {**tensors, "logprobs": logprobs, "entropy": entropy}
        return policy_loss(**free, total_tokens=12, settings=SETTINGS)[0]

    assert torch.autograd.gradcheck(loss, (tensors["logprobs"], tensors["entropy"]))


def test_neither_old_logprobs_nor_the_importance_weight_carry_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    settings = PolicyLossSettings(eps_clip=0.2, eps_clip_high=0.2, tis_clip=10.0, entropy_coef=0.0)
    loss, _ = policy_loss(
        logprobs,
        torch.zeros(2),
        old_logprobs=logprobs,
        rollout_logprobs=torch.tensor([-1.5, -1.0]),
        advantages=torch.tensor([1.0, -1.0]),
        total_tokens=2,
        settings=settings,
    )
    loss.backward()
    weights = torch.tensor([0.5, -1.0]).exp()
    assert torch.allclose(logprobs.grad, torch.tensor([-0.5, 0.5]) * weights)


def test_the_clip_stops_the_gradient_only_where_it_would_push_further_out() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], requires_grad=True)
    objective, clipped = clipped_objective(ratio, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), 0.2, 0.3)
    objective.sum().backward()
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, -1, 1, 0, 1]


def test_importance_weights_are_cut_above_only() -> None:
    assert truncated_importance(torch.tensor([0.1, 1.0, 5.0]), 2.0).tolist() == pytest.approx([0.1, 1.0, 2.0])
    assert truncated_importance(torch.tensor([0.1, 1.0, 5.0]), None).tolist() == [1, 1, 1]


def test_metrics_name_what_happened_to_the_tokens() -> None:
    sums = torch.zeros(len(SUMS))
    for name, value in {"tokens": 4, "objective": -2, "clipped": 1, "ratio": 4, "ratio_squared": 8}.items():
        sums[SUMS.index(name)] = value
    metrics = metrics_from(sums, torch.tensor([0.5]))
    assert metrics["loss"] == 0.5
    assert metrics["clip_fraction"] == 0.25
    assert metrics["ess"] == 0.5
    assert metrics["logprob_gap_max"] == 0.5


def test_a_logprob_that_is_not_a_number_shows_in_the_loss() -> None:
    tensors = inputs()
    tensors["advantages"][3] = float("nan")
    assert policy_loss(**tensors, total_tokens=40, settings=SETTINGS)[0].isnan()


def test_token_logprobs_and_entropy_agree_with_log_softmax_and_with_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    logprobs, entropy = token_logprobs(logits, targets)
    reference = logits.log_softmax(-1)
    assert torch.allclose(logprobs, reference.gather(1, targets[:, None])[:, 0])
    assert torch.allclose(entropy, -(reference.exp() * reference).sum(-1))
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, targets), (logits,))


def test_logprobs_stay_finite_for_logits_of_any_size() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == pytest.approx(-2e4)
    assert entropy.item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_supervised_loss_is_the_mean_over_the_tokens_of_the_step() -> None:
    assert supervised_loss(torch.tensor([-1.0, -2.0]), total_tokens=4).item() == 0.75

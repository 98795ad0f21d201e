from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_async.config.schema import Algorithm
from miles_async.errors import UserError
from miles_async.losses.corrections.correction import CORRECTIONS
from miles_async.losses.critic import value_loss
from miles_async.losses.logprobs import PART_ENTRIES, KeptTokens, kept_token_logprobs, token_logprobs
from miles_async.losses.objectives.cispo import Cispo
from miles_async.losses.objectives.dppo import Dppo
from miles_async.losses.objectives.gmpo import Gmpo
from miles_async.losses.objectives.gspo import sequence_ratio
from miles_async.losses.objectives.m2po import M2po, second_moment_bound
from miles_async.losses.objectives.objective import OBJECTIVES, Objective, PolicyTokens
from miles_async.losses.objectives.ppo import Ppo
from miles_async.losses.objectives.reinforce import Kimi15, Reinforce, Topr
from miles_async.losses.objectives.sapo import Sapo
from miles_async.losses.policy import (
    STALENESS_CLASSES,
    SUMS,
    PolicyLossSettings,
    kl_penalty,
    objective_sum,
    policy_loss,
    policy_metrics,
    sft_loss,
    supervised_loss,
)
from miles_async.losses.sequences import later_sum, sequence_mean
from miles_async.losses.tokens import TokenColumns
from tests.plugin_packages import install_plugin
from tests.torch.recorded_losses import recorded


def settings(objective: str = "ppo", method: str = "tis", upper: float = 2.0, **others: Any) -> PolicyLossSettings:
    usual: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.3, "entropy_coef": 0.01, "kl_estimator": "k3"}
    usual |= {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0}
    own: dict[str, Any] = {"sapo_temperatures": (1.0, 1.05), "dppo_threshold": 0.2, "tis_clip": upper}
    own |= {"icepop_band": (0.5, 1.8), "topr_positive_weight": 1.5, "topr_negative_weight": 0.5}
    plugins: dict[str, Any] = {"objective": OBJECTIVES.find(objective), "correction": CORRECTIONS.find(method)}
    return PolicyLossSettings(own=Algorithm.model_validate(own), **plugins, **usual | others)


def terms(
    objective: Objective,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    old: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    ratio: torch.Tensor | None = None,
    rewards: torch.Tensor | None = None,
    sequences: torch.Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.3),
    prepared: Any = None,
    **own: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of tokens in sequences of their own, and where a bound changed it."""
    zeros = torch.zeros_like(logprobs)
    tokens = PolicyTokens(
        logprobs=logprobs,
        ratio=logprobs.exp() if ratio is None else ratio,
        old_logprobs=zeros if old is None else old,
        rollout_log_probs=zeros if sampled is None else sampled,
        advantages=advantages,
        rewards=advantages if rewards is None else rewards,
        sequences=torch.arange(len(logprobs)) if sequences is None else sequences,
        clip=clip,
        prepared=prepared,
    )
    return objective.compute(tokens, Algorithm.model_validate(own))


def inputs(n: int = 40) -> dict[str, torch.Tensor]:
    """Log-probabilities under the three policies lie near each other, so that some ratios are clipped and some not."""
    random = np.random.default_rng(0)
    rollout = -random.exponential(1.0, n)
    old = rollout + random.normal(0, 0.5, n)
    values = {
        "logprobs": old + random.normal(0, 0.3, n),
        "entropy": random.exponential(1.0, n),
        "old_logprobs": old,
        "rollout_log_probs": rollout,
        "advantages": random.normal(0.0, 1.0, n),
        "loss_weights": random.uniform(0.5, 1.5, n),
        "reference_logprobs": rollout + random.normal(0, 0.5, n),
        "sequences": np.sort(random.integers(0, 6, n)),
        "staleness": random.integers(0, 7, n),
        "rewards": random.normal(0.0, 1.0, n),
    }
    return {name: torch.from_numpy(column) for name, column in values.items()}


def columns(tensors: dict[str, torch.Tensor]) -> TokenColumns:
    inputs: dict[str, Any] = {name: t for name, t in tensors.items() if name not in ("logprobs", "entropy")}
    return TokenColumns(**inputs)


def loss_of(tensors: dict[str, torch.Tensor], total_tokens: int, how: PolicyLossSettings) -> Any:
    return policy_loss(
        tensors["logprobs"],
        tensors["entropy"],
        columns(tensors),
        total_tokens=total_tokens,
        settings=how,
        prepared=0.4,
    )


def in_numpy(tensors: dict[str, torch.Tensor], objective: str, method: str) -> float:
    """The loss written out: entropy bonus 0.01, KL k3 0.1, clip 0.2 and 0.3, weights up to 2, band 0.5 to 1.8, and
    M2PO's bound 0.4."""
    x = {name: tensor.numpy() for name, tensor in tensors.items()}
    lp, old, a = x["logprobs"], x["old_logprobs"], x["advantages"]

    def per_sequence(values: np.ndarray, how: Any) -> np.ndarray:
        return np.array([how(values[x["sequences"] == s]) for s in x["sequences"]])

    ratio, q = np.exp(lp - old), x["rollout_log_probs"]
    sequence_ratio = np.exp(per_sequence(lp - old, np.mean))
    up = a > 0
    log_clipped = np.where(up, np.minimum(lp - old, 0.3), np.maximum(lp - old, -0.2))
    temperature = np.where(up, 1.0, 1.05)
    inside = np.where(up, np.exp(lp) - np.exp(q) <= 0.2, np.exp(q) - np.exp(lp) <= 0.2)
    objectives = {
        "ppo": np.minimum(ratio * a, np.clip(ratio, 0.8, 1.3) * a),
        "gspo": np.minimum(sequence_ratio * a, np.clip(sequence_ratio, 0.8, 1.3) * a),
        "cispo": np.clip(ratio, 0.8, 1.3) * a * lp,
        "gmpo": np.exp(per_sequence(log_clipped, np.mean)) * a,
        "sapo": 4 / temperature / (1 + np.exp(-temperature * (ratio - 1))) * a,
        "dppo": inside * np.exp(lp - q) * a * lp,
        "m2po": np.exp(np.where(up, np.minimum(lp - q, 0.4), np.maximum(lp - q, -0.4))) * a,
        "reinforce": a * lp,
        "topr": np.where(x["rewards"] > 0, 1.5, 0.5 * np.minimum(ratio, 1)) * a * lp,
        "kimi15": a * lp - 0.1 / 2 * (lp - old) ** 2,
    }[objective]
    off = np.exp(old - x["rollout_log_probs"])
    weight = {
        "none": np.ones_like(off),
        "tis": np.minimum(off, 2),
        "decoupled": off,
        "icepop": np.where((off >= 0.5) & (off <= 1.8), off, 0),
        "sequence": np.minimum(per_sequence(off, np.prod), 2),
    }[method]
    away = x["reference_logprobs"] - lp
    tokens = weight * objectives + 0.01 * x["entropy"] - 0.1 * (np.exp(away) - 1 - away)
    return float(-(x["loss_weights"] * tokens).sum() / 100)


METHODS = ["tis", "decoupled", "icepop", "sequence", "none"]
COMBINATIONS = [
    *itertools.product(["ppo", "gspo", "cispo", "gmpo", "sapo", "reinforce", "topr", "kimi15"], METHODS),
    ("dppo", "none"),
    ("m2po", "none"),
]


@pytest.mark.parametrize("objective, method", COMBINATIONS)
def test_the_loss_agrees_with_the_formula_written_out_in_numpy(objective: str, method: str) -> None:
    tensors = inputs()
    loss, _ = loss_of(tensors, 100, settings(objective, method, kl_loss_coef=0.1))
    assert loss.item() == pytest.approx(in_numpy(tensors, objective, method), rel=1e-9)


@pytest.mark.parametrize("objective, method", COMBINATIONS)
def test_gradients_flow_through_logprobs_and_entropy_as_finite_differences_say(objective: str, method: str) -> None:
    tensors = inputs(12)
    tensors["logprobs"].requires_grad_()
    tensors["entropy"].requires_grad_()
    # CISPO, DPPO and TOPR stop the gradient of the ratio, so the check compares with the loss at a constant ratio.
    fixed = tensors["logprobs"].detach().clone()
    sampled = tensors["rollout_log_probs"]

    def factor(logprobs: torch.Tensor) -> torch.Tensor:
        if objective == "cispo":
            return (logprobs - tensors["old_logprobs"]).exp().clamp(0.8, 1.3)
        if objective == "topr":
            tapered = 0.5 * (logprobs - tensors["old_logprobs"]).exp().clamp(max=1)
            return torch.where(tensors["rewards"] > 0, 1.5, tapered)
        moved = logprobs.exp() - sampled.exp()
        outside = torch.where(tensors["advantages"] > 0, moved, -moved) > 0.2
        return torch.where(outside, 0.0, (logprobs - sampled).exp())

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        how = settings(objective, method, kl_loss_coef=0.1)
        actual, _ = loss_of({**tensors, "logprobs": logprobs, "entropy": entropy}, 12, how)
        if objective not in ("cispo", "dppo", "topr"):
            return actual
        change = factor(fixed) - factor(logprobs.detach())
        weight, _ = how.correction.weights(tensors["old_logprobs"] - sampled, tensors["sequences"], how.own)
        difference = weight * change * tensors["advantages"] * logprobs * tensors["loss_weights"]
        return actual - difference.sum() / 12

    assert torch.autograd.gradcheck(loss, (tensors["logprobs"], tensors["entropy"]))


def test_micro_batches_add_up_to_the_loss_and_metrics_of_the_whole() -> None:
    tensors = inputs()
    whole, sums = loss_of(tensors, 40, settings())
    parts = [
        loss_of({name: t[cut] for name, t in tensors.items()}, 40, settings())
        for cut in (slice(0, 7), slice(7, 7), slice(7, 40))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-9)
    assert torch.allclose(torch.stack([part.sums for _, part in parts]).sum(0), sums.sums)
    assert torch.stack([part.maximum for _, part in parts]).amax(0) == sums.maximum


def test_neither_old_logprobs_nor_the_importance_weight_carry_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64)
    own = TokenColumns(
        old_logprobs=logprobs,
        rollout_log_probs=torch.tensor([-1.5, -1.0]),
        advantages=torch.tensor([1.0, -1.0]),
        rewards=torch.tensor([1.0, -1.0]),
        loss_weights=torch.ones(2),
        sequences=none,
        staleness=none,
    )
    loss, _ = policy_loss(
        logprobs, torch.zeros(2), own, total_tokens=2, settings=settings(upper=10.0, entropy_coef=0.0)
    )
    loss.backward()
    weights = torch.tensor([0.5, -1.0]).exp()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([-0.5, 0.5]) * weights)


def test_the_clip_stops_only_gradients_that_move_the_ratio_further_away() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], requires_grad=True)
    objective, clipped = terms(Ppo(), ratio.log(), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), ratio=ratio)
    objective.sum().backward()
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0, -1, 1, 0, 1]


def test_cispo_keeps_the_gradient_of_tokens_whose_weight_it_clips() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ratio = torch.tensor([3.0, 1.0, 0.1])
    objective, clipped = terms(Cispo(), logprobs, torch.ones(3), ratio=ratio)
    objective.sum().backward()
    assert clipped.tolist() == [1, 0, 1]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([1.3, 1.0, 0.8])


def test_reinforce_is_the_policy_gradient_whatever_the_ratio_is() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    objective, clipped = terms(Reinforce(), logprobs, torch.tensor([2.0, -1.0]), ratio=torch.tensor([9.0, 0.1]))
    objective.sum().backward()
    assert objective.tolist() == [-2.0, 2.0]
    assert clipped.tolist() == [0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [2.0, -1.0]


def test_topr_limits_the_weight_of_samples_without_a_positive_reward_only() -> None:
    logprobs = torch.full((5,), -2.0, requires_grad=True)
    objective, clipped = terms(
        Topr(),
        logprobs,
        torch.tensor([1.0, -1.0, -1.0, -1.0, 3.0]),
        ratio=torch.tensor([4.0, 4.0, 0.5, 4.0, 0.5]),
        # The reward decides, and not the advantage. 0 counts as negative.
        rewards=torch.tensor([1.0, 1.0, -1.0, 0.0, -1.0]),
        topr_positive_weight=2.0,
        topr_negative_weight=0.5,
    )
    objective.sum().backward()
    assert objective.tolist() == [-4.0, 4.0, 0.5, 1.0, -1.5]
    assert clipped.tolist() == [0, 0, 0, 1, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [2.0, -2.0, -0.25, -0.5, 0.75]


def test_kimi_draws_a_token_back_to_its_probability_before_the_batch_even_without_an_advantage() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, advantages = torch.tensor([-3.0, -1.0]), torch.tensor([0.0, 1.0])
    objective, _ = terms(Kimi15(), logprobs, advantages, old=old, kimi15_tau=0.5)
    objective.sum().backward()
    assert objective.tolist() == [-1.0, -1.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 1.0]


def test_a_token_that_icepop_excludes_leaves_loss_and_gradient_finite() -> None:
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64)
    excluded = TokenColumns(
        old_logprobs=torch.tensor([-200.0, -1.0]),
        rollout_log_probs=torch.tensor([-1.0, -1.0]),
        advantages=torch.ones(2),
        rewards=torch.ones(2),
        loss_weights=torch.ones(2),
        sequences=none,
        staleness=none,
    )
    how = settings("sapo", "icepop", entropy_coef=0.0)
    for objective in ("ppo", "cispo", "sapo"):
        logprobs.grad = None
        changed = dataclasses.replace(how, objective=OBJECTIVES.find(objective))
        loss, _ = policy_loss(logprobs, torch.zeros(2), excluded, total_tokens=2, settings=changed)
        loss.backward()
        assert loss.isfinite()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [0.0, -0.5]


def test_gmpo_clips_the_log_ratio_only_in_the_direction_of_the_advantage() -> None:
    logprobs = torch.tensor([1.0, 0.1, -1.0, -1.0, 1.0], requires_grad=True)
    advantages, sequences = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0]), torch.tensor([0, 0, 1, 2, 3])
    objective, clipped = terms(Gmpo(), logprobs, advantages, sequences=sequences, clip=(0.4, 0.4))
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    assert objective.tolist() == pytest.approx([np.exp(0.25), np.exp(0.25), np.exp(-1.0), -np.exp(-0.4), 0.0])


def test_sapo_has_the_gradient_of_the_ratio_on_policy_and_less_away_from_it() -> None:
    ratio = torch.tensor([1.0, 1.0, 3.0, 3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    objective, _ = terms(Sapo(), ratio.log(), advantages, ratio=ratio, sapo_temperatures=(1.0, 2.0))
    objective.sum().backward()
    assert ratio.grad is not None
    # 4 s (1 - s) with the sigmoid s of t (r - 1), which is 2 for positive and 4 for negative advantages.
    assert ratio.grad.tolist() == pytest.approx([1.0, -1.0, 0.41997434, -0.07065094])


def test_dppo_stops_only_gradients_that_would_increase_a_change_beyond_the_threshold() -> None:
    sampled = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.001]).log()
    logprobs = torch.tensor([0.9, 0.3, 0.3, 0.9, 0.01]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    objective, clipped = terms(Dppo(), logprobs, advantages, sampled=sampled, dppo_threshold=0.2)
    objective.sum().backward()
    assert clipped.tolist() == [1, 0, 1, 0, 0], "a rare token may change by any factor"
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.5, 0.0, -1.5, 10.0], rel=1e-5)


@pytest.mark.parametrize("case", recorded("m2po"), ids=lambda case: f"clip at {case['highest_ratio']:.3g}")
def test_m2po_trains_the_tokens_that_its_authors_train(case: dict[str, Any]) -> None:
    log_ratios, advantages = (torch.tensor(case[name], dtype=torch.float64) for name in ("log_ratios", "advantages"))
    sampled = torch.full_like(log_ratios, -3.0)
    logprobs = (sampled + log_ratios).requires_grad_()
    bound = second_moment_bound(log_ratios, advantages, budget=0.04)
    objective, clipped = terms(M2po(), logprobs, advantages, sampled=sampled, prepared=bound)
    [gradients] = torch.autograd.grad(objective.sum(), logprobs)
    assert np.exp(bound) >= case["highest_ratio"] - 1e-6 or bound == 0.2
    # The authors put the clip on the largest token that they keep, and rounding decides whether it has a gradient.
    on_the_clip = (log_ratios.abs().exp() - case["highest_ratio"]).abs() < 1e-6
    theirs = torch.tensor(case["gradients"], dtype=torch.float64)
    assert torch.allclose(gradients[~on_the_clip], theirs[~on_the_clip], atol=1e-7)
    assert clipped.tolist() == ((gradients == 0) & (advantages != 0)).double().tolist()


def test_m2po_counts_only_tokens_that_moved_in_the_direction_of_their_advantage() -> None:
    """Among them, squares of 0.01, 0.04 and 4. With the largest limited to the bound b they add up to 0.05 + b²."""
    log_ratios = torch.tensor([0.1, -0.2, 2.0, -9.0, 9.0, 7.0])
    advantages = torch.tensor([1.0, -1.0, 0.5, 1.0, -1.0, 0.0])
    bounds = {1.36: float("inf"), 0.35: 1.0, 0.02: np.sqrt(0.025), 0.005: np.sqrt(0.005)}
    found = [second_moment_bound(log_ratios, advantages, budget) for budget in bounds]
    assert found == pytest.approx(list(bounds.values()), abs=1e-6)


def test_m2po_trains_harmless_tokens_however_far_they_have_moved() -> None:
    sampled = torch.full((4,), -4.0)
    logprobs = (sampled + torch.tensor([-1.0, 0.05, -0.05, 1.0])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    objective, clipped = terms(M2po(), logprobs, advantages, sampled=sampled, prepared=0.2)
    objective.sum().backward()
    assert clipped.tolist() == [0, 0, 0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([np.exp(-1.0), np.exp(0.05), -np.exp(-0.05), -np.e])


def test_m2po_gives_a_clipped_ratio_that_overflows_no_gradient() -> None:
    logprobs = torch.tensor([-0.5, -0.5], requires_grad=True)
    sampled = torch.tensor([-200.0, -0.6])
    objective, clipped = terms(M2po(), logprobs, torch.ones(2), sampled=sampled, prepared=0.2)
    objective.sum().backward()
    assert clipped.tolist() == [1, 0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, np.exp(0.1)])


@pytest.mark.parametrize("advantages", [[], [0.0, 0.0]])
def test_m2po_clips_nothing_if_no_token_has_an_advantage(advantages: list[float]) -> None:
    assert second_moment_bound(torch.ones(len(advantages)), torch.tensor(advantages), 0.04) == float("inf")


def test_all_tokens_of_a_sequence_share_its_ratio() -> None:
    logprobs = torch.tensor([0.2, 0.4, 1.0])
    ratio = sequence_ratio(logprobs, torch.zeros(3), torch.tensor([0, 0, 2]))
    assert ratio.tolist() == pytest.approx([np.exp(0.3), np.exp(0.3), np.e])
    assert sequence_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("method, expected", [
    ("tis", ([0.1, 1.0, 2.0], [0, 0, 1])),
    ("decoupled", ([0.1, 1.0, 5.0], [0, 0, 0])),
    ("icepop", ([0.0, 1.0, 0.0], [1, 0, 1])),
    ("sequence", ([0.1, 2.0, 2.0], [0, 1, 1])),
    ("none", ([1.0, 1.0, 1.0], [0, 0, 0])),
])  # fmt: skip
def test_a_correction_weights_tokens_by_the_ratio_of_their_policies(method: str, expected: Any) -> None:
    gap = torch.tensor([0.1, 1.0, 5.0]).log()
    how = settings(method=method)
    weights, bounded = how.correction.weights(gap, torch.tensor([0, 1, 1]), how.own)
    assert weights.tolist() == pytest.approx(expected[0])
    assert bounded.tolist() == expected[1]


def test_kl_estimates_agree_with_the_divergence_they_estimate() -> None:
    torch.manual_seed(0)
    policy, reference = (torch.randn(5, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        assert torch.allclose((policy.exp() * kl_penalty(policy, reference, estimator)).sum(), exact)
    assert kl_penalty(policy, reference, "k3").min() >= 0
    assert torch.allclose(kl_penalty(policy, reference, "k2"), (policy - reference).square() / 2)
    assert kl_penalty(policy, policy, "k3").tolist() == [0] * 5


def test_later_penalties_are_summed_within_the_sequence() -> None:
    sums = later_sum(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([0, 0, 0, 2, 2]))
    assert sums.tolist() == [7, 6, 4, 24, 16]
    assert later_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_a_discounted_sum_multiplies_each_later_term_by_the_discount_once_more() -> None:
    values, sequences = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([0, 0, 0, 2, 2])
    assert later_sum(values, sequences, 0.5).tolist() == [3, 4, 4, 16, 16]
    assert later_sum(values, sequences, 0.0).tolist() == values.tolist()
    assert values.tolist() == [1, 2, 4, 8, 16]


def test_a_penalty_in_the_reward_lowers_the_advantage_of_a_token_by_all_later_penalties() -> None:
    tensors = inputs()
    penalized, _ = loss_of(tensors, 40, settings(kl_reward_coef=0.1, kl_estimator="k1"))
    away = tensors["old_logprobs"] - tensors["reference_logprobs"]
    lower = {**tensors, "advantages": tensors["advantages"] - 0.1 * later_sum(away, tensors["sequences"])}
    assert penalized.item() == pytest.approx(loss_of(lower, 40, settings())[0].item(), rel=1e-9)


def test_the_gradient_of_k2_is_that_of_the_divergence() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    sampled = (policy.exp().detach() * kl_penalty(policy, reference, "k2")).sum()
    [of_exact] = torch.autograd.grad(exact, logits, retain_graph=True)
    [of_sampled] = torch.autograd.grad(sampled, logits)
    assert torch.allclose(of_exact, of_sampled)


def test_the_value_loss_takes_the_larger_of_free_and_clipped_error() -> None:
    random = np.random.default_rng(0)
    values, old, returns = (random.normal(size=9) for _ in range(3))
    near = old + np.clip(values - old, -0.2, 0.2)
    expected = np.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    given, before, wanted = (torch.from_numpy(x) for x in (values, old, returns))
    assert value_loss(given, before, wanted, 0.2).numpy() == pytest.approx(expected)
    free = given.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, before, wanted, 0.2), (free,))


def test_metrics_are_given_for_the_tokens_of_every_staleness() -> None:
    sums = torch.zeros(STALENESS_CLASSES, len(SUMS))
    for name, value in {"tokens": 4, "objective": -2, "clipped": 1, "ratio": 4, "ratio_squared": 8}.items():
        sums[0, SUMS.index(name)] = value
    for name, value in {"tokens": 4, "bounded": 2, "ratio": 8, "ratio_squared": 16, "gap": 2}.items():
        sums[4, SUMS.index(name)] = value
    metrics = policy_metrics(sums, torch.tensor([0.5]), [0] * STALENESS_CLASSES)
    assert metrics["loss"] == 0.25
    assert metrics["logprob_gap_max"] == 0.5
    assert (metrics["ess"], metrics["ess_staleness_0"], metrics["ess_staleness_4_or_more"]) == (0.75, 0.5, 1.0)
    assert (metrics["clip_fraction"], metrics["clip_fraction_staleness_0"]) == (0.125, 0.25)
    assert metrics["bounded_fraction_staleness_4_or_more"] == metrics["logprob_gap_mean_staleness_4_or_more"] == 0.5
    assert metrics["token_share_staleness_0"] == 0.5
    assert not [name for name in metrics if name.endswith("staleness_1")], "there were none"


def test_the_gap_to_the_engines_is_measured_also_if_their_logprobs_are_those_of_the_old_policy() -> None:
    tensors = inputs()
    tensors["old_logprobs"] = tensors["rollout_log_probs"]
    gap = (tensors["logprobs"] - tensors["rollout_log_probs"]).abs()
    _, sums = loss_of(tensors, 40, settings(method="none", uses_rollout_logprobs=True))
    metrics = policy_metrics(sums.sums, sums.maximum, [0.0] * STALENESS_CLASSES)
    assert metrics["logprob_gap_mean"] == pytest.approx(gap.mean().item())
    assert metrics["logprob_gap_max"] == pytest.approx(gap.max().item())
    assert metrics["ess"] < 1
    assert PolicyLossSettings.from_algorithm(Algorithm(use_rollout_logprobs=True)).uses_rollout_logprobs


def test_tokens_that_took_no_pass_count_in_the_loss_and_in_the_shares_only() -> None:
    sums = torch.zeros(STALENESS_CLASSES, len(SUMS))
    for name, value in {"tokens": 4, "objective": -2, "ratio": 4, "ratio_squared": 4, "entropy": 8}.items():
        sums[0, SUMS.index(name)] = value
    metrics = policy_metrics(sums, torch.tensor([0.5]), [4, 8, 0, 0, 0])
    assert (metrics["loss"], metrics["loss_tokens"], metrics["computed_fraction"]) == (2 / 16, 16, 0.25)
    assert (metrics["token_share_staleness_0"], metrics["token_share_staleness_1"]) == (0.5, 0.5)
    assert (metrics["entropy"], metrics["ess"]) == (2, 1)
    assert "ess_staleness_1" not in metrics
    nothing = policy_metrics(torch.zeros_like(sums), torch.zeros(1), [0, 0, 6, 0, 0])
    assert nothing == {"loss": 0, "loss_tokens": 6, "computed_fraction": 0, "token_share_staleness_2": 1}


def test_a_logprob_that_is_not_a_number_shows_in_the_loss() -> None:
    tensors = inputs()
    tensors["advantages"][3] = float("nan")
    loss, parts = loss_of(tensors, 40, settings())
    assert loss.isnan()
    assert np.isnan(objective_sum(parts.sums))


def test_token_logprobs_and_entropy_agree_with_log_softmax_and_with_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    logprobs, entropy = token_logprobs(logits, targets)
    reference = logits.log_softmax(-1)
    assert torch.allclose(logprobs, reference.gather(1, targets[:, None])[:, 0])
    assert torch.allclose(entropy, -(reference.exp() * reference).sum(-1))
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, targets), (logits,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entries", [1, 11, 40])
def test_a_softmax_over_parts_of_the_rows_is_that_over_all(
    monkeypatch: pytest.MonkeyPatch, entries: int, temperature: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    monkeypatch.setitem(PART_ENTRIES, "cpu", entries)
    logprobs, entropy = token_logprobs(logits, targets, temperature=temperature)
    reference = (logits / temperature).log_softmax(-1)
    assert torch.allclose(logprobs, reference.gather(1, targets[:, None])[:, 0])
    assert torch.allclose(entropy, -(reference.exp() * reference).sum(-1))
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, targets, temperature=temperature), (logits,))


def test_the_softmax_of_logits_in_bfloat16_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 300).bfloat16().requires_grad_(), torch.tensor([0, 299, 5, 7])
    wide = logits.detach().float().requires_grad_()
    ours, exact = token_logprobs(logits, targets), token_logprobs(wide, targets)
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype is torch.float32
        assert torch.allclose(one, other, atol=1e-6)
    (gradient,), (expected,) = (
        torch.autograd.grad(torch.stack(pair).sum(), x) for pair, x in ((ours, logits), (exact, wide))
    )
    assert torch.equal(gradient, expected.bfloat16())


def test_a_gradient_that_overwrites_the_logits_is_computed_once() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    scratch = logits * 1
    targets = torch.tensor([4, 0, 2])
    logprobs, _ = token_logprobs(scratch, targets, overwrite=True)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1).gather(1, targets[:, None]).sum(), logits)
    assert torch.allclose(gradient, expected)
    assert torch.equal(scratch, gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprobs.sum(), logits)


def test_logprobs_and_their_gradient_read_nothing_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on `meta` has no values that could be read."""
    monkeypatch.setitem(PART_ENTRIES, "meta", 20)
    logits = torch.randn(6, 11, device="meta", requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(6, dtype=torch.int64, device="meta"))
    (logprobs + 0.1 * entropy).sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


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


def test_the_supervised_loss_of_a_run_weights_tokens_as_the_loss_aggregation_says() -> None:
    """Two examples of one and three tokens: each example counts as much as the other."""
    logprobs, weights = torch.tensor([-6.0, -1.0, -2.0, -3.0]), torch.tensor([2.0, 2 / 3, 2 / 3, 2 / 3])
    loss, sums = sft_loss(logprobs, torch.ones(4), weights, total_tokens=4)
    assert loss.item() == pytest.approx((6.0 + 2.0) / 2)
    metrics = policy_metrics(sums.sums, sums.maximum, [0.0] * STALENESS_CLASSES)
    assert metrics["loss"] == pytest.approx((6.0 + 2.0) / 2)
    assert metrics["entropy"] == metrics["importance_weight"] == 1.0


def kept(*rows: list[int]) -> KeptTokens:
    ids = [token for row in rows for token in row]
    return KeptTokens(torch.tensor([len(row) for row in rows]), torch.tensor(ids, dtype=torch.int32))


def test_probabilities_are_renormalized_over_the_kept_tokens_after_the_temperature() -> None:
    """By hand: logits of 2 log 2, 2 log 3 and 2 log 5 at temperature 2 have the weights 2, 3 and 5."""
    weights = torch.tensor([[2.0, 3.0, 5.0, 7.0], [1.0, 1.0, 6.0, 2.0]])
    logits = 2 * weights.log()
    logprobs, entropy = kept_token_logprobs(logits, torch.tensor([1, 2]), kept([2, 0, 1], [2, 3]), temperature=2.0)
    assert logprobs.exp().tolist() == pytest.approx([0.3, 0.75])
    expected = [-sum(p * np.log(p) for p in row) for row in ((0.2, 0.3, 0.5), (0.75, 0.25))]
    assert entropy.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_single_kept_token_has_probability_one_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 5.0, -3.0]], requires_grad=True)
    logprobs, entropy = kept_token_logprobs(logits, torch.tensor([2]), kept([2]))
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_unlikely_kept_tokens_do_not_underflow() -> None:
    """A mask that older weights sampled may exclude the token that is now almost certain."""
    logits = torch.tensor([[500.0, 1.0, 1.0]])
    logprobs, _ = kept_token_logprobs(logits, torch.tensor([1]), kept([1, 2]))
    assert logprobs.exp().item() == pytest.approx(0.5)


def test_keeping_the_whole_vocabulary_changes_nothing_and_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 6, dtype=torch.float32, requires_grad=True)
    targets, everything = torch.tensor([4, 0, 2]), kept(*[list(range(6))] * 3)
    one = kept_token_logprobs(logits, targets, everything, temperature=0.5)
    other = token_logprobs(logits / 0.5, targets)
    for ours, theirs in zip(one, other, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    factors = torch.randn(2, 3)
    ours, theirs = (torch.autograd.grad((torch.stack(pair) * factors).sum(), logits)[0] for pair in (one, other))
    assert torch.allclose(ours, theirs, atol=1e-6)
    some = kept([4, 1], [0, 3, 5], [2, 0])
    assert torch.autograd.gradcheck(
        lambda x: kept_token_logprobs(x, targets, some, temperature=0.5), logits, eps=1e-2, atol=1e-3, rtol=1e-2
    )


@pytest.mark.parametrize(
    "kind, method, failure",
    [
        (OBJECTIVES, "def compute(self, tokens, settings): return tokens.prizes", "compute the loss: AttributeError"),
        (OBJECTIVES, "def compute(self, tokens, settings): return 0.0, 0.0", "compute the loss: AttributeError"),
        (CORRECTIONS, "def weights(self, ratio, sequences, settings): return ratio.x", "weight tokens: AttributeError"),
    ],
)
def test_a_loss_of_a_package_that_raises_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, method: str, failure: str
) -> None:
    base = kind.base.__name__
    source = f"from {kind.base.__module__} import {base}\nclass Corridor({base}):\n    {method}\n"
    install_plugin(tmp_path, monkeypatch, kind, "corridor", "raising_loss:Corridor", source)
    how = settings("corridor") if kind is OBJECTIVES else settings(method="corridor")
    named = "the entry point corridor = raising_loss:Corridor of the distribution users failed to "
    with pytest.raises(UserError, match=f"^{named}{failure}.*; correct the plug-in$"):
        loss_of(inputs(), 40, how)

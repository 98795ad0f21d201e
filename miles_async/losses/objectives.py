"""Per-token terms of the policy's objective and of the losses, one small function per paper.

All tensors are [m], with one entry per trained token. Objectives are maximized. `advantages` carry no gradient;
log-probabilities and ratios do. `sequences` is the number of each token's sequence in the micro-batch, ascending.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clipped_objective(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), and 1 where clipping removed the gradient.

    Source: PPO, Schulman et al. 2017 (arXiv 1707.06347), equation 7. GRPO (arXiv 2402.03300) uses it unchanged, DAPO
    (arXiv 2503.14476, section 3.1) with a higher upper clip, and GSPO with the ratio of the whole sequence.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return torch.minimum(unclipped, clipped), (clipped < unclipped).to(ratio.dtype)


def cispo_objective(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """sg(clip(r)) A log p, where sg stops the gradient, and 1 where the weight was clipped.

    Only the weight is clipped, so every token keeps its gradient. Rare tokens that change the course of an argument
    have large ratios, and PPO's clip would remove them.
    Source: CISPO, MiniMax-M1 (arXiv 2506.13585), equation 4.
    """
    weight = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    return weight * advantages * logprobs, (weight != ratio.detach()).to(ratio.dtype)


def geometric_mean_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """The geometric mean of a sequence's clipped ratios times A, and 1 where clipping removed a token's gradient.

    The clip bounds log-ratios to [-eps_low, eps_high]. The geometric mean is less sensitive to a few tokens with large
    ratios than the arithmetic mean of GRPO, so a wider clip range works (0.4 in the paper).
    Source: GMPO (arXiv 2507.20673), equation 4.
    """
    log_ratio = logprobs - old_logprobs
    sign = advantages.sign()
    # As in PPO, only a move in the direction of the advantage is clipped.
    limited = log_ratio.clamp(-eps_low, eps_high)
    clipped = sign * limited < sign * log_ratio
    objective = sequence_mean(torch.where(clipped, limited, log_ratio), sequences).exp() * advantages
    return objective, clipped.to(log_ratio.dtype)


def soft_gate_objective(ratio: Tensor, advantages: Tensor, temperatures: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A 4 / t sigmoid(t (r - 1)), and zeros: a smooth gate takes the place of the clip.

    `temperatures` are t for positive and for negative advantages. The gradient equals that of r A at r = 1 and fades as
    the ratio moves away from 1 in either direction.
    Source: SAPO (arXiv 2511.20347), section 3.
    """
    positive, negative = ratio.new_tensor(temperatures)
    temperature = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return gate * advantages, torch.zeros_like(ratio)


def divergence_objective(
    logprobs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """sg(r) A log p with r = p / q for the sampling policy q, and 1 where the trust region removed the gradient.

    A token loses its gradient if its probability differs by more than `threshold` from that under the sampling policy
    (total variation of the token against all others) and the gradient would increase the difference. A bound on
    probabilities treats tokens alike that a bound on ratios does not: a rare token has a large ratio after a tiny
    change. The ratio is limited to 20, as in the authors' code.
    Source: DPPO with the binary total variation (arXiv 2602.04879).
    """
    moved = logprobs.detach().exp() - rollout_log_probs.exp()
    outside = torch.where(advantages > 0, moved, -moved) > threshold
    ratio = (logprobs.detach() - rollout_log_probs).exp().clamp(max=20.0)
    return torch.where(outside, 0.0, ratio) * advantages * logprobs, outside.to(logprobs.dtype)


def second_moment_objective(
    logprobs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    """r A with r = p / q for the sampling policy q, and 1 where the clip at `bound` removed the gradient.

    As in PPO, only a move in the direction of the advantage is clipped: r at exp(bound) if A > 0, and at exp(-bound) if
    A < 0. `bound` is that of `second_moment_bound` for the optimizer step.
    Source: M2PO (arXiv 2510.01161).
    """
    log_ratio, sign = logprobs - rollout_log_probs, advantages.sign()
    clipped = sign * log_ratio > bound
    # Selected before the exponential, so that a clipped ratio cannot overflow and give NaN gradients.
    return torch.where(clipped, sign * bound, log_ratio).exp() * advantages, clipped.to(logprobs.dtype)


def second_moment_bound(log_ratios: Tensor, advantages: Tensor, budget: float) -> float:
    """Absolute log-ratio at which M2PO clips the tokens of an optimizer step; infinity if the budget needs no clip.

    `log_ratios` [n] and `advantages` [n] are those of all tokens of the step. Only tokens that have moved in the
    direction of their advantage count: A > 0 and r > 1, or A < 0 and r < 1. The bound makes the mean square of their
    log-ratios, each limited to the bound, equal to `budget`. The order of the tokens does not matter.
    Source: M2PO (arXiv 2510.01161) as its authors implemented it (Infini-AI-Lab/M2PO, `kpo_clip_harmful_tokens`).
    Algorithm 1 of the paper leaves out the largest tokens until the mean of the others is within the budget. The
    authors' code, and this function, limit them to the bound and keep counting them, so fewer tokens remain.
    """
    squares = log_ratios[log_ratios * advantages.sign() > 0].double().square().sort().values
    total = len(squares) * budget
    if squares.sum() <= total:
        return float("inf")
    sums = squares.cumsum(0)
    # The sum of all squares if they were limited to each of them in turn. It grows, so the bound lies just before the
    # first one that exceeds the budget.
    limited = sums + squares * torch.arange(len(squares) - 1, -1, -1, device=squares.device)
    kept = int((limited < total).sum())
    below = sums[kept - 1].item() if kept else 0.0
    return math.sqrt((total - below) / (len(squares) - kept))


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the mean of `values` over its sequence."""
    sums = _sequence_sums(torch.stack([values, torch.ones_like(values)]), sequences)
    return (sums[0] / sums[1].clamp_min(1))[sequences]


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the sum of `values` over its sequence."""
    return _sequence_sums(values[None], sequences)[0][sequences]


def _sequence_sums(rows: Tensor, sequences: Tensor) -> Tensor:
    """[k, n] sums over each of n sequences, of `rows` [k, m]."""
    count = int(sequences[-1]) + 1 if len(sequences) else 0
    return rows.new_zeros(rows.shape[0], count).index_add(1, sequences, rows)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor) -> Tensor:
    """[m] the ratio of the whole sequence's probabilities, to the power of one over its length.

    Rewards are given to whole sequences, so the ratio that is clipped belongs to the sequence too.
    Source: GSPO (arXiv 2507.18071), equation 7.
    """
    return sequence_mean(logprobs - old_logprobs, sequences).exp()


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled; 0 where both agree.

    `k1`, the log-ratio, is unbiased but may be negative. `k2`, half its square, has the right gradient. `k3` is
    unbiased and never negative. Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def suffix_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the sum of `values` over this token and all later ones of its sequence."""
    # A reversed cumulative sum runs on into later sequences. What it adds there is its value at the sequence's first
    # token minus the sequence's own sum.
    running = values.flip(0).cumsum(0).flip(0)
    first = torch.searchsorted(sequences, sequences)
    return running - (running[first] - sequence_sum(values, sequences))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, eps_clip: float) -> Tensor:
    """[m] half the larger of two squared errors: of the value, and of the value clipped around the old one.

    Source: PPO's reference implementation; Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    clipped = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2

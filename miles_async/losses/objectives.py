"""What a token contributes to the policy's objective, one small function per paper. Higher is better.

All tensors are [n], one entry per trained token; `advantages` carry no gradient, ratios do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_objective(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), and 1 where the clip cut the gradient.

    Source: PPO, Schulman et al. 2017 (arXiv 1707.06347), equation 7. GRPO (arXiv 2402.03300) uses it as it is, DAPO
    (arXiv 2503.14476, section 3.1) with a higher upper clip, GSPO with the ratio of the whole sequence.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return torch.minimum(free, bounded), (bounded < free).to(ratio.dtype)


def cispo_objective(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """sg(clip(r)) A log p: the weight is clipped, never the gradient; and 1 where the weight was.

    Rare tokens that turn an argument around have large ratios; PPO's clip silences them, this keeps them.
    Source: CISPO, MiniMax-M1 (arXiv 2506.13585), equation 4.
    """
    weight = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    return weight * advantages * logprobs, (weight != ratio.detach()).to(ratio.dtype)


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[n] for every token the mean of `values` over its sequence. `sequences` [n] numbers them, rising."""
    sums = _sequence_sums(torch.stack([values, torch.ones_like(values)]), sequences)
    return (sums[0] / sums[1].clamp_min(1))[sequences]


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[n] for every token the sum of `values` over its sequence."""
    return _sequence_sums(values[None], sequences)[0][sequences]


def _sequence_sums(rows: Tensor, sequences: Tensor) -> Tensor:
    count = int(sequences[-1]) + 1 if len(sequences) else 0
    return rows.new_zeros(rows.shape[0], count).index_add(1, sequences, rows)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor) -> Tensor:
    """[n] the ratio of the whole sequence's probabilities, to the power of one over its length.

    Source: GSPO (arXiv 2507.18071), equation 7. Rewards judge sequences, so the ratio that is clipped is theirs.
    """
    return sequence_mean(logprobs - old_logprobs, sequences).exp()


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(policy || reference) from tokens the policy drew, 0 where both agree.

    `k1`, the log ratio, is unbiased and may be negative; `k2`, half its square, has the right gradient; `k3` is
    unbiased and never negative. Source: Schulman, "Approximating KL divergence", 2020.
    """
    gap = reference - logprobs
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    return gap.exp() - 1 - gap


def suffix_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[n] for every token the sum of `values` over it and the tokens of its sequence after it."""
    after_all = values.flip(0).cumsum(0).flip(0)
    # What comes after the sequence's own last token: the running sum at its first one, less its own.
    first = torch.searchsorted(sequences, sequences)
    return after_all - (after_all[first] - sequence_sum(values, sequences))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, eps_clip: float) -> Tensor:
    """[n] half the squared error of a critic, the larger of free and clipped to `eps_clip` around its old estimate.

    Source: PPO's reference implementation; Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    near = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2

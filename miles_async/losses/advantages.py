"""Advantages of single tokens, from a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, sequences: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """[m] advantage and [m] return of every token, from its reward and the critic's value before it.

    `sequences` [m] numbers the tokens' sequences, rising; nothing is expected after the last token of one. `discount`
    is gamma, `decay` lambda: 0 trusts the critic, 1 the rewards.
    Source: GAE, Schulman et al. 2015 (arXiv 1506.02438), equation 16.
    """
    if not len(sequences):
        return rewards, values
    # A row per sequence, so that one step back through time is one step for all of them.
    places = torch.arange(len(sequences), device=sequences.device) - torch.searchsorted(sequences, sequences)
    rows = rewards.new_zeros(2, int(sequences[-1]) + 1, int(places.max()) + 1)
    rows[:, sequences, places] = torch.stack([rewards, values])
    advantages = torch.zeros_like(rows[0])
    following = after = torch.zeros_like(rows[0, :, 0])
    for place in reversed(range(rows.shape[2])):
        reward, value = rows[:, :, place]
        following = reward + discount * after - value + discount * decay * following
        advantages[:, place] = following
        after = value
    found = advantages[sequences, places]
    return found, found + values


def last_token_rewards(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] `values` at the last token of each sequence, 0 at the others: where the reward of a whole response comes."""
    last = torch.ones_like(sequences, dtype=torch.bool)
    last[:-1] = sequences[1:] != sequences[:-1]
    return torch.where(last, values, 0.0)

"""Advantages of single tokens that depend on the learner's own log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.batching.batch import TrainStep
from miles_async.config.schema import Algorithm
from miles_async.losses.advantages.statistics import EPSILON
from miles_async.losses.divergence import kl_penalty, suffix_sum


def reward_penalties(old: Sequence[Tensor], reference: Sequence[Tensor], algorithm: Algorithm) -> list[Tensor]:
    """[m] per micro-batch: what the KL divergence from the reference model subtracts from the reward of each token."""
    return [
        algorithm.kl_coef * kl_penalty(batch_old, batch_reference, algorithm.kl_loss_type)
        for batch_old, batch_reference in zip(old, reference, strict=True)
    ]


def penalized_returns(step: TrainStep, penalties: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """[m] per micro-batch: the reward of each token's sample less the penalties of this token and of all later ones.

    REINFORCE++ (arXiv 2501.03262) normalizes them over the batch.
    """
    return [
        torch.from_numpy(batch.advantages).to(device)
        - suffix_sum(batch_penalties, torch.from_numpy(batch.sequences).to(device))
        for batch, batch_penalties in zip(step.micro_batches, penalties, strict=True)
    ]


def normalize(steps: Sequence[Sequence[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Shift and scale to mean 0 and variance 1 over all tokens of the batch.

    `steps` are [m] advantages per micro-batch of every optimizer step of the batch. All data-parallel ranks must call
    this function. The result depends neither on packing nor on the number of ranks. If any value is not
    finite, all results are NaN.
    """
    # In double precision, because rewards may be large and differ little.
    flat = torch.cat([torch.zeros(0, device=device), *chain.from_iterable(steps)]).double()
    count, total = _sum_over_ranks(torch.ones_like(flat).sum(), flat.sum())
    mean = total / max(count, 1.0)
    [squares] = _sum_over_ranks((flat - mean).square().sum())
    deviation = math.sqrt(squares / max(count, 1.0)) + EPSILON
    return [[((one.double() - mean) / deviation).to(one.dtype) for one in step] for step in steps]


def _sum_over_ranks(*values: Tensor) -> list[float]:
    sums = torch.stack(values)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums.tolist()

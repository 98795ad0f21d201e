"""Advantages of single tokens that depend on the learner's own log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.batching.batch import PackedBatch, TrainStep
from miles_async.config.schema import Algorithm
from miles_async.losses.advantages.statistics import whitening_deviation
from miles_async.losses.critic import last_token_rewards
from miles_async.losses.functions import AdvantageColumns, LossFunctions, SampleLayout, function_advantages, postprocess
from miles_async.losses.policy import kl_penalty
from miles_async.losses.sequences import later_sum


@dataclass(frozen=True, slots=True)
class PreStepValues:
    """Inputs of one optimizer step that are computed before the batch's first step: one tensor [m] per micro-batch."""

    advantages: list[Tensor] | None
    """None if those of the batch are used as they are."""
    old_logprobs: list[Tensor] | None
    """None if the step's own forward pass gives the same values."""
    reference: list[Tensor] | None
    """Log-probabilities under the reference model; None if there is none."""
    critic_values: Sequence[Tensor] = ()
    """The critic's values before the tokens; empty if there is no critic."""
    returns: Sequence[Tensor] = ()
    """What the critic learns to predict; empty if there is no critic."""
    masks: Sequence[Tensor] | None = None
    """Factors of the loss weight of each token, from a function of the user; None without one. 0 takes the token
    out."""
    tokens_left: int | None = None
    """Trained tokens of the step over all ranks that the masks leave; None without masks."""

    def left(self, number: int) -> Tensor | slice:
        """Which of the trained tokens of a micro-batch the masks leave."""
        return slice(None) if self.masks is None else self.masks[number].nonzero()[:, 0]


def reward_penalties(old: Sequence[Tensor], reference: Sequence[Tensor], algorithm: Algorithm) -> list[Tensor]:
    """[m] per micro-batch: what the KL divergence from the reference model subtracts from the reward of each token."""
    return [
        algorithm.kl_coef * kl_penalty(batch_old, batch_reference, algorithm.kl_loss_type)
        for batch_old, batch_reference in zip(old, reference, strict=True)
    ]


def advantages_of_function(
    functions: LossFunctions,
    steps: Sequence[TrainStep],
    values: Sequence[PreStepValues],
    algorithm: Algorithm,
    device: torch.device,
) -> list[PreStepValues]:
    """`values` of each step with the advantages that a function of the user computes from the batch of this rank."""
    computed = iter(function_advantages(functions, _samples(steps, values, algorithm, device)))
    results = []
    for of_step in values:
        pairs = [next(computed) for _ in of_step.old_logprobs or []]
        returns = [own if given is None else given for own, (_, given) in zip(of_step.returns, pairs, strict=False)]
        results.append(replace(of_step, advantages=[advantages for advantages, _ in pairs], returns=returns))
    return results


def postprocessed(
    functions: LossFunctions,
    rollout_id: int,
    steps: Sequence[TrainStep],
    values: Sequence[PreStepValues],
    algorithm: Algorithm,
    device: torch.device,
) -> list[PreStepValues]:
    """`values` of each step with the advantages and masks that a function of the user leaves.

    As in slime, the mean over tokens is that of the tokens that are left, and the mean of a sample is divided by all of
    its trained tokens.
    """
    batch = _samples(steps, values, algorithm, device)
    before = [
        one
        for step, of_step in zip(steps, values, strict=True)
        for one in of_step.advantages or [to_device(micro.advantages, device) for micro in step.micro_batches]
    ]
    changed = iter(postprocess(functions, rollout_id, batch, before))
    results = []
    for step, of_step in zip(steps, values, strict=True):
        pairs = [next(changed) for _ in step.micro_batches]
        masks = [mask for _, mask in pairs]
        none = torch.zeros((), dtype=torch.int64, device=device)
        [count] = _sum_over_ranks(sum((mask.count_nonzero() for mask in masks), none))
        left = max(int(count), 1)
        if not functions.per_token:
            # The loss is divided by the tokens that are left, and these weights by all of them.
            masks = [mask * left / step.total_tokens for mask in masks]
        results.append(replace(of_step, advantages=[one for one, _ in pairs], masks=masks, tokens_left=left))
    return results


def _samples(
    steps: Sequence[TrainStep], values: Sequence[PreStepValues], algorithm: Algorithm, device: torch.device
) -> list[tuple[SampleLayout, AdvantageColumns]]:
    """All micro-batches of this rank."""
    return [
        (SampleLayout(one, device), _advantage_columns(one, of_step, number, algorithm, device))
        for step, of_step in zip(steps, values, strict=True)
        for number, one in enumerate(step.micro_batches)
    ]


def _advantage_columns(
    batch: PackedBatch, values: PreStepValues, number: int, algorithm: Algorithm, device: torch.device
) -> AdvantageColumns:
    """The columns of micro-batch `number` of a step."""
    assert values.old_logprobs is not None
    old, rewards = values.old_logprobs[number], to_device(batch.advantages, device)
    reference = None if values.reference is None else values.reference[number]
    divergences = torch.zeros_like(old)
    if reference is not None and algorithm.kl_coef > 0:
        divergences = kl_penalty(old, reference, algorithm.kl_loss_type)
    return AdvantageColumns(
        rewards=rewards,
        old_logprobs=old,
        rollout_log_probs=to_device(batch.columns["rollout_log_probs"], device),
        divergences=divergences,
        reference_logprobs=reference,
        values=values.critic_values[number] if values.critic_values else None,
        columns={name: to_device(entries, device) for name, entries in batch.of_plugins.items()},
    )


def discounted_returns(
    step: TrainStep, penalties: Sequence[Tensor] | None, discount: float, device: torch.device
) -> list[Tensor]:
    """[m] per micro-batch: the discounted sum of the rewards of each token and of all later ones.

    The reward of a token is that of its sample if the token is the last one, less its penalty. REINFORCE++ (arXiv
    2501.03262) normalizes the sums over the batch.
    """
    returns = []
    for number, batch in enumerate(step.micro_batches):
        sequences = to_device(batch.sequences, device)
        rewards = last_token_rewards(to_device(batch.advantages, device), sequences)
        if penalties is not None:
            rewards = rewards - penalties[number]
        returns.append(later_sum(rewards, sequences, discount))
    return returns


def normalize(steps: Sequence[Sequence[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Whiten over all tokens of the batch, as `statistics.whiten` does.

    `steps` are [m] advantages per micro-batch of every optimizer step of the batch. All data-parallel ranks must call
    this function. The result depends neither on packing nor on the number of ranks. If any value is not
    finite, all results are NaN.
    """
    # In double precision, because rewards may be large and differ little.
    flat = torch.cat([torch.zeros(0, device=device), *chain.from_iterable(steps)]).double()
    count, total = _sum_over_ranks(torch.ones_like(flat).sum(), flat.sum())
    mean = total / max(count, 1.0)
    [squares] = _sum_over_ranks((flat - mean).square().sum())
    deviation = whitening_deviation(math.sqrt(squares / max(count, 1.0)), count)
    return [[((one.double() - mean) / deviation).to(one.dtype) for one in step] for step in steps]


def _sum_over_ranks(*values: Tensor) -> list[float]:
    sums = torch.stack(values)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums.tolist()

"""Runs micro-batches through the model on Megatron's schedules: one stage, a pipeline, or one with virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.environment import environment
from miles_async.adapters.megatron.model.factory import MegatronModel, TrainedModel
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.adapters.megatron.model.local_layers import uses_local_layers
from miles_async.adapters.megatron.model.lora import without_dropout
from miles_async.adapters.megatron.model.packed_params import packed_params
from miles_async.batching.batch import PackedBatch, pack_samples
from miles_async.batching.layout import Padding, context_parallel_indices
from miles_async.batching.shared_prefixes import Pack
from miles_async.losses.logprobs import KeptTokens

R = TypeVar("R")
Outputs = Sequence[Tensor]
"""[t, h] hidden states of a model, and of each of its MTP heads if it has any."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch as this rank's model takes it. With context parallelism the rank has a part of every sequence."""

    batch: PackedBatch
    """The whole micro-batch, with m targets."""
    tokens: Tensor
    """[t] ids of this rank's tokens."""
    positions: Tensor
    """[t] positions of these tokens in their sequences."""
    params: PackedSeqParams
    predictors: Tensor
    """[k] indices among the t tokens of those that predict a target. A token of a shared prefix may occur in it more
    than once."""
    target_indices: Tensor
    """[k] index of the predicted target among the m targets. Without context parallelism k is m."""
    local_index: NDArray[np.int64]
    """[T] index among the t tokens of each token of the micro-batch, or -1 if another rank has it."""
    kept: KeptTokens | None
    """The kept tokens of the k predicted targets; None if the tokens were sampled from the whole vocabulary."""

    def of_head(self, number: int) -> ModelInput:
        """The same tokens with what MTP head `number` predicts, from 1 on: each target from as many tokens earlier.

        A sequence's first tokens are no target of the head. Which tokens sampling kept is unknown for its predictions.
        """
        targets, sequences = self.batch.targets, self.batch.sequences
        starts = np.cumsum(self.batch.lengths) - self.batch.lengths
        reached = np.flatnonzero(targets - starts[sequences] > number)
        predictors = self.local_index[targets[reached] - 1 - number]
        own = predictors >= 0
        return replace(
            self,
            predictors=to_device(predictors[own], self.tokens.device),
            target_indices=to_device(reached[own], self.tokens.device),
            kept=None,
        )


def run_forward(model: MegatronModel, inputs: Sequence[ModelInput], read: Callable[[ModelInput, Tensor], R]) -> list[R]:
    """Run the micro-batches without gradients and return `read(input, output)` of each.

    `output` [t, h] are the hidden states from which `OutputLayer` computes logits, or the values [t, 1] of a
    critic. With sequence parallelism a rank has the hidden states of its part of the tokens. Ranks that are
    not on the last pipeline stage have no output and return an empty list.
    """
    results: dict[int, R] = {}

    def keep(number: int, output: Tensor, non_loss_data: bool) -> None:
        results[number] = read(inputs[number], output[0])

    with torch.no_grad(), without_dropout(model.chunks):
        _run_schedule(model, inputs, keep, forward_only=True, collect_non_loss_data=True)
    return [results[number] for number in sorted(results)]


def run_forward_backward(
    model: TrainedModel, inputs: Sequence[ModelInput], loss: Callable[[int, ModelInput, Outputs], tuple[Tensor, R]]
) -> list[R]:
    """Run the micro-batches and add up the gradients of their losses.

    `loss(number, input, outputs)` returns the micro-batch's loss and any other result; the other results are returned.
    `outputs` are that of the model, as in `run_forward`, and those of its MTP heads. Earlier stages return an empty
    list.

    Auxiliary losses that the model's configuration turns on (load balance and z-loss of the routers) are added. Each is
    its coefficient times the mean of its values on the micro-batches of all data-parallel ranks, weighted by tokens.
    With experts this is a collective operation of the data-parallel ranks.
    """
    results: dict[int, R] = {}
    no_tokens = torch.zeros((), dtype=torch.int)
    scale = _auxiliary_scale(model, inputs)

    def compute_loss(number: int, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value, results[number] = loss(number, inputs[number], output[0].chunk(1 + model.heads))
        # Megatron divides gradients by the number of tokens returned here, and leaves them unchanged if it is 0. The
        # loss is already divided by the tokens of the whole step. `grad_scale_func` multiplies it by `scale` again.
        return value / scale, no_tokens, {}

    model.config.grad_scale_func = None if scale == 1.0 else lambda value: value * scale
    _run_schedule(model, inputs, compute_loss, forward_only=False, collect_non_loss_data=False)
    model.config.grad_scale_func = None
    return [results[number] for number in sorted(results)]


def _auxiliary_scale(model: TrainedModel, inputs: Sequence[ModelInput]) -> float:
    """Factor of auxiliary losses; 1 for a model without experts, which has none.

    Megatron multiplies the auxiliary loss of each micro-batch by its number of tokens, because it expects all gradients
    to be divided by the tokens of the step in the end. Here the policy loss is already divided by them, and this factor
    does the same for auxiliary losses. Tokens are those that the routers process: prompts and padding count,
    skipped samples do not.
    """
    if model.config.num_moe_experts is None:
        return 1.0
    # With context parallelism each rank has a part of the tokens, so the sum over ranks counts every token once.
    tokens = torch.tensor([float(sum(len(one.tokens) for one in inputs))], device=model.device)
    dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Up to 0.18 Megatron multiplies by the tokens of one of the ranks that share a micro-batch, from 0.19 on by the
    # tokens of all of them.
    sharing = parallel_state.get_tensor_and_context_parallel_group().size() if (MAJOR, MINOR) < (0, 19) else 1
    return sharing / max(float(tokens), 1.0)


def _run_schedule(
    model: MegatronModel, inputs: Sequence[ModelInput], finish: Callable[..., Any], **options: bool
) -> None:
    def step(numbered: Iterator[tuple[int, ModelInput]], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        number, one = next(numbered)
        output = chunk(one.tokens[None], one.positions[None], None, packed_seq_params=one.params)
        return output, partial(finish, number)

    with redirect_cuda_to_cpu(), environment(model.variables):
        get_forward_backward_func()(
            forward_step_func=step,
            # Each virtual stage goes through all micro-batches in an order of the schedule's choice, so each needs its
            # own iterator. Results are collected by number for the same reason.
            data_iterator=[enumerate(inputs) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(inputs),
            # Ignored with `variable_seq_lengths`: stages send each other the shape of every micro-batch.
            seq_length=1,
            micro_batch_size=1,
            **options,
        )


def model_inputs(model: MegatronModel, batches: Sequence[PackedBatch]) -> list[ModelInput]:
    """Convert micro-batches to tensors on the model's device, padded so that its parallel layout divides them evenly.

    With expert parallelism this is a collective operation of the data-parallel ranks. Tokens then travel between ranks
    in every layer, so all ranks need equally many micro-batches: ranks with fewer get empty ones at the end. On CPUs
    they also need equally many tokens in each.
    """
    learner, device = model.settings, model.device
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    has_expert_parallelism = learner.expert_model_parallel_size > 1
    if has_expert_parallelism:
        most = torch.tensor([len(batches)], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        empty = pack_samples([], list(batches[0].columns), Padding(unit=learner.sequence_unit))
        batches = [*batches, *[empty] * (int(most) - len(batches))]
    unit = learner.pack_unit
    counts = [batch.computed_tokens if model.shares_prefixes else len(batch.tokens) for batch in batches]
    totals = [-(-count // unit) * unit for count in counts]
    if has_expert_parallelism and on_cpu():
        # The all-gather dispatcher, the only one that works on CPUs, needs equal sizes on all ranks.
        largest = torch.tensor(totals)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        totals = largest.tolist()
    return [
        _model_input(model, batch, total - count) for batch, count, total in zip(batches, counts, totals, strict=True)
    ]


def _model_input(model: MegatronModel, batch: PackedBatch, missing: int) -> ModelInput:
    """This rank's part of a micro-batch that is padded by `missing` tokens."""

    device, shares_prefixes = model.device, model.shares_prefixes
    tokens, lengths, shared = batch.tokens, batch.lengths, batch.shared if shares_prefixes else None
    if missing:
        # The padding is a separate sequence, so no token of a sample attends to it and no target index changes.
        tokens, lengths = np.append(tokens, np.zeros(missing, np.int32)), np.append(lengths, missing)
        shared = None if shared is None else np.append(shared, 0)
    pack = Pack.of(lengths, shared)
    group = parallel_state.get_context_parallel_group()
    own, local_index = pack.computed, pack.index
    if group.size() > 1:
        own = context_parallel_indices(lengths, group.size())[group.rank()]
        # Invert `own`: index among this rank's tokens by index in the pack, and -1 for tokens of other ranks.
        local_index = np.full(len(tokens), -1)
        local_index[own] = np.arange(len(own))
    # A target is predicted by the logits of the token before it.
    predictors = local_index[batch.targets - 1]
    target_indices = np.flatnonzero(predictors >= 0)
    mask = batch.columns.get("sampling_mask")
    mask = None if mask is None else mask.take(target_indices)
    positions = to_device(pack.positions[own], device)
    return ModelInput(
        batch=batch,
        tokens=to_device(tokens[own].astype(np.int64), device),
        positions=positions,
        params=packed_params(
            pack,
            device,
            positions if model.by_position else None,
            local=uses_local_layers(model.settings),
            shares_prefixes=shares_prefixes,
        ),
        predictors=to_device(predictors[target_indices], device),
        target_indices=to_device(target_indices, device),
        local_index=local_index,
        kept=None if mask is None else KeptTokens(to_device(mask.counts, device), to_device(mask.token_ids, device)),
    )

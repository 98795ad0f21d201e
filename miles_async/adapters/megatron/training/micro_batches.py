"""Micro-batches through the model, on Megatron's schedules: one stage, a pipeline, or one with virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.model.attention import packed_params
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel, ReferenceModel
from miles_async.batching.batch import PackedBatch, pack_sequences
from miles_async.batching.layout import context_parallel_indices
from miles_async.batching.layout import Padding
from miles_async.config.derived import pack_unit, sequence_unit
from miles_async.config.schema import Learner

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch as this rank computes it."""

    batch: PackedBatch
    tokens: Tensor
    """[t] this rank's tokens: all, or its share of every sequence."""
    positions: Tensor
    """[t] their places in their sequences."""
    params: PackedSeqParams
    sources: Tensor
    """[k] places of those of them whose logits predict a target."""
    wanted: Tensor
    """[k] which of the batch's targets those are."""


def forward(
    model: MegatronModel | ReferenceModel, passes: Sequence[ModelInput], read: Callable[[ModelInput, Tensor], R]
) -> list[R]:
    """`read(pass, logits)` of every micro-batch, without gradients; nothing on ranks that are not the last stage."""
    results: dict[int, R] = {}

    def keep(number: int, output: Tensor, non_loss_data: bool) -> None:
        results[number] = read(passes[number], output[0])

    with torch.no_grad():
        _run(model, passes, keep, forward_only=True, collect_non_loss_data=True)
    return [results[number] for number in sorted(results)]


def forward_backward(
    model: MegatronModel, passes: Sequence[ModelInput], loss: Callable[[int, ModelInput, Tensor], tuple[Tensor, R]]
) -> list[R]:
    """Add up the gradients of the losses; `loss(number, pass, logits)` also returns what is kept of a micro-batch.

    `logits` [t, columns] are this rank's columns of the (padded) vocabulary. Nothing is returned on ranks that are not
    the last stage.
    """
    results: dict[int, R] = {}
    no_tokens = torch.zeros((), dtype=torch.int)

    def finish(number: int, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value, results[number] = loss(number, passes[number], output[0])
        # The loss is divided by the step's tokens already: there are none for Megatron to divide by.
        return value, no_tokens, {}

    _run(model, passes, finish, forward_only=False, collect_non_loss_data=False)
    return [results[number] for number in sorted(results)]


def _run(
    model: MegatronModel | ReferenceModel, passes: Sequence[ModelInput], finish: Callable[..., Any], **how: bool
) -> None:
    def step(numbered: Iterator[tuple[int, ModelInput]], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        number, own = next(numbered)
        output = chunk(own.tokens[None], own.positions[None], None, packed_seq_params=own.params)
        return output, partial(finish, number)

    with redirect_cuda_to_cpu():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[enumerate(passes) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(passes),
            # Neither counts: stages tell each other the shape of every micro-batch.
            seq_length=1,
            micro_batch_size=1,
            **how,
        )


def model_inputs(batches: Sequence[PackedBatch], learner: Learner, device: torch.device) -> list[ModelInput]:
    """Each micro-batch, filled up to what this layout can cut evenly.

    Ranks that share experts compute equally many tokens at once on a CPU, and equally many micro-batches everywhere.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts_shared = learner.expert_model_parallel_size > 1
    if experts_shared:
        most = torch.tensor([len(batches)], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        empty = pack_sequences([], [], Padding(unit=sequence_unit(learner)))
        batches = [*batches, *[empty] * (int(most) - len(batches))]
    unit = pack_unit(learner)
    totals = torch.tensor([-(-len(batch.tokens) // unit) * unit for batch in batches], device=device)
    if experts_shared and on_cpu():
        # The dispatcher that runs there gathers the tokens of all ranks in one piece.
        dist.all_reduce(totals, dist.ReduceOp.MAX, group=group)
    return [_pass(batch, total, device) for batch, total in zip(batches, totals.tolist(), strict=True)]


def _pass(batch: PackedBatch, total: int, device: torch.device) -> ModelInput:
    def there(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    tokens, lengths = batch.tokens, batch.lengths
    if missing := total - len(tokens):
        # A sequence of its own makes up the difference.
        tokens, lengths = np.append(tokens, np.zeros(missing, np.int64)), np.append(lengths, missing)
    positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    group = parallel_state.get_context_parallel_group()
    own = context_parallel_indices(lengths, group.size())[group.rank()]
    place = np.full(len(tokens), -1)
    place[own] = np.arange(len(own))
    sources = place[batch.targets - 1]
    wanted = np.flatnonzero(sources >= 0)
    return ModelInput(
        batch=batch,
        tokens=there(tokens[own]),
        positions=there(positions[own]),
        params=packed_params(lengths, device),
        sources=there(sources[wanted]),
        wanted=there(wanted),
    )

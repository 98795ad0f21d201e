"""Packed forward passes, and what is read off them: log-probabilities and next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from miles_async.adapters.megatron.model.factory import MegatronModel, ReferenceModel
from miles_async.adapters.megatron.model.process_groups import broadcast_from_last_stage
from miles_async.adapters.megatron.training.micro_batches import ModelInput, forward, model_inputs
from miles_async.batching.batch import PackedBatch, pack_sequences, repack_for_forward
from miles_async.batching.layout import forward_layout
from miles_async.config.schema import Learner
from miles_async.losses.logprobs import token_logprobs


def target_logprobs(
    own: ModelInput, logits: Tensor, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """[m] log-probability of each target token given what precedes it, and [m] entropy, in nats, on all ranks.

    Of the distribution that sampling at `temperature` draws from, which is what engines report and what is trained.
    """
    start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    columns = min(logits.shape[1], vocab_size - start)
    shared = parallel_state.get_tensor_model_parallel_world_size() > 1
    targets = torch.from_numpy(own.batch.tokens[own.batch.targets]).to(logits.device)
    logprobs, entropy = token_logprobs(
        logits.index_select(0, own.sources)[:, :columns].float() / temperature,
        targets[own.wanted],
        vocab_start=start,
        group=parallel_state.get_tensor_model_parallel_group() if shared else None,
    )
    logprobs, entropy = _of_whole_sequences(own, torch.stack([logprobs, entropy])).unbind()
    return logprobs, entropy


def target_values(own: ModelInput, output: Tensor) -> Tensor:
    """[m] a critic's value before each target token, on all ranks; `output` [t, 1] is its head's."""
    return _of_whole_sequences(own, output.index_select(0, own.sources).T)[0]


def _of_whole_sequences(own: ModelInput, found: Tensor) -> Tensor:
    """[k, m] of all targets, from [k, n] of those that this rank's share of the sequences predicts."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return found
    # Losses look at whole sequences. Each rank computes all of the loss, and its gradient flows back to the rank's own
    # tokens only: added up over the ranks, it is there once.
    whole = found.new_zeros(len(found), len(own.batch.targets)).index_copy(1, own.wanted, found)
    return reduce_from_tensor_model_parallel_region(whole, group=group)


def batch_logprobs(
    model: MegatronModel | ReferenceModel,
    batches: Sequence[PackedBatch],
    settings: Learner,
    device: torch.device,
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """[m] for each micro-batch, log-probabilities of its targets without gradients, on the ranks of every stage."""

    def read(own: ModelInput, logits: Tensor) -> Tensor:
        return target_logprobs(own, logits, model.vocab_size, temperature)[0]

    return _of_every_batch(model, batches, settings, device, read)


def batch_values(
    critic: MegatronModel, batches: Sequence[PackedBatch], settings: Learner, device: torch.device
) -> list[Tensor]:
    """[m] for each micro-batch, a critic's values without gradients, on the ranks of every stage."""
    return _of_every_batch(critic, batches, settings, device, target_values)


def _of_every_batch(
    model: MegatronModel | ReferenceModel,
    batches: Sequence[PackedBatch],
    settings: Learner,
    device: torch.device,
    read: Callable[[ModelInput, Tensor], Tensor],
) -> list[Tensor]:
    found = forward(model, model_inputs(batches, settings, device), read)[: len(batches)]
    counts = [len(batch.targets) for batch in batches]
    flat = torch.cat(found) if found else torch.empty(sum(counts), device=device)
    return list(broadcast_from_last_stage(flat).split(counts))


def frozen_logprobs(
    model: MegatronModel | ReferenceModel,
    batches: Sequence[PackedBatch],
    settings: Learner,
    device: torch.device,
    *,
    temperature: float,
) -> list[Tensor]:
    """As `batch_logprobs`, but laid out as work without gradients is."""
    if not (settings.use_dynamic_batching_in_train or settings.use_dynamic_batching_in_infer):
        return batch_logprobs(model, batches, settings, device, temperature=temperature)
    counts = [len(batch.targets) for batch in batches]
    result = torch.zeros(sum(counts), device=device)
    parts = repack_for_forward(batches, settings)
    found = batch_logprobs(model, [part.batch for part in parts], settings, device, temperature=temperature)
    for part, logprobs in zip(parts, found, strict=True):
        result[torch.from_numpy(part.target_indices).to(device)] = logprobs
    return list(result.split(counts))


def sequence_logprobs(
    model: MegatronModel, token_lists: Sequence[list[int]], settings: Learner, *, device: torch.device
) -> list[list[float]]:
    """For each sequence, the log-probability of every token but the first, given those before it."""
    results: list[list[float]] = [[] for _ in token_lists]
    layout = forward_layout([len(tokens) for tokens in token_lists], settings)
    batches = [
        pack_sequences([token_lists[i] for i in bin_], [1] * len(bin_), pad)
        for bin_, pad in zip(layout.bins[0], layout.paddings, strict=True)
    ]
    for bin_, found in zip(layout.bins[0], batch_logprobs(model, batches, settings, device), strict=True):
        logprobs = iter(found.tolist())
        for i in bin_:
            results[i] = [next(logprobs) for _ in token_lists[i][1:]]
    return results


def greedy(
    model: MegatronModel,
    prompts: Sequence[list[int]],
    settings: Learner,
    *,
    max_new_tokens: int,
    eos: int,
    device: torch.device,
) -> list[list[int]]:
    """The most probable continuation of each prompt, token by token, up to and with `eos`.

    Every step runs the whole prefix again: meant for short answers to many prompts, where a KV cache gains little.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        tokens = _next_tokens(model, [prompts[i] + outputs[i] for i in live], settings, device)
        for i, token in zip(live, tokens, strict=True):
            outputs[i].append(token)
        live = [i for i in live if outputs[i][-1] != eos]
        if not live:
            break
    return outputs


def _next_tokens(
    model: MegatronModel, sequences: list[list[int]], settings: Learner, device: torch.device
) -> list[int]:
    """One forward pass; a sequence is followed by a token that stands where the wanted one will."""
    layout = forward_layout([len(sequence) + 1 for sequence in sequences], settings)
    batches = [
        pack_sequences([[*sequences[i], 0] for i in bin_], [len(sequences[i]) for i in bin_], pad)
        for bin_, pad in zip(layout.bins[0], layout.paddings, strict=True)
    ]

    def read(own: ModelInput, logits: Tensor) -> Tensor:
        last = gather_from_tensor_model_parallel_region(logits.index_select(0, own.sources))
        best = torch.zeros(len(own.batch.targets), dtype=torch.int64, device=device)
        best[own.wanted] = last[:, : model.vocab_size].argmax(-1)
        return reduce_from_tensor_model_parallel_region(best, group=parallel_state.get_context_parallel_group())

    found = forward(model, model_inputs(batches, settings, device), read)
    flat = torch.cat(found) if found else torch.empty(len(sequences), dtype=torch.int64, device=device)
    order = [i for bin_ in layout.bins[0] for i in bin_]
    tokens = dict(zip(order, broadcast_from_last_stage(flat).tolist(), strict=True))
    return [tokens[i] for i in range(len(sequences))]

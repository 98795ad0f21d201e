"""Packed forward passes, and what is read off them: log-probabilities and next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from miles_async.adapters.megatron.attention import packed_params
from miles_async.adapters.megatron.batch import PackedBatch, laid_out_for_forward, pack_sequences
from miles_async.adapters.megatron.layout import forward_layout
from miles_async.adapters.megatron.model import Model, Reference
from miles_async.config.schema import Learner
from miles_async.losses.logprobs import token_logprobs


def packed_logits(model: Model | Reference, batch: PackedBatch, device: torch.device) -> Tensor:
    """[T, columns] logits at every place of the pack: this rank's columns of the (padded) vocabulary."""
    tokens, lengths = batch.tokens, batch.lengths
    split = parallel_state.get_tensor_model_parallel_world_size() if model.bridge.config.sequence_parallel else 1
    if missing := -len(tokens) % split:
        # Sequence parallelism cuts the pack into equal parts: a sequence of its own makes up the difference.
        tokens, lengths = np.append(tokens, np.zeros(missing, np.int64)), np.append(lengths, missing)
    positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    logits: Tensor = model.ddp(
        torch.from_numpy(tokens)[None].to(device),
        torch.from_numpy(positions)[None].to(device),
        None,
        packed_seq_params=packed_params(lengths, device),
    )
    return logits[0]


def target_logprobs(
    model: Model | Reference, batch: PackedBatch, device: torch.device, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """[m] log-probability of each target token given what precedes it, and [m] entropy, in nats.

    Of the distribution that sampling at `temperature` draws from, which is what engines report and what is trained.
    """
    targets = torch.from_numpy(batch.targets).to(device)
    logits = packed_logits(model, batch, device).index_select(0, targets - 1)
    start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    columns = min(logits.shape[1], model.vocab_size - start)
    shared = parallel_state.get_tensor_model_parallel_world_size() > 1
    return token_logprobs(
        logits[:, :columns].float() / temperature,
        torch.from_numpy(batch.tokens[batch.targets]).to(device),
        vocab_start=start,
        group=parallel_state.get_tensor_model_parallel_group() if shared else None,
    )


def token_values(model: Model, batch: PackedBatch, device: torch.device) -> Tensor:
    """[m] a critic's value before each target token."""
    targets = torch.from_numpy(batch.targets).to(device)
    return packed_logits(model, batch, device).index_select(0, targets - 1)[:, 0]


@torch.no_grad()
def fixed_values(model: Model, batches: Sequence[PackedBatch], device: torch.device) -> list[Tensor]:
    """[m] for each micro-batch, without gradients."""
    return [token_values(model, batch, device) for batch in batches]


@torch.no_grad()
def sequence_logprobs(
    model: Model, token_lists: Sequence[list[int]], settings: Learner, *, device: torch.device
) -> list[list[float]]:
    """For each sequence, the log-probability of every token but the first, given those before it."""
    results: list[list[float]] = [[] for _ in token_lists]
    layout = forward_layout([len(tokens) for tokens in token_lists], settings)
    for bin_, width in zip(layout.bins[0], layout.padded, strict=True):
        batch = pack_sequences([token_lists[i] for i in bin_], [1] * len(bin_), width)
        logprobs = iter(target_logprobs(model, batch, device)[0].tolist())
        for i in bin_:
            results[i] = [next(logprobs) for _ in token_lists[i][1:]]
    return results


@torch.no_grad()
def fixed_logprobs(
    model: Model | Reference,
    batches: Sequence[PackedBatch],
    settings: Learner,
    device: torch.device,
    *,
    temperature: float,
) -> list[Tensor]:
    """[m] for each micro-batch, log-probabilities of its targets without gradients, and laid out as such work is."""
    if not (settings.use_dynamic_batching_in_train or settings.use_dynamic_batching_in_infer):
        return [target_logprobs(model, batch, device, temperature=temperature)[0] for batch in batches]
    counts = [len(batch.targets) for batch in batches]
    result = torch.zeros(sum(counts), device=device)
    for part in laid_out_for_forward(batches, settings):
        places = torch.from_numpy(part.places).to(device)
        result[places] = target_logprobs(model, part.batch, device, temperature=temperature)[0]
    return list(result.split(counts))


@torch.no_grad()
def greedy(
    model: Model,
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


def _next_tokens(model: Model, sequences: list[list[int]], settings: Learner, device: torch.device) -> list[int]:
    chosen = [0] * len(sequences)
    layout = forward_layout([len(sequence) for sequence in sequences], settings)
    for bin_, width in zip(layout.bins[0], layout.padded, strict=True):
        batch = pack_sequences([sequences[i] for i in bin_], [len(sequences[i]) - 1 for i in bin_], width)
        last = packed_logits(model, batch, device).index_select(0, torch.from_numpy(batch.targets).to(device))
        best = gather_from_tensor_model_parallel_region(last)[:, : model.vocab_size].argmax(-1)
        for i, token in zip(bin_, best.tolist(), strict=True):
            chosen[i] = token
    return chosen

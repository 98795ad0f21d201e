"""Reads log-probabilities, values and next tokens from the model's output, and runs passes without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.model.factory import MegatronModel
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.adapters.megatron.model.process_groups import broadcast_from_last_stage
from miles_async.adapters.megatron.training.micro_batches import ModelInput, model_inputs, run_forward
from miles_async.batching.batch import PackedBatch, pack_layout, repack_for_forward
from miles_async.batching.layout import forward_layout
from miles_async.losses.logprobs import kept_token_logprobs, token_logprobs


def target_logprobs(
    model: MegatronModel,
    model_input: ModelInput,
    output: Tensor,
    temperature: float = 1.0,
    *,
    trains_output_layer: bool = True,
) -> tuple[Tensor, Tensor]:
    """[m] log-probability of each target given the tokens before it, and [m] entropy, in nats and on all ranks.

    `output` [t, h] is the model's output on this rank. Both results are of the distribution from which sampling at
    `temperature` draws, with top-p and top-k if the batch has a sampling mask: the engines report its
    log-probabilities, and it is the policy that is trained. Without `trains_output_layer` the weight of the output
    layer gets no gradient.
    """
    layer = model.output_layer
    assert layer is not None, "only a language model's last pipeline stage has outputs"
    vocab_start = parallel_state.get_tensor_model_parallel_rank() * layer.columns
    # Megatron's vocabulary may be padded. Padded columns must not take part in the softmax.
    columns = min(layer.columns, model.vocab_size - vocab_start)
    is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
    targets = to_device(model_input.batch.tokens[model_input.batch.targets].astype(np.int64), output.device)
    targets = targets[model_input.target_indices]
    group = parallel_state.get_tensor_model_parallel_group() if is_split else None

    def read(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        own, wanted = logits[:, :columns], targets[chunk]
        options: dict[str, Any] = {"temperature": temperature, "vocab_start": vocab_start, "group": group}
        if model_input.kept is None:
            return token_logprobs(own, wanted, **options, overwrite=True)
        return kept_token_logprobs(own, wanted, model_input.kept.part(chunk), **options)

    logprobs, entropy = layer.map(output, model_input.predictors, read, trains_weight=trains_output_layer)
    return _gather_targets(model_input, logprobs), _gather_targets(model_input, entropy)


def head_loss(
    model: MegatronModel, model_input: ModelInput, outputs: Sequence[Tensor], mask: Tensor | None, tokens: int
) -> dict[str, Tensor]:
    """Sum over the targets of their negative log-likelihood in nats under the MTP heads, divided by `tokens`.

    It is averaged over the heads.

    `outputs` [t, h] are those of the heads, and `mask` [m] are factors of the targets. The same on all ranks that share
    the micro-batch.

    - `mtp_loss`: Mean negative log-likelihood of a trained token under the MTP heads, in nats. Worry if it rises:
      engines with these heads would accept fewer of the tokens that they draft.
    """
    total = torch.zeros((), device=model.device)
    for number, output in enumerate(outputs, 1):
        logprobs, _ = target_logprobs(model, model_input.of_head(number), output, trains_output_layer=False)
        masked = logprobs if mask is None else logprobs * mask
        total = total - masked.sum() / len(outputs)
    return {"mtp_loss": total / tokens}


def whole_logits(model: MegatronModel, model_input: ModelInput, output: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """[n, vocabulary] float32 logits after the tokens at `rows` [n] of the micro-batch, on all ranks.

    The backward pass gives each rank the gradient of its part, if all ranks compute the same loss from the result.
    """
    layer = model.output_layer
    assert layer is not None, "only a language model's last pipeline stage has outputs"
    index = model_input.local_index[rows]
    own = np.flatnonzero(index >= 0)

    def read(logits: Tensor, _: slice) -> tuple[Tensor]:
        return (gather_from_tensor_model_parallel_region(logits)[:, : model.vocab_size].float().T,)

    local = layer.map(output, to_device(index[own], output.device), read)[0].T
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return local
    # As in `_gather_targets`.
    whole = local.new_zeros(len(rows), model.vocab_size)
    whole = whole.index_copy(0, to_device(own, output.device), local)
    return reduce_from_tensor_model_parallel_region(whole, group=group)


def target_values(model_input: ModelInput, output: Tensor) -> Tensor:
    """[m] a critic's value before each target token, on all ranks; `output` [t, 1] is that of its value head."""
    return _gather_targets(model_input, output.index_select(0, model_input.predictors)[:, 0])


def _gather_targets(model_input: ModelInput, own: Tensor) -> Tensor:
    """[m] entries for all targets, from those [k] of the targets that this context-parallel rank predicts.

    Targets that no rank predicts have the entry 0.
    """
    group, targets = parallel_state.get_context_parallel_group(), len(model_input.batch.targets)
    if group.size() == 1 and len(own) == targets:
        return own
    # Losses need whole sequences, so every rank computes the whole loss. The backward pass of this reduction passes the
    # gradient on to each rank's own entries without a sum over ranks. Thus every token's gradient counts once when
    # Megatron adds gradients up over context-parallel ranks.
    whole = own.new_zeros(targets).index_copy(0, model_input.target_indices, own)
    return reduce_from_tensor_model_parallel_region(whole, group=group)


def batch_logprobs(model: MegatronModel, batches: Sequence[PackedBatch], *, temperature: float = 1.0) -> list[Tensor]:
    """[m] log-probabilities of each micro-batch's targets, without gradients, on the ranks of every stage."""

    def read(model_input: ModelInput, output: Tensor) -> Tensor:
        return target_logprobs(model, model_input, output, temperature)[0]

    return read_targets(model, batches, read)


def read_targets(
    model: MegatronModel, batches: Sequence[PackedBatch], read: Callable[[ModelInput, Tensor], Tensor]
) -> list[Tensor]:
    """[m] what `read(input, output)` returns for each micro-batch's targets, on the ranks of every stage."""
    # Expert parallelism may have appended empty micro-batches.
    results = run_forward(model, model_inputs(model, batches), read)[: len(batches)]
    counts = [len(batch.targets) for batch in batches]
    flat = torch.cat(results) if results else torch.empty(sum(counts), device=model.device)
    return list(broadcast_from_last_stage(flat).split(counts))


def frozen_logprobs(model: MegatronModel, batches: Sequence[PackedBatch], *, temperature: float) -> list[Tensor]:
    """[m] log-probabilities of each micro-batch's targets, computed in the layout of passes without gradients.

    For weights that do not change while the batch is trained: the policy before its first step and the reference model.
    """
    if not (model.settings.use_dynamic_batching_in_train or model.settings.use_dynamic_batching_in_infer):
        return batch_logprobs(model, batches, temperature=temperature)  # both layouts are the same
    counts = [len(batch.targets) for batch in batches]
    result = torch.zeros(sum(counts), device=model.device)
    repacked = repack_for_forward(batches, model.settings)
    logprobs = batch_logprobs(model, [one.batch for one in repacked], temperature=temperature)
    for one, batch_result in zip(repacked, logprobs, strict=True):
        result[to_device(one.target_indices, model.device)] = batch_result
    return list(result.split(counts))


def sequence_logprobs(model: MegatronModel, token_lists: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each sequence, the log-probabilities in nats of all tokens but the first, given the tokens before them."""
    results: list[list[float]] = [[] for _ in token_lists]
    layout = forward_layout([len(tokens) for tokens in token_lists], model.settings)
    batches = pack_layout(layout, token_lists, [1] * len(token_lists))
    for bin_, batch_result in zip(layout.bins[0], batch_logprobs(model, batches), strict=True):
        logprobs = iter(batch_result.tolist())
        for i in bin_:
            results[i] = [next(logprobs) for _ in token_lists[i][1:]]
    return results


def greedy(model: MegatronModel, prompts: Sequence[list[int]], max_new_tokens: int, eos: int) -> list[list[int]]:
    """Generate the most probable continuation of each prompt, token by token, up to and including `eos`.

    Every step computes the whole sequence again. This is meant for short answers to many prompts, where a KV cache
    would save little.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        tokens = _next_tokens(model, [prompts[i] + outputs[i] for i in unfinished])
        for i, token in zip(unfinished, tokens, strict=True):
            outputs[i].append(token)
        unfinished = [i for i in unfinished if outputs[i][-1] != eos]
        if not unfinished:
            break
    return outputs


def _next_tokens(model: MegatronModel, sequences: list[list[int]]) -> list[int]:
    """The most probable next token of each sequence, from one forward pass."""
    # Targets mark the logits to read. A placeholder token after each sequence is the target at the next position.
    layout = forward_layout([len(sequence) + 1 for sequence in sequences], model.settings)
    batches = pack_layout(layout, [[*sequence, 0] for sequence in sequences], list(map(len, sequences)))
    layer = model.output_layer

    def most_probable(logits: Tensor, _: slice) -> tuple[Tensor]:
        return (gather_from_tensor_model_parallel_region(logits)[:, : model.vocab_size].argmax(-1),)

    def read(model_input: ModelInput, output: Tensor) -> Tensor:
        best = torch.zeros(len(model_input.batch.targets), dtype=torch.int64, device=output.device)
        assert layer is not None, "only a language model's last pipeline stage has outputs"
        (best[model_input.target_indices],) = layer.map(output, model_input.predictors, most_probable)
        return reduce_from_tensor_model_parallel_region(best, group=parallel_state.get_context_parallel_group())

    results = run_forward(model, model_inputs(model, batches), read)
    flat = torch.cat(results) if results else torch.empty(len(sequences), dtype=torch.int64, device=model.device)
    order = [i for bin_ in layout.bins[0] for i in bin_]
    tokens = dict(zip(order, broadcast_from_last_stage(flat).tolist(), strict=True))
    return [tokens[i] for i in range(len(sequences))]

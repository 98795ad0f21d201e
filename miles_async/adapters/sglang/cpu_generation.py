"""Faster generation on CPU: prompts that are computed once per group, products with weights, and sampling.

The functions are hooked around those of SGLang (`plugin.py`) and give the same results, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from miles_async.adapters.system.matrix_products import onednn_linear

Scheduler = Any
"""`sglang.srt.managers.scheduler.Scheduler`, which takes seconds to import."""
TOKENS = ("input_ids", "positions", "out_cache_loc")
"""Fields of SGLang's `ForwardBatch` that have an entry per new token."""
SEQUENCES = ("req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens")
"""Fields that have an entry per sequence."""
LISTS = (
    "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "extend_logprob_start_lens_cpu", "top_logprobs_nums",
    "token_ids_logprobs", "lora_ids", "rids", "mm_inputs",
)  # fmt: skip
"""Fields that are lists with an entry per sequence."""
MIN_SHARED_TOKENS = 256
"""Shortest prompt that waits for the prefix cache: the copies of such a prompt would fill a batch."""


def share_prompts(original: Callable[..., Any], scheduler: Scheduler, *arguments: Any, **keywords: Any) -> Any:
    """Wrap `Scheduler._get_new_batch_prefill_raw`: of the requests with the same prompt, admit one to the batch.

    The samples of a group arrive together, before any of them is in the prefix cache, so SGLang would compute their
    prompt once per sample. The others are admitted to the next batch, where only the last token of the prompt is left
    to compute.
    """
    queue = scheduler.waiting_queue
    if scheduler.disable_radix_cache or not queue:
        return original(scheduler, *arguments, **keywords)
    # The prompt of a chunked request is not in the cache yet.
    prompts = {_prompt(scheduler.chunked_req)} if scheduler.chunked_req is not None else set()
    admitted: list[Any] = []
    held: list[Any] = []
    for request in queue:
        prompt = _prompt(request)
        repeated = len(request.origin_input_ids) >= MIN_SHARED_TOKENS and prompt in prompts
        (held if repeated else admitted).append(request)
        prompts.add(prompt)
    scheduler.waiting_queue = admitted
    try:
        return original(scheduler, *arguments, **keywords)
    finally:
        # SGLang has removed the requests of the batch, and may have added requests that were preempted.
        scheduler.waiting_queue = [*held, *scheduler.waiting_queue]


def _prompt(request: Any) -> tuple[object, ...]:
    """Return the key under which two requests share a cached prompt."""
    return request.origin_input_ids.tobytes(), request.extra_key


def compute_prompts_once(original: Callable[..., Any], runner: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
    """Wrap `EagerRunner._execute_extend`: compute sequences with the same tokens once, and copy the results.

    The samples of a group arrive together, before the prefix cache has their prompt. Each sequence keeps its cache
    slots, so nothing else changes for SGLang. `batch` is SGLang's `ForwardBatch`.
    """
    model_runner = runner.model_runner
    if not _has_only_text(batch, model_runner):
        return original(runner, batch, pp_proxy_tensors)
    slots = batch.out_cache_loc.split(batch.extend_seq_lens_cpu)
    first = _first_of_same(batch, model_runner.req_to_token_pool.req_to_token)
    kept = sorted(set(first))
    if len(kept) == len(first):
        return original(runner, batch, pp_proxy_tensors)
    part = _part_of(batch, kept)
    if model_runner.lora_manager is not None:
        model_runner.lora_manager.prepare_lora_batch(part)
    output = original(runner, part, pp_proxy_tensors)
    copies = [sequence for sequence, same in enumerate(first) if sequence != same]
    source = torch.cat([slots[first[sequence]] for sequence in copies])
    target = torch.cat([slots[sequence] for sequence in copies])
    cache = model_runner.token_to_kv_pool
    for layer in (*cache.k_buffer, *cache.v_buffer):
        layer.index_copy_(0, target, layer.index_select(0, source))
    rows = torch.searchsorted(torch.tensor(kept), torch.tensor(first))
    output.next_token_logits = output.next_token_logits.index_select(0, rows)
    return output


def _has_only_text(batch: Any, model_runner: Any) -> bool:
    """Whether nothing but tokens goes into the batch, and nothing but keys, values and the last logits comes out."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    inputs = (batch.input_embeds, batch.replace_embeds, batch.mrope_positions, batch.encoder_lens, batch.spec_info)
    return (
        # Other pools have more state per sequence, such as that of linear attention.
        type(model_runner.token_to_kv_pool) is MHATokenToKVPool
        and type(model_runner.req_to_token_pool) is ReqToTokenPool
        and model_runner.is_generation
        and model_runner.ps.pp_size == 1
        and batch.global_num_tokens_cpu is None
        and all(value is None for value in inputs)
        and not batch.contains_mm_inputs()
        and not batch.capture_hidden_mode.need_capture()
        # The log-probabilities of prompts are returned as one list for the whole batch.
        and (not batch.return_logprob or batch.extend_logprob_start_lens_cpu == batch.extend_seq_lens_cpu)
    )


def _first_of_same(batch: Any, req_to_token: torch.Tensor) -> list[int]:
    """Return for each sequence the first one that has the same new tokens after the same cached ones."""
    first: dict[tuple[object, ...], int] = {}
    found = []
    tokens = batch.input_ids.split(batch.extend_seq_lens_cpu)
    cached = zip(batch.req_pool_indices.tolist(), batch.extend_prefix_lens_cpu, strict=True)
    for sequence, (row, length) in enumerate(cached):
        prefix, new = req_to_token[row, :length], tokens[sequence]
        key = prefix.numpy().tobytes(), new.numpy().tobytes(), batch.lora_ids[sequence]
        found.append(first.setdefault(key, sequence))
    return found


def _part_of(batch: Any, kept: list[int]) -> Any:
    """Return the part of a batch that consists of some of its sequences."""
    lengths = batch.extend_seq_lens_cpu
    numbers = torch.arange(len(batch.input_ids)).split(lengths)
    tokens, sequences = torch.cat([numbers[row] for row in kept]), torch.tensor(kept)
    parts: dict[str, Any] = {name: vars(batch)[name].index_select(0, tokens) for name in TOKENS}
    parts |= {name: vars(batch)[name].index_select(0, sequences) for name in SEQUENCES if vars(batch)[name] is not None}
    parts |= {name: [vars(batch)[name][row] for row in kept] for name in LISTS if vars(batch)[name] is not None}
    extended = parts["extend_seq_lens"]
    return replace(
        batch,
        batch_size=len(kept),
        seq_lens_sum=int(parts["seq_lens"].sum()),
        extend_num_tokens=len(tokens),
        extend_start_loc=extended.cumsum(0, dtype=extended.dtype) - extended,
        global_num_token_non_padded_cpu=len(tokens),
        **parts,
    )


def apply_linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Wrap `UnquantizedLinearMethod.apply`: compute products in float32 with oneDNN instead of MKL."""
    if x.dtype is torch.float32 and layer.weight.dtype is torch.float32:
        return onednn_linear(x, layer.weight, bias)
    return original(method, layer, x, bias)


def compute_logits(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: torch.nn.Module,
    embedding_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Wrap `LogitsProcessor._compute_lm_head`: compute logits in float32 with oneDNN instead of MKL."""
    plain = type(lm_head).__name__ in ("ParallelLMHead", "VocabParallelEmbedding") and embedding_bias is None
    if plain and hidden_states.dtype is lm_head.weight.dtype is torch.float32 and processor.rl_on_policy_target is None:
        return onednn_linear(hidden_states, lm_head.weight)
    return original(processor, hidden_states, lm_head, embedding_bias)


def sample_tokens(
    original: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Wrap `sampling_from_probs_torch`: draw one random number per sequence instead of one per token.

    `probs` is [sequences, vocabulary]. Returns the sampled token of each sequence, by inverting the cumulative
    distribution. `torch.multinomial` takes fifteen times as long with a vocabulary of 49,152 tokens.
    """
    if sampling_seed is not None:
        return original(probs, sampling_seed, positions)
    # In float64, so that unlikely tokens keep their probability.
    sums = probs.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    if not bool((total > 0).logical_and(total.isfinite()).all()):
        return original(probs, sampling_seed, positions)  # raises the error of torch
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * total
    # A product may round up to the total, which would be the index behind the last token.
    drawn = torch.minimum(drawn, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, drawn, right=True).view(-1).to(torch.int32)

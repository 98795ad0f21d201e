"""Faster generation on CPU: prompts that are computed once per group, products with weights, and sampling.

The functions are hooked around those of SGLang (`plugin.py`) and give the same results, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from miles_async.adapters.system.matrix_products import onednn_linear

Scheduler = Any
"""`sglang.srt.managers.scheduler.Scheduler`, which takes seconds to import."""
MIN_SHARED_TOKENS = 32
"""Shortest prompt that is worth another pass; SGLang's cache-aware policies have the same limit."""


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

"""Attention over packed sequences, and over common prefixes, against plain attention over one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.report import NotPossibleError, Report
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Precision, Surroundings, require_transformer_engine
from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.flex_attention import FlexAttention, FlexSeqParams
from miles_async.adapters.megatron.model.local_layers import (
    BucketedSeqParams,
    LocalAttention,
    bucket_sequences,
)
from miles_async.adapters.megatron.model.packed_params import packed_params
from miles_async.adapters.megatron.model.process_groups import create_process_groups
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.shared_prefixes import Pack
from miles_async.config.schema import Learner

HEADS, KV_HEADS, WIDTH = 8, 4, 64
LIMIT = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest difference, relative to the largest value."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 3
GROUPS, SAMPLES, PROMPT, RESPONSE = (4, 8, 1024, 512) if ON_GPU else (2, 4, 100, 40)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[t, 1, heads * d] from queries [t, heads, d], keys and values [t, kv heads, d]."""


def check(report: Report, surroundings: Surroundings) -> None:
    """Create the process groups that Megatron's attention asks for, and measure every attention."""
    create_process_groups(rank=0, world_size=1, address="127.0.0.1", port=free_port(), learner=Learner())
    for shares_prefixes in (False, True):
        pack = pack_of(shares_prefixes=shares_prefixes)
        kind = "shared prefixes" if shares_prefixes else "packed"
        for name, build in ATTENTIONS.items():
            for precision in DTYPES:
                part = f"{kind}, {name}, {precision}"
                with report.part(part):
                    measure(report, part, build(pack, precision), pack, precision)


def measure(report: Report, part: str, attention: Attention, pack: Pack, precision: str) -> None:
    torch.manual_seed(0)
    shape = [(len(pack.computed), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(*one, device=DEVICE).to(DTYPES[precision]).requires_grad_() for one in shape]
    weights = torch.randn(len(pack.computed), 1, HEADS * WIDTH, device=DEVICE)

    def exact_attention(*tensors: Tensor) -> Tensor:
        return plain(pack, *(tensor.float() for tensor in tensors))

    exact, ours = exact_attention(*inputs), attention(*inputs)
    report.figure(f"{part}: result", difference([ours], [exact]), "relative", at_most=LIMIT[precision])
    if not ours.requires_grad:
        report.not_possible(f"{part}: gradients", "torch computes them only on a GPU")
        return
    gradients = [torch.autograd.grad(out, inputs, weights.to(out.dtype)) for out in (ours, exact)]
    apart = difference(*map(list, gradients))
    report.figure(f"{part}: gradients", apart, "relative", at_most=LIMIT[precision])

    def seconds(attention: Attention) -> float:
        took = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            out = attention(*inputs)
            torch.autograd.grad(out, inputs, weights.to(out.dtype))
            if ON_GPU:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        return median(took)

    speed = seconds(lambda *tensors: plain(pack, *tensors)) / seconds(attention)
    report.figure(f"{part}: speed", speed, "times plain")


def plain(pack: Pack, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to one whole sequence at a time, and keep the results of the computed tokens."""
    results, start = [], 0
    for length, shared in zip(pack.lengths.tolist(), pack.shared.tolist(), strict=True):
        rows = torch.from_numpy(pack.index[start : start + length]).to(q.device)
        queries, keys, values = (one.index_select(0, rows).transpose(0, 1)[None] for one in (q, k, v))
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        results.append(out[0].transpose(0, 1)[shared:])
        start += length
    return torch.cat(results).reshape(len(q), 1, -1)


def difference(ours: list[Tensor], exact: list[Tensor]) -> float:
    """The largest of the differences, each relative to the largest value of its tensor."""
    pairs = zip(ours, exact, strict=True)
    return max(((one.float() - other.float()).abs().max() / other.abs().max()).item() for one, other in pairs)


def pack_of(*, shares_prefixes: bool) -> Pack:
    lengths = np.array([PROMPT + RESPONSE - 3 * i for _ in range(GROUPS) for i in range(SAMPLES)])
    shared = np.array([PROMPT if i else 0 for _ in range(GROUPS) for i in range(SAMPLES)])
    return Pack.of(lengths, shared if shares_prefixes else None)


def local_layers(pack: Pack, precision: Precision) -> Attention:
    buckets, restore = bucket_sequences(pack, DEVICE)
    params = BucketedSeqParams(buckets=buckets, restore=restore)
    return in_megatron(LocalAttention(config(precision)), params)


def flex(pack: Pack, precision: Precision) -> Attention:
    params = FlexSeqParams(mask=flex_attention.prefix_mask(pack, DEVICE))
    attention = in_megatron(FlexAttention(config(precision)), params)
    if flex_attention.has_gradients():
        return attention
    return lambda *inputs: attention(*(one.detach() for one in inputs))


def transformer_engine(pack: Pack, precision: Precision) -> Attention:
    require_transformer_engine()
    if pack.shared.any():
        raise NotPossibleError("Transformer Engine's attention takes whole sequences")
    if precision == "fp32":
        raise NotPossibleError("Transformer Engine's attention over packed sequences has no kernel for float32")
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention = TEDotProductAttention(
        config(precision), layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )

    def attend(*inputs: Tensor) -> Tensor:
        params = packed_params(pack, DEVICE, None, local=False, shares_prefixes=False)
        return attention(*inputs, None, AttnMaskType.causal, packed_seq_params=params).reshape(len(inputs[0]), 1, -1)

    return attend


ATTENTIONS: dict[str, Callable[[Pack, Any], Attention]] = {
    "local layers": local_layers,
    "FlexAttention": flex,
    "Transformer Engine": transformer_engine,
}


def in_megatron(module: torch.nn.Module, params: Any) -> Attention:
    return lambda *inputs: module(*inputs, None, packed_seq_params=params)


def config(precision: Precision) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=WIDTH,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=precision == "bf16",
        params_dtype=DTYPES[precision],
    )

"""Transformer layers without Transformer Engine: Megatron's local layers with attention and norms from torch.

Megatron's attention for packed sequences needs Transformer Engine, which needs CUDA. Here, packed sequences are sorted
into buckets of similar length, and each bucket is one padded call of torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.batching.layout import context_parallel_indices
from miles_async.batching.shared_prefixes import Pack
from miles_async.config.schema import Learner
from miles_async.errors import UserError

_LONG = 256
"""Sequences of more tokens than this get their own call: padding them costs more than the call."""


_MOST_MASKED = 1 << 15
"""Tokens of the largest micro-batch for which local layers make masks: 1 GiB for a sequence of all of them."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, laid out as n padded rows of queries and n padded rows of keys."""

    queries: Tensor
    """[n * longest] index among this rank's tokens for every cell; cells past a row's end repeat its last token."""
    keys: Tensor
    """[n * longest] index of every cell among the keys. With context parallelism these are the keys of all ranks, in
    the order in which an all-gather concatenates them."""
    count: int
    """Number of rows n."""
    kept: Tensor | None
    """Indices of the query cells that are not padding, in the order of `queries`; None if there is no padding."""
    mask: Tensor | None
    """[n, 1, query cells, key cells] true where a query may attend. None means the ordinary causal mask: every query
    has a key at its own cell."""


@dataclass
class BucketedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed sequences with their buckets; computed once per micro-batch and used by every layer."""

    buckets: list[Bucket] = field(default_factory=list)
    restore: Tensor | None = None
    """Permutation from the tokens of all buckets, concatenated, to the order of the pack; None if it is the same."""
    positions: Tensor | None = None
    """[t] position of each of this rank's tokens in its sequence, for `PositionRotary`."""


def bucket_sequences(
    pack: Pack, device: torch.device, ranks: int = 1, rank: int = 0
) -> tuple[list[Bucket], Tensor | None]:
    """Sort packed sequences into buckets; returns them with the permutation back to the order of the computed tokens.

    The queries of a sequence are its computed tokens, and its keys are all its tokens, including a prefix that was
    computed for the sequence before it. Sequences with up to 256 queries share a bucket if the same powers of two hold
    their queries and keys; longer ones have their own. A bucket is padded to its longest sequence, which at most
    doubles its tokens. Padding does not change the result, because causal attention never looks at later tokens.

    Measured on one core against one SDPA call per sequence: 512 sequences of 12 to 15 tokens take a tenth of the time
    in buckets, but 8 sequences of 300 to 1000 tokens take twice the time.

    With context parallelism, `rank` of `ranks` holds its part of the queries and gathers the keys of all ranks.
    """
    lengths = pack.lengths
    rank_indices = context_parallel_indices(lengths, ranks) if ranks > 1 else pack.computed[None]
    # gathered[i] is where token i of the pack is after the all-gather, which concatenates the ranks' tokens.
    gathered = np.argsort(rank_indices, axis=None) if ranks > 1 else pack.index
    starts, local_lengths = np.cumsum(lengths) - lengths, (lengths - pack.shared) // ranks
    local_starts = np.cumsum(local_lengths) - local_lengths
    # Position of each of this rank's tokens in its whole sequence. The causal mask needs it if the rank's queries do
    # not start with the sequence or are not contiguous.
    positions = rank_indices[rank] - np.repeat(starts, local_lengths)
    buckets, order = [], []
    for chosen in _similar(local_lengths * ranks, lengths):
        keys, _ = _padded_rows(starts[chosen], lengths[chosen])
        queries, kept = _padded_rows(local_starts[chosen], local_lengths[chosen])
        order.append(queries.reshape(-1)[kept])
        mask = None
        if ranks > 1 or pack.shared[chosen].any():
            mask = to_device(np.arange(keys.shape[1]) <= positions[queries][:, None, :, None], device)
        buckets.append(
            Bucket(
                queries=to_device(queries.reshape(-1), device),
                keys=to_device(gathered[keys.reshape(-1)], device),
                count=len(chosen),
                kept=None if len(kept) == queries.size else to_device(kept, device),
                mask=mask,
            )
        )
    restore = np.argsort(np.concatenate(order))
    in_order = bool((restore == np.arange(len(restore))).all())
    return buckets, None if in_order else to_device(restore, device)


def _similar(queries: NDArray[np.int64], keys: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of the sequences of each bucket, from their numbers of queries and keys.

    Sequences without queries, which are the same as the sequence before them, are in no bucket.
    """
    buckets: dict[tuple[int, ...], list[int]] = {}
    for number, (query_count, key_count) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        if query_count > _LONG:
            buckets[-1, number] = [number]
        elif query_count:
            # A prefix makes a bucket's mask necessary, so sequences without one stay apart.
            shape = (query_count - 1).bit_length(), (key_count - 1).bit_length(), int(query_count == key_count)
            buckets.setdefault(shape, []).append(number)
    return [np.array(numbers) for _, numbers in sorted(buckets.items())]


def _padded_rows(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[n, longest] token index of every cell, and the flat indices of the cells that are not padding."""
    cells = np.arange(int(lengths.max()))[None, :]
    rows = starts[:, None] + np.minimum(cells, lengths[:, None] - 1)
    return rows, np.flatnonzero((cells < lengths[:, None]).reshape(-1))


class LocalAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of Megatron's layer spec: causal attention over packed sequences, bucket by bucket.

    A subclass may compute another attention within the sequences of a bucket (`attend`).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, packed_seq_params: BucketedSeqParams, **_: Any
    ) -> Tensor:
        """Returns [t, 1, heads * d] from `q` [t, heads, d], `k` and `v` [t, kv heads, d]; t are this rank's tokens."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            # Gathering keys and values as one tensor takes one collective. Its backward pass returns the sum of the
            # gradients of all ranks (reduce-scatter).
            both = gather_from_sequence_parallel_region(torch.cat((k, v), -1), group=group)
            k, v = both.split((k.shape[-1], v.shape[-1]), -1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [self._attend(q, k, v, bucket) for bucket in packed_seq_params.buckets]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out if packed_seq_params.restore is None else out.index_select(0, packed_seq_params.restore)

        if torch.is_grad_enabled():
            # Buckets hold copies of their keys and values: with their padding, for each query head, and with a shared
            # prefix for each sequence. They are computed again in the backward pass instead of kept in every layer.
            # As a view, the values would keep the output of the layer that also computed queries and keys.
            out = checkpoint(attend, q, k, v.contiguous(), use_reentrant=False, preserve_rng_state=False)
        else:
            out = attend(q, k, v)
        return out.reshape(q.shape[0], 1, -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bucket: Bucket) -> Tensor:
        """[tokens of the bucket, heads, d] attention of one bucket, without its padding."""
        queries, keys, values = (
            tokens.index_select(0, indices).view(bucket.count, -1, *tokens.shape[1:]).transpose(1, 2)
            for tokens, indices in ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        )
        out = self.attend(queries, keys, values, bucket.mask).transpose(1, 2).flatten(0, 1)
        return out if bucket.kept is None else out.index_select(0, bucket.kept)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[n, heads, queries, d] attention within n sequences; `k` and `v` are [n, kv heads, keys, d].

        `mask` is that of `Bucket`.
        """
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


class LocalNorm(torch.nn.RMSNorm):
    """RMS norm that works with sequence parallelism and with weights around 0, which Megatron's own local norm refuses.

    Each rank normalizes a part of the sequence. Megatron adds up the gradients of parameters with this attribute.
    Without CUDA torch composes the norm from operations that keep several copies of their input for the backward pass.
    `_RmsNorm` keeps the input and one number per token.
    """

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, dtype: torch.dtype | None = None, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps, dtype=dtype)
        self._zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., h] in the type of `x` [..., h]."""
        return rms_norm(x, self.weight + 1 if self._zero_centered else self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """[..., h] in the type of `x` [..., h], from `weight` [h]."""
    output: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return output


class _RmsNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^(-1/2), in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """dw = sum(g x r);  dx = r (g w - x r^2 mean(g w x))."""
        x, weight, scale = ctx.saved_tensors
        normalized = x.float() * scale
        gradient = gradient.float()
        weight_gradient = (gradient * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = gradient * weight
        mean = (scaled * normalized).mean(-1, keepdim=True)
        return (scaled - normalized.mul_(mean)).mul_(scale).to(x.dtype), weight_gradient, None


def replace_swiglu(model: torch.nn.Module) -> None:
    """Let the feed-forward parts of dense layers use `_SwiGlu` if they are gated with SiLU and have no biases."""
    for module in model.modules():
        if type(module) is MLP and _is_plain_swiglu(module.config):
            module.forward = partial(_forward_swiglu, module, module.forward)


def _forward_swiglu(
    mlp: Any, original: Callable[..., Any], hidden: Tensor, per_token_scale: Tensor | None = None, **options: Any
) -> Any:
    """Replaces `MLP.forward`: [t, 1, h] and no bias. Experts, whose tokens are scaled, keep the original."""
    if per_token_scale is not None:
        return original(hidden, per_token_scale, **options)
    gate_and_up, _ = mlp.linear_fc1(hidden)
    activated: Tensor = _SwiGlu.apply(gate_and_up)  # type: ignore[no-untyped-call]
    address, kept = activated.data_ptr(), gate_and_up.detach()

    # The second layer keeps its input for the gradient of its weights. `_SwiGlu` keeps `gate_and_up` anyway, so the
    # input is computed from it again in the backward pass; this takes a sixth off the activations of a layer.
    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if saved.data_ptr() == address else saved

    def unpack(saved: Tensor | torch.Size) -> Tensor:
        return saved if isinstance(saved, Tensor) else _swiglu(kept).view(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return mlp.linear_fc2(activated)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return silu(gate).mul_(up)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [..., 2 f]; keeps only its input. Megatron's own is composed of three operations."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        return _swiglu(gate_and_up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, -1)
        result = torch.empty_like(gate_and_up)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradient, silu(gate), out=of_up)
        of_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return result


def dtype_of(settings: Learner) -> torch.dtype:
    """The type of weights and activations."""
    precision = settings.precision or ("fp32" if on_cpu() else "bf16")
    return torch.bfloat16 if precision == "bf16" else torch.float32


def uses_local_layers(settings: Learner) -> bool:
    """Whether the learner uses the layers of this module instead of Transformer Engine's.

    Raises UserError if the settings ask for Transformer Engine and this process cannot use it.
    """
    # None of Transformer Engine's attention kernels computes packed sequences in float32. Its layers get no adapters.
    if settings.transformer_impl is None and settings.lora_rank:
        return True
    if settings.transformer_impl is None:
        return on_cpu() or not HAVE_TE or dtype_of(settings) is torch.float32
    if settings.transformer_impl == "transformer_engine" and (on_cpu() or not HAVE_TE):
        lack = "needs a GPU" if on_cpu() else "is not installed"
        raise UserError(f"Transformer Engine {lack}: set transformer_impl to local, or unset it")
    return settings.transformer_impl == "local"


def refuse_for_local_layers(settings: Learner) -> None:
    """Raise UserError if local layers cannot follow the settings, or if their masks would be too large."""
    if needs := settings.of_transformer_engine:
        raise UserError(
            f"this learner uses Megatron's local layers, and only those of Transformer Engine have "
            f"{' and '.join(needs)}: unset this, or install Transformer Engine on a machine with GPUs (make setup-gpu)"
        )
    tokens = settings.micro_batch_tokens
    if settings.context_parallel_size > 1 and tokens > _MOST_MASKED:
        raise UserError(
            f"without Transformer Engine, context parallelism computes attention with a mask over all tokens, and a "
            f"micro-batch may hold {tokens} tokens: install Transformer Engine (make setup-gpu), or set "
            f"max_tokens_per_gpu to {_MOST_MASKED // settings.context_parallel_size} or less"
        )


def local_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The layer spec of one pipeline stage, with attention and norms that need no Transformer Engine."""
    # The router checks whether Transformer Engine's matrix product is None, but the name is only defined if Transformer
    # Engine is installed.
    vars(moe_utils).setdefault("te_general_gemm", None)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    block.layer_norm = LocalNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = LocalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
    return block


def _is_plain_swiglu(config: Any) -> bool:
    """Whether a feed-forward part computes silu(gate) * up and nothing else."""
    return bool(
        config.gated_linear_unit
        and config.activation_func is silu
        and not config.add_bias_linear
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
    )

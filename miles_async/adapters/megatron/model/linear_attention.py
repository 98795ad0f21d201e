"""Linear attention and state space models in torch: what FLA (Qwen3-Next, Qwen3.5) and mamba_ssm (Nemotron-H) compute.

Both libraries consist of Triton kernels, which need a GPU. These functions have their names and arguments, as far as
Megatron uses them, and compute each sequence of a pack in turn. Shapes are in tokens t, heads h, and widths of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from miles_async.adapters.megatron.model.stand_in import stand_in


def install() -> None:
    """Let Megatron's layers use these functions, in this process from now on.

    Megatron reads the names from mamba_ssm when its mixer is imported.
    """
    with stand_in(
        {
            "mamba_ssm": {},
            "mamba_ssm.ops": {},
            "mamba_ssm.ops.triton": {},
            "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRmsNorm},
            "mamba_ssm.ops.triton.ssd_combined": {
                "mamba_chunk_scan_combined": mamba_split_conv1d_scan_combined,  # read, but not used in training
                "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
            },
        }
    ):
        mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    mixer._check_mamba_sequence_packing_support = _supports_packing  # type: ignore[attr-defined]
    common = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    delta = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    rule = partial(_by_sequence, common.torch_chunk_gated_delta_rule)
    vars(common).update({"HAVE_FLA": True, "l2norm": l2norm})
    vars(delta).update({"l2norm": l2norm, "causal_conv1d": causal_conv1d, "chunk_gated_delta_rule": rule})


def _supports_packing(for_inference_not_training: bool = True) -> tuple[bool, None]:
    return True, None


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """`x` divided by its length along `dim`."""
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, t, d] convolution of each channel of `x` [1, t, d] with the last tokens of its sequence.

    `weight` is [d, width]. FLA's function also returns a state, which training does not need.
    """

    def convolve(part: Tensor) -> Tensor:
        padded = {"padding": weight.shape[-1] - 1, "groups": weight.shape[0]}
        result = conv1d(part.transpose(1, 2), weight[:, None], bias, **padded)[..., : part.shape[1]].transpose(1, 2)
        return silu(result) if activation in ("silu", "swish") else result

    return torch.cat([convolve(part) for part in x.split(_lengths(x, cu_seqlens), 1)], 1), None


def _by_sequence(
    rule: Callable[..., tuple[Tensor, Any]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply Megatron's own gated delta rule, which takes no packs, to each sequence; the tensors are [1, t, ...]."""
    parts = zip(*(tensor.split(_lengths(q, cu_seqlens), 1) for tensor in (q, k, v, g, beta)), strict=True)
    return torch.cat([rule(q, k, v, g=g, beta=beta, **options)[0] for q, k, v, g, beta in parts], 1), None


def _lengths(x: Tensor, bounds: Tensor | None) -> list[int]:
    return [x.shape[1]] if bounds is None else bounds.diff().tolist()


class GatedRmsNorm(torch.nn.Module):
    """Root mean square norm by groups of `group_size` channels."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        group_size: int,
        norm_before_gate: bool,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "the gate comes before the norm"
        self._eps, self._group = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., d] in the type of `x` [..., d]."""
        groups = x.float().unflatten(-1, (-1, self._group))
        normalized = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)
        return (normalized.flatten(-2) * self.weight).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # the names of mamba_ssm
    *,
    D: Tensor,
    activation: str,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """[1, t, h * p] output of a layer of Mamba-2 (arXiv 2405.21060), from its projection `zxbcdt` [1, t, ...].

    The projection has five parts: gate z, input x, B, C and step sizes dt. After a convolution of x, B and C

    y[t] = sum over s <= t of C[t] B[s] exp(A dt[s+1] + ... + A dt[t]) dt[s] x[s], plus D x[t],

    and the output is y silu(z). Sequences, whose numbers are in `seq_idx` [1, t], are independent. Time and memory grow
    with the square of a sequence's length.
    """
    heads, inner = len(dt_bias), len(dt_bias) * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    bounds = _bounds(seq_idx)
    xbc, _state = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation, bounds)
    x, b, c = xbc.float().split([inner, ngroups * state, ngroups * state], -1)
    x, dt = x.unflatten(-1, (heads, -1)), softplus(dt.float() + dt_bias)
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for part in (b, c))
    sequences = zip(*(tensor.split(_lengths(x, bounds), 1) for tensor in (x, dt, b, c)), strict=True)
    y = torch.cat([_scan(*one, rates=A) for one in sequences], 1) + x * D.float()[:, None]
    return (y.flatten(-2) * silu(z.float())).to(zxbcdt.dtype)


def _scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, rates: Tensor) -> Tensor:
    """[1, t, h, p] of one sequence, from `x` [1, t, h, p], `dt` [1, t, h], `b` and `c` [1, t, h, n], `rates` [h]."""
    total = (dt * rates).cumsum(1)
    decay = total[:, :, None] - total[:, None]  # [1, t, s, h]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)[None, :, :, None]
    weights = torch.einsum("bthn,bshn->btsh", c, b) * decay.masked_fill(later, -torch.inf).exp() * dt[:, None]
    return torch.einsum("btsh,bshp->bthp", weights, x)


def _bounds(seq_idx: Tensor | None) -> Tensor | None:
    """[sequences + 1] first token of each sequence, and the number of tokens, from the number of each token's."""
    if seq_idx is None:
        return None
    changes = seq_idx[0].diff().nonzero().flatten() + 1
    return torch.cat((changes.new_zeros(1), changes, changes.new_tensor([seq_idx.shape[1]])))

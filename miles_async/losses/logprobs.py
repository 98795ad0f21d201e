"""Log-probabilities of given tokens and entropy, even if tensor-parallel ranks divide the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PART_ENTRIES = {"cpu": 2**20, "cuda": 2**25}
"""Most logits, by device, that a softmax computes at a time: few on a CPU, so that they stay in its cache."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log p(target) and the entropy at each position, both in nats and differentiable.

    `logits` [n, v] are this rank's columns of the vocabulary, for the tokens `vocab_start` to `vocab_start + v`; the
    ranks of `group` hold the others (None: this rank holds all). They may have any floating-point type, are computed
    with in at least float32, and are divided by `temperature`. `targets` [n] are global token ids. Returns two tensors
    [n], equal on all ranks of the group.

    The logits are the only [n, v] tensor kept for the backward pass. With `overwrite` their gradient takes the place of
    their values, so they must not be used elsewhere.
    """
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, vocab_start, group, overwrite
    )
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that top-p and top-k sampling kept at each of n positions, E entries in all."""

    counts: Tensor
    """[n] number of kept tokens at each position."""
    token_ids: Tensor
    """[E] global token ids, those of the first position first."""

    def part(self, positions: slice) -> KeptTokens:
        """The kept tokens of some positions."""
        ends = self.counts.cumsum(0)
        first = int(ends[positions.start - 1]) if positions.start else 0
        last = int(ends[positions.stop - 1]) if positions.stop else 0
        return KeptTokens(self.counts[positions], self.token_ids[first:last])


def kept_token_logprobs(
    logits: Tensor,
    targets: Tensor,
    kept: KeptTokens,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log p(target) and the entropy like `token_logprobs`, of the distribution over the kept tokens only.

    `logits` [n, v] may have any floating-point type and are divided by `temperature`. Only the logits of kept tokens
    are read, so no [n, v] tensor is created in the forward pass. Each target must be among its position's kept tokens.
    """
    count = len(targets)
    positions = torch.arange(count, device=logits.device).repeat_interleave(
        kept.counts, output_size=len(kept.token_ids)
    )
    local = kept.token_ids.long() - vocab_start
    is_local = (local >= 0) & (local < logits.shape[1])
    positions, columns = positions[is_local], local[is_local]
    values = logits[positions, columns].float() / temperature
    is_target = (columns + vocab_start == targets[positions]).to(values.dtype)
    logprobs, entropy = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
        values, positions, is_target, count, group
    )
    return logprobs, entropy


class _KeptLogprobs(torch.autograd.Function):
    """`_TokenLogprobs` over a ragged set of columns: entry e belongs to position `positions[e]`."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, positions: Tensor, is_target: Tensor, count: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        # A rank may hold no kept token of a position, and all ranks must reduce the same shapes.
        maximum = values.new_full((count,), -torch.inf).scatter_reduce(0, positions, values, "amax")
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        shifted = values - maximum[positions]
        weights = shifted.exp()
        sums = values.new_zeros(3, count).index_add(
            1, positions, torch.stack([weights, weights * shifted, shifted * is_target])
        )
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, chosen = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(shifted - log_total[positions], entropy, positions, is_target)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The same derivatives as in `_TokenLogprobs`, for kept tokens only; the other logits have none."""
        log_probabilities, entropy, positions, is_target = ctx.saved_tensors
        logprob_gradient, entropy_gradient = (gradient[positions] for gradient in gradients)
        probabilities = log_probabilities.exp()
        gradient = logprob_gradient * (is_target - probabilities)
        gradient -= entropy_gradient * probabilities * (log_probabilities + entropy[positions])
        return gradient, None, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    """Vocabulary-parallel log-softmax, like Megatron's `vocab_parallel_cross_entropy` with the entropy added.

    Autograd would keep several [n, v] tensors and does not differentiate through the all-reduce. Here tensors in
    float32 have the size of a part of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        # The softmax needs the maximum over the whole vocabulary first, so that no exponential overflows.
        maximum = logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32))
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        # Exactly one rank holds the column of a target; the others contribute 0 to the sum over ranks.
        local = targets - vocab_start
        is_local = (local >= 0) & (local < logits.shape[1])
        column = local.clamp(0, logits.shape[1] - 1)[:, None]
        chosen = (logits.gather(1, column)[:, 0] - maximum) / temperature * is_local
        # H = log(sum w) - sum(w * shifted) / sum w, with w = exp(shifted).
        total, weighted = torch.empty_like(maximum), torch.empty_like(maximum)
        for rows in _parts(logits):
            shifted = _shifted(logits[rows], maximum[rows], temperature)
            weights = shifted.exp()
            torch.sum(weights, -1, out=total[rows])
            torch.sum(shifted.mul_(weights), -1, out=weighted[rows])
        # One all-reduce for all three sums.
        sums = torch.stack([total, weighted, chosen])
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, chosen = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, maximum, total, entropy, column, is_local)
        ctx.temperature, ctx.overwrite = temperature, overwrite
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
        """d log p(t) / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H);  z are the logits / temperature."""
        logits, maximum, total, entropy, column, is_local = ctx.saved_tensors
        logprob_gradient, entropy_gradient = gradients
        result = logits if ctx.overwrite else torch.empty_like(logits)
        # Of one row, with w = exp(shifted): gradient = -w (factor + slope * shifted), plus `of_target` in one column.
        scale = 1 / (ctx.temperature * total)
        factor, slope = torch.zeros_like(total), None
        if logprob_gradient is not None:
            factor = logprob_gradient * scale
        if entropy_gradient is not None:
            slope = entropy_gradient * scale
            factor = factor + slope * (entropy - total.log())
        for rows in _parts(logits):
            shifted = _shifted(logits[rows], maximum[rows], ctx.temperature)
            if slope is None:
                gradient = shifted.exp_().mul_(-factor[rows, None])
            else:
                gradient = shifted.exp().mul_(shifted.mul_(-slope[rows, None]).sub_(factor[rows, None]))
            if logprob_gradient is not None:
                of_target = logprob_gradient[rows] / ctx.temperature * is_local[rows]
                gradient.scatter_add_(1, column[rows], of_target[:, None])
            result[rows] = gradient
        return result, None, None, None, None, None


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of `logits` [n, v]."""
    size = max(1, PART_ENTRIES[logits.device.type] // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _shifted(logits: Tensor, maximum: Tensor, temperature: float) -> Tensor:
    """(logits - maximum) / temperature, in the type of `maximum`."""
    shifted = logits - maximum[:, None]
    return shifted if temperature == 1.0 else shifted.div_(temperature)


def _all_reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, operation, group=group)

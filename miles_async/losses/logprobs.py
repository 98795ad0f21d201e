"""Log-probability of given tokens and entropy of the distribution, also where ranks share the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy at each position, both in nats and differentiable.

    `logits` [n, v] in float32 are this rank's columns, tokens `vocab_start` to `vocab_start + v`, of the vocabulary
    that the ranks of `group` share (None: one rank holds all of it); `targets` [n] are global token ids. Returns two
    tensors [n], equal on all ranks of the group. One softmax serves both, and no [n, v] tensor but it is kept.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, vocab_start, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        top = logits.amax(-1)
        _reduce(top, dist.ReduceOp.MAX, group)
        shifted = logits - top[:, None]
        weights = shifted.exp()
        local = targets - vocab_start
        here = (local >= 0) & (local < logits.shape[1])
        column = local.clamp(0, logits.shape[1] - 1)[:, None]
        chosen = shifted.gather(1, column)[:, 0] * here
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), chosen])
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, chosen = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        probabilities = weights.div_(total[:, None])
        ctx.save_for_backward(probabilities, entropy, column, here)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d log p(t) / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H)."""
        of_logprobs, of_entropy = gradients
        probabilities, entropy, column, here = ctx.saved_tensors
        gradient = -probabilities * of_logprobs[:, None]
        gradient.scatter_add_(1, column, (of_logprobs * here)[:, None])
        if of_entropy.any():
            logs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
            gradient -= of_entropy[:, None] * probabilities * (logs + entropy[:, None])
        return gradient, None, None, None


def _reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, operation, group=group)

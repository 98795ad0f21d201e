"""The function of slime's and Miles' example of mismatch correction, `train_infer_mismatch_helper/mis.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles_async.losses.masks import TokenMasks
from miles_async.losses.mismatch import LARGEST, mismatch
from miles_async.losses.sequences import at_level, sequence_mean


def compute_mis_weights_with_cp(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The weighted loss, the masks without rejected tokens, and metrics; a function of `custom_tis_function_path`.

    `args` has the keys of the example's `mis.yaml`. Without `use_tis` there are only metrics. As in slime,
    `tis_batch_normalize` makes the mean weight of a micro-batch 1.
    """
    trained = torch.cat(loss_masks).bool()
    samples = torch.arange(len(loss_masks), device=pg_loss.device)
    sequences = samples.repeat_interleave(torch.tensor(response_lengths, device=pg_loss.device))[trained]
    learner, engine = (torch.cat(columns)[trained] for columns in (train_log_probs, rollout_log_probs))

    def spread(column: Tensor) -> Tensor:
        return torch.zeros_like(pg_loss).masked_scatter(trained, column.to(pg_loss.dtype))

    metrics = {f"mis_{name}": spread(one) for name, one in mismatch(learner, engine, sequences).items()}
    # `use_tis` selects it, on the command line and in the file.
    if args.off_policy_correction != "tis":
        return pg_loss, loss_masks, metrics
    log_ratio, upper = learner - engine, args.tis_upper_bound
    lower = 1 / upper if args.tis_lower_bound is None else args.tis_lower_bound
    weight = at_level(log_ratio, sequences, args.tis_level).clamp(-LARGEST, LARGEST).exp()
    kept = torch.ones_like(weight).bool()
    if args.tis_mode == "mask":
        kept = (weight >= lower) & (weight <= upper)
    else:
        weight = weight.clamp(lower if args.tis_mode == "clip" else 0.0, upper)
    if args.use_rs:
        low, high = args.rs_lower_bound, args.rs_upper_bound
        band = (lower if low is None else low, upper if high is None else high)
        kept &= ~TokenMasks(level=args.rs_level, band=band, veto=args.rs_veto_threshold).rejected(log_ratio, sequences)
    if args.tis_batch_normalize:
        weight = weight / _mean(weight, sequences, args.tis_level)
    masks = list(spread(kept).split(response_lengths))
    return pg_loss * spread(weight), masks, {**metrics, "mis_is_ratio_mean_final": spread(weight)}


def _mean(weight: Tensor, sequences: Tensor, level: str) -> Tensor:
    """The mean over tokens, or for weights of sequences over sequences."""
    if level == "token":
        return weight.mean()
    each = 1 / torch.bincount(sequences)[sequences]
    return (sequence_mean(weight, sequences) * each).sum() / each.sum()

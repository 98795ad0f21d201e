"""Functions of a user that compute the loss, advantages, the correction and the mean, as docs/how-to/write-a-loss.md
describes them. Together they compute what the built-in loss computes with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_async.losses.tokens import LossTokens


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def loss_of_tokens(args: Any, tokens: LossTokens) -> tuple[Tensor, Mapping[str, Tensor]]:
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    weight = (tokens.old_logprobs - tokens.rollout_log_probs).exp().clamp(max=args.tis_clip)
    loss = weight * clipped(ratio, tokens.advantages)
    return loss, {"weight": weight}


def loss_by_temperature(args: Any, tokens: LossTokens) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Gives tokens that were sampled at a high temperature less weight. A plug-in declares the column."""
    loss, metrics = loss_of_tokens(args, tokens)
    temperature = tokens.columns["temperature"]
    return loss / temperature, {**metrics, "temperature": temperature}


def loss_of_logits(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    assert logits.shape[:2] == (1, sum(batch["total_lengths"]))
    logprobs, end = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        rows = logits[0, end - response - 1 : end - 1].div(args.rollout_temperature).log_softmax(-1)
        logprobs.append(rows.gather(1, tokens[-response:, None])[:, 0])
    old, rollout = torch.cat(batch["log_probs"]), torch.cat(batch["rollout_log_probs"])
    weight = (old - rollout).exp().clamp(max=args.tis_clip)
    loss = weight * clipped((torch.cat(logprobs) - old).exp(), torch.cat(batch["advantages"]))
    return sum_of_sample_mean(loss), {"weight": sum_of_sample_mean(weight).detach()}


def advantages_of_rewards(args: Any, rollout_data: dict[str, Any]) -> None:
    pairs = zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    rollout_data["advantages"] = [torch.full((length,), reward) for reward, length in pairs]
    rollout_data["returns"] = rollout_data["advantages"]


def truncated(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **others: Any,
) -> tuple[Tensor, list[Tensor], Mapping[str, Tensor]]:
    weight = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().clamp(max=args.tis_clip)
    return pg_loss * weight, loss_masks, {"weight": weight}


def mean_of_samples(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    def reduce(pg_loss: Tensor) -> Tensor:
        parts = zip(pg_loss.split(response_lengths), loss_masks, strict=True)
        return torch.stack(
            [(part * mask).sum() / (1 if calculate_per_token_loss else mask.sum()) for part, mask in parts]
        ).sum()

    return reduce


def opposite_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    advantages_of_rewards(args, rollout_data)
    rollout_data["advantages"] = [-one for one in rollout_data["advantages"]]


def turned_around(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    assert len(rollout_data["log_probs"]) == len(rollout_data["tokens"])
    rollout_data["advantages"] = [-one for one in rollout_data["advantages"]]


def later_tokens_only(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Masks the first trained token of each sample."""
    for mask in rollout_data["loss_masks"]:
        mask[0] = 0


def without_masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    del rollout_data["loss_masks"]


def half(args: Any, *, pg_loss: Tensor, **others: Any) -> tuple[Tensor, list[Tensor], Mapping[str, Tensor]]:
    corrected, masks, metrics = truncated(args, pg_loss=pg_loss, **others)
    return corrected / 2, masks, metrics


def half_of_the_sum(*given: Any) -> Callable[[Tensor], Tensor]:
    return lambda pg_loss: mean_of_samples(*given)(pg_loss) / 2


def of_another_shape(args: Any, tokens: LossTokens) -> Tensor:
    return tokens.logprobs.sum()


def not_finite(args: Any, tokens: LossTokens) -> Tensor:
    return -tokens.logprobs / 0


def raising(args: Any, tokens: LossTokens) -> Tensor:
    raise KeyError("weights")

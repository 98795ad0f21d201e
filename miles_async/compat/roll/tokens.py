"""What ROLL changes of the tokens of a batch before it trains them, as a function by path.

A file of ROLL sets the attributes of `args` that are read here with `custom_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Clip advantages and leave tokens out, for `rollout_data_postprocess_path`.

    Advantages are clipped to ±`critic_advantage_clip`, unless it is None. A token is left out if any of
    `train_infer_filters` says so. A filter has a `level`, and bands `[low, high]` with the limits included: `ratio` for
    the learner's probability divided by the engine's, and `difference` for the first less the second. At level `token`
    both are those of the token. At the others, log-ratios and differences are averaged over the `segment` (tokens that
    are trained without a gap) or over the response (`geometric`), or added up over the response (`sequence`).

    With `loss_aggregation` sequence_mean, the tokens that stay have the weight of all tokens of their sample together,
    so that the mean of the sample is over them.
    """
    if (limit := args.critic_advantage_clip) is not None:
        rollout_data["advantages"] = [one.clamp(-limit, limit) for one in rollout_data["advantages"]]
    if not args.train_infer_filters:
        return
    names = ("loss_masks", "log_probs", "rollout_log_probs")
    samples = zip(*(rollout_data[name] for name in names), strict=True)
    masks = []
    for mask, logprobs, sampled in samples:
        kept = mask.clone()
        for one in args.train_infer_filters:
            kept *= _inside(one, mask, logprobs, sampled)
        if args.loss_aggregation == "sequence_mean":
            kept *= mask.sum() / kept.sum().clamp(min=1)
        masks.append(kept)
    rollout_data["loss_masks"] = masks


def _inside(one: Mapping[str, Any], mask: Tensor, logprobs: Tensor, sampled: Tensor) -> Tensor:
    """[response_length] whether the tokens are inside the bands of a filter."""
    inside = mask > 0
    if (band := one.get("ratio")) is not None:
        inside = inside & _between(_at_level(logprobs - sampled, mask, one["level"]).exp(), band)
    if (band := one.get("difference")) is not None:
        inside = inside & _between(_at_level(logprobs.exp() - sampled.exp(), mask, one["level"]), band)
    return inside


def _between(values: Tensor, band: tuple[float, float]) -> Tensor:
    low, high = band
    return (values >= low) & (values <= high)


def _at_level(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """[response_length] the value of each token, or what it adds up to or is on average where the mask is 1."""
    if level == "token":
        return values
    # Numbers of segments, from 1 on. All tokens of a response are in one segment at the other levels.
    segments = (mask > 0).long()
    segments[1:] *= 1 - (mask[:-1] > 0).long()
    segments = segments.cumsum(0) if level == "segment" else segments.new_ones(len(mask))
    sums, counts = (values.new_zeros(len(mask) + 1).index_add(0, segments, one) for one in (values * mask, mask))
    return (sums if level == "sequence" else sums / counts.clamp(min=1))[segments]

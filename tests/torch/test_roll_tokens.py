"""The advantages that ROLL clips and the tokens that it leaves out, in numbers computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_async.compat.roll.tokens import postprocess

MASK = torch.tensor([1.0, 1, 0, 1, 1])
"""Two segments of two tokens. The token between them is not trained."""
LEARNER = torch.tensor([0.5, 0.4, 1.0, 0.2, 0.9]).log()
ENGINE = torch.tensor([0.5, 0.5, 1.0, 0.4, 0.3]).log()
"""The ratios of the trained tokens are 1, 0.8, 0.5 and 3, and the differences 0, -0.1, -0.2 and 0.6."""


def after(filters: list[dict[str, Any]], *, clip: float | None = None, mean: str = "token_mean") -> dict[str, Any]:
    """What the function leaves of a batch of one sample."""
    data: dict[str, Any] = {
        "advantages": [torch.tensor([-5.0, 0.5, 0.0, 3.0, 1.0])],
        "loss_masks": [MASK.clone()],
        "log_probs": [LEARNER],
        "rollout_log_probs": [ENGINE],
    }
    args = SimpleNamespace(critic_advantage_clip=clip, train_infer_filters=filters, loss_aggregation=mean)
    postprocess(args, 0, data)
    return data


def kept(*filters: dict[str, Any], mean: str = "token_mean") -> list[float]:
    """The factors of the tokens."""
    factors: list[float] = after(list(filters), mean=mean)["loss_masks"][0].tolist()
    return factors


ALL, FIRST_SEGMENT, NONE = [1, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "level, ratio, difference, expected",
    [
        ("token", [0.75, 1.2], None, FIRST_SEGMENT),
        ("token", None, [-0.3, 0.15], [1, 1, 0, 1, 0]),
        ("token", [0.75, 4.0], [-0.15, 0.7], [1, 1, 0, 0, 1]),
        # Geometric means of 1 and 0.8, and of 0.5 and 3: 0.894 and 1.225. Mean differences: -0.05 and 0.2.
        ("segment", [0.8, 1.05], None, FIRST_SEGMENT),
        ("segment", [0.9, 1.3], None, [0, 0, 0, 1, 1]),
        ("segment", None, [-0.1, 0.1], FIRST_SEGMENT),
        ("segment", [0.8, 1.3], [-0.04, 0.3], [0, 0, 0, 1, 1]),
        # The fourth root of 1.2 is 1.047, and the mean of the differences 0.075.
        ("geometric", [1.04, 1.05], [0.07, 0.08], ALL),
        ("geometric", [1.05, 2.0], None, NONE),
        # 1 * 0.8 * 0.5 * 3, and 0 - 0.1 - 0.2 + 0.6.
        ("sequence", [1.19, 1.21], [0.29, 0.31], ALL),
        ("sequence", None, [0.0, 0.2], NONE),
    ],
)
def test_a_filter_leaves_out_what_is_outside_of_its_bands(
    level: str, ratio: list[float] | None, difference: list[float] | None, expected: list[float]
) -> None:
    bands = {"ratio": ratio, "difference": difference}
    assert kept({"level": level, **{name: band for name, band in bands.items() if band}}) == expected


def test_the_limits_of_a_band_are_inside() -> None:
    assert kept({"level": "token", "ratio": [1.0, 1.0]}) == [1, 0, 0, 0, 0]


def test_a_token_has_to_pass_all_filters_and_each_compares_all_tokens() -> None:
    first, second = {"level": "token", "ratio": [0.0, 0.9]}, {"level": "geometric", "ratio": [1.04, 1.05]}
    assert kept(first, second) == kept(second, first) == kept(first) == [0, 1, 0, 1, 0]


def test_the_mean_of_a_sample_is_over_the_tokens_that_stay() -> None:
    by_ratio = {"level": "token", "ratio": [0.0, 1.5]}
    factors = kept(by_ratio, mean="sequence_mean")
    assert factors == pytest.approx([4 / 3, 4 / 3, 0, 4 / 3, 0])
    losses = [6.0, 3.0, 9.0, 3.0, 100.0]
    mean = sum(factor * loss for factor, loss in zip(factors, losses, strict=True)) / 4
    assert mean == pytest.approx((6 + 3 + 3) / 3)
    assert kept(by_ratio, mean="sequence_sum") == [1, 1, 0, 1, 0]
    assert kept({"level": "token", "ratio": [8.0, 9.0]}, mean="sequence_mean") == NONE


def test_advantages_of_a_critic_are_clipped() -> None:
    assert after([], clip=2.0)["advantages"][0].tolist() == [-2.0, 0.5, 0.0, 2.0, 1.0]
    unclipped = after([{"level": "token", "ratio": [0.75, 1.2]}])
    assert unclipped["advantages"][0].tolist() == [-5.0, 0.5, 0.0, 3.0, 1.0]
    assert after([], clip=2.0)["loss_masks"][0].tolist() == ALL

"""The norm of gradients without Transformer Engine and Apex."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import clip_grads

from miles_async.adapters.megatron.training import optimizer


def norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    result, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False)
    assert isinstance(result, torch.Tensor)
    return result


def test_the_norm_is_that_of_all_gradients_together() -> None:
    assert clip_grads.l2_norm_impl is optimizer._norm
    assert norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]).tolist() == pytest.approx([5.0])


def test_no_gradient_is_read_back_from_the_device() -> None:
    """A tensor on `meta` has no values that could be read."""
    assert norm([torch.zeros(3, device="meta"), torch.zeros(2, 2, device="meta")]).shape == (1,)


def test_the_norm_of_gradients_in_bfloat16_has_the_precision_of_float32() -> None:
    gradients = [torch.full((257,), 1.0, dtype=torch.bfloat16), torch.full((2,), 3.0, dtype=torch.bfloat16)]
    assert norm(gradients).item() == pytest.approx(275**0.5, rel=1e-6)

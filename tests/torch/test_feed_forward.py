"""The feed-forward parts of dense layers on CPUs: the same result as their plain composition, with less memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import silu

from miles_async.adapters.megatron.model import local_layers


class Linear(torch.nn.Linear):
    """Returns its output and no bias, as Megatron's linear layers do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@pytest.fixture
def mlp() -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(linear_fc1=Linear(8, 32, bias=False), linear_fc2=Linear(16, 8, bias=False))


def gradients(mlp: Any, output: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output.square().sum(), (hidden, mlp.linear_fc1.weight, mlp.linear_fc2.weight))


def test_output_and_gradients_are_those_of_the_plain_composition(mlp: Any) -> None:
    hidden = torch.randn(5, 1, 8, requires_grad=True)
    output, bias = local_layers._forward_swiglu(mlp, pytest.fail, hidden)
    gate, up = mlp.linear_fc1(hidden)[0].chunk(2, -1)
    expected = mlp.linear_fc2(silu(gate) * up)[0]
    assert bias is None
    torch.testing.assert_close(output, expected)
    for found, wanted in zip(gradients(mlp, output, hidden), gradients(mlp, expected, hidden), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_input_of_the_second_layer_is_not_kept_for_the_backward_pass(
    mlp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[StorageWeakRef] = []
    compute = mlp.linear_fc2.forward

    def remember(x: Tensor) -> Any:
        kept.append(StorageWeakRef(x.untyped_storage()))
        return compute(x)

    monkeypatch.setattr(mlp.linear_fc2, "forward", remember)
    output, _ = local_layers._forward_swiglu(mlp, pytest.fail, torch.randn(5, 1, 8, requires_grad=True))
    assert kept[0].expired()
    assert output.requires_grad

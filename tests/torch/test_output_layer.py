"""Logits in chunks: results, gradients, and what the gradients lose to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_async.adapters.megatron.model.output_layer import OutputLayer
from miles_async.losses.logprobs import token_logprobs

TOKENS, HIDDEN, VOCABULARY = 512, 32, 64


class Linear(torch.nn.Module):
    """As much of Megatron's output layer as `OutputLayer` uses."""

    sequence_parallel = False
    output_size_per_partition = VOCABULARY

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN).to(dtype))

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return hidden @ weight.t(), None


class Model(torch.nn.Module):
    share_embeddings_and_output_weights = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(params_dtype=dtype)
        self.output_layer = Linear(dtype)


def loss_of(model: Model, hidden: Tensor, rows_per_chunk: int, entropy_coef: float = 0.1) -> Tensor:
    targets = torch.arange(len(hidden)) % VOCABULARY

    def read(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        return token_logprobs(logits, targets[chunk], overwrite=True)

    layer = OutputLayer(model, rows_per_chunk * VOCABULARY)
    logprobs, entropy = layer.map(hidden, torch.arange(len(hidden)), read)
    return logprobs.sum() + (entropy_coef * entropy.sum() if entropy_coef else 0.0)


def gradients(dtype: torch.dtype, rows_per_chunk: int, entropy_coef: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    model = Model(dtype)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    loss = loss_of(model, hidden, rows_per_chunk, entropy_coef)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, model.output_layer.weight))
    return loss.detach(), of_hidden, of_weight


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("rows_per_chunk", [1, 5, TOKENS - 1, TOKENS])
def test_chunks_leave_the_loss_and_its_gradients_unchanged(rows_per_chunk: int, entropy_coef: float) -> None:
    ours = gradients(torch.float32, rows_per_chunk, entropy_coef)
    exact = gradients(torch.float32, TOKENS, entropy_coef)
    assert all(relative(one, other) < 1e-5 for one, other in zip(ours, exact, strict=True))


def test_many_chunks_lose_no_more_of_a_gradient_in_bfloat16_than_one() -> None:
    exact = gradients(torch.bfloat16, TOKENS)[2].float()
    many = gradients(torch.bfloat16, 2)[2]
    assert relative(many, exact) < 4e-3  # one rounding to bfloat16 more


def test_the_gradient_of_many_chunks_is_added_to_megatrons_buffer_in_float32() -> None:
    _, _, expected = gradients(torch.bfloat16, 2)
    model = Model(torch.bfloat16)
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight: Any = model.output_layer.weight
    weight.main_grad = torch.ones(VOCABULARY, HIDDEN)
    loss_of(model, hidden, 2).backward()
    assert weight.grad is None
    assert weight.main_grad.dtype is torch.float32
    assert relative(weight.main_grad - 1, expected.float()) < 4e-3


def test_chunks_do_not_leave_the_gradient_of_the_weight_to_a_fused_kernel() -> None:
    class FusedLinear(Linear):
        """Like Megatron's layer with Apex, looks for the buffer of gradients on the weight that it is given."""

        gradient_accumulation_fusion = True

        def forward(self, hidden: Tensor, weight: Any) -> tuple[Tensor, None]:
            if self.gradient_accumulation_fusion:
                assert weight.main_grad is not None
            return super().forward(hidden, weight)

    model = Model(torch.float32)
    model.output_layer = FusedLinear(torch.float32)
    weight: Any = model.output_layer.weight
    weight.main_grad = torch.zeros(VOCABULARY, HIDDEN)
    loss_of(model, torch.randn(TOKENS, HIDDEN), 2).backward()
    assert weight.main_grad.any()


def test_a_buffer_in_bfloat16_gets_the_gradient_that_was_added_up_in_float32() -> None:
    _, _, expected = gradients(torch.bfloat16, 2)
    model = Model(torch.bfloat16)
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight: Any = model.output_layer.weight
    weight.main_grad = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    loss_of(model, hidden, 2).backward()
    assert torch.equal(weight.grad, expected), "Megatron adds it to the buffer"
    assert not weight.main_grad.any()


def test_without_an_entropy_bonus_no_gradient_of_the_entropy_is_computed() -> None:
    taken: list[Tensor | None] = []

    class Entropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, entropy: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)  # type: ignore[attr-defined]
            return entropy.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor | None) -> Tensor | None:
            taken.append(gradient)
            return gradient

    entropy_with_record: Callable[[Tensor], Tensor] = Entropy.apply
    model, hidden = Model(torch.float32), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.zeros(TOKENS, dtype=torch.int64)

    def read(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        logprobs, entropy = token_logprobs(logits, targets[chunk], overwrite=True)
        return logprobs, entropy_with_record(entropy)

    layer = OutputLayer(model, 7 * VOCABULARY)
    layer.map(hidden, torch.arange(TOKENS), read)[0].sum().backward()
    assert taken == []
    layer.map(hidden, torch.arange(TOKENS), read)[1].sum().backward()
    assert len(taken) == -(-TOKENS // 7)

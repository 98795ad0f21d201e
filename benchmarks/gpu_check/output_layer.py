"""The output layer with a vocabulary of 151,936: as in a learner, in four chunks, plain logits, and Liger's kernels.

All are compared with float32. Liger's kernels need its package: `pip install --no-deps liger-kernel==0.8.5`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu_check.measure import report_cost
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Surroundings, require_gpu
from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.output_layer import OutputLayer
from miles_async.adapters.megatron.model.process_groups import create_process_groups, destroy_process_groups
from miles_async.adapters.system.network_ports import free_port
from miles_async.config.schema import Learner
from miles_async.losses.logprobs import token_logprobs

VOCABULARY = 151_936
HIDDEN, TOKENS = (2560, 9216) if ON_GPU else (64, 192)
WEIGHT_STD = 0.02
GRADIENT_LIMIT = 0.02
"""Norm of the difference of a gradient, relative to the norm of the gradient."""

Logprobs = Callable[[Tensor, Tensor], Tensor]
"""[t] log-probabilities of the targets from hidden states [t, h] and weights [vocabulary, h]."""


def check(report: Report, surroundings: Surroundings) -> None:
    create_process_groups(rank=0, world_size=1, address="127.0.0.1", port=free_port(), learner=Learner())
    try:
        compare(report)
    finally:
        destroy_process_groups()


def compare(report: Report) -> None:
    """Report time, memory and gradients of log-probabilities in bfloat16."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(WEIGHT_STD * torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16))
    targets = torch.randint(VOCABULARY, (TOKENS,), device=DEVICE)
    advantages = torch.randn(TOKENS, device=DEVICE) / TOKENS

    def gradients(logprobs: Logprobs, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        loss = (logprobs(hidden, weight) * advantages).sum()
        return torch.autograd.grad(loss, (hidden, weight))

    plain = plain_logits(targets)
    exact = gradients(plain, hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_())
    variants: dict[str, Callable[[], Logprobs]] = {
        "as in a learner": lambda: in_chunks(weight, targets, None),
        "four chunks": lambda: in_chunks(weight, targets, TOKENS * VOCABULARY // 4),
        "plain logits": lambda: plain,
        "Liger's cross-entropy": lambda: liger_cross_entropy(targets),
        "Liger's scaled cross-entropy": lambda: liger_scaled_cross_entropy(targets),
    }
    for part, variant in variants.items():
        with report.part(part), redirect_cuda_to_cpu():
            logprobs = variant()
            ours = gradients(logprobs, hidden, weight)
            for name, one, other in zip(("hidden states", "weights"), ours, exact, strict=True):
                error = ((one.float() - other).norm() / other.norm()).item()
                report.figure(f"{part}: gradient of {name}", error, "relative", at_most=GRADIENT_LIMIT)
            del ours
            report_cost(report, part, partial(gradients, logprobs, hidden, weight))


def in_chunks(weight: torch.nn.Parameter, targets: Tensor, chunk_entries: int | None) -> Logprobs:
    """As the learner computes them, with at most `chunk_entries` logits at a time (None: its own choice)."""
    layer = OutputLayer(Head(weight), chunk_entries)
    rows = torch.arange(TOKENS, device=DEVICE)

    def read(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        return token_logprobs(logits, targets[chunk], overwrite=True)

    return lambda hidden, _: layer.map(hidden, rows, read)[0]


def plain_logits(targets: Tensor) -> Logprobs:
    """With all logits at once, and their derivatives by torch."""

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    return logprobs


def liger_cross_entropy(targets: Tensor) -> Logprobs:
    """A kernel in Triton for the softmax. The gradients of the weights are added up in float32, as in a learner."""
    require_gpu("Liger's kernel")
    function = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    no_bias, no_weights, ignored, no_z_loss, no_smoothing, no_cap = None, None, -100, 0.0, 0.0, None
    options = (no_bias, no_weights, ignored, no_z_loss, no_smoothing, "none", no_cap, False, torch.float32)
    return lambda hidden, weight: -function.apply(hidden, weight, targets, *options)[0]


def liger_scaled_cross_entropy(targets: Tensor) -> Logprobs:
    """A kernel for H100 and H200, which needs nvidia-cutlass-dsl; on other GPUs PyTorch, in chunks of 512 tokens."""
    require_gpu("Liger's kernel")
    module = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    return lambda hidden, weight: -module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)


class Head(torch.nn.Module):
    """As much of a GPT model as `OutputLayer` reads."""

    share_embeddings_and_output_weights = False

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            use_cpu_initialization=True,
            perform_initialization=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        self.output_layer = ColumnParallelLinear(
            HIDDEN, VOCABULARY, config=self.config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
        )
        self.output_layer.weight = weight

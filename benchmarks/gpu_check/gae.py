"""Generalized advantage estimation over long responses: kernels, time, and results against a plain recursion."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_check.measure import report_cost, report_kernels
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Surroundings
from miles_async.losses.critic import generalized_advantages

TOKENS = 8192 if ON_GPU else 256
"""Of each response."""
BATCHES = {"one response": 1, "64 responses": 64}
DISCOUNT, DECAY = 1.0, 0.95
LIMIT = 1e-6
"""Largest difference of an advantage, relative to the largest advantage."""


def check(report: Report, surroundings: Surroundings) -> None:
    """Report the cost of advantages for one response and for a batch."""
    for part, count in BATCHES.items():
        with report.part(part):
            measure(report, part, count)


def measure(report: Report, part: str, count: int) -> None:
    rewards, values = np.random.default_rng(0).standard_normal((2, count, TOKENS), np.float32)
    rewards_on_device, values_on_device = (torch.from_numpy(one.reshape(-1)).to(DEVICE) for one in (rewards, values))
    sequences = torch.arange(count, device=DEVICE).repeat_interleave(TOKENS)

    def advantages() -> torch.Tensor:
        return generalized_advantages(rewards_on_device, values_on_device, sequences, discount=DISCOUNT, decay=DECAY)[0]

    exact = recursion(rewards.astype(np.float64), values.astype(np.float64))
    apart = np.abs(advantages().cpu().numpy().reshape(count, TOKENS) - exact).max() / np.abs(exact).max()
    report.figure(f"{part}: advantages", float(apart), "relative", at_most=LIMIT)
    report_cost(report, part, advantages)
    report_kernels(report, part, advantages)


def recursion(rewards: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, t] advantages of n responses, token by token from the last one."""
    advantages = np.zeros_like(rewards)
    advantage = next_value = np.zeros(len(rewards))
    for token in reversed(range(rewards.shape[1])):
        error = rewards[:, token] + DISCOUNT * next_value - values[:, token]
        advantages[:, token] = advantage = error + DISCOUNT * DECAY * advantage
        next_value = values[:, token]
    return advantages

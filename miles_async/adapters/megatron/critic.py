"""PPO's critic: a second model whose head estimates, before each token, the reward that is still to come.

It learns beside the policy, on the same micro-batches and ranks, with an optimizer of its own.
Source: PPO, Schulman et al. 2017 (arXiv 1707.06347); on language models InstructGPT (arXiv 2203.02155), appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron import forward
from miles_async.adapters.megatron.batch import TrainStep
from miles_async.adapters.megatron.model import build_model
from miles_async.adapters.megatron.optimizer import clear_gradients, take_step
from miles_async.config.derived import critic_learning_rate
from miles_async.config.schema import RunConfig
from miles_async.losses.advantages import at_last_tokens, generalized_advantages
from miles_async.losses.critic import CRITIC_SUMS, critic_loss, critic_metrics


@dataclass(frozen=True, slots=True)
class Judged:
    """What the critic makes of one optimizer step: by micro-batch, [m] each."""

    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]


class Critic:
    def __init__(self, config: RunConfig, hf_checkpoint: str, device: torch.device) -> None:
        """Built from `critic_load`, or else from `hf_checkpoint`. The process groups must exist."""
        self._algorithm = config.algorithm
        self._weight_decay = config.learner.weight_decay
        self._lr = critic_learning_rate(config)
        self._device = device
        start = Path(config.algorithm.critic_load or hf_checkpoint).expanduser()
        self.model = build_model(config.learner, str(start), values=True)
        self.steps_taken = 0

    def judge(self, step: TrainStep, penalties: list[Tensor] | None) -> Judged:
        """Advantages and returns under the critic as it is; `penalties` [m] are taken off each token's reward."""
        values = forward.fixed_values(self.model, step.micro_batches, self._device)
        advantages, returns = [], []
        for i, (batch, own) in enumerate(zip(step.micro_batches, values, strict=True)):
            sequences = torch.from_numpy(batch.sequences).to(self._device)
            rewards = at_last_tokens(torch.from_numpy(batch.advantages).to(self._device), sequences)
            if penalties is not None:
                rewards = rewards - penalties[i]
            found = generalized_advantages(
                rewards, own, sequences, discount=self._algorithm.gamma, decay=self._algorithm.lambd
            )
            advantages.append(found[0])
            returns.append(found[1])
        if self._algorithm.normalize_advantages:
            advantages = _normalized(advantages)
        return Judged(values, advantages, returns)

    def learn(self, step: TrainStep, judged: Judged) -> tuple[bool, Mapping[str, float]]:
        """One optimizer step towards the returns. Returns whether it was finite, and metrics of the whole step."""
        clear_gradients(self.model)
        sums = torch.zeros(len(CRITIC_SUMS), device=self._device)
        for batch, old, returns in zip(step.micro_batches, judged.values, judged.returns, strict=True):
            values = forward.token_values(self.model, batch, self._device)
            loss, part = critic_loss(
                values, old, returns, total_tokens=step.total_tokens, clip=self._algorithm.value_clip
            )
            loss.backward()
            sums += part
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        metrics = critic_metrics(sums)
        if not sums[0]:
            return True, metrics  # no tokens to learn from
        lr, healthy = self._lr.at(self.steps_taken), math.isfinite(metrics["value_loss"])
        finite, norm = take_step(self.model, lr=lr, weight_decay=self._weight_decay, loss_is_finite=healthy)
        self.steps_taken += finite
        return finite, {**metrics, "critic_grad_norm": norm, "critic_lr": lr}


def _normalized(advantages: list[Tensor]) -> list[Tensor]:
    """To mean 0 and variance 1 over all tokens of the step, on whichever rank."""
    flat = torch.cat(advantages)
    sums = torch.stack([torch.ones_like(flat).sum(), flat.sum(), flat.square().sum()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    count, total, squares = sums.tolist()
    mean = total / max(count, 1.0)
    spread = math.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) + 1e-6
    return [(own - mean) / spread for own in advantages]

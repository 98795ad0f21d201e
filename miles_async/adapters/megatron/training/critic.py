"""PPO's critic: a second model whose head estimates, before each token, the reward that is still to come.

It learns beside the policy, on the same micro-batches and ranks, with an optimizer of its own.
Source: PPO, Schulman et al. 2017 (arXiv 1707.06347); on language models InstructGPT (arXiv 2203.02155), appendix C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron.model import process_groups
from miles_async.adapters.megatron.model.environment import environment
from miles_async.adapters.megatron.model.factory import build_model
from miles_async.adapters.megatron.training import inference
from miles_async.adapters.megatron.training.micro_batches import ModelInput, forward_backward, model_inputs
from miles_async.adapters.megatron.training.optimizer import (
    Gradients,
    apply_gradients,
    clear_gradients,
    reduce_gradients,
)
from miles_async.batching.batch import TrainStep
from miles_async.config.derived import critic_learning_rate
from miles_async.config.schema import RunConfig
from miles_async.losses.critic import generalized_advantages, last_token_rewards
from miles_async.losses.critic import CRITIC_SUMS, critic_loss, critic_metrics


@dataclass(frozen=True, slots=True)
class CriticOutput:
    """What the critic makes of one optimizer step: by micro-batch, [m] each."""

    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]


class Critic:
    def __init__(self, config: RunConfig, hf_checkpoint: str, device: torch.device) -> None:
        """Built from `critic_load`, or else from `hf_checkpoint`. The process groups must exist."""
        self._algorithm = config.algorithm
        self._learner = config.learner
        self._lr = critic_learning_rate(config)
        self._device = device
        start = Path(config.algorithm.critic_load or hf_checkpoint).expanduser()
        with environment(config.learner.critic_env_vars):
            self.model = build_model(config.learner, str(start), values=True)
        self.steps_taken = 0

    def evaluate(self, step: TrainStep, penalties: list[Tensor] | None) -> CriticOutput:
        """Advantages and returns under the critic as it is; `penalties` [m] are taken off each token's reward."""
        with environment(self._learner.critic_env_vars):
            values = inference.batch_values(self.model, step.micro_batches, self._learner, self._device)
        advantages, returns = [], []
        for i, (batch, own) in enumerate(zip(step.micro_batches, values, strict=True)):
            sequences = torch.from_numpy(batch.sequences).to(self._device)
            rewards = last_token_rewards(torch.from_numpy(batch.advantages).to(self._device), sequences)
            if penalties is not None:
                rewards = rewards - penalties[i]
            found = generalized_advantages(
                rewards, own, sequences, discount=self._algorithm.gamma, decay=self._algorithm.lambd
            )
            advantages.append(found[0])
            returns.append(found[1])
        if self._algorithm.normalize_advantages:
            advantages = _normalized(advantages)
        return CriticOutput(values, advantages, returns)

    def gradients(self, step: TrainStep, critic_output: CriticOutput) -> Gradients:
        """Of one optimizer step towards the returns."""
        clear_gradients(self.model)
        clip = self._algorithm.value_clip

        def loss(number: int, own: ModelInput, output: Tensor) -> tuple[Tensor, Tensor]:
            values, old = inference.target_values(own, output), critic_output.values[number]
            return critic_loss(values, old, critic_output.returns[number], total_tokens=step.total_tokens, clip=clip)

        passes = model_inputs(step.micro_batches, self._learner, self._device)
        with environment(self._learner.critic_env_vars):
            parts = forward_backward(self.model, passes, loss)
        sums = torch.zeros(len(CRITIC_SUMS), device=self._device)
        if parts:  # on the last stage of a pipeline
            sums = torch.stack(parts).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        sums = process_groups.broadcast_from_last_stage(sums)
        metrics = critic_metrics(sums)
        if not sums[0]:
            return Gradients(metrics, finite=True, apply=lambda: None)  # no tokens to learn from
        lr, norm = self._lr.at(self.steps_taken), reduce_gradients(self.model)

        def apply() -> None:
            apply_gradients(self.model, lr=lr, weight_decay=self._learner.weight_decay)
            self.steps_taken += 1

        finite = math.isfinite(metrics["value_loss"]) and math.isfinite(norm)
        return Gradients({**metrics, "critic_grad_norm": norm, "critic_lr": lr}, finite, apply)


def _normalized(advantages: list[Tensor]) -> list[Tensor]:
    """To mean 0 and variance 1 over all tokens of the step, on whichever rank."""
    flat = torch.cat(advantages)
    sums = torch.stack([torch.ones_like(flat).sum(), flat.sum(), flat.square().sum()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    count, total, squares = sums.tolist()
    mean = total / max(count, 1.0)
    spread = math.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) + 1e-6
    return [(own - mean) / spread for own in advantages]

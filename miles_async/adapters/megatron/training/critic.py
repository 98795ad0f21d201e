"""PPO's critic: a second model that predicts, before each token, the reward that is still to come.

The critic trains on the same ranks and micro-batches as the policy, with its own optimizer.
Source: PPO, Schulman et al. 2017 (arXiv 1707.06347); for language models InstructGPT (arXiv 2203.02155), appendix C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron.model.environment import environment
from miles_async.adapters.megatron.model.factory import build_model
from miles_async.adapters.megatron.model.process_groups import broadcast_from_last_stage
from miles_async.adapters.megatron.training import inference
from miles_async.adapters.megatron.training.micro_batches import ModelInput, model_inputs, run_forward_backward
from miles_async.adapters.megatron.training.optimizer import (
    Gradients,
    apply_gradients,
    clear_gradients,
    reduce_gradients,
)
from miles_async.batching.batch import TrainStep
from miles_async.config.learning_rate import critic_learning_rate
from miles_async.config.schema import RunConfig
from miles_async.losses.critic import (
    CRITIC_SUMS,
    critic_loss,
    critic_metrics,
    generalized_advantages,
    last_token_rewards,
)


@dataclass(frozen=True, slots=True)
class CriticOutput:
    """The critic's results for one optimizer step: one tensor [m] per micro-batch."""

    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]


class Critic:
    """This rank's part of the critic."""

    def __init__(self, config: RunConfig, hf_checkpoint: str, device: torch.device) -> None:
        """Load `critic_load`, or `hf_checkpoint` if it is unset. The process groups must exist."""
        self._algorithm = config.algorithm
        self._learner = config.learner
        self._lr = critic_learning_rate(config)
        self._device = device
        checkpoint = Path(config.algorithm.critic_load or hf_checkpoint).expanduser()
        with environment(config.learner.critic_env_vars):
            self.model = build_model(config.learner, str(checkpoint), values=True)
        self.steps_taken = 0

    def evaluate(self, step: TrainStep, penalties: list[Tensor] | None) -> CriticOutput:
        """Compute advantages and returns with the critic's current weights.

        `penalties` [m] per micro-batch are subtracted from the rewards of single tokens.
        """
        with environment(self._learner.critic_env_vars):
            values = inference.batch_values(self.model, step.micro_batches, self._learner, self._device)
        advantages, returns = [], []
        for i, (batch, batch_values) in enumerate(zip(step.micro_batches, values, strict=True)):
            sequences = torch.from_numpy(batch.sequences).to(self._device)
            rewards = last_token_rewards(torch.from_numpy(batch.advantages).to(self._device), sequences)
            if penalties is not None:
                rewards = rewards - penalties[i]
            batch_advantages, batch_returns = generalized_advantages(
                rewards, batch_values, sequences, discount=self._algorithm.gamma, decay=self._algorithm.lambd
            )
            advantages.append(batch_advantages)
            returns.append(batch_returns)
        return CriticOutput(values, advantages, returns)

    def compute_gradients(self, step: TrainStep, critic_output: CriticOutput) -> Gradients:
        """Compute the gradients of one optimizer step towards the returns."""
        clear_gradients(self.model)
        clip = self._algorithm.value_clip

        def loss(number: int, model_input: ModelInput, output: Tensor) -> tuple[Tensor, Tensor]:
            values, old_values = inference.target_values(model_input, output), critic_output.values[number]
            returns = critic_output.returns[number]
            return critic_loss(values, old_values, returns, total_tokens=step.total_tokens, clip=clip)

        by_position = self.model.by_position
        inputs = model_inputs(step.micro_batches, self._learner, self._device, by_position=by_position)
        with environment(self._learner.critic_env_vars):
            parts = run_forward_backward(self.model, inputs, loss)
        sums = torch.zeros(len(CRITIC_SUMS), device=self._device)
        if parts:  # only the last stage of a pipeline computes losses
            sums = torch.stack(parts).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        sums = broadcast_from_last_stage(sums)
        metrics = critic_metrics(sums)
        if not sums[0]:
            # Without tokens there is nothing to learn, but Adam's momentum would still move the weights.
            return Gradients(metrics, finite=True, apply=lambda: None)
        lr, norm = self._lr.at(self.steps_taken), reduce_gradients(self.model)

        def apply() -> None:
            apply_gradients(self.model, lr=lr, weight_decay=self._learner.weight_decay)
            self.steps_taken += 1

        finite = math.isfinite(metrics["value_loss"]) and math.isfinite(norm)
        return Gradients({**metrics, "critic_grad_norm": norm, "critic_lr": lr}, finite, apply)

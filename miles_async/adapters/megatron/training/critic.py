"""PPO's critic: a second model that predicts, before each token, the reward that is still to come.

The critic trains on the same ranks and micro-batches as the policy, with its own optimizer.
Source: PPO, Schulman et al. 2017 (arXiv 1707.06347); for language models InstructGPT (arXiv 2203.02155), appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron.model.factory import build_model
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.adapters.megatron.model.process_groups import broadcast_from_last_stage
from miles_async.adapters.megatron.training import inference
from miles_async.adapters.megatron.training.micro_batches import (
    ModelInput,
    Outputs,
    model_inputs,
    run_forward_backward,
)
from miles_async.adapters.megatron.training.optimizer import Gradients, clear_gradients, complete_gradients
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


class Critic:
    """This rank's part of the critic."""

    def __init__(self, config: RunConfig, hf_checkpoint: str) -> None:
        """Load `critic_load`, or `hf_checkpoint` if it is unset. The process groups must exist."""
        self._algorithm = config.algorithm
        self._lr = critic_learning_rate(config)
        checkpoint = Path(config.algorithm.critic_load or hf_checkpoint).expanduser()
        self.model = build_model(config.learner, str(checkpoint), values=True)

    def evaluate(
        self, step: TrainStep, penalties: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Compute values, advantages and returns with the critic's current weights: one tensor [m] per micro-batch.

        `penalties` [m] per micro-batch are subtracted from the rewards of single tokens.
        """
        values = inference.read_targets(self.model, step.micro_batches, inference.target_values)
        device = self.model.device
        advantages, returns = [], []
        for i, (batch, batch_values) in enumerate(zip(step.micro_batches, values, strict=True)):
            sequences = to_device(batch.sequences, device)
            rewards = last_token_rewards(to_device(batch.advantages, device), sequences)
            if penalties is not None:
                rewards = rewards - penalties[i]
            batch_advantages, batch_returns = generalized_advantages(
                rewards, batch_values, sequences, discount=self._algorithm.gamma, decay=self._algorithm.lambd
            )
            advantages.append(batch_advantages)
            returns.append(batch_returns)
        return values, advantages, returns

    def compute_gradients(self, step: TrainStep, old_values: Sequence[Tensor], returns: Sequence[Tensor]) -> Gradients:
        """Compute the gradients of one optimizer step from the values and returns of `evaluate`."""
        clear_gradients(self.model)
        clip = self._algorithm.value_clip

        def loss(number: int, model_input: ModelInput, outputs: Outputs) -> tuple[Tensor, Tensor]:
            values, total = inference.target_values(model_input, outputs[0]), step.total_tokens
            weights = to_device(step.micro_batches[number].loss_weights, self.model.device)
            return critic_loss(values, old_values[number], returns[number], weights, total_tokens=total, clip=clip)

        parts = run_forward_backward(self.model, model_inputs(self.model, step.micro_batches), loss)
        sums = torch.zeros(len(CRITIC_SUMS), device=self.model.device)
        if parts:  # only the last stage of a pipeline computes losses
            sums = torch.stack(parts).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        sums = broadcast_from_last_stage(sums)
        metrics = critic_metrics(sums)
        empty, loss_value = not sums[0], metrics["value_loss"]
        lr = self._lr.at(self.model.steps_taken)
        return complete_gradients(self.model, metrics, lr, loss=loss_value, empty=empty, prefix="critic_")

"""One rank of the trainer: Megatron-core in this process, without Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.checkpoint.hf_checkpoint import replace_checkpoint, write_checkpoint
from miles_async.adapters.megatron.checkpoint.state_copy import CheckpointCopy, StateCopy
from miles_async.adapters.megatron.checkpoint.training_state import copy_state, load_state
from miles_async.adapters.megatron.model import process_groups
from miles_async.adapters.megatron.model.environment import environment
from miles_async.adapters.megatron.model.factory import build_model, build_reference
from miles_async.adapters.megatron.model.hf_weights import export_weights
from miles_async.adapters.megatron.training import inference
from miles_async.adapters.megatron.training.critic import Critic, CriticOutput
from miles_async.adapters.megatron.training.micro_batches import ModelInput, forward_backward, model_inputs
from miles_async.adapters.megatron.training.offload import offload, onload
from miles_async.adapters.megatron.training.optimizer import (
    Gradients,
    Snapshot,
    apply_gradients,
    clear_gradients,
    reduce_gradients,
)
from miles_async.adapters.megatron.training.performance import usage
from miles_async.batching.batch import NO_VERSION, PackedBatch, TrainStep, supervised_step
from miles_async.config.derived import keeps_reference, learning_rate, reference_batching
from miles_async.config.schema import Algorithm, RunConfig
from miles_async.losses.correction import CorrectionSettings
from miles_async.losses.objectives import kl_penalty
from miles_async.losses.policy import (
    STALENESS_CLASSES,
    SUMS,
    Objective,
    PolicyLossSettings,
    TokenColumns,
    TokenSums,
    objective_sum,
    policy_loss,
    policy_metrics,
)
from miles_async.losses.supervised import sft_loss, supervised_loss
from miles_async.types import StepReport


@dataclass(frozen=True, slots=True)
class PreStepValues:
    """What is known of an optimizer step from before the drain's first one: by micro-batch, [m] each."""

    old_logprobs: list[Tensor] | None
    """None: those of the step's own forward pass."""
    reference: list[Tensor] | None
    """None where no reference model is kept."""
    critic_output: CriticOutput | None
    """None where there is no critic."""


class MegatronLearner:
    """Trains, scores and exports one model. All ranks must call the same methods in the same order.

    Not thread-safe: call it from one thread. Ranks that share layers or sequences, or are stages of one pipeline, are
    handed the same batches.
    """

    def __init__(
        self, config: RunConfig, hf_checkpoint: str, rank: int, world_size: int, master_addr: str, master_port: int
    ) -> None:
        self._settings = config.learner
        self._algorithm = config.algorithm
        torch.use_deterministic_algorithms(config.learner.deterministic_mode)
        self._loss = _loss_settings(config.algorithm)
        # Greedy decoding, temperature 0, reports log-probabilities at temperature 1.
        self._temperature = config.rollout.rollout_temperature or 1.0
        self._checkpoint = Path(hf_checkpoint)
        self._rank = rank
        self._device = process_groups.join(
            rank=rank,
            world_size=world_size,
            address=master_addr,
            port=master_port,
            learner=config.learner,
        )
        self._model = build_model(config.learner, hf_checkpoint)
        self._critic = None
        self._critic_only = config.algorithm.num_critic_only_steps
        if config.algorithm.advantage_estimator == "ppo":
            self._critic = Critic(config, hf_checkpoint, self._device)
        self._reference = None
        if keeps_reference(config):
            reference = Path(config.algorithm.ref_load or hf_checkpoint).expanduser()
            with environment(config.learner.ref_env_vars):
                self._reference = build_reference(config.learner, str(reference))
        self._steps_taken = 0
        self.version = 0
        """The weight version that was staged last: what the staleness of tokens is measured from."""
        self._lr = learning_rate(config)

    def train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        """Take the optimizer steps of one drained batch, of which `steps` are this rank's share.

        All of them count or none: after a loss or gradient that is not finite, the weights are those from before the
        call. Metrics are global, the same on every rank; `tokens` are this rank's own.
        """
        started = time.time()
        known = [self._before(step, several=len(steps) > 1) for step in steps]
        restore = self._restorer() if len(steps) > 1 else None
        metrics: list[Mapping[str, float]] = []
        finite = True
        for step, before in zip(steps, known, strict=True):
            found = [self._policy_step(step, before)] if rollout_id >= self._critic_only else []
            if self._critic is not None and before.critic_output is not None:
                found.append(self._critic.gradients(step, before.critic_output))
            metrics.append(dict(chain(*(one.metrics.items() for one in found), _of_packing(step).items())))
            finite = all(one.finite for one in found)
            if not finite:
                break
            for one in found:
                one.apply()
        if not finite and restore is not None:
            restore()
        tokens = sum(len(batch.tokens) - batch.padding for step in steps for batch in step.micro_batches)
        ended = time.time()
        of_machine = usage(self._model, steps, ended - started)
        return StepReport(
            started=started, ended=ended, tokens=tokens, finite=finite, metrics=_over_steps(metrics) | of_machine
        )

    def _before(self, step: TrainStep, *, several: bool) -> PreStepValues:
        """What a step needs from before the drain's first one, of which it is one of several."""
        reference = self._reference_logprobs(step)
        penalized = self._critic is not None and reference is not None
        # With one step, the log-probabilities from before it are those of its own forward pass.
        old = self._old_logprobs(step) if several or penalized else None
        if self._critic is None:
            return PreStepValues(old, reference, None)
        penalties = None
        if old is not None and reference is not None:
            algorithm = self._algorithm
            penalties = [
                algorithm.kl_coef * kl_penalty(own, other, algorithm.kl_loss_type)
                for own, other in zip(old, reference, strict=True)
            ]
        return PreStepValues(old, reference, self._critic.evaluate(step, penalties))

    def _restorer(self) -> Callable[[], None]:
        """Undoes what is done to models, optimizers and step counts from here on."""
        policy, taken = Snapshot(self._model), self._steps_taken
        critic = self._critic
        values = None if critic is None else (critic, Snapshot(critic.model), critic.steps_taken)

        def restore() -> None:
            policy.restore()
            self._steps_taken = taken
            if values is not None:
                values[1].restore()
                values[0].steps_taken = values[2]

        return restore

    def _policy_step(self, step: TrainStep, before: PreStepValues) -> Gradients:
        sums, maximum = self._policy_gradients(step, before)
        metrics = policy_metrics(sums, maximum)
        if not metrics["loss_tokens"]:
            # A filter took all of it: there is nothing to learn, and Adam would drift on by its momentum.
            return Gradients(metrics, finite=True, apply=lambda: None)
        lr, norm = self._lr.at(self._steps_taken), reduce_gradients(self._model)

        def apply() -> None:
            apply_gradients(self._model, lr=lr, weight_decay=self._settings.weight_decay)
            self._steps_taken += 1

        finite = math.isfinite(objective_sum(sums)) and math.isfinite(norm)
        return Gradients({**metrics, "grad_norm": norm, "lr": lr}, finite, apply)

    def _policy_gradients(self, step: TrainStep, before: PreStepValues) -> tuple[Tensor, Tensor]:
        clear_gradients(self._model)

        def loss(number: int, own: ModelInput, logits: Tensor) -> tuple[Tensor, TokenSums]:
            logprobs, entropy = inference.target_logprobs(own, logits, self._model.vocab_size, self._temperature)
            if self._settings.loss_type == "sft_loss":
                return sft_loss(logprobs, entropy, total_tokens=step.total_tokens)
            columns = self._columns(own.batch, logprobs, before, number)
            return policy_loss(logprobs, entropy, columns, total_tokens=step.total_tokens, settings=self._loss)

        parts = forward_backward(self._model, self._passes(step), loss)
        # Only the last stage of a pipeline has seen a loss.
        sums = torch.zeros(STALENESS_CLASSES, len(SUMS), device=self._device)
        maximum = torch.zeros(1, device=self._device)
        if parts:
            sums = torch.stack([part.sums for part in parts]).sum(0)
            maximum = torch.stack([part.maximum for part in parts]).amax(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return process_groups.broadcast_from_last_stage(sums), process_groups.broadcast_from_last_stage(maximum)

    def _passes(self, step: TrainStep) -> list[ModelInput]:
        return model_inputs(step.micro_batches, self._settings, self._device)

    def _columns(self, batch: PackedBatch, logprobs: Tensor, before: PreStepValues, number: int) -> TokenColumns:
        def here(column: NDArray[Any]) -> Tensor:
            return torch.from_numpy(column).to(self._device)

        # A token that no span covers counts as fresh: it is here only if a mask says that it is to be trained.
        staleness = np.where(batch.versions == NO_VERSION, 0, self.version - batch.versions)
        return TokenColumns(
            old_logprobs=logprobs if before.old_logprobs is None else before.old_logprobs[number],
            rollout_log_probs=here(batch.rollout_log_probs),
            advantages=here(batch.advantages)
            if before.critic_output is None
            else before.critic_output.advantages[number],
            loss_weights=here(batch.loss_weights),
            sequences=here(batch.sequences),
            staleness=here(staleness),
            reference_logprobs=None if before.reference is None else before.reference[number],
        )

    def _old_logprobs(self, step: TrainStep) -> list[Tensor]:
        return inference.frozen_logprobs(
            self._model, step.micro_batches, self._settings, self._device, temperature=self._temperature
        )

    def _reference_logprobs(self, step: TrainStep) -> list[Tensor] | None:
        if self._reference is None:
            return None
        settings = reference_batching(self._settings)
        with environment(self._settings.ref_env_vars):
            return inference.frozen_logprobs(
                self._reference, step.micro_batches, settings, self._device, temperature=self._temperature
            )

    def supervised_step(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], lr: float) -> float:
        """One optimizer step on the mean negative log-likelihood of `responses`, which is returned (nats per token).

        With several data-parallel ranks each takes the same step: hand all of them the same sequences.
        """
        step = supervised_step(prompts, responses, self._settings)
        copies = parallel_state.get_data_parallel_world_size()
        clear_gradients(self._model)

        def loss(_: int, own: ModelInput, logits: Tensor) -> tuple[Tensor, Tensor]:
            logprobs, _entropy = inference.target_logprobs(own, logits, self._model.vocab_size)
            value = supervised_loss(logprobs, total_tokens=step.total_tokens * copies)
            return value, value.detach() * copies

        losses = forward_backward(self._model, self._passes(step), loss)
        seen = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        total = process_groups.broadcast_from_last_stage(seen).item()
        if math.isfinite(reduce_gradients(self._model)) and math.isfinite(total):
            apply_gradients(self._model, lr=lr, weight_decay=self._settings.weight_decay)
        return total

    def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        """For each sequence, log p of every token but the first given those before it: `len(tokens) - 1` entries.

        At temperature 1, in nats; the last `response_length` entries are those of a response.
        """
        return inference.sequence_logprobs(self._model, token_lists, self._settings, device=self._device)

    def greedy(self, prompts: Sequence[list[int]], max_new_tokens: int, eos: int) -> list[list[int]]:
        """The most probable continuation of each prompt, up to and with `eos`."""
        return inference.greedy(
            self._model, prompts, self._settings, max_new_tokens=max_new_tokens, eos=eos, device=self._device
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by their Hugging Face names, whole on every rank. They may be views: copy what must last."""
        return export_weights(self._model.bridge, self._model.chunks)

    def save_hf(self, path: str, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write a checkpoint that transformers and SGLang load; it appears whole or not at all.

        `notes` are further files to put into it: their text by their names. Raises OSError when `path` exists already.
        """
        tensors = self._whole_weights()
        if self._rank == 0:
            write_checkpoint(Path(path), tensors, like=self._checkpoint, notes=notes)
        dist.barrier()

    def _whole_weights(self) -> dict[str, Tensor]:
        """A copy of all weights on rank 0; the others help to gather them."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if self._rank == 0:
                tensors[name] = tensor.to("cpu", copy=True)
        return tensors

    def copy_state(self, folder: str | None, hf_path: str | None = None) -> CheckpointCopy:
        """Copy aside what `load_state` needs to go on exactly from here, to be written into `folder` later.

        And, for `hf_path`, the weights for an export as `save_hf` makes it, which takes the place of an earlier one.
        """
        models = [] if folder is None else self._copied(Path(folder))
        if hf_path is None:
            return CheckpointCopy(models)
        tensors = self._whole_weights()
        if self._rank > 0:
            return CheckpointCopy(models)
        like = self._checkpoint
        return CheckpointCopy(models, lambda: replace_checkpoint(Path(hf_path), tensors, like=like))

    def _copied(self, folder: Path) -> list[StateCopy]:
        copies = [copy_state(self._model, folder / "actor", self._steps_taken)]
        if self._critic is not None:
            copies.append(copy_state(self._critic.model, folder / "critic", self._critic.steps_taken))
        return copies

    def offload(self) -> None:
        """Leave the GPU's memory to an engine that shares it, until `onload`."""
        offload(self._model.chunks, self._model.optimizer)

    def onload(self) -> None:
        onload(self._model.chunks, self._model.optimizer)

    def load_state(self, folder: str) -> None:
        """Go on from a checkpoint of any layout. Raises UserError when it is broken, or of another model."""
        self._steps_taken = load_state(self._model, Path(folder) / "actor")
        if self._critic is not None:
            self._critic.steps_taken = load_state(self._critic.model, Path(folder) / "critic")

    def close(self) -> None:
        """Leave the process groups; another learner may then be built in this process."""
        process_groups.leave()


_OBJECTIVES: dict[str, Objective] = {"gspo": "sequence_clip", "cispo": "cispo"}
"""By advantage estimator; the others clip the ratio of a token."""


def _loss_settings(algorithm: Algorithm) -> PolicyLossSettings:
    return PolicyLossSettings(
        objective=_OBJECTIVES.get(algorithm.advantage_estimator, "token_clip"),
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
        correction=CorrectionSettings(
            method=algorithm.off_policy_correction, upper=algorithm.tis_clip, band=algorithm.icepop_band
        ),
        entropy_coef=algorithm.entropy_coef,
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        # Under ppo it is in the rewards that the critic judges.
        kl_reward_coef=0.0 if algorithm.advantage_estimator == "ppo" else algorithm.kl_coef,
        kl_estimator=algorithm.kl_loss_type,
    )


def _of_packing(step: TrainStep) -> dict[str, float]:
    report = step.packing
    if report is None:
        return {}
    return {
        "micro_batches": report.micro_batches,
        "micro_batches_lower_bound": report.lower_bound,
        "flop_imbalance": report.imbalance,
        "padding": report.padding,
    }


def _over_steps(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the optimizer steps of a batch that have the metric; of a maximum, the maximum."""
    names = dict.fromkeys(name for step in metrics for name in step)
    return {
        name: (max if name.endswith("_max") else fmean)([step[name] for step in metrics if name in step])
        for name in names
    }

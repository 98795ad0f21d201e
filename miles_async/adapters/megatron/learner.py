"""One rank of the trainer: Megatron-core in this process, without Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_async.adapters.megatron import forward, parallel
from miles_async.adapters.megatron.batch import PackedBatch, TrainStep, supervised_step
from miles_async.adapters.megatron.checkpoint import write_checkpoint
from miles_async.adapters.megatron.model import build_model
from miles_async.adapters.megatron.optimizer import Snapshot, clear_gradients, learning_rate, take_step
from miles_async.config.schema import RunConfig
from miles_async.losses.policy import SUMS, PolicyLossSettings, TokenSums, metrics_from, policy_loss
from miles_async.losses.supervised import lesson_loss, supervised_loss
from miles_async.types import StepReport


class MegatronLearner:
    """Trains, scores and exports one model. All ranks must call the same methods in the same order.

    Not thread-safe: call it from one thread. Ranks of one tensor-parallel group are handed the same batches.
    """

    def __init__(
        self, config: RunConfig, hf_checkpoint: str, rank: int, world_size: int, master_addr: str, master_port: int
    ) -> None:
        self._settings = config.learner
        self._loss = PolicyLossSettings(
            eps_clip=config.algorithm.eps_clip,
            eps_clip_high=config.algorithm.eps_clip
            if config.algorithm.eps_clip_high is None
            else config.algorithm.eps_clip_high,
            tis_clip=config.algorithm.tis_clip if config.algorithm.use_tis else None,
            entropy_coef=config.algorithm.entropy_coef,
        )
        # Greedy decoding, temperature 0, reports log-probabilities at temperature 1.
        self._temperature = config.rollout.rollout_temperature or 1.0
        self._checkpoint = Path(hf_checkpoint)
        self._rank = rank
        self._device = parallel.join(
            rank=rank,
            world_size=world_size,
            address=master_addr,
            port=master_port,
            tensor_parallel=config.learner.tensor_model_parallel_size,
            seed=config.learner.seed,
        )
        self._model = build_model(config.learner, hf_checkpoint)
        self._steps_taken = 0
        self._total_steps = config.rollout.num_rollout * config.learner.num_steps_per_rollout

    def train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        """Take the optimizer steps of one drained batch, of which `steps` are this rank's share.

        All of them count or none: after a loss or gradient that is not finite, the weights are those from before the
        call. Metrics are global, the same on every rank; `tokens` are this rank's own.
        """
        started = time.time()
        # With one step, the log-probabilities from before it are those of its own forward pass.
        old = [self._old_logprobs(step) for step in steps] if len(steps) > 1 else [None]
        before = Snapshot(self._model) if len(steps) > 1 else None
        taken = self._steps_taken
        metrics: list[Mapping[str, float]] = []
        finite = True
        for step, old_logprobs in zip(steps, old, strict=True):
            lr = learning_rate(self._settings, self._steps_taken, self._total_steps)
            sums, maximum = self._policy_gradients(step, old_logprobs)
            finite, norm = self._take_step(lr, loss_is_finite=math.isfinite(float(sums[SUMS.index("objective")])))
            metrics.append({**metrics_from(sums, maximum), "grad_norm": norm, "lr": lr})
            if not finite:
                break
        if not finite and before is not None:
            before.restore()
            self._steps_taken = taken
        tokens = sum(len(batch.tokens) for step in steps for batch in step.micro_batches)
        return StepReport(
            started=started, ended=time.time(), tokens=tokens, finite=finite, metrics=_over_steps(metrics)
        )

    def _policy_gradients(self, step: TrainStep, old_logprobs: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        clear_gradients(self._model)
        parts: list[TokenSums] = []
        for i, batch in enumerate(step.micro_batches):
            logprobs, entropy = self._target_logprobs(batch)
            if self._settings.loss_type == "sft_loss":
                loss, part = lesson_loss(logprobs, entropy, total_tokens=step.total_tokens)
            else:
                loss, part = policy_loss(
                    logprobs,
                    entropy,
                    old_logprobs=logprobs if old_logprobs is None else old_logprobs[i],
                    rollout_logprobs=torch.from_numpy(batch.rollout_logprobs).to(self._device),
                    advantages=torch.from_numpy(batch.advantages).to(self._device),
                    total_tokens=step.total_tokens,
                    settings=self._loss,
                )
            loss.backward()
            parts.append(part)
        sums = torch.stack([part.sums for part in parts]).sum(0)
        maximum = torch.stack([part.maximum for part in parts]).amax(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return sums, maximum

    def _take_step(self, lr: float, *, loss_is_finite: bool) -> tuple[bool, float]:
        stepped, norm = take_step(
            self._model, lr=lr, weight_decay=self._settings.weight_decay, loss_is_finite=loss_is_finite
        )
        self._steps_taken += stepped
        return stepped, norm

    @torch.no_grad()
    def _old_logprobs(self, step: TrainStep) -> list[Tensor]:
        return [self._target_logprobs(batch)[0] for batch in step.micro_batches]

    def _target_logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return forward.target_logprobs(self._model, batch, self._device, temperature=self._temperature)

    def supervised_step(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], lr: float) -> float:
        """One optimizer step on the mean negative log-likelihood of `responses`, which is returned (nats per token).

        With several data-parallel ranks each takes the same step: hand all of them the same sequences.
        """
        step = supervised_step(prompts, responses, max_tokens=self._settings.max_tokens_per_gpu)
        copies = parallel_state.get_data_parallel_world_size()
        clear_gradients(self._model)
        total = 0.0
        for batch in step.micro_batches:
            logprobs, _ = forward.target_logprobs(self._model, batch, self._device)
            loss = supervised_loss(logprobs, total_tokens=step.total_tokens * copies)
            loss.backward()
            total += loss.item() * copies
        take_step(self._model, lr=lr, weight_decay=self._settings.weight_decay, loss_is_finite=math.isfinite(total))
        return total

    def logprobs(self, token_lists: Sequence[list[int]]) -> list[list[float]]:
        """For each sequence, log p of every token but the first given those before it: `len(tokens) - 1` entries.

        At temperature 1, in nats; the last `response_length` entries are those of a response.
        """
        return forward.sequence_logprobs(
            self._model, token_lists, max_tokens=self._settings.max_tokens_per_gpu, device=self._device
        )

    def greedy(self, prompts: Sequence[list[int]], max_new_tokens: int, eos: int) -> list[list[int]]:
        """The most probable continuation of each prompt, up to and with `eos`."""
        return forward.greedy(
            self._model,
            prompts,
            max_new_tokens=max_new_tokens,
            eos=eos,
            max_tokens=self._settings.max_tokens_per_gpu,
            device=self._device,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by their Hugging Face names, whole on every rank. They may be views: copy what must last."""
        with torch.no_grad():
            for name, tensor in self._model.bridge.export_weights([self._model.ddp.module]):
                yield name, tensor.detach()

    def save_hf(self, path: str, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write a checkpoint that transformers and SGLang load; it appears whole or not at all.

        `notes` are further files to put into it: their text by their names. Raises OSError when `path` exists already.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if self._rank == 0:
                tensors[name] = tensor.to("cpu", copy=True)
        if self._rank == 0:
            write_checkpoint(Path(path), tensors, like=self._checkpoint, notes=notes)
        dist.barrier()

    def close(self) -> None:
        """Leave the process groups; another learner may then be built in this process."""
        parallel.leave()


def _over_steps(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the optimizer steps of a batch; of a maximum, the maximum."""
    return {name: (max if name.endswith("_max") else fmean)(step[name] for step in metrics) for name in metrics[0]}

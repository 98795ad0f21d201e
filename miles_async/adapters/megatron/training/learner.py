"""One rank of the learner: Megatron-core in this process. This module does not know Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.checkpoint.huggingface import (
    replace_adapter,
    replace_checkpoint,
    write_checkpoint,
)
from miles_async.adapters.megatron.checkpoint.state_copy import CheckpointCopy
from miles_async.adapters.megatron.checkpoint.training_state import copy_state, load_state
from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.factory import (
    MegatronModel,
    TrainedModel,
    build_model,
    build_reference,
    frozen_part,
)
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.adapters.megatron.model.local_layers import refuse_for_local_layers, uses_local_layers
from miles_async.adapters.megatron.model.lora import (
    adapter_config,
    export_adapter,
    merge_adapter,
    without_adapters,
)
from miles_async.adapters.megatron.model.process_groups import (
    add_over_data_parallel,
    broadcast_from_last_stage,
    create_process_groups,
    destroy_process_groups,
    gather_over_data_parallel,
)
from miles_async.adapters.megatron.training import inference
from miles_async.adapters.megatron.training.adapter_states import AdapterStates
from miles_async.adapters.megatron.training.advantages import (
    PreStepValues,
    advantages_of_function,
    discounted_returns,
    normalize,
    postprocessed,
    reward_penalties,
)
from miles_async.adapters.megatron.training.critic import Critic
from miles_async.adapters.megatron.training.hooks import NO_HOOKS, LearnerHooks
from miles_async.adapters.megatron.training.micro_batches import (
    ModelInput,
    Outputs,
    model_inputs,
    run_forward_backward,
)
from miles_async.adapters.megatron.training.offloading import Offloaded, offload
from miles_async.adapters.megatron.training.optimizer import (
    Gradients,
    Snapshot,
    apply_gradients,
    clear_gradients,
    complete_gradients,
    complete_weights,
    reduce_gradients,
)
from miles_async.adapters.megatron.training.performance import performance_metrics
from miles_async.batching.batch import PackedBatch, TrainStep, supervised_step
from miles_async.columns.spans import NO_VERSION
from miles_async.config.learning_rate import learning_rate
from miles_async.config.losses import discount, estimator_of, normalizes_on_rank
from miles_async.config.model_shape import reference_of
from miles_async.config.schema import RunConfig
from miles_async.config.untested import drafts_from_heads
from miles_async.losses.functions import NO_FUNCTIONS, FunctionsOfMicroBatch, LossFunctions, SampleLayout
from miles_async.losses.objectives.objective import StepTokens
from miles_async.losses.policy import (
    STALENESS_CLASSES,
    SUMS,
    PolicyLossSettings,
    TokenSums,
    function_loss,
    objective_sum,
    penalized_advantages,
    policy_loss,
    policy_metrics,
    sft_loss,
    supervised_loss,
)
from miles_async.losses.tokens import TokenColumns
from miles_async.models.lora import AdapterConfig
from miles_async.plugins import errors_of
from miles_async.scheduling.lineage import Lineage
from miles_async.types import StepReport

log = structlog.get_logger(__name__)


class MegatronLearner:
    """Trains, scores and exports one model. All ranks must call the same methods in the same order.

    The class is not thread-safe. All ranks of one model replica (tensor, context and pipeline parallelism) must be
    given the same batches.
    """

    def __init__(
        self,
        config: RunConfig,
        hf_checkpoint: str,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        functions: LossFunctions = NO_FUNCTIONS,
        hooks: LearnerHooks = NO_HOOKS,
    ) -> None:
        """Connect to the other ranks and load the policy, and the critic and reference model if there are any.

        `functions` are those of the user that compute a part of the loss; `hooks` are called between the steps.

        Raises UserError if a checkpoint's model family is not supported.
        """
        self._settings = config.learner
        self._algorithm = config.algorithm
        torch.use_deterministic_algorithms(config.learner.deterministic_mode)
        self._loss = PolicyLossSettings.from_algorithm(config.algorithm)
        self._functions = functions
        self._hooks = hooks
        self._normalizes_returns = normalizes_on_rank(config.algorithm)
        # Engines report log-probabilities at temperature 1 for greedy decoding (temperature 0).
        self._temperature = config.rollout.rollout_temperature or 1.0
        self._checkpoint = Path(hf_checkpoint)
        self._rank = rank
        self._device = create_process_groups(
            rank=rank,
            world_size=world_size,
            address=master_addr,
            port=master_port,
            learner=config.learner,
        )
        hooks.initialize()
        if local := uses_local_layers(config.learner):
            refuse_for_local_layers(config.learner)
        self._model = build_model(config.learner, hf_checkpoint)
        if rank == 0 and local and not on_cpu() and self._model.config.num_moe_experts:
            log.warning("without Transformer Engine, experts are computed one after the other: run make setup-gpu")
        self._critic = None
        self._publishes_heads = drafts_from_heads(config)
        self._critic_only = config.algorithm.num_critic_only_steps
        if estimator_of(config.algorithm).trains_critic:
            self._critic = Critic(config, hf_checkpoint)
        self._reference = None
        if config.keeps_reference and config.learner.lora_rank and config.algorithm.ref_load is None:
            self._reference = frozen_part(self._model, config.learner.reference_batching)
        elif config.keeps_reference:
            reference = Path(reference_of(config.algorithm.ref_load, hf_checkpoint)).expanduser()
            self._reference = build_reference(config.learner.reference_batching, str(reference))
        self._offloaded: list[Offloaded] = []
        self.version = 0
        """Weight version that was staged last. The staleness of tokens is measured from it."""
        self.adapters = AdapterStates(self._model, list(config.data.adapter_weights))
        """Those that the run trains. A run that does not train several has one, whose name is empty."""
        self.lineages = {name: Lineage() for name in config.data.adapter_weights}
        """Which versions the weights of each adapter descend from."""
        self._lr = learning_rate(config)
        if rank == 0 and not self.shares_prefixes:
            self._log_unshared_prefixes()

    @property
    def _trained(self) -> list[TrainedModel]:
        """The models with an optimizer."""
        return [self._model, *([] if self._critic is None else [self._critic.model])]

    @property
    def _shares_weights(self) -> bool:
        """Whether the reference model is the policy without its adapters."""
        return self._reference is not None and self._reference.chunks is self._model.chunks

    @property
    def shares_prefixes(self) -> bool:
        """Whether this learner computes a common prefix of samples once."""
        return self._model.shares_prefixes and self._settings.shares_prefixes

    def _log_unshared_prefixes(self) -> None:
        if self._settings.share_prefixes is False:
            cause = "share_prefixes is off"
        elif not self._settings.shares_prefixes:
            cause = "context parallelism and dynamic batching need whole samples"
        elif self._settings.share_prefixes is None and not on_cpu():
            cause = "set share_prefixes to share them on GPUs"
        else:
            cause = "the attention of this model needs whole samples"
        log.info("the prompt of a group is computed once per sample", cause=cause)

    def train(self, rollout_id: int, steps: Sequence[TrainStep]) -> StepReport:
        """Take the optimizer steps of one drained batch; `steps` are this rank's parts of those of a pass.

        Either all steps count or none: if a loss or gradient is not finite, the weights from before the call are
        restored. Metrics are global and equal on all ranks; `tokens` are those that this rank computed.
        """
        started = time.monotonic()
        # All steps of the batch are off-policy by the same weights, so these values come first, before any step.
        pre_step_values = self._pre_step_values(rollout_id, steps) * self._settings.passes_per_rollout
        steps = [*steps] * self._settings.passes_per_rollout
        # A single step is only applied if it is finite, so it needs no copy of the weights.
        snapshots = [Snapshot(model, weights=len(steps) > 1) for model in self._trained]
        metrics: list[Mapping[str, float]] = []
        finite = True
        for number, (step, values) in enumerate(zip(steps, pre_step_values, strict=True)):
            hook = partial(self._hooks.before_train_step, self._model, rollout_id, number)
            gradients = [self._policy_step(step, values, hook)] if rollout_id >= self._critic_only else []
            if self._critic is not None:
                gradients.append(self._critic.compute_gradients(step, values.critic_values, values.returns))
            metrics.append(dict(chain(*(one.metrics.items() for one in gradients), _packing_metrics(step).items())))
            finite = all(one.finite for one in gradients)
            if not finite:
                break
            for one in gradients:
                one.apply()
        for model in self._trained:
            complete_weights(model)
        for snapshot in () if finite else snapshots:
            snapshot.restore()
        tokens = sum(len(batch.tokens) - batch.padding for step in steps for batch in step.micro_batches)
        seconds = time.monotonic() - started
        performance = performance_metrics(self._model, steps, seconds)
        return StepReport(
            seconds=seconds,
            tokens=tokens,
            finite=finite,
            metrics=_combine_steps(metrics) | performance,
        )

    def _pre_step_values(self, rollout_id: int, steps: Sequence[TrainStep]) -> list[PreStepValues]:
        """Compute what the steps need from the weights before the batch's first step."""
        several = len(steps) * self._settings.passes_per_rollout > 1
        values = [self._values_of(step, is_one_of_several=several) for step in steps]
        if self._functions.advantages is not None:
            values = advantages_of_function(self._functions, steps, values, self._algorithm, self._device)
        if self._normalizes_returns or (self._critic is not None and self._algorithm.normalize_advantages):
            normalized = normalize([one.advantages or [] for one in values], self._device)
            values = [replace(one, advantages=advantages) for one, advantages in zip(values, normalized, strict=True)]
        if self._functions.postprocess is not None:
            values = postprocessed(self._functions, rollout_id, steps, values, self._algorithm, self._device)
        return values

    def _values_of(self, step: TrainStep, *, is_one_of_several: bool) -> PreStepValues:
        reference = None if self._reference is None else self._logprobs(self._reference, step)
        needs_penalties = reference is not None and (self._critic is not None or self._normalizes_returns)
        # The first step's own forward pass runs on the same weights, so a single step needs no separate pass. With
        # dropout, that pass computes other log-probabilities than the policy from which engines sample.
        drops = self._settings.lora_dropout > 0
        needs_old = is_one_of_several or needs_penalties or self._functions.change_batches or drops
        old = self._logprobs(self._model, step) if needs_old and not self._algorithm.use_rollout_logprobs else None
        if self._algorithm.use_rollout_logprobs:
            old = [to_device(batch.columns["rollout_log_probs"], self._device) for batch in step.micro_batches]
        advantages = penalties = None
        if old is not None and reference is not None:
            penalties = reward_penalties(old, reference, self._algorithm)
        if self._critic is not None:
            critic_values, advantages, returns = self._critic.evaluate(step, penalties)
            return PreStepValues(advantages, old, reference, critic_values, returns)
        if self._normalizes_returns:
            advantages = discounted_returns(step, penalties, discount(self._algorithm), self._device)
        return PreStepValues(advantages, old, reference)

    def _prepare_step(self, step: TrainStep, values: PreStepValues) -> Any:
        """What the objective needs to know of the whole step.

        Earlier steps on the batch have moved the policy, so the log-probabilities come from a forward pass with the
        current weights.
        """
        objective = self._loss.objective
        if self._settings.loss_type != "policy_loss" or not objective.reads_step:
            return None
        empty = torch.zeros(0, device=self._device)
        rows = [(empty, empty, empty, empty)]
        for number, logprobs in enumerate(self._logprobs(self._model, step)):
            columns = self._token_columns(step.micro_batches[number], logprobs, values, number)
            advantages = penalized_advantages(columns, self._loss)
            rows.append((logprobs[values.left(number)], columns.old_logprobs, columns.rollout_log_probs, advantages))
        names = ("logprobs", "old_logprobs", "rollout_log_probs", "advantages")
        gathered = (gather_over_data_parallel(torch.cat(column)) for column in zip(*rows, strict=True))
        with errors_of(objective, "prepare a step"):
            return objective.prepare_step(StepTokens(**dict(zip(names, gathered, strict=True))), self._loss.own)

    def _policy_step(self, step: TrainStep, values: PreStepValues, hook: Callable[[], None]) -> Gradients:
        sums, maximum, others = self._policy_gradients(step, values, hook=hook)
        metrics = {**policy_metrics(sums, maximum, self._skipped_by_staleness(step)), **others}
        # Filters or masks may have removed all tokens, or no sample has an advantage.
        empty = not metrics["computed_fraction"]
        lr = self._lr.at(self._model.steps_taken, self.adapters.steps_taken)
        return complete_gradients(self._model, metrics, lr, loss=objective_sum(sums), empty=empty, prefix="")

    def _policy_gradients(
        self, step: TrainStep, values: PreStepValues, *, hook: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor, Mapping[str, float]]:
        """Run forward and backward passes; returns the global entries of `TokenSums`.

        `hook` is called when the gradients are zero.
        """
        prepared = self._prepare_step(step, values)
        total = step.total_tokens if values.tokens_left is None else values.tokens_left
        clear_gradients(self._model)
        hook()

        def loss(number: int, model_input: ModelInput, outputs: Outputs) -> tuple[Tensor, TokenSums]:
            value, sums = policy(number, model_input, outputs[0])
            if len(outputs) == 1:
                return value, sums
            mask = None if values.masks is None else values.masks[number] != 0
            of_heads = inference.head_loss(self._model, model_input, outputs[1:], mask, total)
            value = value + self._settings.mtp_loss_scaling_factor * of_heads["mtp_loss"]
            detached = {name: one.detach() for name, one in of_heads.items()}
            return value, replace(sums, metrics={**sums.metrics, **detached})

        def policy(number: int, model_input: ModelInput, output: Tensor) -> tuple[Tensor, TokenSums]:
            of_logits = self._functions.loss is not None and self._functions.loss.takes_logits
            with torch.set_grad_enabled(not of_logits):
                logprobs, entropy = inference.target_logprobs(self._model, model_input, output, self._temperature)
            if self._settings.loss_type == "sft_loss":
                weights = to_device(model_input.batch.loss_weights, self._device)
                return sft_loss(logprobs, entropy, weights, total_tokens=total)
            columns, left = self._token_columns(model_input.batch, logprobs, values, number), values.left(number)
            logprobs, entropy = logprobs[left], entropy[left]
            functions = self._functions_of(model_input.batch, columns, left, total, step.trajectories)
            if functions is not None and self._functions.loss is not None:
                if of_logits:
                    logits = inference.whole_logits(self._model, model_input, output, functions.layout.rows)
                result = functions.logits_loss(logits) if of_logits else functions.token_loss(logprobs, entropy)
                return function_loss(*(logprobs, entropy, columns, result), total_tokens=total, settings=self._loss)
            return policy_loss(
                *(logprobs, entropy, columns),
                total_tokens=total,
                settings=self._loss,
                prepared=prepared,
                functions=functions,
            )

        parts = run_forward_backward(self._model, model_inputs(self._model, step.micro_batches), loss)
        # Only the last stage of a pipeline computes losses. The other stages receive the result from it.
        sums = torch.zeros(STALENESS_CLASSES, len(SUMS), device=self._device)
        maximum = torch.zeros(1, device=self._device)
        if parts:
            sums = torch.stack([part.sums for part in parts]).sum(0)
            maximum = torch.stack([part.maximum for part in parts]).amax(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        metrics = self._further_metrics(parts)
        return broadcast_from_last_stage(sums), broadcast_from_last_stage(maximum), metrics

    def _functions_of(
        self, batch: PackedBatch, columns: TokenColumns, left: Tensor | slice, tokens: int, trajectories: int
    ) -> FunctionsOfMicroBatch | None:
        """The functions that compute a part of the loss of this micro-batch; None if there are none.

        `left` are the trained tokens that have entries in `columns`; the step has `tokens` of them in all.
        """
        if not self._functions.compute_loss:
            return None
        layout = SampleLayout(batch, self._device, left)
        columns = replace(columns, advantages=penalized_advantages(columns, self._loss))
        return FunctionsOfMicroBatch(self._functions, layout, columns, tokens, trajectories)

    def _further_metrics(self, parts: Sequence[TokenSums]) -> Mapping[str, float]:
        """`TokenSums.metrics` over all micro-batches and ranks."""
        if not (self._functions.compute_loss or self._algorithm.get_mismatch_metrics or self._model.heads):
            return {}
        totals: dict[str, float] = {}
        for part in parts:
            for name, value in part.metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return add_over_data_parallel(totals)

    def _skipped_by_staleness(self, step: TrainStep) -> list[float]:
        """Number of skipped tokens in each staleness class."""
        versions = np.array(list(step.skipped_tokens), np.int64)
        classes = self._staleness(versions).clip(0, STALENESS_CLASSES - 1)
        return np.bincount(classes, list(step.skipped_tokens.values()), minlength=STALENESS_CLASSES).tolist()

    def _staleness(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Age of tokens in weight versions. Tokens without a version, such as trained tool output, count as fresh."""
        known = np.unique(versions)
        # A learner that has staged nothing yet, in a run without engines, counts all tokens as fresh.
        lineage = self.lineages[self.adapters.selected]
        ages = [
            0 if version == NO_VERSION or version > self.version else lineage.age(version, self.version)
            for version in known.tolist()
        ]
        return np.array(ages, np.int64)[np.searchsorted(known, versions)]

    def _token_columns(self, batch: PackedBatch, logprobs: Tensor, values: PreStepValues, number: int) -> TokenColumns:
        """Inputs of the policy loss for micro-batch `number`, of the trained tokens that masks leave.

        `logprobs` are those of all trained tokens, from the micro-batch's forward pass.
        """

        def on_device(column: NDArray[Any]) -> Tensor:
            return to_device(column, self._device)

        weights = on_device(batch.loss_weights)
        columns = TokenColumns(
            old_logprobs=logprobs if values.old_logprobs is None else values.old_logprobs[number],
            rollout_log_probs=on_device(batch.columns["rollout_log_probs"]),
            advantages=on_device(batch.advantages) if values.advantages is None else values.advantages[number],
            rewards=on_device(batch.rewards),
            loss_weights=weights if values.masks is None else weights * values.masks[number],
            sequences=on_device(batch.sequences),
            staleness=on_device(self._staleness(batch.columns["spans"].of_tokens())),
            reference_logprobs=None if values.reference is None else values.reference[number],
            columns={name: on_device(entries) for name, entries in batch.of_plugins.items()},
        )
        return columns.take(values.left(number))

    def _logprobs(self, model: MegatronModel, step: TrainStep) -> list[Tensor]:
        """[m] log-probabilities of each micro-batch under the current weights of a model."""
        is_reference = model is self._reference
        self._hooks.before_log_prob(model, "ref_" if is_reference else "")
        # Any other reference model has no adapters.
        with without_adapters(model.chunks) if is_reference else nullcontext():
            return inference.frozen_logprobs(model, step.micro_batches, temperature=self._temperature)

    def supervised_step(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], lr: float) -> float:
        """Take one supervised step on token ids; returns the mean negative log-likelihood in nats per response token.

        If there are several data-parallel ranks, all must be given the same sequences and take the same step.
        Raises ValueError if an example does not fit into a micro-batch.
        """
        step = supervised_step(prompts, responses, self._settings)
        # Gradients are added up over data-parallel ranks, which all compute the same ones here.
        copies = parallel_state.get_data_parallel_world_size()
        clear_gradients(self._model)

        def loss(_: int, model_input: ModelInput, outputs: Outputs) -> tuple[Tensor, Tensor]:
            logprobs, _entropy = inference.target_logprobs(self._model, model_input, outputs[0])
            value = supervised_loss(logprobs, total_tokens=step.total_tokens * copies)
            return value, value.detach() * copies

        losses = run_forward_backward(self._model, model_inputs(self._model, step.micro_batches), loss)
        step_loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        total = broadcast_from_last_stage(step_loss).item()
        if math.isfinite(reduce_gradients(self._model)) and math.isfinite(total):
            apply_gradients(self._model, lr)
        complete_weights(self._model)
        return total

    def logprobs(self, token_lists: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence, the log-probability of every token but the first: `len(tokens) - 1` entries in nats.

        The temperature is 1. The last `response_length` entries belong to a response.
        """
        return inference.sequence_logprobs(self._model, token_lists)

    def greedy(self, prompts: Sequence[list[int]], max_new_tokens: int, eos: int) -> list[list[int]]:
        """Generate the most probable continuation of each prompt, up to and including `eos`."""
        return inference.greedy(self._model, prompts, max_new_tokens, eos)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, whole and with Hugging Face names, on every rank; with adapters, those of the base model.

        Tensors may be views of parameters, so copy those that must outlast the next optimizer step.
        """
        return self._model.source.export(self._model.chunks)

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a publish sends to engines, on every rank: an adapter, or those of `weights` that engines hold.

        MTP heads are among these only if engines draft tokens from them.
        """
        if self._settings.lora_rank:
            return export_adapter(self._model.chunks)
        if self._publishes_heads:
            return self.weights()
        return ((name, one) for name, one in self.weights() if not self._model.source.is_of_heads(name))

    def adapter(self) -> dict[str, Tensor]:
        """Copies of the adapter's tensors in host memory on rank 0, in float32 and with PEFT's names and shapes.

        Other ranks return nothing. All ranks must call it.
        """
        return self._gather(self.engine_weights())

    @property
    def adapter_config(self) -> AdapterConfig:
        """What PEFT and the engines must know of the adapter."""
        return adapter_config(self._settings, self._checkpoint)

    def save_hf(self, path: str, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write a checkpoint that transformers and SGLang load. It appears complete or not at all.

        `notes` are the contents of further files by name. Raises OSError if `path` exists and is not empty.
        """
        tensors = self._gather(self.weights())
        if self._rank == 0:
            write_checkpoint(Path(path), tensors, like=self._checkpoint, notes=notes)
        dist.barrier()

    def _gather(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of tensors in host memory on rank 0, and nothing on other ranks. All ranks must call it."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in named if self._rank == 0}

    def _export(self, path: Path) -> Callable[[], None]:
        """Copy what is exported; returns a function that writes it. All ranks must call it."""
        like, config = self._checkpoint, self.adapter_config if self._settings.lora_rank else None
        if len(self.lineages) > 1:
            adapters = {name: self.adapter() for name in self.adapters}

            def write() -> None:
                for name, tensors in adapters.items():
                    replace_adapter(path / name, tensors, self.adapter_config, base=like)

            return write
        adapter = {} if config is None else self.adapter()
        if config is not None and not self._settings.lora_merge:
            return lambda: replace_adapter(path, adapter, config, base=like)
        tensors = self._gather(self.weights())
        if config is not None:
            merge_adapter(tensors, adapter, config)
        return lambda: replace_checkpoint(path, tensors, like=like)

    def copy_state(self, folder: str | None, hf_path: str | None = None) -> CheckpointCopy:
        """Copy the training state to host memory, to be written into `folder` while training goes on.

        With `hf_path` the copy includes an export like that of `save_hf`, which replaces an earlier one.
        """
        models = []
        if folder is not None:
            for adapter in self.adapters:
                actor, memory = Path(folder) / "actor" / adapter, self.adapters.checkpoint_memory[adapter]
                models.append(copy_state(self._model, actor, memory))
            if self._critic is not None:
                critic = self._critic.model
                models.append(copy_state(critic, Path(folder) / "critic", critic.checkpoint_memory))
        if hf_path is None:
            return CheckpointCopy(models)
        export = self._export(Path(hf_path))
        return CheckpointCopy(models, export if self._rank == 0 else None)

    def offload(self) -> None:
        """Free the GPU memory of all models for an engine that shares the device, until `onload`."""
        if not self._offloaded:
            reference = [] if self._reference is None or self._shares_weights else [self._reference]
            self._offloaded = offload([*self._trained, *reference])

    def onload(self) -> None:
        """Move the models back to the GPU."""
        for offloaded in self._offloaded:
            offloaded.restore()
        self._offloaded = []

    def load_state(self, folder: str) -> None:
        """Resume from a checkpoint of any parallel layout. Raises UserError if it is broken or of another model."""
        for adapter in self.adapters:
            load_state(self._model, Path(folder) / "actor" / adapter)
        if self._critic is not None:
            load_state(self._critic.model, Path(folder) / "critic")

    def close(self) -> None:
        """Leave the process groups, so that another learner can be created in this process."""
        destroy_process_groups()


def _packing_metrics(step: TrainStep) -> dict[str, float]:
    """Compare the micro-batches of a step with ideal ones (`PackingReport`).

    - `shared_fraction`: Fraction of the tokens that are not computed, because samples share their prefix.
    - `micro_batches`: Micro-batches per rank.
    - `micro_batches_lower_bound`: Fewest micro-batches per rank that can hold all tokens.
    - `flop_imbalance`: Work of the busiest rank divided by the mean, minus 1. Worry if it exceeds 0.1: give a step more
      samples per rank (`--global-batch-size`), and leave `--balance-data` on.
    - `padding`: Tokens that are computed per token of a sample; 1 means no padding.
    """
    report = step.packing
    if report is None:
        return {}
    tokens = sum(len(batch.tokens) for batch in step.micro_batches)
    computed = sum(batch.computed_tokens for batch in step.micro_batches)
    return {
        "shared_fraction": 1 - computed / tokens,
        "micro_batches": report.micro_batches,
        "micro_batches_lower_bound": report.lower_bound,
        "flop_imbalance": report.imbalance,
        "padding": report.padding,
    }


def _combine_steps(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it; metrics whose names end in `_max` take the maximum."""
    names = dict.fromkeys(name for step in metrics for name in step)
    return {
        name: (max if name.endswith("_max") else fmean)([step[name] for step in metrics if name in step])
        for name in names
    }

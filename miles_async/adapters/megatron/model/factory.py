"""Builds Megatron models and their optimizers from Hugging Face checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel, utils
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from packaging.version import Version

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.environment import ATTENTION, environment
from miles_async.adapters.megatron.model.host_memory import HostMemory
from miles_async.adapters.megatron.model.local_layers import dtype_of, replace_swiglu, uses_local_layers
from miles_async.adapters.megatron.model.lora import attach_adapters
from miles_async.adapters.megatron.model.mtp_heads import heads_of, return_heads
from miles_async.adapters.megatron.model.output_layer import OutputLayer, attach_value_head
from miles_async.adapters.megatron.model.packed_params import PositionRotary
from miles_async.adapters.megatron.model.plugin_source import PluginSource
from miles_async.adapters.megatron.model.process_groups import gather_json
from miles_async.adapters.megatron.model.source import ModelSource, passed_on
from miles_async.config.model_source import source_of
from miles_async.config.schema import Learner
from miles_async.errors import UserError

if not HAVE_TE:
    # Megatron 0.16 compares the version for some settings even so. 0.19 has this value.
    utils._te_version = Version("0.0.0")
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(slots=True, eq=False)
class MegatronModel:
    """This rank's part of a model."""

    settings: Learner
    """Parallel layout and micro-batches of the model's passes."""
    variables: Mapping[str, str]
    """Environment variables under which the model is built and computes, in addition to those of the process."""
    source: ModelSource
    """Where the model comes from; converts its weights to those of Hugging Face."""
    chunks: Sequence[Any]
    """The layers that this rank holds: one chunk per virtual pipeline stage, else one."""
    output_layer: OutputLayer | None
    """Computes the logits of chosen tokens; None for critics and on ranks that are not on the last pipeline stage."""
    by_position: bool
    """Whether the model's rotary embedding takes the position of each token, in place of the bounds of sequences."""
    shares_prefixes: bool
    """Whether the model can compute common prefixes of sequences once, which needs the positions."""
    host_memory: HostMemory = field(default_factory=HostMemory)
    """For the copy from which a batch is rolled back, or for the contents of memory that an engine uses."""

    @property
    def config(self) -> TransformerConfig:
        return self.source.config

    @property
    def heads(self) -> int:
        """Number of MTP heads that are trained with the model."""
        return heads_of(self.config)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the checkpoint. Megatron's may be padded, so that tensor-parallel ranks divide it evenly."""
        return self.source.shape.vocabulary


@dataclass(slots=True, eq=False, kw_only=True)
class TrainedModel(MegatronModel):
    """A model with gradients and an optimizer. Its chunks are of the type `DistributedDataParallel`."""

    optimizer: MegatronOptimizer
    checkpoint_memory: HostMemory = field(default_factory=HostMemory)
    """For the copy of a critic that is written as a checkpoint while training goes on; `AdapterStates` has that of the
    policy."""
    steps_taken: int = 0
    """Optimizer steps since the start of the training."""

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that compute the steps.

        Megatron chains several, such as one for experts, and divides each between CPU and GPU if the state is
        offloaded.
        """
        found: list[torch.optim.Optimizer] = []
        for one in (chained.optimizer for chained in self.optimizer.chained_optimizers):
            found += one.sub_optimizers if isinstance(one, HybridDeviceOptimizer) else [one]
        return found


def build_reference(settings: Learner, hf_checkpoint: str) -> MegatronModel:
    """Load the reference model with the parallel layout of the policy. Raises UserError like `build_model`."""
    with redirect_cuda_to_cpu(), environment(settings.ref_env_vars):
        source, chunks = _load_chunks(settings, hf_checkpoint)
    output_layer, positions = _replace_output_layer(chunks), use_positions(source, chunks, settings)
    frozen = [chunk.requires_grad_(False) for chunk in chunks]
    return MegatronModel(settings, settings.ref_env_vars, source, frozen, output_layer, *positions)


def frozen_part(model: TrainedModel, settings: Learner) -> MegatronModel:
    """The reference model of a run that trains adapters: the same weights, computed without the adapters."""
    parts = (model.source, model.chunks, model.output_layer, model.by_position, model.shares_prefixes)
    return MegatronModel(settings, settings.ref_env_vars, *parts)


def build_model(settings: Learner, hf_checkpoint: str, *, values: bool = False) -> TrainedModel:
    """Load this rank's part of a checkpoint and create its optimizer. The process groups must exist.

    With `values` the model is a critic: a value head replaces the output layer, and it has no MTP heads.
    Raises UserError if no source has the model, if the checkpoint does not fit it, or if this process cannot compute
    the optimizer's steps as the settings ask.
    """
    _refuse_optimizer(settings)
    if values:
        settings = settings.model_copy(update={"enable_mtp_training": False})
    variables = settings.critic_env_vars if values else {}
    with redirect_cuda_to_cpu(), environment(variables):
        source, chunks = _load_chunks(settings, hf_checkpoint)
        for chunk in chunks if values else ():
            attach_value_head(chunk)
        if settings.lora_rank:
            attach_adapters(chunks, source, settings, Path(hf_checkpoint).expanduser())
        output_layer = None if values else _replace_output_layer(chunks)
        positions = use_positions(source, chunks, settings)
        sharded = _shards_optimizer(settings)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.main_grads_dtype == "fp32",
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            overlap_param_gather=settings.overlap_param_gather and sharded,
            **passed_on(settings, "ddp"),
        )
        wrapped = [DistributedDataParallel(source.config, ddp_config, chunk) for chunk in chunks]
        if settings.overlap_grad_reduce:
            # Megatron's schedules reduce gradients beside the last micro-batch of a step only.
            syncs = [chunk.no_sync for chunk in wrapped]
            source.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        # Megatron puts norms and biases into a parameter group of their own, without weight decay.
        optimizer = get_megatron_optimizer(_optimizer_config(settings, sharded=sharded), wrapped)
        if settings.lora_rank:
            _drop_empty(optimizer)
        if settings.optimizer_cpu_offload:
            # Megatron first copies the weights of all data-parallel ranks to main memory, in objects that refer to each
            # other.
            gc.collect()
        fields = (settings, variables, source, wrapped, output_layer, *positions)
        return TrainedModel(*fields, optimizer=optimizer)


def _drop_empty(chained: MegatronOptimizer) -> None:
    """Remove the optimizer of a group of parameters that no rank has, such as all but those of experts.

    Megatron's checkpoints fail with an optimizer without parameters.
    """
    empty = gather_json([one.optimizer is None for one in chained.chained_optimizers])
    if any(own != empty[0] for own in empty):
        raise UserError(
            "lora_target_modules: Megatron does not save the optimizer of a pipeline stage that has adapters of "
            "experts only while another stage has others; choose the same kinds of layers in each stage"
        )
    chained.chained_optimizers = [
        one for one, is_empty in zip(chained.chained_optimizers, empty[0], strict=True) if not is_empty
    ]


def _optimizer_config(settings: Learner, *, sharded: bool) -> OptimizerConfig:
    # Adapters are float32, whatever the type of the frozen weights.
    dtype = torch.float32 if settings.lora_rank else dtype_of(settings)
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
        overlap_param_gather=settings.overlap_param_gather and sharded,
        # Megatron keeps the fp32 weights on the GPU unless the optimizer holds them.
        use_precision_aware_optimizer=settings.optimizer_holds_masters,
        # Otherwise checkpoints would contain the lower half of each fp32 weight in place of the weight.
        store_param_remainders=False,
        main_grads_dtype=_TYPES[settings.main_grads_dtype],
        main_params_dtype=_TYPES[settings.main_params_dtype],
        exp_avg_dtype=_TYPES[settings.exp_avg_dtype],
        exp_avg_sq_dtype=_TYPES[settings.exp_avg_sq_dtype],
        optimizer_cpu_offload=settings.optimizer_cpu_offload,
        optimizer_offload_fraction=settings.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=settings.overlap_cpu_optimizer_d2h_h2d,
        **passed_on(settings, "optimizer"),
    )


def _refuse_optimizer(settings: Learner) -> None:
    """Raise UserError if this process has no GPU to offload from, or no optimizer that holds the master weights."""
    if settings.optimizer_cpu_offload and on_cpu():
        raise UserError(
            "optimizer_cpu_offload moves the optimizer's state from GPUs to main memory, but this learner runs on "
            "CPUs: unset it"
        )
    if settings.has_adam_of_transformer_engine and (on_cpu() or not HAVE_TE):
        lack = "needs a GPU" if on_cpu() else "is not installed (make setup-gpu installs it)"
        raise UserError(
            f"use_precision_aware_optimizer needs the Adam of Transformer Engine, which {lack}: unset it, or set "
            "optimizer_cpu_offload on GPUs"
        )


def _load_chunks(settings: Learner, hf_checkpoint: str) -> tuple[ModelSource, list[torch.nn.Module]]:
    """Build this rank's layers and load their weights: one chunk per virtual pipeline stage, else one."""
    source = open_source(settings, hf_checkpoint)
    # Megatron sets these variables while it builds a model, and asserts that they have no other value. Transformer
    # Engine reads them later, in forward passes, where the user's values apply again.
    with environment(dict.fromkeys(ATTENTION)):
        models = source.build_chunks()
    chunks = [_finish_chunk(model, source.config, local=uses_local_layers(settings)) for model in models]
    source.load(chunks)
    return source, chunks


def open_source(settings: Learner, hf_checkpoint: str, *, fuses: bool = False) -> ModelSource:
    """Where the model of a checkpoint comes from, in the layout of the process groups, which must exist.

    With `fuses` activations are those of a GPU also on a CPU.
    """
    mode, trains_adapter = settings.megatron_to_hf_mode, settings.lora_rank > 0
    if source_of(mode, hf_checkpoint, trains_adapter=trains_adapter) == "raw":
        return PluginSource(settings, hf_checkpoint, fuses=fuses)
    # Imported here, because its imports need Megatron-Bridge.
    from miles_async.adapters.megatron.model.bridge_source import BridgeSource

    return BridgeSource(settings, hf_checkpoint, fuses=fuses)


def _finish_chunk(chunk: Any, config: TransformerConfig, *, local: bool) -> torch.nn.Module:
    """Prepare a new chunk for Megatron's schedules and optimizer, on this rank's device."""
    chunk.model_type = ModelType.encoder_or_decoder
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if local:
        replace_swiglu(chunk)
    if not on_cpu():
        chunk.cuda(torch.cuda.current_device())
    if config.bf16:
        chunk = Float16Module(config, chunk)
        _keep_router_bias_in_float32(chunk)
    return chunk


def _keep_router_bias_in_float32(chunk: torch.nn.Module) -> None:
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()


def _replace_output_layer(chunks: Sequence[torch.nn.Module]) -> OutputLayer | None:
    """Let the model return hidden states in place of logits; returns None if no chunk is the last pipeline stage."""
    last = unwrap_model(chunks[-1])
    if not last.post_process:
        return None
    if heads_of(last.config):
        return_heads(last)
    return OutputLayer(last)


def use_positions(source: ModelSource, chunks: Sequence[torch.nn.Module], settings: Learner) -> tuple[bool, bool]:
    """Let the model take the position of each token if it can; returns `by_position` and `shares_prefixes`.

    It cannot if it has multi-head latent attention or no plain rotary embedding. On GPUs `settings` must ask for shared
    prefixes. FlexAttention then replaces the attention, except in models with other features. Otherwise Transformer
    Engine's attention needs the bounds of sequences. That of the local layers does not, and angles by token save
    Megatron from reading the bounds back from the GPU in every layer.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    config = source.config
    if not source.takes_positions:
        return False, False
    if config.multi_latent_attention or models[0].position_embedding_type != "rope":
        return False, False
    shares_prefixes = True
    if flex_attention.has_gradients():
        wanted = settings.share_prefixes is True and settings.shares_prefixes
        shares_prefixes = wanted and flex_attention.is_plain_attention(config)
        if not shares_prefixes and not uses_local_layers(settings):
            return False, False
    for model in models:
        if shares_prefixes and flex_attention.has_gradients():
            flex_attention.use_flex_attention(model)
        model.rotary_pos_emb = PositionRotary(model.rotary_pos_emb)
    return True, shares_prefixes


def _shards_optimizer(settings: Learner) -> bool:
    """Whether data-parallel ranks divide the optimizer state (ZeRO stage 1) or all keep the whole state.

    By default it is divided on GPUs, where memory is scarce.
    """
    if settings.optimizer_holds_masters:
        return True
    wanted = settings.use_distributed_optimizer
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return several and (not on_cpu() if wanted is None else wanted)

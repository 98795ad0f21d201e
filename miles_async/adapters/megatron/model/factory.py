"""Builds Megatron models and their optimizers from Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch.nn.functional import gelu, silu
from transformers import AutoConfig

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.environment import ATTENTION, environment
from miles_async.adapters.megatron.model.hf_weights import WeightConverter, load_weights
from miles_async.adapters.megatron.model.host_memory import HostMemory
from miles_async.adapters.megatron.model.local_layers import local_layer_spec, replace_swiglu, uses_local_layers
from miles_async.adapters.megatron.model.output_layer import OutputLayer, attach_value_head
from miles_async.adapters.megatron.model.packed_params import PositionRotary
from miles_async.config.schema import Learner
from miles_async.errors import UserError
from miles_async.models.plugin import MODELS, HfConfig, ModelPlugin, plugin_errors
from miles_async.plugins import name_of

_CPU_MODEL = {
    # Fused kernels need CUDA.
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
_CPU_EXPERTS = {
    # The all-to-all dispatcher needs CUDA streams.
    "moe_token_dispatcher_type": "allgather",
    # Megatron refuses variable lengths together with the all-gather dispatcher, which cannot gather unequal parts.
    # `_transformer_config` sets it after that check; `model_inputs` makes the parts equal.
    "variable_seq_lengths": False,
}
_ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
"""By `hidden_act` of `config.json`."""


@dataclass(slots=True, eq=False)
class MegatronModel:
    """This rank's part of a model."""

    settings: Learner
    """Parallel layout and micro-batches of the model's passes."""
    variables: Mapping[str, str]
    """Environment variables under which the model is built and computes, in addition to those of the process."""
    config: TransformerConfig
    converter: WeightConverter
    """Converts names and tensors between Megatron and Hugging Face."""
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
    def device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the checkpoint. Megatron's may be padded, so that tensor-parallel ranks divide it evenly."""
        return self.converter.shape.vocabulary


@dataclass(slots=True, eq=False, kw_only=True)
class TrainedModel(MegatronModel):
    """A model with gradients and an optimizer. Its chunks are of the type `DistributedDataParallel`."""

    optimizer: MegatronOptimizer
    checkpoint_memory: HostMemory = field(default_factory=HostMemory)
    """For the copy that is written as a checkpoint while training goes on."""
    steps_taken: int = 0
    """Optimizer steps since the start of the training."""


def build_reference(settings: Learner, hf_checkpoint: str) -> MegatronModel:
    """Load the reference model with the parallel layout of the policy. Raises UserError like `build_model`."""
    with redirect_cuda_to_cpu(), environment(settings.ref_env_vars):
        config, converter, chunks = _load_chunks(settings, hf_checkpoint)
    output_layer, positions = _replace_output_layer(chunks), _use_positions(chunks, settings)
    frozen = [chunk.requires_grad_(False) for chunk in chunks]
    return MegatronModel(settings, settings.ref_env_vars, config, converter, frozen, output_layer, *positions)


def build_model(settings: Learner, hf_checkpoint: str, *, values: bool = False) -> TrainedModel:
    """Load this rank's part of a checkpoint and create its optimizer. The process groups must exist.

    With `values` the model is a critic: a value head replaces the output layer.
    Raises UserError if no plug-in supports the model, if the plug-in fails or does not fit the checkpoint, and if
    Megatron does not support the scaling of the rotary embedding.
    """
    variables = settings.critic_env_vars if values else {}
    with redirect_cuda_to_cpu(), environment(variables):
        config, converter, chunks = _load_chunks(settings, hf_checkpoint)
        for chunk in chunks if values else ():
            attach_value_head(chunk)
        output_layer = None if values else _replace_output_layer(chunks)
        positions = _use_positions(chunks, settings)
        sharded = _shards_optimizer(settings)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        # Megatron puts norms and biases into a parameter group of their own, without weight decay.
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            clip_grad=settings.clip_grad,
            bf16=settings.precision == "bf16",
            params_dtype=_dtype(settings),
            use_distributed_optimizer=sharded,
        )
        optimizer = get_megatron_optimizer(optimizer_config, wrapped)
        fields = (settings, variables, config, converter, wrapped, output_layer, *positions)
        return TrainedModel(*fields, optimizer=optimizer)


def _load_chunks(
    settings: Learner, hf_checkpoint: str
) -> tuple[TransformerConfig, WeightConverter, list[torch.nn.Module]]:
    plugin, hf_config = _read_checkpoint(hf_checkpoint)
    config = _transformer_config(plugin, hf_config, settings)
    # Tensor-parallel ranks hold equal parts of the vocabulary.
    vocabulary, ranks = plugin.shape(hf_config).vocabulary, settings.tensor_model_parallel_size
    padded = vocabulary + -vocabulary % ranks
    converter = WeightConverter(plugin, hf_config, padded_vocabulary=padded, dtype=_dtype(settings))
    # Megatron sets these variables while it builds a model, and asserts that they have no other value. Transformer
    # Engine reads them later, in forward passes, where the user's values apply again.
    with environment(dict.fromkeys(ATTENTION)):
        chunks = _build_chunks(plugin, hf_config, config, padded, local=uses_local_layers(settings))
    load_weights(converter, chunks, hf_checkpoint)
    return config, converter, chunks


def _read_checkpoint(hf_checkpoint: str) -> tuple[ModelPlugin, HfConfig]:
    """Return the plug-in for a checkpoint, and the checkpoint's configuration with the defaults of transformers."""
    try:
        config = AutoConfig.from_pretrained(hf_checkpoint).to_dict()
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"transformers cannot read {hf_checkpoint}/config.json: {reason}") from error
    try:
        return MODELS.find(config["model_type"]), config
    except UserError as error:
        raise UserError(f"{hf_checkpoint}: {error}") from error


def _build_chunks(
    plugin: ModelPlugin, hf_config: HfConfig, config: TransformerConfig, padded_vocabulary: int, *, local: bool
) -> list[torch.nn.Module]:
    """Build this rank's layers with random weights: one chunk per virtual pipeline stage, else one."""
    stages = config.virtual_pipeline_model_parallel_size
    with plugin_errors(plugin, "describe its position embedding"):
        position_embedding = plugin.gpt_model(hf_config)
    chunks = []
    for stage in range(stages or 1):
        vp_stage = None if stages is None else stage
        if local:
            spec = local_layer_spec(config, vp_stage)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        with plugin_errors(plugin, "change the layer spec"):
            spec = plugin.layer_spec(spec, hf_config)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocabulary,
            max_sequence_length=hf_config["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
            vp_stage=vp_stage,
            **position_embedding,
        )
        with plugin_errors(plugin, "finish the model"):
            plugin.finish_model(chunk, hf_config)
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
        chunks.append(chunk)
    return chunks


def _keep_router_bias_in_float32(chunk: torch.nn.Module) -> None:
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()


def _replace_output_layer(chunks: Sequence[torch.nn.Module]) -> OutputLayer | None:
    """Let the model return hidden states in place of logits; returns None if no chunk is the last pipeline stage."""
    last = unwrap_model(chunks[-1])
    return OutputLayer(last) if last.post_process else None


def _use_positions(chunks: Sequence[torch.nn.Module], settings: Learner) -> tuple[bool, bool]:
    """Let the model take the position of each token if it can; returns `by_position` and `shares_prefixes`.

    It cannot if it has multi-head latent attention or no plain rotary embedding. On GPUs `settings` must ask for shared
    prefixes. FlexAttention then replaces the attention, except in models with other features. Otherwise Transformer
    Engine's attention needs the bounds of sequences. That of the local layers does not, and angles by token save
    Megatron from reading the bounds back from the GPU in every layer.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    config = models[0].config
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
    wanted = settings.use_distributed_optimizer
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return several and (not on_cpu() if wanted is None else wanted)


def _dtype(settings: Learner) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def _transformer_config(plugin: ModelPlugin, hf_config: HfConfig, settings: Learner) -> TransformerConfig:
    with plugin_errors(plugin, "describe its shape and Megatron's configuration"):
        shape, of_the_model = plugin.shape(hf_config), plugin.transformer_config(hf_config)
    dtype, stages = _dtype(settings), settings.virtual_pipeline_model_parallel_size
    arguments: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.query_groups,
        "kv_channels": shape.head_width,
        "ffn_hidden_size": shape.feed_forward,
        "num_moe_experts": shape.experts,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": hf_config.get("attention_dropout", 0.0),
        "masked_softmax_fusion": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": stages,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": settings.sequence_parallel,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": stages is not None,
        "batch_p2p_comm": False,
        # With a per-token loss Megatron adds gradients up over ranks and does not average them. This is needed because
        # the loss is already divided by the tokens of the whole step.
        "calculate_per_token_loss": True,
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
    }
    if shape.experts:
        arguments |= {"moe_ffn_hidden_size": shape.feed_forward, "moe_router_topk": shape.active_experts}
    if "activation_func" not in of_the_model:
        arguments["activation_func"] = _activation(hf_config["hidden_act"])
    if "layernorm_epsilon" not in of_the_model:
        arguments["layernorm_epsilon"] = hf_config["rms_norm_eps"]
    arguments |= of_the_model
    if shape.experts and uses_local_layers(settings):
        arguments["moe_grouped_gemm"] = False
    if on_cpu():
        arguments |= _CPU_MODEL | (_CPU_EXPERTS if shape.experts else {})
    try:
        config = TransformerConfig(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"Megatron refuses the configuration of the model plug-in {name_of(plugin)}: {error}"
        ) from error
    config.variable_seq_lengths = True
    return config


def _activation(name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise UserError(
            f"the learner does not know the activation {name!r}; use a model with {' or '.join(_ACTIVATIONS)}, or let "
            "the transformer_config of its model plug-in return activation_func"
        )
    return _ACTIVATIONS[name]

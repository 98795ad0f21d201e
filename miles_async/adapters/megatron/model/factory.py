"""Builds Megatron models and their optimizers from Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core import Bridge
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.cpu_layers import cpu_layer_spec, replace_swiglu
from miles_async.adapters.megatron.model.environment import ATTENTION, environment
from miles_async.adapters.megatron.model.hf_weights import load_weights
from miles_async.adapters.megatron.model.output_layer import OutputLayer
from miles_async.adapters.megatron.model.packed_params import PositionRotary
from miles_async.adapters.megatron.model.value_head import attach_value_head
from miles_async.config.derived import shares_prefixes
from miles_async.config.schema import Learner
from miles_async.errors import UserError

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
    # The all-to-all dispatcher needs CUDA streams, and grouped matrix products need CUDA kernels.
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    # Megatron refuses variable lengths together with the all-gather dispatcher, which cannot gather unequal parts.
    # `_create_bridge` sets it after that check; `model_inputs` makes the parts equal.
    "variable_seq_lengths": False,
}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1, 3.2 and 3.3. Megatron has these values as constants and supports no others."""


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """This rank's part of a model that is trained, with its optimizer."""

    bridge: Bridge
    """Converts names and tensors between Megatron and Hugging Face."""
    chunks: list[DistributedDataParallel]
    """The layers that this rank holds: one chunk per virtual pipeline stage, else one."""
    optimizer: MegatronOptimizer
    vocab_size: int
    """Vocabulary of the checkpoint. Megatron's may be padded, so that tensor-parallel ranks divide it evenly."""
    output_layer: OutputLayer | None
    """Computes the logits of chosen tokens; None for critics and on ranks that are not on the last pipeline stage."""
    by_position: bool
    """Whether the model takes the position of each token, which common prefixes of sequences need."""

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory and free the GPU for an engine (`--colocate`).

        Gradients are dropped; the next step clears them anyway. Does nothing on a CPU.
        """
        if on_cpu():
            return
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.offload_to_cpu()
        self.optimizer.offload_to_cpu()
        torch.cuda.synchronize()
        # Return the freed blocks from torch's cache to the device, where the engine's process can allocate them.
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move parameters and optimizer state back to the GPU."""
        if on_cpu():
            return
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.reload_from_cpu()
        self.optimizer.restore_from_cpu()
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """This rank's part of a frozen model, which has no gradients and no optimizer. Fields as in `MegatronModel`."""

    bridge: Bridge
    chunks: list[torch.nn.Module]
    vocab_size: int
    output_layer: OutputLayer | None
    by_position: bool


def build_reference(settings: Learner, hf_checkpoint: str) -> ReferenceModel:
    """Load the reference model with the parallel layout of the policy. Raises UserError like `build_model`."""
    with redirect_cuda_to_cpu():
        bridge, chunks = _load_chunks(settings, hf_checkpoint)
    output_layer, by_position = _replace_output_layer(chunks), _use_positions(chunks, settings)
    frozen = [chunk.requires_grad_(False) for chunk in chunks]
    return ReferenceModel(bridge, frozen, bridge.hf_config.vocab_size, output_layer, by_position)


def build_model(settings: Learner, hf_checkpoint: str, *, values: bool = False) -> MegatronModel:
    """Load this rank's part of a checkpoint and create its optimizer. The process groups must exist.

    With `values` the model is a critic: a value head replaces the output layer.
    Raises UserError if mbridge does not support the model family or Megatron does not support its RoPE scaling.
    """
    with redirect_cuda_to_cpu():
        bridge, chunks = _load_chunks(settings, hf_checkpoint)
        for chunk in chunks if values else ():
            attach_value_head(chunk)
        output_layer = None if values else _replace_output_layer(chunks)
        by_position = _use_positions(chunks, settings)
        sharded = _shards_optimizer(settings)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        wrapped = [DistributedDataParallel(bridge.config, ddp_config, chunk) for chunk in chunks]
        # Megatron puts norms and biases into a parameter group of their own, without weight decay.
        config = OptimizerConfig(
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
        optimizer = get_megatron_optimizer(config, wrapped)
        return MegatronModel(bridge, wrapped, optimizer, bridge.hf_config.vocab_size, output_layer, by_position)


def _load_chunks(settings: Learner, hf_checkpoint: str) -> tuple[Any, list[torch.nn.Module]]:
    bridge = _create_bridge(settings, hf_checkpoint)
    # Megatron sets these variables while it builds a model, and asserts that they have no other value. Transformer
    # Engine reads them later, in forward passes, where the user's values apply again.
    with environment(dict.fromkeys(ATTENTION)):
        chunks = bridge.get_model(wrap_with_ddp=False, fp16=False, bf16=settings.precision == "bf16")
    for chunk in chunks if on_cpu() else ():
        replace_swiglu(chunk)
    load_weights(bridge, chunks, hf_checkpoint)
    return bridge, chunks


def _replace_output_layer(chunks: Sequence[torch.nn.Module]) -> OutputLayer | None:
    """Let the model return hidden states in place of logits; returns None if no chunk is the last pipeline stage."""
    last = unwrap_model(chunks[-1])
    return OutputLayer(last) if last.post_process else None


def _use_positions(chunks: Sequence[torch.nn.Module], settings: Learner) -> bool:
    """Let the model take the position of each token if it can, so that common prefixes need not be computed again.

    It cannot if it has multi-head latent attention or no plain rotary embedding. On GPUs this replaces Transformer
    Engine's attention, which is kept for models with other features and unless `settings` ask for shared prefixes.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    config = models[0].config
    if config.multi_latent_attention or models[0].position_embedding_type != "rope":
        return False
    if flex_attention.has_gradients():
        wanted = settings.share_prefixes and shares_prefixes(settings)
        if not wanted or not flex_attention.is_plain_attention(config):
            return False
        for model in models:
            flex_attention.use_flex_attention(model)
    for model in models:
        model.rotary_pos_emb = PositionRotary(model.rotary_pos_emb)
    return True


def _shards_optimizer(settings: Learner) -> bool:
    """Whether data-parallel ranks divide the optimizer state (ZeRO stage 1) or all keep the whole state.

    By default it is divided on GPUs, where memory is scarce.
    """
    wanted = settings.use_distributed_optimizer
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return several and (not on_cpu() if wanted is None else wanted)


def _dtype(settings: Learner) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def _create_bridge(settings: Learner, hf_checkpoint: str) -> Any:
    try:
        bridge = AutoBridge.from_pretrained(
            hf_checkpoint,
            dtype=_dtype(settings),
            make_vocab_size_divisible_by=settings.tensor_model_parallel_size,
        )
    except ValueError as error:
        if "Unregistered model type" not in str(error):
            raise
        families = ", ".join(AutoBridge.list_supported_models())
        raise UserError(
            f"{hf_checkpoint}: mbridge does not support this model family; use a model of one of {families}"
        ) from error
    _configure_rope(bridge)
    # With tied embeddings mbridge changes this mapping on the class, which would affect the next model of the process.
    head = "model.embed_tokens.weight" if bridge.hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": head}
    # With a per-token loss Megatron adds gradients up over ranks and does not average them. This is needed because the
    # loss is already divided by the tokens of the whole step.
    common: dict[str, Any] = {
        "sequence_parallel": settings.sequence_parallel,
        "calculate_per_token_loss": True,
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
    }
    if bridge.hf_config.model_type == "mixtral":
        # In Mixtral the weights of a token's chosen experts add up to 1: top-k comes before the softmax. mbridge's
        # default has the opposite order.
        common["moe_router_pre_softmax"] = False
        # mbridge reads `head_dim`, which Mixtral's configuration may leave unset.
        bridge.hf_config.head_dim = bridge.config.kv_channels
    if on_cpu():
        common |= _CPU_MODEL | (_CPU_EXPERTS if bridge.config.num_moe_experts else {})
    bridge.set_extra_args(**common)
    bridge.config.variable_seq_lengths = True
    if on_cpu():
        _use_local_layers(bridge)
    return bridge


def _configure_rope(bridge: Any) -> None:
    """Pass the checkpoint's RoPE parameters on to Megatron.

    mbridge 0.15 reads `rope_theta` from where transformers 4 had it and supports only unscaled RoPE.
    Raises UserError for other scalings than Llama 3's.
    """
    rope = bridge.hf_config.rope_parameters
    bridge.hf_config.rope_theta = rope["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "llama3" and _LLAMA3.items() <= rope.items():
        arguments = bridge._get_gptmodel_args() | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        bridge._get_gptmodel_args = arguments.copy
    elif kind != "default":
        raise UserError(
            f"the learner does not support rope type {kind!r} with {rope}; use a model with plain RoPE or Llama 3's"
        )


def _use_local_layers(bridge: Any) -> None:
    """Make mbridge build layers without Transformer Engine.

    Transformer Engine fuses norms into the linear layers that follow them. Local layers keep norms separate, so their
    parameters have other names.
    """
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = partial(cpu_layer_spec, bridge)
    layer = "model.layers.{layer_number}"
    bridge._OTHER_MAPPING = {**bridge._OTHER_MAPPING, "input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    bridge._MLP_MAPPING = {
        **bridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"],
    }

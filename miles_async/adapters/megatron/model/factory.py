"""The Megatron model and its optimizer, built from a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core import Bridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.cpu_layers import cpu_layers
from miles_async.adapters.megatron.model.environment import ATTENTION, environment
from miles_async.adapters.megatron.model.hf_weights import load_weights
from miles_async.adapters.megatron.model.value_head import attach_value_head
from miles_async.config.schema import Learner
from miles_async.errors import UserError

_CPU_MODEL = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
_CPU_EXPERTS = {
    # The all-to-all dispatcher needs CUDA's streams, grouped matrix products its kernels.
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    # Refused together with that dispatcher, which cannot gather unequal parts; set below, where parts are made equal.
    "variable_seq_lengths": False,
}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1, 3.2 and 3.3 stretch their positions, and the only way that Megatron does."""


@dataclass(frozen=True, slots=True)
class MegatronModel:
    bridge: Bridge
    """Converts names and tensors between Megatron and Hugging Face."""
    chunks: list[DistributedDataParallel]
    """The layers that this rank holds: one chunk, or as many as it has virtual stages."""
    optimizer: MegatronOptimizer
    vocab_size: int
    """Of the checkpoint; Megatron's may be padded so that ranks share it evenly."""


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model that is only looked at: without gradients and without optimizer."""

    bridge: Bridge
    chunks: list[torch.nn.Module]
    """As in `MegatronModel`."""
    vocab_size: int


def build_reference(settings: Learner, hf_checkpoint: str) -> ReferenceModel:
    """Load the checkpoint to compare with, in the layout of the model being trained."""
    with redirect_cuda_to_cpu():
        bridge, chunks = _built(settings, hf_checkpoint)
    return ReferenceModel(bridge, [chunk.requires_grad_(False) for chunk in chunks], bridge.hf_config.vocab_size)


def build_model(settings: Learner, hf_checkpoint: str, *, values: bool = False) -> MegatronModel:
    """Load the checkpoint into this rank's part of the model. The process groups must exist.

    With `values` it is a critic, which has a head for values in place of the output layer.
    Raises UserError when mbridge does not know the model family.
    """
    with redirect_cuda_to_cpu():
        bridge, chunks = _built(settings, hf_checkpoint)
        for chunk in chunks if values else ():
            attach_value_head(chunk)
        sharded = optimizer_is_sharded(settings)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        wrapped = [DistributedDataParallel(bridge.config, ddp_config, chunk) for chunk in chunks]
        # Norms and biases are not decayed: Megatron gives them their own parameter group.
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
        return MegatronModel(bridge, wrapped, get_megatron_optimizer(config, wrapped), bridge.hf_config.vocab_size)


def _built(settings: Learner, hf_checkpoint: str) -> tuple[Any, list[torch.nn.Module]]:
    bridge = _bridge(settings, hf_checkpoint)
    # Megatron sets these, and refuses to where they are set otherwise; Transformer Engine reads them when it computes.
    with environment(dict.fromkeys(ATTENTION)):
        chunks = bridge.get_model(wrap_with_ddp=False, fp16=False, bf16=settings.precision == "bf16")
    load_weights(bridge, chunks, hf_checkpoint)
    return bridge, chunks


def optimizer_is_sharded(settings: Learner) -> bool:
    """Whether each data-parallel rank keeps a part of the optimizer's state, or all keep the same."""
    wanted = settings.use_distributed_optimizer
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return several and (not on_cpu() if wanted is None else wanted)


def _dtype(settings: Learner) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def _bridge(settings: Learner, hf_checkpoint: str) -> Any:
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
        raise UserError(f"{hf_checkpoint}: mbridge knows no such model family; it knows {families}") from error
    _read_rope(bridge)
    # mbridge rewrites this mapping on the class when embeddings are tied; the next model need not tie them.
    head = "model.embed_tokens.weight" if bridge.hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": head}
    # Per-token loss: gradients are sums over ranks, because the loss is already divided by the step's tokens.
    common: dict[str, Any] = {
        "sequence_parallel": settings.sequence_parallel,
        "calculate_per_token_loss": True,
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
    }
    if bridge.hf_config.model_type == "mixtral":
        # The shares of a token's experts add up to 1; mbridge would take them from the softmax over all experts.
        common["moe_router_pre_softmax"] = False
        # It reads this, which may be left open.
        bridge.hf_config.head_dim = bridge.config.kv_channels
    if on_cpu():
        common |= _CPU_MODEL | (_CPU_EXPERTS if bridge.config.num_moe_experts else {})
    bridge.set_extra_args(**common)
    bridge.config.variable_seq_lengths = True
    if on_cpu():
        _use_local_layers(bridge)
    return bridge


def _read_rope(bridge: Any) -> None:
    """mbridge 0.15 reads `rope_theta` where transformers 4 had it, and knows no rope type but the plain one."""
    rope = bridge.hf_config.rope_parameters
    bridge.hf_config.rope_theta = rope["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "llama3" and _LLAMA3.items() <= rope.items():
        arguments = bridge._get_gptmodel_args() | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        bridge._get_gptmodel_args = arguments.copy
    elif kind != "default":
        raise UserError(
            f"rope type {kind!r} is not supported by the learner with {rope}; use a model with plain RoPE or Llama 3's"
        )


def _use_local_layers(bridge: Any) -> None:
    """Layers without Transformer Engine. They keep norms apart from linear layers, so the norms have other names."""
    bridge.has_vp_stage = True
    bridge._get_transformer_layer_spec = partial(cpu_layers, bridge)
    layer = "model.layers.{layer_number}"
    bridge._OTHER_MAPPING = {**bridge._OTHER_MAPPING, "input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    bridge._MLP_MAPPING = {
        **bridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"],
    }

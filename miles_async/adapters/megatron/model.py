"""The Megatron model and its optimizer, built from a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core import Bridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from miles_async.adapters.megatron.attention import CpuAttention
from miles_async.adapters.megatron.cpu import cuda_means_cpu, on_cpu
from miles_async.adapters.megatron.value_head import put_value_head
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


@dataclass(frozen=True, slots=True)
class Model:
    bridge: Bridge
    """Converts names and tensors between Megatron and Hugging Face."""
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    vocab_size: int
    """Of the checkpoint; Megatron's may be padded so that ranks share it evenly."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model that is only looked at: without gradients and without optimizer."""

    bridge: Bridge
    ddp: torch.nn.Module
    """As in `Model`, what the forward pass calls."""
    vocab_size: int


def build_reference(settings: Learner, hf_checkpoint: str) -> Reference:
    """Load the checkpoint to compare with, in the layout of the model being trained."""
    with cuda_means_cpu():
        bridge = _bridge(settings, hf_checkpoint)
        [module] = bridge.get_model(
            weight_path=hf_checkpoint, wrap_with_ddp=False, fp16=False, bf16=settings.precision == "bf16"
        )
    return Reference(bridge, module.requires_grad_(False), bridge.hf_config.vocab_size)


def build_model(settings: Learner, hf_checkpoint: str, *, values: bool = False) -> Model:
    """Load the checkpoint into this rank's part of the model. The process groups must exist.

    With `values` it is a critic, which has a head for values in place of the output layer.
    Raises UserError when mbridge does not know the model family or this machine cannot run the settings.
    """
    if on_cpu() and settings.sequence_parallel:
        raise UserError("sequence_parallel needs CUDA: Megatron's layers for CPUs lack it; leave it off here")
    if on_cpu() and settings.precision != "fp32":
        raise UserError("the learner computes in fp32 on a CPU; set precision: fp32")
    with cuda_means_cpu():
        bridge = _bridge(settings, hf_checkpoint)
        [module] = bridge.get_model(
            weight_path=hf_checkpoint, wrap_with_ddp=False, fp16=False, bf16=settings.precision == "bf16"
        )
        if values:
            put_value_head(module)
        shard_optimizer = optimizer_is_sharded()
        ddp = DistributedDataParallel(
            bridge.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shard_optimizer),
            module,
        )
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
            use_distributed_optimizer=shard_optimizer,
        )
        return Model(bridge, ddp, get_megatron_optimizer(config, [ddp]), bridge.hf_config.vocab_size)


def optimizer_is_sharded() -> bool:
    """Whether each data-parallel rank keeps a part of the optimizer's state, or all keep the same."""
    return not on_cpu() and parallel_state.get_data_parallel_world_size() > 1


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
    _as_before_transformers_5(bridge.hf_config)
    # mbridge rewrites this mapping on the class when embeddings are tied; the next model need not tie them.
    head = "model.embed_tokens.weight" if bridge.hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": head}
    # Per-token loss: gradients are sums over ranks, because the loss is already divided by the step's tokens.
    common = {"sequence_parallel": settings.sequence_parallel, "calculate_per_token_loss": True}
    recomputed = {
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
    }
    bridge.set_extra_args(**common, **recomputed, **(_CPU_MODEL if on_cpu() else {}))
    if on_cpu():
        _use_local_layers(bridge)
    return bridge


def _as_before_transformers_5(hf_config: Any) -> None:
    """mbridge 0.15 reads `rope_theta` and `rope_scaling` where transformers 4 had them."""
    rope = hf_config.rope_parameters
    hf_config.rope_theta = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope type {rope['rope_type']!r} is not supported by the learner; use a model with plain RoPE")


def _use_local_layers(bridge: Any) -> None:
    """Layers without Transformer Engine. They keep norms apart from linear layers, so the norms have other names."""

    def spec(vp_stage: int | None = None) -> Any:
        block = get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=False, vp_stage=vp_stage)
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CpuAttention
        return block

    bridge._get_transformer_layer_spec = spec
    layer = "model.layers.{layer_number}"
    bridge._OTHER_MAPPING = {**bridge._OTHER_MAPPING, "input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    bridge._MLP_MAPPING = {
        **bridge._MLP_MAPPING,
        "pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"],
    }

"""What the learner needs of a source of models: Megatron's configuration, the layers, and the conversion of weights.

`PluginSource` takes models from plug-ins (`miles_async.models`), and `BridgeSource` from NVIDIA's Megatron-Bridge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.linear_parts import Part
from miles_async.adapters.megatron.model.local_layers import dtype_of
from miles_async.config.megatron import megatron_fields
from miles_async.config.schema import Learner
from miles_async.models.layers import ModelShape

_CPU_FIELDS = {
    # Fused kernels need CUDA.
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
_CPU_EXPERT_FIELDS = {
    # The all-to-all dispatcher needs CUDA streams.
    "moe_token_dispatcher_type": "allgather",
    # Megatron refuses variable lengths together with the all-gather dispatcher, which cannot gather unequal parts.
    # A source sets it after that check; `model_inputs` makes the parts equal.
    "variable_seq_lengths": False,
}


class ModelSource(ABC):
    """Builds one checkpoint's model in the parallel layout of the settings. The process groups must exist.

    A method that loads or exports is a collective operation of all ranks.
    """

    takes_positions: ClassVar[bool]
    """Whether the rotary embedding of the models can be replaced by one that takes the position of each token."""
    config: TransformerConfig
    shape: ModelShape

    def is_of_heads(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to MTP heads only."""
        return False

    @abstractmethod
    def build(self, vp_stage: int | None) -> torch.nn.Module:
        """Return this rank's layers with any weights; `vp_stage` is the virtual pipeline stage, or None without."""

    def build_chunks(self) -> list[torch.nn.Module]:
        """Return this rank's layers with any weights: one chunk per virtual pipeline stage, else one."""
        stages = self.config.virtual_pipeline_model_parallel_size
        return [self.build(stage) for stage in ([None] if stages is None else range(stages))]

    @abstractmethod
    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Load this rank's part of the checkpoint into the chunks, one per virtual pipeline stage.

        Raises UserError if the checkpoint lacks a tensor, or has one that no parameter of the model holds.
        """

    @abstractmethod
    def linear_parts(self, name: str, outputs: int) -> list[Part]:
        """The layers of the checkpoint in a linear layer of Megatron that has `outputs` on this rank.

        `name` is that of the layer's weight in the whole model. Weights of experts are named as in a layer of all
        experts: `decoder.layers.0.mlp.experts.linear_fc1.weight3`.
        """

    @abstractmethod
    def export(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once, whole and with its Hugging Face name, on every rank.

        All ranks must iterate to the end. Only a few whole tensors exist at a time. Tensors may be views of parameters,
        so copy those that must outlast the next optimizer step.
        """


def cpu_fields(*, has_experts: bool, fuses: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig` without which a model does not work on a CPU; none if CUDA is there.

    With `fuses` activations are computed as on a GPU, by functions that torch compiles there.
    """
    if not on_cpu():
        return {}
    return (
        _CPU_FIELDS | ({} if fuses else {"bias_activation_fusion": False}) | (_CPU_EXPERT_FIELDS if has_experts else {})
    )


def run_fields(settings: Learner) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig` that follow from the settings of a run, for any model."""
    dtype, stages = dtype_of(settings), settings.virtual_pipeline_model_parallel_size
    return {
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
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "overlap_p2p_comm": stages is not None,
        "batch_p2p_comm": False,
        # With a per-token loss Megatron adds gradients up over ranks and does not average them. This is needed because
        # the loss is already divided by the tokens of the whole step.
        "calculate_per_token_loss": True,
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
        "recompute_modules": None if settings.recompute_modules is None else list(settings.recompute_modules),
        "num_layers_in_first_pipeline_stage": settings.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": settings.decoder_last_pipeline_num_layers,
        **({} if settings.moe_router_dtype is None else {"moe_router_dtype": settings.moe_router_dtype}),
        **chosen_fusions(settings),
    }


def passed_on(settings: Learner, kind: str) -> dict[str, Any]:
    """Fields that a user sets in one of Megatron's classes: `transformer`, `optimizer` or `ddp`."""
    known = megatron_fields()
    return {name: value for name, value in settings.megatron_args.items() if known[name] == kind}


def chosen_fusions(settings: Learner) -> dict[str, bool]:
    """The fused kernels that the settings turn on or off. A source decides about the others."""
    wanted = {
        "apply_rope_fusion": settings.rope_fusion,
        "bias_activation_fusion": settings.bias_swiglu_fusion,
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion,
        "moe_permute_fusion": settings.moe_permute_fusion,
        "moe_router_fusion": settings.moe_router_fusion,
    }
    if settings.gradient_accumulation_fusion is None and not layers._grad_accum_fusion_available:
        # Megatron refuses to build an output layer with this fusion if Apex, which has the kernel, is not installed.
        wanted["gradient_accumulation_fusion"] = False
    return {field: fused for field, fused in wanted.items() if fused is not None}

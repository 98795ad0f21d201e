"""The flags of Megatron-LM's command line and the fields of Megatron-core's configuration, by version.

The tables are committed, because reading them from Megatron would import torch. `python -m tests.megatron_flags` writes
the table of the installed version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """A flag of Megatron-LM."""

    takes: Literal["nothing", "value", "values"]
    """How many words follow the flag."""
    group: str
    """The group in Megatron's help, such as `logging`."""
    field: str
    """The field of Megatron-core's configuration that the flag sets; empty if it sets none."""
    value: bool | None = None
    """What a flag without a value sets the field to."""


def megatron_flags() -> Mapping[str, MegatronFlag]:
    """Megatron's flags by name, with underscores."""
    return _tables(table_version())[1]


def flags_of_other_versions() -> Mapping[str, tuple[str, MegatronFlag]]:
    """The flags that only other versions have, by name, each with the newest version that has it."""
    own, others = megatron_flags(), [one for one in _versions() if one != table_version()]
    found = {name: (one, flag) for one in others for name, flag in _tables(one)[1].items()}
    return {name: entry for name, entry in found.items() if name not in own}


def megatron_fields() -> Mapping[str, str]:
    """The class of each field of Megatron-core's configuration: `transformer`, `optimizer` or `ddp`.

    They stand for `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig`.
    """
    return _tables(table_version())[0]


@cache
def table_version() -> str:
    """The version whose table is used: that of the installed Megatron-core, or the next older one that has a table."""
    versions = _versions()
    try:
        installed = Version(version("megatron-core"))
    except PackageNotFoundError:
        return versions[-1]
    return next((one for one in reversed(versions) if Version(one) <= installed), versions[0])


def _versions() -> list[str]:
    """The versions that have a table, oldest first."""
    return sorted((path.stem for path in Path(__file__).parent.glob("*.json")), key=Version)


@cache
def _tables(version: str) -> tuple[Mapping[str, str], Mapping[str, MegatronFlag]]:
    content: dict[str, Any] = json.loads((Path(__file__).parent / f"{version}.json").read_bytes())
    return content["fields"], {name: MegatronFlag(*row) for name, row in content["flags"].items()}


_LAYOUT = "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size"
_OWN = f"""
    {_LAYOUT} expert_tensor_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
    moe_token_dispatcher_type moe_router_dtype recompute_granularity recompute_method recompute_num_layers
    recompute_modules moe_permute_fusion gradient_accumulation_fusion overlap_grad_reduce
    moe_router_fusion overlap_param_gather use_precision_aware_optimizer main_grads_dtype main_params_dtype
    exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
    lr weight_decay adam_beta1 adam_beta2 clip_grad use_distributed_optimizer attention_backend deterministic_mode
""".split()
_MODEL = "the checkpoint defines the model, set hf_checkpoint"
SET_BY_THE_RUN: Mapping[str, str] = {
    **{name: f"set {name}" for name in _OWN},
    "apply_rope_fusion": "set rope_fusion",
    "bias_activation_fusion": "set bias_swiglu_fusion",
    "num_layers_in_first_pipeline_stage": "set decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "set decoder_last_pipeline_num_layers",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "set precision"),
    **dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm", "variable_seq_lengths"), "it follows from the layout"),
    "calculate_per_token_loss": "set loss_aggregation",
    "grad_reduce_in_fp32": "set main_grads_dtype",
    "store_param_remainders": "checkpoints hold whole weights",
    "tp_comm_overlap": "micro-batches differ in size",
    "optimizer": "the learner uses AdamW",
    "mtp_num_layers": "the checkpoint defines the heads, set enable_mtp_training",
    "mtp_loss_scaling_factor": "set mtp_loss_scaling_factor",
    "min_lr": "set min_lr",
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *("ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "normalization"),
            *("gated_linear_unit", "add_bias_linear", "activation_func", "layernorm_epsilon"),
        ),
        _MODEL,
    ),
}
"""Fields that users cannot set, each with the setting to use instead."""

OF_THE_TRAINING_LOOP: Mapping[str, str] = {
    **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "all weights have one learning rate: set lr and min_lr"),
    "loss_scale": "bf16 and fp32 need no scaled loss: remove it",
    **dict.fromkeys(
        ("qk_clip", "qk_clip_alpha", "qk_clip_threshold"), "no weights are clipped after a step: remove it"
    ),
    "moe_enable_routing_replay": "routing replay is not supported: remove it",
    "batch_invariant_mode": "no kernels that compute each row alike are installed: remove it",
    "overlap_param_gather_with_optimizer_step": "set overlap_param_gather",
    "use_mup": "learning rates do not depend on the width of the model: remove it",
    "init_model_with_meta_device": "weights are loaded into allocated memory: remove it",
    **dict.fromkeys(
        ("defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
        "the gradient of the output layer is computed with each part of the logits: remove it",
    ),
    **dict.fromkeys(
        ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
        "each micro-batch is computed as a whole: remove it",
    ),
    **dict.fromkeys(
        ("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
        "all context-parallel ranks share each sample: remove it",
    ),
    **dict.fromkeys(
        (
            *("hierarchical_context_parallel_sizes", "num_distributed_optimizer_instances"),
            "pipeline_model_parallel_comm_backend",
        ),
        "the parallel sizes alone determine the process groups: remove it",
    ),
    **dict.fromkeys(
        (
            *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"),
            *("cuda_graph_warmup_steps", "optimizer_cuda_graph"),
        ),
        "micro-batches differ in size, so no CUDA graphs are captured: remove it",
    ),
    **dict.fromkeys(
        (
            *("timers", "barrier_with_L1_time", "log_max_attention_logit", "log_num_zeros_in_grad"),
            "moe_per_layer_logging",
        ),
        "Megatron-LM's own logs are not written: remove it",
    ),
}
"""Fields that need code of Megatron-LM's training loop, which this project does not run, each with what to do."""

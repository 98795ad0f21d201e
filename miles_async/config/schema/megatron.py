"""Switches of Megatron-core, under the names of Megatron's own command line."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_async.section import Section

Recomputed = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class MegatronSwitches(Section):
    """Settings that the learner passes on to Megatron-core. Megatron decides which of them a model supports."""

    megatron_args: dict[str, Any] = {}
    """Any other field of Megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, under its
    name. Megatron's flags, which `--help-megatron` lists, set single fields: `--adam-eps 1e-15`. Fields that only
    Megatron-LM's own training loop reads are refused."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Attention kernels of Transformer Engine: flash needs the package flash-attn, fused is cuDNN's. auto lets
    Transformer Engine choose. Transformer Engine 2.11 refuses a flash-attn above 2.8.3. Without Transformer Engine,
    attention is PyTorch's."""
    rope_fusion: bool | None = None
    """Rotate queries and keys of packed sequences in one kernel of Transformer Engine. If unset, this is on with
    Transformer Engine's layers; Megatron-Bridge decides about its models."""
    bias_swiglu_fusion: bool | None = None
    """Compute the activation of feed-forward layers in one kernel. If unset, this is on for SwiGLU with Transformer
    Engine's layers; the local layers have a kernel of their own. Megatron-Bridge decides about its models."""
    gradient_accumulation_fusion: bool | None = None
    """Add weight gradients to the accumulated ones within the matrix product. Megatron's output layer does this with a
    kernel of Apex, so Apex must be installed. If unset and Apex is installed, this is on with Transformer Engine's
    layers; Megatron-Bridge then decides about its models."""
    moe_permute_fusion: bool | None = None
    """Sort the tokens of a mixture-of-experts layer by expert in one kernel. If unset, this is on with Transformer
    Engine's layers; Megatron-Bridge decides about its models."""
    moe_router_fusion: bool | None = None
    """Choose the experts of each token in one kernel of Transformer Engine, which needs its layers and does
    not support moe_router_dtype fp64. If unset, this is off; Megatron-Bridge decides about its models."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision in which the routers of experts compute their scores. If unset, it is the precision of the model,
    except that Megatron-Bridge decides about its models."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts. flex uses DeepEP, a package that has to be installed, which needs
    expert parallelism. CPU machines always use allgather."""
    overlap_grad_reduce: bool = False
    """Add up the gradients of data-parallel ranks while the rest of the backward pass is computed. Each parameter needs
    a gradient in each step, which experts without tokens do not have."""
    overlap_param_gather: bool = False
    """Gather the weights that other data-parallel ranks have updated while the next forward pass is computed. It needs
    overlap_grad_reduce and a sharded optimizer, and helps only between the optimizer steps of one batch, because the
    engines get the weights after the last one."""
    recompute_modules: list[Recomputed] | None = None
    """Parts of a layer that recompute_granularity selective recomputes. If unset, this is core_attn, the attention,
    which saves little with flash attention, because that stores no scores."""
    decoder_first_pipeline_num_layers: int | None = Field(None, ge=1)
    """Number of layers of the first pipeline stage. If unset, the stages divide the layers evenly."""
    decoder_last_pipeline_num_layers: int | None = Field(None, ge=1)
    """Number of layers of the last pipeline stage. If unset, the stages divide the layers evenly."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state in main memory, and let the CPU compute its steps: 16 bytes of main memory for each
    weight in place of 12 bytes on the GPU. Steps take longer. It needs GPUs and bf16, and always shards the state over
    the data-parallel ranks."""
    optimizer_offload_fraction: float = Field(1.0, gt=0, le=1)
    """Part of the optimizer's state that optimizer_cpu_offload keeps in main memory. The rest stays on the GPU."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients to main memory and weights back while the CPU computes the step of other weights."""
    use_precision_aware_optimizer: bool = False
    """Let the optimizer of Transformer Engine hold the master weights, so that main_params_dtype, exp_avg_dtype and
    exp_avg_sq_dtype take effect. It needs bf16, and always shards the state over the data-parallel ranks."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are added up over micro-batches and ranks. bf16 needs
    use_precision_aware_optimizer or optimizer_cpu_offload."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Precision of the master weights. fp16 has 11 significant bits, so it loses updates of less than 1/4096 of a
    weight. fp16 needs use_precision_aware_optimizer."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision in which Adam's first moment is stored. Adam computes in float32. Values other than fp32 need
    use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision in which Adam's second moment is stored, as exp_avg_dtype."""
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    """Gather the state of a sharded optimizer for a checkpoint in the host memory of one data-parallel rank. Otherwise
    all data-parallel ranks gather it on their GPUs, one buffer at a time, and keep it in host memory until the
    checkpoint is written: 12 bytes for each parameter of the rank's model part. Gathering in host memory takes
    longer."""

    @property
    def optimizer_holds_masters(self) -> bool:
        """Whether the optimizer holds the master weights, which Megatron supports only for a sharded state."""
        return self.use_precision_aware_optimizer or self.optimizer_cpu_offload

    @property
    def has_adam_of_transformer_engine(self) -> bool:
        """Whether the optimizer is that of Transformer Engine, whose states may have 16 bits."""
        return self.use_precision_aware_optimizer and not self.optimizer_cpu_offload

    @property
    def of_transformer_engine(self) -> list[str]:
        """The settings that only the layers of Transformer Engine can follow."""
        modules = [one for one in self.recompute_modules or () if one in ("layernorm", "mla_up_proj", "moe_act")]
        return [
            *(f"recompute_modules {one}" for one in modules),
            *(["moe_router_fusion"] if self.moe_router_fusion else []),
        ]

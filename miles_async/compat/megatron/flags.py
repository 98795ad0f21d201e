"""The rule of each flag of Megatron-LM that is not a flag of this project."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from miles_async.config.megatron import (
    OF_THE_TRAINING_LOOP,
    MegatronFlag,
    flags_of_other_versions,
    megatron_flags,
    table_version,
)
from miles_async.config.model_flags import COMPARED
from miles_async.config.translation import Combined, Flag, Idle, Only, Refused, Rule, Sets, Translator, converts, sets

_MODEL = Idle("describes a part of the model, which hf_checkpoint defines")
_PRECISION = Refused("the learner computes in bf16 or fp32: set precision")
_CHECKPOINTS = Idle("belongs to checkpoints of Megatron-LM; those of this project are written and read in another way")
_LOGS = Idle("belongs to Megatron-LM's own logs; this project has other metrics and traces")
_LOOP = "belongs to Megatron-LM's own training loop, which this project does not run"

_UNREADABLE = """
    moe_shared_expert_gate moe_router_pre_softmax moe_router_enable_expert_bias rotary_interleaved
    attention_output_gate apply_layernorm_1p use_rotary_position_embeddings position_embedding_type rope_type
    use_rope_scaling experimental_attention_variant padded_vocab_size
""".split()
"""Flags of the model that `config.json` tells in no form that could be compared."""

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_UNREADABLE, _MODEL),
    # The optimizer and its schedule.
    "optimizer": Only(("adam",), "the learner uses AdamW; set it to adam"),
    "lr_decay_iters": sets("learner.lr_decay_steps"),
    "lr_warmup_iters": sets("learner.lr_warmup_steps"),
    "lr_wsd_decay_iters": sets("learner.lr_wsd_decay_steps"),
    "lr_warmup_init": Only((0, 0.0), "the warm-up starts at 0"),
    "use_checkpoint_opt_param_scheduler": Idle("has no effect: learning rates always follow the settings of the run"),
    "override_opt_param_scheduler": Idle("has no effect: learning rates always follow the settings of the run"),
    # Precision.
    "bf16": converts("learner.precision", {True: "bf16"}),
    "fp16": _PRECISION,
    "accumulate_allreduce_grads_in_fp32": converts("learner.main_grads_dtype", {True: "fp32"}),
    "grad_reduce_in_bf16": converts("learner.main_grads_dtype", {True: "bf16"}),
    **dict.fromkeys(
        ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        Idle("has no effect: all layers are computed in bf16 or fp32"),
    ),
    **dict.fromkeys(
        ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        Idle("has no effect: the learner computes log-probabilities from parts of the logits"),
    ),
    **dict.fromkeys(
        (
            *("flash_decode", "cache_mla_latents", "mlp_chunks_for_prefill", "inference_rng_tracker"),
            "inference_fuse_tp_communication",
        ),
        Idle("belongs to Megatron-LM's own inference; the engines run SGLang"),
    ),
    "tp_comm_overlap": Refused(
        "Transformer Engine has buffers for micro-batches of one size only, and packed ones differ in size: remove it"
    ),
    "fp16_lm_cross_entropy": _PRECISION,
    **dict.fromkeys(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        Idle("has no effect: Megatron-LM scales the loss with fp16 only"),
    ),
    **dict.fromkeys(
        (
            *("no_barrier_with_level_1_timing", "log_max_attention_logit", "log_num_zeros_in_grad"),
            "moe_per_layer_logging",
        ),
        _LOGS,
    ),
    # Parts of the model that the run sets.
    "hidden_dropout": Only((0, 0.0), "models are trained without dropout; set it to 0"),
    "attention_dropout": Only((0, 0.0), "models are trained without dropout; set it to 0"),
    "transformer_impl": Combined(),
    "use_flash_attn": converts("learner.attention_backend", {True: "flash"}),
    "use_mcore_models": Idle("has no effect: all models are those of Megatron-core"),
    "moe_grouped_gemm": Idle("has no effect: Transformer Engine's layers always compute all experts in one product"),
    "moe_router_load_balancing_type": Idle("has no effect: no loss that balances the experts is added"),
    "moe_aux_loss_coeff": Only((0, 0.0), "no loss that balances the experts is added; set it to 0"),
    "moe_use_upcycling": Refused("train the checkpoint that upcycling made: set hf_checkpoint"),
    "spec": Idle("names the layers of a model, which hf_checkpoint defines"),
    "recompute_activations": converts("learner.recompute_granularity", {True: "selective"}),
    "num_virtual_stages_per_pipeline_rank": sets("learner.virtual_pipeline_model_parallel_size"),
    "num_layers_per_virtual_pipeline_stage": Combined(),
    "no_bias_swiglu_fusion": converts("learner.bias_swiglu_fusion", {True: False}),
    "no_rope_fusion": converts("learner.rope_fusion", {True: False}),
    "no_gradient_accumulation_fusion": converts("learner.gradient_accumulation_fusion", {True: False}),
    "cpu_offloading_num_layers": Refused("set cpu_offloading and cpu_offloading_num_layers in megatron_args"),
    "no_overlap_p2p_communication": Refused("pipeline stages overlap as Megatron's schedules do by default: remove it"),
    "calculate_per_token_loss": converts("algorithm.loss_aggregation", {True: "token_mean"}),
    "use_cpu_initialization": Idle("has no effect: weights come from the checkpoint"),
    "no_initialization": Idle("has no effect: weights come from the checkpoint"),
    "init_method_std": Idle("has no effect: weights come from the checkpoint"),
    "embedding_init_method_std": Idle("has no effect: weights come from the checkpoint"),
    "use_megatron_fsdp": Refused("the learner shards the optimizer only: set use_distributed_optimizer"),
    "use_torch_fsdp2": Refused("the learner shards the optimizer only: set use_distributed_optimizer"),
    # Checkpoints.
    "no_save_optim": Refused("checkpoints hold the optimizer, because a run continues from them: remove it"),
    "no_load_optim": Refused(
        "load continues a run with its optimizer: to begin with its weights only, set hf_checkpoint"
    ),
    "no_load_rng": Refused("load continues a run with its random numbers: remove it"),
    "finetune": Refused("load continues a run: to begin another run with its weights, set hf_checkpoint"),
    "ckpt_step": Refused("load continues from the newest checkpoint: remove it"),
    "save_retain_interval": Idle("has no effect: save_keep says how many checkpoints are kept"),
    # What follows from the checkpoint or from the data.
    "tokenizer_type": Idle("has no effect: the tokenizer is that of hf_checkpoint"),
    "tokenizer_model": Idle("has no effect: the tokenizer is that of hf_checkpoint"),
    "seq_length": Idle("has no effect: sequences are packed by their own lengths"),
    "make_vocab_size_divisible_by": Idle("has no effect: the vocabulary is padded as the tensor-parallel ranks need"),
    "trust_remote_code": Refused("models of the Hub that bring code of their own are not supported: remove it"),
    "distributed_backend": Only(("nccl",), "GPUs communicate with NCCL, and CPUs with Gloo"),
    "distributed_timeout_minutes": Idle("has no effect: a rank that hangs is found by the run"),
}
_GROUPS: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("logging", "one logger", "profiling", "straggler", "workload inspector", "Logits Distillation"), _LOGS
    ),
    **dict.fromkeys(
        ("data and dataloader", "tokenizer", "validation"),
        Idle("belongs to Megatron-LM's own data sets; prompts come from prompt_data"),
    ),
    **dict.fromkeys(
        ("autoresume", "rerun engine", "In-process restart", "ft_package", "msc", "fault injector", "training"),
        Idle(_LOOP),
    ),
    "checkpointing": _CHECKPOINTS,
    "network size": _MODEL,
    "learning rate and weight decay": Refused("set lr_decay_style, lr_warmup_steps, lr_decay_steps or weight_decay"),
}
"""Rules of flags that set no field of Megatron-core's configuration, by their group in Megatron's help."""
_LOW_PRECISION = ("fp8", "fp4", "megatron_fsdp", "kitchen")
_FIELDS_WITHOUT_EFFECT: Mapping[str, Rule] = {
    "muon_": Idle("has no effect: the learner uses AdamW"),
    "sgd_": Idle("has no effect: the learner uses AdamW"),
    "tp_comm_": Idle("has no effect without tp_comm_overlap"),
    "fsdp_": Idle("has no effect without use_megatron_fsdp"),
}
"""Rules of flags that set fields of Megatron-core's configuration with these beginnings."""


@cache
def flags() -> Mapping[str, Flag]:
    """All flags by name, also those that only another version of Megatron has."""
    others = {
        name: Flag(Refused(f"Megatron-core {other} has it, but not {table_version()}: remove it"), flag.takes)
        for name, (other, flag) in flags_of_other_versions().items()
    }
    return {**others, **{name: _flag(name, flag) for name, flag in megatron_flags().items()}}


def _flag(name: str, flag: MegatronFlag) -> Flag:
    rule = _rule(name, flag)
    # Megatron takes a list in which each value would have to be the same.
    return Flag(rule, "value" if isinstance(rule, Only) and flag.takes == "values" else flag.takes)


def _rule(name: str, flag: MegatronFlag) -> Rule:
    if name in _RULES:
        return _RULES[name]
    if name in COMPARED:
        return sets(f"model.megatron_model_flags.{name}")
    if any(word in name for word in _LOW_PRECISION):
        return _PRECISION
    for beginning, rule in _FIELDS_WITHOUT_EFFECT.items():
        if flag.field.startswith(beginning):
            return rule
    if flag.field in OF_THE_TRAINING_LOOP:
        return Refused(OF_THE_TRAINING_LOOP[flag.field])
    if flag.field:
        field = f"learner.megatron_args.{flag.field}"
        return sets(field) if flag.value is None else Sets((field,), {True: flag.value})
    return _GROUPS.get(flag.group, Refused("this project does not use it: remove it"))


def combine(values: Mapping[str, Any], translator: Translator) -> None:
    """Translate the flags that need more than their own value."""
    if "transformer_impl" in values:
        translator.set("learner.transformer_impl", values["transformer_impl"], "--transformer-impl")
    if (layers := values.get("num_layers_per_virtual_pipeline_stage")) is not None:
        total, key = values.get("num_layers"), "--num-layers-per-virtual-pipeline-stage"
        translator.problems.append(
            f"{key} {layers}{'' if total is None else f' of {total} layers'} has no counterpart: set "
            "virtual_pipeline_model_parallel_size to the number of parts per pipeline stage"
        )

"""The memory plan of a run, from its settings: what `--check-config` prints and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from miles_async.config.device_plan import demand_of
from miles_async.config.generation import adapter_versions_of, generates
from miles_async.config.losses import estimator_of
from miles_async.config.model_shape import adapted_modules, family_of, linear_layers_of, mtp_heads, shape_of
from miles_async.config.schema import Learner, RunConfig
from miles_async.config.untested import weight_transport
from miles_async.models.families import FAMILIES
from miles_async.models.layers import ModelShape, Split, Weights, parts_of
from miles_async.models.plugin import MODELS
from miles_async.planning.adapters import elements_in_engine, elements_of_head, elements_of_layer
from miles_async.planning.plan import (
    FREE_FRACTION,
    GIB,
    LOGITS_FRACTION,
    EngineJob,
    EngineMemory,
    LearnerJob,
    MeasuredStage,
    RankMemory,
    Recomputation,
    highest,
    plan_engine,
    plan_learner,
)

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the processes of a run need on their devices, in bytes."""

    card: int
    """Memory of each device."""
    learner: RankMemory | None
    """The learner rank that needs the most; None if the run does not train."""
    learner_job: LearnerJob | None
    engine: EngineMemory | None
    """Each rank of each engine; None if the run does not generate."""
    longest: int
    """Tokens of the longest sample."""
    host: int
    """Host memory of the learner ranks of a node."""

    @property
    def room(self) -> int:
        """What the plan uses of a card at most."""
        return int(self.card * (1 - FREE_FRACTION))

    @property
    def learner_fits(self) -> bool:
        return self.learner is None or self.learner.peak <= self.room

    @property
    def engine_fits(self) -> bool:
        """Whether the KV cache of an engine holds the longest sample."""
        return self.engine is None or self.engine.cache >= self.longest * self.engine.per_token


def memory_plan(config: RunConfig) -> MemoryPlan | None:
    """The plan of a run whose layout is valid; None if `gpu_memory_gib` is unset or the model's family is not known."""
    model, memory = planned_model(config), config.cluster.gpu_memory_gib
    return None if model is None or memory is None else plan_of(config, model, int(memory * GIB))


def planned_model(config: RunConfig) -> ModelShape | None:
    """The layers of the model; None if `config.json` lacks dimensions, or names a type whose layers are not known."""
    family = family_of(config.model)
    shape = shape_of(config.model) if family in FAMILIES or MODELS.has(family) else None
    return shape if shape is not None and shape.vocabulary else None


def plan_of(config: RunConfig, model: ModelShape, card: int, measured: Sequence[MeasuredStage] = ()) -> MemoryPlan:
    """The plan on devices with `card` bytes of memory, from what the learner's modules have if that is `measured`."""
    demand, longest = demand_of(config), longest_sample(config)
    learner, job, host = None, None, 0
    if demand.learner:
        job = learner_job(config, model, card)
        learner = highest(plan_learner(job, measured))
        host = _host_of_node(learner, job, config.learner.actor_num_gpus_per_node)
    return MemoryPlan(
        card=card,
        learner=learner,
        learner_job=job,
        engine=plan_engine(engine_job(config, model, card)) if demand.engines else None,
        longest=longest,
        host=host,
    )


def _host_of_node(memory: RankMemory, job: LearnerJob, ranks: int) -> int:
    """Host memory of a node with `ranks` learner ranks. In each stage, `tensor` neighbouring ranks are the first ones
    of their data-parallel groups."""
    stages = -(-ranks * job.pipeline // job.ranks)
    first = min(ranks, stages * job.split.tensor)
    return memory.host * ranks + memory.saved * first + memory.gathered * (ranks - first)


def split_of(learner: Learner) -> Split:
    """How the learner's ranks divide a model."""
    tensor, given = learner.tensor_model_parallel_size, learner.megatron_args
    layout = given.get("pipeline_model_parallel_layout")
    return Split(
        tensor=tensor,
        sequence=tensor if learner.sequence_parallel else 1,
        context=learner.context_parallel_size,
        expert=learner.expert_model_parallel_size,
        expert_tensor=learner.expert_tensor_parallel_size or tensor,
        first=learner.decoder_first_pipeline_num_layers,
        last=learner.decoder_last_pipeline_num_layers,
        embedding=bool(given.get("account_for_embedding_in_pipeline_split")),
        loss=bool(given.get("account_for_loss_in_pipeline_split")),
        parts=parts_of(layout) if isinstance(layout, str) else None,
        transformer_engine=learner.transformer_impl == "transformer_engine",
        fusion=learner.bias_swiglu_fusion,
    )


def precision_on_gpus(learner: Learner) -> Literal["fp32", "bf16"]:
    """The precision of a learner on GPUs, where the default is bf16."""
    return learner.precision or "bf16"


def gib_text(size: int) -> str:
    """Bytes for people, such as `3.7 GiB`."""
    return f"{size / GIB:,.1f} GiB"


def learner_job(config: RunConfig, model: ModelShape, card: int) -> LearnerJob:
    """What determines the memory of a learner rank on a GPU with `card` bytes.

    If `transformer_impl` is unset, the layers are those that need more. Transformer Engine's need bf16.
    """
    learner, algorithm = config.learner, config.algorithm
    width = 4 if precision_on_gpus(learner) == "fp32" else 2
    transport = weight_transport(config, on_gpus=True)
    copies = learner.ranks // (learner.tensor_model_parallel_size * learner.pipeline_model_parallel_size)
    job = LearnerJob(
        model=model,
        ranks=learner.ranks,
        split=split_of(learner),
        pipeline=learner.pipeline_model_parallel_size,
        chunks=learner.virtual_pipeline_model_parallel_size or 1,
        sharded_optimizer=learner.optimizer_holds_masters
        or (copies > 1 and learner.use_distributed_optimizer is not False),
        gradient=_WIDTHS[learner.main_grads_dtype],
        master=_WIDTHS[learner.main_params_dtype],
        moments=_WIDTHS[learner.exp_avg_dtype] + _WIDTHS[learner.exp_avg_sq_dtype],
        offloaded=learner.optimizer_offload_fraction if learner.optimizer_cpu_offload else 0.0,
        width=width,
        tokens=_tokens(config),
        recomputation=_recomputation(learner, len(model.layers)),
        # As if all layers had as many as the one with the most.
        adapters=max(_adapters_by_layer(config, split_of(learner)), key=lambda one: one.total, default=Weights()),
        head_adapter=_head_adapter(config, learner.tensor_model_parallel_size),
        heads=mtp_heads(config),
        # Without its adapters, the policy is its own reference model.
        references=int(config.keeps_reference and not (learner.lora_rank and algorithm.ref_load is None)),
        critics=int(estimator_of(algorithm).trains_critic),
        checkpoints=learner.save is not None,
        gathers_on_host=learner.distrib_optim_fully_reshardable_mem_efficient,
        rollback=config.steps_per_rollout > 1 or learner.segments_are_samples,
        offloads=config.cluster.colocate,
        bucket=config.weights.update_weight_buffer_size * (transport in ("broadcast", "ipc")),
        stages_on_device=transport == "ipc",
        engine_width=_engine_width(config) if generates(config) else 0,
        chunk_entries=int(card * LOGITS_FRACTION) // width,
        foreach_adam=learner.transformer_impl != "transformer_engine" and not learner.optimizer_holds_masters,
    )
    if learner.transformer_impl is not None or width == 4 or learner.lora_rank:
        return job
    both = [job, replace(job, split=replace(job.split, transformer_engine=True), foreach_adam=False)]
    return max(both, key=lambda one: highest(plan_learner(one)).peak)


def adapter_elements(config: RunConfig, *, in_files: bool = False) -> int | None:
    """Elements of all adapters, which are the trainable parameters; None if there are none, or the model is not known.

    Those `in_files` include the copies that each expert has of what all of them share.
    """
    layers = _adapters_by_layer(config, Split(), in_files=in_files)
    return sum(one.total for one in layers) + _head_adapter(config, 1) or None


def _adapters_by_layer(config: RunConfig, split: Split, *, in_files: bool = False) -> Sequence[Weights]:
    """Elements of the adapters of each decoder layer on a rank; nothing without adapters or a known model."""
    learner, model = config.learner, linear_layers_of(config.model)
    if model is None or not learner.lora_rank:
        return []
    shares_outer = learner.experts_shared_outer_loras and not in_files
    return [
        elements_of_layer(model, paths, learner.lora_rank, split, shares_outer=shares_outer)
        for paths in learner.lora_targets.by_layer(model)
    ]


def _head_adapter(config: RunConfig, tensor: int) -> int:
    """The same for the output layer."""
    learner, model = config.learner, linear_layers_of(config.model)
    if model is None or not learner.lora_rank:
        return 0
    return elements_of_head(model, adapted_modules(config.learner, config.model), learner.lora_rank, tensor)


def _adapter_buffers(config: RunConfig) -> int:
    """Elements of the buffers of a rank of an engine: for each version that it may hold, and for the model itself."""
    model, versions = linear_layers_of(config.model), adapter_versions_of(config)
    if model is None or versions is None:
        return 0
    ranks = config.engine.rollout_num_gpus_per_engine
    of_one = elements_in_engine(model, adapted_modules(config.learner, config.model), config.learner.lora_rank, ranks)
    return (versions.capacity + 1) * of_one


def engine_job(config: RunConfig, model: ModelShape, card: int) -> EngineJob:
    """What determines the memory of the ranks of an engine on GPUs with `card` bytes."""
    arguments = config.engine.sglang_server_args
    cache = str(arguments.get("kv_cache_dtype", "auto"))
    width, fraction = _engine_width(config), arguments.get("mem_fraction_static")
    return EngineJob(
        model=model,
        ranks=config.engine.rollout_num_gpus_per_engine,
        width=width,
        cache_width=1 if cache.startswith("fp8") else width,
        fraction=float(fraction) if isinstance(fraction, int | float) else None,
        adapters=_adapter_buffers(config),
        card=card,
    )


def _engine_width(config: RunConfig) -> int:
    return 4 if config.engine.sglang_server_args.get("dtype") in ("float32", "float") else 2


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest prompt and response that the settings allow."""
    return (config.rollout.rollout_max_prompt_len or 1) + config.rollout.rollout_max_response_len


def _tokens(config: RunConfig) -> int:
    """Tokens of the fullest micro-batch on each rank: at most the samples of a rank, all as long as they may be."""
    learner, longest = config.learner, longest_sample(config)
    samples = -(-config.samples_per_step // learner.data_parallel_ranks(learner.ranks))
    limit = learner.micro_batch_tokens
    if learner.use_dynamic_batching_in_train:
        limit = learner.max_tokens_per_microbatch_in_train or limit
    elif not learner.use_dynamic_batch_size:
        limit = learner.micro_batch_size * longest
    padded = samples * (longest + -longest % learner.pack_unit)
    return -(-min(limit, padded) // learner.context_parallel_size)


def _recomputation(learner: Learner, layers: int) -> Recomputation:
    """Selective recomputation is not counted: no layer keeps the scores of its attention anyway."""
    number = learner.recompute_num_layers or 1
    if learner.recompute_granularity != "full":
        return Recomputation()
    if learner.recompute_method == "block":
        return Recomputation(group=1, layers=number)
    return Recomputation(group=number, layers=layers)

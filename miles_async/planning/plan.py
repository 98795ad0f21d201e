"""The memory plan of a job: what each learner rank and each engine rank keeps in the memory of its device.

All sizes are in bytes, and GiB are 2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_async.models.layers import ModelShape, Split, Weights

GIB = 2**30
FREE_FRACTION = 0.05
"""Part of a card that a plan leaves free, for what it does not count: the context of CUDA, buffers of NCCL, memory
between torch's blocks, and the difference between the name of a card (80 GB) and its memory (79.1 GiB). A convention,
not a measurement."""
LOGITS_FRACTION = 1 / 24
"""Part of a card for the logits of a chunk; the same as `GPU_FRACTION` of `adapters/megatron/model/output_layer.py`."""
SOFTMAX_BYTES = 2 * 4 * 2**25
"""Two float32 parts of `PART_ENTRIES` logits each (`losses/logprobs.py`), while a softmax is computed."""
GRADIENT, MASTER, MOMENTS = 4, 4, 8
"""Bytes per weight: the float32 gradient, the float32 copy under bf16, and Adam's two float32 moments."""
HOST_GRADIENT = 4
"""Bytes per weight for the gradient of an offloaded optimizer, in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Layers whose activations the backward pass computes again."""

    group: int = 0
    """Number of layers that are computed again together. Only the input of the first is kept. 0 recomputes nothing."""
    layers: int = 0
    """Number of layers of each pipeline stage to which that applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerJob:
    """What determines the memory of a learner rank."""

    model: ModelShape
    ranks: int
    split: Split = field(default_factory=Split)
    pipeline: int = 1
    """Pipeline stages."""
    chunks: int = 1
    """Virtual pipeline stages per rank."""
    sharded_optimizer: bool = False
    """Whether data-parallel ranks divide the state of the optimizer."""
    gradient: int = GRADIENT
    """Bytes of a gradient."""
    master: int = MASTER
    """Bytes of the optimizer's copy of a weight, which it has under bf16."""
    moments: int = MOMENTS
    """Bytes of Adam's moments of a weight."""
    offloaded: float = 0.0
    """Part of the optimizer's state that is in host memory, where the CPU computes the steps."""
    width: int = 2
    """Bytes of a weight and of an activation: 2 with bf16, 4 with fp32."""
    tokens: int
    """Of a full micro-batch, on each rank."""
    recomputation: Recomputation = Recomputation()
    adapters: Weights = field(default_factory=Weights)
    """Elements of the float32 adapters of each layer, which are trained in place of the weights; 0 without adapters."""
    head_adapter: int = 0
    """Elements of the adapter of the output layer."""
    heads: int = 0
    """MTP heads that are trained."""
    references: int = 0
    """Frozen models beside the policy."""
    critics: int = 0
    checkpoints: bool = False
    gathers_on_host: bool = False
    """Whether only one data-parallel rank gathers the state of a sharded optimizer for a checkpoint, in host memory."""
    rollback: bool = False
    """Whether a copy of weights and optimizer is taken before the steps of a batch."""
    offloads: bool = False
    """Whether the state moves to host memory while engines use the device."""
    bucket: int = 0
    """Bytes of weights that a rank copies to its device at a time, to send them to the engines."""
    stages_on_device: bool = False
    """Whether staged weights and that copy stay on the device."""
    engine_width: int = 2
    """Bytes of a weight in the engines."""
    chunk_entries: int
    """Most logits that are computed at a time."""
    softmax: int = SOFTMAX_BYTES
    foreach_adam: bool = True
    """Whether the optimizer is torch's, which takes the square root of all second moments at once. Megatron uses that
    of Transformer Engine where it is installed."""

    @property
    def trains_adapters(self) -> bool:
        return self.adapters.total + self.head_adapter > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of a learner rank of one pipeline stage, in bytes."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    others: int
    """Reference model, and critic with its gradients and optimizer."""
    activations: int
    """What all layers keep for the backward pass, of all micro-batches in flight."""
    layer: int
    """In addition while the backward pass is in one layer, or in one group of recomputed layers."""
    logits: int
    """In addition while the output layer and the loss are computed; 0 before the last stage."""
    step: int
    """In addition while the optimizer takes its step."""
    publish: int
    """In addition while weights are copied for the engines."""
    checkpoint: int
    """In addition while the state is gathered for a checkpoint."""
    staged: int
    """Weights that are staged on the device, and the buffer from which engines read them."""
    host: int
    """Host memory: weights that are staged there, the offloaded state of the optimizer, and a copy of the state for
    rollbacks or for engines that use the device."""
    saved: int
    """Host memory for a checkpoint, on the first data-parallel rank."""
    gathered: int
    """Host memory for a checkpoint, on the other data-parallel ranks."""

    @property
    def state(self) -> int:
        """What the rank keeps all the time."""
        return self.weights + self.gradients + self.optimizer + self.others + self.staged

    @property
    def peak(self) -> int:
        """The most at any time. The backward pass, optimizer step, publish and checkpoint follow each other."""
        training = self.activations + max(self.layer, self.logits)
        return self.state + max(training, self.step, self.publish, self.checkpoint)


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """What the modules of a rank of a pipeline stage have, in place of what the plan computes."""

    weights: Weights
    kept: float
    """Bytes that a micro-batch keeps until its backward pass, per token."""


def plan_learner(job: LearnerJob, measured: Sequence[MeasuredStage] = ()) -> list[RankMemory]:
    """The memory of the ranks of each pipeline stage; `measured` are all stages, or none."""
    return [_stage_memory(job, stage, measured[stage] if measured else None) for stage in range(job.pipeline)]


def _stage_memory(job: LearnerJob, stage: int, measured: MeasuredStage | None) -> RankMemory:
    split, model = job.split, job.model
    heads = _heads(job, stage)
    weights = measured.weights if measured else model.weights(split, stage, job.pipeline) + heads
    of_head = job.head_adapter * (stage == job.pipeline - 1)
    layers = len(model.stage(split, stage, job.pipeline))
    adapters = Weights(job.adapters.dense * layers + of_head, job.adapters.expert * layers)
    trained = adapters if job.trains_adapters else weights
    has_copy = job.width < MASTER and not job.trains_adapters
    state, stored = job.moments + job.master * has_copy, MOMENTS + MASTER * has_copy
    on_device = state * (1 - job.offloaded)
    per_stage = job.ranks // job.pipeline
    copies = (per_stage // split.tensor, per_stage // (split.expert * split.expert_tensor))
    shards = copies if job.sharded_optimizer else (1, 1)
    sharded = -(-trained.dense // shards[0]) + -(-trained.expert // shards[1])
    weight_bytes = weights.total * job.width + (MASTER * trained.total if job.trains_adapters else 0)
    without_heads = weights.total - heads.total
    critic = without_heads * (job.width + job.gradient) + int(sharded * on_device)
    whole = model.weights(Split())
    staged = whole.total * job.engine_width // job.ranks
    activations, layer = (elements * job.width for elements in _activations(job, stage))
    if measured is not None:
        activations = job.tokens * measured.kept * _micro_batches_in_flight(job, stage)
    in_host = (1 + job.critics) * sharded * job.offloaded
    is_copied = weight_bytes if job.offloads or not job.trains_adapters else MASTER * trained.total
    copied = is_copied + sharded * max(job.rollback * state, job.offloads * on_device)
    staged_there = staged * (not job.stages_on_device)
    host = staged_there + in_host * (state + HOST_GRADIENT) + (job.rollback or job.offloads) * copied
    # At first Megatron copies the weights that other data-parallel ranks update too.
    host = max(host, MASTER * (in_host + trained.total * job.offloaded))
    # The first data-parallel rank copies weights and state. Before, all of these ranks, or only this one, gather the
    # state if they divide it: all three values in float32, and one of them twice more (`get_parameter_state_dp_zero` of
    # Megatron's optimizer).
    shares = job.checkpoints and job.sharded_optimizer
    gathered = trained.total * (MASTER + MOMENTS + 2 * MASTER) * shares
    saved = trained.total * ((MASTER if job.trains_adapters else job.width) + stored) * job.checkpoints + gathered
    # Transformer Engine's Adam computes states of less than 4 bytes in float32.
    unpacked = (MASTER - job.master + MOMENTS - job.moments) // 2
    return RankMemory(
        stage=stage,
        weights=weight_bytes,
        gradients=trained.total * job.gradient,
        optimizer=int(sharded * on_device),
        others=job.references * without_heads * job.width + job.critics * critic,
        activations=int(activations),
        layer=int(layer),
        logits=_logits(job) if stage == job.pipeline - 1 else 0,
        step=MASTER * sharded * (unpacked + job.foreach_adam),
        publish=2 * _largest_matrix(model, split.expert) * job.width + job.bucket * (not job.stages_on_device),
        staged=(staged + min(job.bucket, staged)) * job.stages_on_device,
        # One value of all weights in float32, gathered on the device.
        checkpoint=MASTER * max(trained.dense, trained.expert) * (shares and not job.gathers_on_host),
        host=int(host),
        saved=saved,
        gathered=gathered * (not job.gathers_on_host),
    )


def _heads(job: LearnerJob, stage: int) -> Weights:
    """Elements of MTP heads on a rank, and of the embedding that the last pipeline stage has because of them."""
    model, split = job.model, job.split
    if not job.heads or stage < job.pipeline - 1:
        return Weights(0)
    total = Weights(model.columns(split) * model.hidden * (job.pipeline > 1 and not model.is_tied))
    for _ in range(job.heads):
        total += model.head(split)
    return total


def _activations(job: LearnerJob, stage: int) -> tuple[float, float]:
    """Elements that the layers of a rank keep, and those that the backward pass of a layer needs in addition."""
    split = job.split
    layers = job.model.stage(split, stage, job.pipeline)
    of_kinds = [kind.kept(split) for kind in job.model.kinds]
    kept = [of_kinds[layer] for layer in layers]
    working = max(kind.feed_forward.working(split) for kind in job.model.kinds)
    between = job.model.hidden / split.sequence
    recomputed = min(job.recomputation.layers, len(layers))
    if group := min(job.recomputation.group, recomputed):
        working += max(sum(kept[start : start + group]) for start in range(0, recomputed, group))
        kept = [between * -(-recomputed // group), *kept[recomputed:]]
    in_flight = _micro_batches_in_flight(job, stage)
    # A stage holds its result, and in a pipeline what it exchanges with its neighbours.
    ends = between * (3 if job.pipeline > 1 else 1)
    if stage == job.pipeline - 1:
        # The last norm keeps its input. Megatron returns the result in float32.
        ends += between * (1 if job.width == MASTER else 1 + MASTER / job.width)
        # Heads are computed again where all layers are.
        is_recomputed = job.recomputation.layers >= len(job.model.layers)
        ends += job.heads * (3 * between if is_recomputed else job.model.kept_by_head(split))
    return job.tokens * (sum(kept) * in_flight + ends), job.tokens * working


def _micro_batches_in_flight(job: LearnerJob, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at a time, in Megatron's schedules.

    With one chunk per rank a stage runs ahead by the number of stages behind it (1F1B, arXiv 2104.04473, section 2.2).
    With several chunks it runs ahead by 2 * (stages behind) + (chunks - 1) * stages chunks.
    """
    behind = job.pipeline - 1 - stage
    if job.chunks == 1:
        return behind + 1
    return (2 * behind + (job.chunks - 1) * job.pipeline + 1) / job.chunks


def _logits(job: LearnerJob) -> int:
    """What `OutputLayer.map` and the loss need: the logits of a chunk, and a part of its softmax or the gradients.

    The hidden states of the tokens that predict one are copied. With sequence parallelism they are gathered first.
    """
    columns, tokens = job.model.columns(job.split), job.tokens
    chunks = max(1, -(-tokens * columns // job.chunk_entries))
    logits = -(-tokens // chunks) * columns * job.width
    hidden = tokens * job.model.hidden * (job.width + (4 if job.split.sequence > 1 else 0))
    gradient = (columns + tokens * min(chunks, 2)) * job.model.hidden * job.width
    if chunks == 1:
        logits *= 1 + job.heads  # those of the heads are computed in addition, and all are kept
    return hidden + logits + max(gradient, min(job.softmax, 2 * 4 * -(-tokens // chunks) * columns))


def _largest_matrix(model: ModelShape, expert: int) -> int:
    """Elements of the largest whole parameter; the experts of all expert-parallel ranks are gathered together."""
    return model.hidden * max(model.vocabulary, 2 * model.experts.width * expert if model.experts else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What determines the memory of the ranks of an engine."""

    model: ModelShape
    ranks: int = 1
    width: int = 2
    """Bytes of a weight."""
    cache_width: int = 2
    """Bytes of an element of the KV cache."""
    fraction: float | None = None
    """SGLang's `mem_fraction_static`: part of the card for weights and KV cache. None is SGLang's default."""
    adapters: int = 0
    """Elements of the buffers for all adapters that an engine may hold, on each rank."""
    card: int
    """Bytes of the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of each rank of an engine, in bytes."""

    weights: int
    adapters: int
    """For the buffers of adapters."""
    cache: int
    """For the KV cache; negative if weights and adapters do not fit."""
    per_token: float
    """Bytes of a token in the KV cache; 0 if the model has none."""
    fraction: float
    """Part of the card for weights, adapters and KV cache."""

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(max(0, self.cache) / self.per_token) if self.per_token else 0


def plan_engine(job: EngineJob) -> EngineMemory:
    """The memory of each rank of an engine."""
    split = Split(tensor=job.ranks, expert_tensor=job.ranks)
    weights = job.model.weights(split).total * job.width
    fraction = default_fraction(job.card, job.ranks) if job.fraction is None else job.fraction
    of_kinds = [kind.attention.cache(split) for kind in job.model.kinds]
    per_token = sum(of_kinds[layer] for layer in job.model.layers) * job.cache_width
    adapters = job.adapters * job.width
    cache = int(fraction * job.card) - weights - adapters
    return EngineMemory(weights=weights, adapters=adapters, cache=cache, per_token=per_token, fraction=fraction)


def default_fraction(card: int, ranks: int) -> float:
    """SGLang's default of `mem_fraction_static` (0.5.20, `arg_groups/memory_hook.py`), at its lowest.

    It reserves 0.5 GiB, 1.5 MiB per token of a chunk of the prefill (8,192 on cards of 60 to 160 GiB, else 4,096 or
    16,384), 2 MiB per sequence of a CUDA graph (256, or 512 from four ranks on), and an eighth of a GiB per rank.
    """
    gib = card / GIB
    chunk = 4096 if gib < 60 else 8192 if gib < 160 else 16_384
    graph = 512 if ranks >= 4 or gib >= 160 else 256
    reserved = 0.5 + (1.5 * chunk + 2 * graph) / 1024 + ranks / 8
    return round(max(0.1, 1 - max(reserved, 10.0 * (gib > 60)) / gib), 3)


def highest(stages: Sequence[RankMemory]) -> RankMemory:
    """The stage whose ranks need the most."""
    return max(stages, key=lambda one: one.peak)

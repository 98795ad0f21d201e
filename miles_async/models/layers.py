"""The layers of a model: weights, what a token leaves for the backward pass, its cache, and its operations.

Numbers of elements are per rank. "Kept" are the elements of one token that a layer keeps from the forward to the
backward pass. The counts follow from the code of the layers. `tests/stack/test_memory_plan.py` and
`tests/bridge/test_memory_plan.py` compare them with real learners, and `tests/torch/test_operations.py` compares the
numbers of products with models of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from miles_async.models.lora_layers import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    LINEAR_ATTENTION,
    SHARED_EXPERT,
    LinearLayers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How ranks divide a model, and which layers compute it."""

    tensor: int = 1
    """Ranks that share each layer."""
    sequence: int = 1
    """Ranks that divide the activations between layers: `tensor` with sequence parallelism, else 1."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks over which the experts of a layer are distributed."""
    expert_tensor: int = 1
    """Ranks that share each expert."""
    first: int | None = None
    """Layers of the first pipeline stage; None if the stages divide the layers evenly."""
    last: int | None = None
    """Layers of the last pipeline stage, likewise."""
    embedding: bool = False
    """Whether the embedding takes the place of a layer in the first pipeline stage."""
    loss: bool = False
    """Whether the output layer and the loss take the place of a layer in the last pipeline stage."""
    parts: tuple[int, ...] | None = None
    """Layers of each part of the pipeline, if a layout in Megatron's notation names them; see `parts_of`."""
    transformer_engine: bool = False
    """Whether the layers are Transformer Engine's, not those of `local_layers.py`."""
    fusion: bool | None = None
    """Whether Megatron's fused kernel computes activations; None if each model decides."""

    def layers_of_stages(self, layers: int, stages: int) -> list[int]:
        """The number of layers of each pipeline stage, of `layers` in all."""
        if self.parts is not None:
            return [sum(self.parts[stage::stages]) for stage in range(stages)]
        own = {stage: count for stage, count in ((0, self.first), (stages - 1, self.last)) if count is not None}
        others = stages - len(own)
        even = (layers + self.embedding + self.loss - sum(own.values())) // others if others else 0
        counts = [own.get(stage, even) for stage in range(stages)]
        counts[0] -= self.embedding
        counts[-1] -= self.loss
        return counts


_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d{1,3})"), re.compile(r"(.)\*(\d{1,3})"))
_LAYOUT = re.compile(r"E(t|\|(?=[tL]))*L")


def parts_of(layout: str) -> tuple[int, ...] | None:
    """The number of layers of each part of a pipeline, such as (2, 2, 0) for `Ett|tt|L`; None if it is not a layout.

    Megatron's notation (`pipeline_model_parallel_layout`) has E for the embedding, t for a layer and L for the loss, |
    between parts, commas without a meaning, and repetitions such as `(tt|)*29` and `t*2`.
    """
    text = layout.replace(",", "")
    for repeated in _REPEATED:
        text = repeated.sub(lambda found: found[1] * int(found[2]), text)
    return tuple(part.count("t") for part in text.split("|")) if _LAYOUT.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements on a rank."""

    dense: int = 0
    """Outside of experts: all data-parallel ranks hold the same."""
    expert: int = 0
    """In experts: only the ranks with the same experts hold the same."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention in which several query heads may share a key/value head."""

    hidden: int
    heads: int
    groups: int
    """Key/value heads."""
    width: int
    """Of a head."""
    has_norms: bool = False
    """Whether each head of queries and keys is normalized."""
    has_biases: bool = False
    """Whether queries, keys and values have biases."""
    has_output_bias: bool = False
    has_sinks: bool = False
    """Whether each head has a learned sink (gpt-oss)."""
    has_gate: bool = False
    """Whether the output of each head is multiplied with a gate (Qwen3.5)."""

    def weights(self, split: Split) -> Weights:
        query, key = self.heads * self.width // split.tensor, self.groups * self.width // split.tensor
        projected = query * (2 if self.has_gate else 1) + 2 * key
        biases = projected * self.has_biases + self.hidden * self.has_output_bias
        norms = self.hidden + 2 * self.width * self.has_norms
        sinks = self.heads // split.tensor * self.has_sinks
        return Weights(self.hidden * (projected + query) + biases + norms + sinks)

    def kept(self, split: Split) -> float:
        """The input and its norm; queries, keys, values and output; and the angles of the rotary embedding.

        Where heads are normalized, their projections are kept before the norm too. With context parallelism the local
        attention keeps the keys and values of all ranks. Transformer Engine's layers keep the whole projection, of
        which the values are a part, the rotated queries and keys, the output, and one float32 number per head.
        """
        query, key = self.heads * self.width / split.tensor, self.groups * self.width / split.tensor
        between, gate = 2 * self.hidden / split.sequence, 3 * query * self.has_gate
        if split.transformer_engine:
            return between + 3 * query + 3 * key + 2 * self.heads / split.tensor + gate
        attended = 2 * query + 2 * key if split.context == 1 else 2 * query + 3 * key * split.context
        projected = 2 * query + 2 * key if self.has_norms else 0
        return between + 4 * self.width + attended + projected + gate

    def cache(self, split: Split) -> float:
        """Elements per token in an engine; ranks beyond the key/value heads hold copies."""
        return 2 * self.width * max(1.0, self.groups / split.tensor)

    def products(self, tokens: float, pairs: float) -> float:
        """Products besides those with weights: of queries with keys, and of scores with values."""
        return 2 * self.heads * self.width * pairs

    def linear_layers(self) -> Mapping[str, int]:
        """See `LinearLayers.layers`. The projection of queries also computes the gate."""
        query, key = self.heads * self.width, self.groups * self.width
        return _in_block(
            "self_attn", zip(ATTENTION, (query * (2 if self.has_gate else 1), key, key, query), strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the latent query; None if queries are projected from the hidden state."""
    latent: int
    """Width of the latent keys and values."""
    rotated: int
    """Width of the part of a head with a rotary embedding, whose key all heads share."""
    plain: int
    """Width of the other part of queries and keys."""
    value: int
    """Width of the values of a head."""

    @property
    def groups(self) -> int:
        """Each head has its own keys and values."""
        return self.heads

    @property
    def width(self) -> int:
        """Of the queries and keys of a head."""
        return self.plain + self.rotated

    def weights(self, split: Split) -> Weights:
        heads, hidden = self.heads // split.tensor, self.hidden
        query = heads * self.width
        # The projections to latent vectors, and their norms, are whole on every rank.
        queries = hidden * query
        if self.query_rank is not None:
            queries = self.query_rank * (hidden + 1 + query)
        keys = hidden * (self.latent + self.rotated) + self.latent * (1 + heads * (self.plain + self.value))
        return Weights(hidden + queries + keys + heads * self.value * hidden)

    def kept(self, split: Split) -> float:
        """The input and its norm, the latent vectors before and after their norms, queries, keys, values and output.

        Values are padded to the width of keys.
        """
        heads, latent = self.heads / split.tensor, 2 * (self.query_rank or 0) + 2 * self.latent
        attended = heads * (3 * self.width + self.value)
        return 2 * self.hidden / split.sequence + latent / split.sequence + attended + 6 * self.rotated

    def cache(self, split: Split) -> float:
        """Elements per token in an engine, the same on each of its ranks."""
        return self.latent + self.rotated

    def products(self, tokens: float, pairs: float) -> float:
        """As in `Attention`: training computes whole keys and values, whose widths differ."""
        return self.heads * (self.width + self.value) * pairs

    def linear_layers(self) -> Mapping[str, int]:
        """None of them can have an adapter."""
        return {}


_CHUNK = 64
"""Tokens of a chunk of the delta rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Linear attention with a gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

    hidden: int
    heads: int
    """Of values, which have a state each."""
    groups: int
    """Heads of queries and keys; several heads of values share one."""
    width: int
    """Of a head of queries and keys."""
    value: int
    """Of a head of values."""
    convolution: int
    """Tokens that a convolution spans."""

    def weights(self, split: Split) -> Weights:
        keys = self.groups * self.width // split.tensor
        values, heads = self.heads * self.value // split.tensor, self.heads // split.tensor
        projected = 2 * keys + 2 * values + 2 * heads
        outer = self.hidden * (projected + values) + self.hidden
        return Weights(outer + (2 * keys + values) * self.convolution + 2 * heads + self.value)

    def kept(self, split: Split) -> float:
        """The input and its norm, the projection, its convolution, and what the rule keeps in its chunks.

        The rule of the local layers is composed of torch's operations. It solves a triangular system of each chunk row
        by row and keeps a third of its cube, and it keeps the state after each chunk; what is in float32 is counted
        twice. The kernels of FLA keep a matrix.
        """
        keys = self.groups * self.width / split.tensor
        values, heads = self.heads * self.value / split.tensor, self.heads / split.tensor
        repeated = heads * self.width
        between = 2 * self.hidden / split.sequence
        if split.transformer_engine:
            return between + 2 * (2 * keys + 2 * values) + 2 * repeated + 4 * values + heads * _CHUNK
        states = 2 * repeated * self.value / _CHUNK
        of_chunks = heads * (12 * _CHUNK + 2 * _CHUNK**2 / 3) + states
        return between + 6 * keys + 16 * values + 14 * repeated + of_chunks

    def cache(self, split: Split) -> float:
        """Nothing per token: an engine keeps one state per request."""
        return 0.0

    def products(self, tokens: float, pairs: float) -> float:
        """Products besides those with weights, in the recurrence (section 3.1): a head reads its state with the key,
        adds the outer product of the key and the corrected value, and reads the state with the query.

        The chunks in which learners compute the recurrence take more products. Like other ways to compute the same
        result, they do not count.
        """
        return 3 * self.heads * self.width * self.value * tokens

    def linear_layers(self) -> Mapping[str, int]:
        """See `LinearLayers.layers`."""
        keys, values = self.groups * self.width, self.heads * self.value
        return _in_block("linear_attn", zip(LINEAR_ATTENTION, (2 * keys + values, values, values), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """A gated feed-forward layer."""

    hidden: int
    width: int
    is_silu: bool = True
    """Whether the gate is SiLU, for which the local layers have a function that keeps only its input."""
    is_fused: bool = True
    """Whether the activation is Megatron's fused kernel with Transformer Engine's layers, if `Split` leaves it open."""

    def weights(self, split: Split) -> Weights:
        return Weights(3 * self.hidden * self.width // split.tensor + self.hidden)

    def kept(self, split: Split) -> float:
        return 2 * self.hidden / split.sequence + self.widths(split) * self.width / split.tensor

    def widths(self, split: Split) -> int:
        """Kept elements per unit of width: gate and up, the result, and without a fused kernel its two factors."""
        if not split.transformer_engine:
            return 2 if self.is_silu else 5
        is_fused = self.is_fused if split.fusion is None else split.fusion
        return 3 if is_fused else 5

    def working(self, split: Split) -> float:
        """Elements per token of the backward pass: gradients of gate and up, of their product, and their factors."""
        return 5 * self.width / split.tensor + self.hidden / split.sequence

    def linear_layers(self) -> Mapping[str, int]:
        """See `LinearLayers.layers`."""
        return _in_block("mlp", ((name, self.width) for name in FEED_FORWARD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts. Counts per token assume that all experts get equally many tokens."""

    hidden: int
    count: int
    active: int
    """Experts that each token is routed to."""
    width: int
    """Of an expert."""
    shared: int = 0
    """Width of the experts that all tokens use."""
    has_shared_gate: bool = False
    has_biases: bool = False
    is_clamped: bool = False
    """Whether the activation limits its two factors (gpt-oss), which keeps two more."""
    is_fused: bool = True
    """As in `FeedForward`."""
    is_fused_locally: bool = True
    """The same with the local layers."""

    def weights(self, split: Split) -> Weights:
        hidden, width = self.hidden, self.width // split.expert_tensor
        expert = 3 * hidden * width + (2 * width + hidden) * self.has_biases
        router = self.count * (hidden + self.has_biases)
        shared = 3 * hidden * self.shared // split.tensor + hidden * self.has_shared_gate
        return Weights(hidden + router + shared, self.count // split.expert * expert)

    def kept(self, split: Split) -> float:
        """The input and its norm, what each expert keeps of its tokens, and the same of the shared experts.

        A fused kernel keeps gate, up and its result. Composed of torch's operations, the activation also keeps its
        factors, and their product before the router's weight scales it.
        """
        is_fused = self.is_fused if split.transformer_engine else self.is_fused_locally
        is_fused = is_fused if split.fusion is None else split.fusion
        widths = (3 if is_fused else 6) + 2 * self.is_clamped
        # The tensor-parallel ranks of an expert gather the tokens of the others.
        tokens = self.active * split.expert_tensor / split.sequence
        routed = tokens * (widths * self.width / split.expert_tensor + self.hidden)
        shared = (3 if is_fused else 5) * self.shared / split.tensor
        return (2 + self.has_shared_gate) * self.hidden / split.sequence + routed + shared

    def working(self, split: Split) -> float:
        """Elements per token of the backward pass: gradients of what tokens bring to their experts."""
        return 2 * self.active * split.expert_tensor / split.sequence * self.hidden + self.hidden / split.sequence

    def linear_layers(self) -> Mapping[str, int]:
        """See `LinearLayers.layers`."""
        widths = {EXPERTS: self.width, **({SHARED_EXPERT: self.shared} if self.shared else {})}
        return {
            path: width
            for block, width in widths.items()
            for path in _in_block(block, ((name, width) for name in FEED_FORWARD))
        }


def _in_block(block: str, widths: Iterable[tuple[str, int]]) -> dict[str, int]:
    return {f"{block}.{name}": width for name, width in widths}


class Layer(NamedTuple):
    attention: Attention | LatentAttention | DeltaRule
    feed_forward: FeedForward | Experts

    def weights(self, split: Split) -> Weights:
        return self.attention.weights(split) + self.feed_forward.weights(split)

    def kept(self, split: Split) -> float:
        return self.attention.kept(split) + self.feed_forward.kept(split)

    def products(self, tokens: float, pairs: float) -> float:
        """Products of numbers in a forward pass over tokens, with so many pairs of a query and a key.

        A token is multiplied with each weight once, but only with those experts that it is routed to. A norm or a bias
        counts as much as a row of a matrix; it is negligible, like the embedding, which is looked up.
        """
        weights, experts = self.weights(Split()), self.feed_forward
        routed = weights.expert * experts.active / experts.count if isinstance(experts, Experts) else 0
        return (weights.dense + routed) * tokens + self.attention.products(tokens, pairs)

    def linear_layers(self) -> Mapping[str, int]:
        """See `LinearLayers.layers`."""
        return {**self.attention.linear_layers(), **self.feed_forward.linear_layers()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The layers of a decoder-only language model, and their dimensions."""

    hidden: int
    vocabulary: int
    """Size of the vocabulary before it is padded; 0 if `config.json` does not define it."""
    is_tied: bool
    """Whether embedding and output layer share their weights."""
    kinds: tuple[Layer, ...]
    """The different layers."""
    layers: tuple[int, ...]
    """The kind of each layer, as an index of `kinds`."""

    @property
    def attention(self) -> Attention | LatentAttention | DeltaRule:
        """That of the first layer with keys and values of all tokens; if there is none, that of the first layer."""
        return max(self.kinds, key=lambda kind: not isinstance(kind.attention, DeltaRule)).attention

    @property
    def experts(self) -> Experts | None:
        """Those of the first layer that has some; None for a dense model."""
        return next((kind.feed_forward for kind in self.kinds if isinstance(kind.feed_forward, Experts)), None)

    def stage(self, split: Split, stage: int, stages: int) -> tuple[int, ...]:
        """The kinds of the layers of a pipeline stage. Virtual stages are counted as if they were adjacent."""
        counts = split.layers_of_stages(len(self.layers), stages)
        return self.layers[sum(counts[:stage]) : sum(counts[: stage + 1])]

    def weights(self, split: Split, stage: int = 0, stages: int = 1) -> Weights:
        """Elements on a rank of a pipeline stage."""
        total = Weights(self.hidden if stage == stages - 1 else 0)  # the norm before the output layer
        of_kinds = [kind.weights(split) for kind in self.kinds]
        for layer in self.stage(split, stage, stages):
            total += of_kinds[layer]
        matrices = (stage == 0) + (stage == stages - 1)
        if self.is_tied and stages == 1:
            matrices = 1
        return total + Weights(matrices * self.columns(split) * self.hidden)

    def products(self, tokens: float, pairs: float) -> float:
        """Products of numbers in a forward pass through all layers; see `Layer.products`."""
        of_kinds = [kind.products(tokens, pairs) for kind in self.kinds]
        return sum(of_kinds[layer] for layer in self.layers)

    def head(self, split: Split) -> Weights:
        """Elements of an MTP head: a layer like the last one, three norms, and a projection of two vectors to one."""
        projection = 2 * self.hidden**2 // split.tensor
        return self.kinds[self.layers[-1]].weights(split) + Weights(projection + 3 * self.hidden)

    def kept_by_head(self, split: Split) -> float:
        """What an MTP head keeps: that of its layer, inputs of its norms, the projected vectors, and its result."""
        return self.kinds[self.layers[-1]].kept(split) + 6 * self.hidden / split.sequence

    def linear_layers(self) -> LinearLayers:
        """The linear layers that can have an adapter."""
        of_kinds, experts = [kind.linear_layers() for kind in self.kinds], self.experts
        return LinearLayers(
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            layers=tuple(of_kinds[kind] for kind in self.layers),
            experts=experts.count if experts else 0,
            alternates=experts is not None and experts.is_clamped,
        )

    def columns(self, split: Split) -> int:
        """A rank's part of the vocabulary, which is padded to equal parts."""
        return -(-self.vocabulary // split.tensor)

"""Elements of low-rank adapters, on the ranks of the learner and of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from miles_async.models.layers import Split, Weights
from miles_async.models.lora_layers import EXPERTS, HEAD, LinearLayers, buffered_modules, joins_gate_and_up

_COPIES = {"in_proj_qkv": 3}
"""How often SGLang has A of a layer, if more than once: it computes queries, keys and values as three layers."""


def elements_of_layer(
    model: LinearLayers, paths: Iterable[str], rank: int, split: Split, *, shares_outer: bool = False
) -> Weights:
    """Elements of the adapters of these linear layers of a decoder layer, on a rank of the learner.

    With `shares_outer`, experts share the matrices on the side that is as wide as the model.
    """
    widths, experts = model.widest(), model.experts // split.expert
    dense = expert = 0
    for path in paths:
        if path.startswith(f"{EXPERTS}."):
            whole = 1 if shares_outer else experts
            expert += rank * (experts * (widths[path] // split.expert_tensor) + whole * model.hidden)
        else:
            dense += rank * (widths[path] // split.tensor + model.hidden)
    return Weights(dense, expert)


def elements_of_head(model: LinearLayers, modules: Sequence[str], rank: int, ranks: int = 1) -> int:
    """Elements of the adapter of the output layer on each of the ranks that share it; 0 without one."""
    return rank * (model.hidden + model.vocabulary // ranks) if HEAD in modules else 0


def elements_in_engine(model: LinearLayers, modules: Sequence[str], rank: int, ranks: int) -> int:
    """Elements of the buffers for an adapter of these kinds of layers, on each of the ranks of an engine.

    Every decoder layer has buffers for all kinds.
    """
    buffered, total = buffered_modules(modules), 0
    widths, rank = model.widest(), engine_rank(model, modules, rank)
    for path, width in widths.items():
        if (kind := path.rpartition(".")[2]) in buffered:
            copies = model.experts if path.startswith(f"{EXPERTS}.") else 1
            total += copies * rank * (width // ranks + _COPIES.get(kind, 1) * model.hidden)
    return len(model.layers) * total + elements_of_head(model, modules, rank, ranks)


def engine_rank(model: LinearLayers, modules: Iterable[str], rank: int) -> int:
    """The rank of an adapter in engines; see `adapters/weights/engine_adapter.py`."""
    return 2 * rank if joins_gate_and_up(modules, alternates=model.alternates) else rank

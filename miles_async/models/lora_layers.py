"""Which linear layers of a model get LoRA adapters: by name, by the end of a name, or by a pattern of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from miles_async.errors import UserError

ALL_LINEAR = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "out_proj")
"""The linear layers of linear attention (Qwen3.5) that have adapters. Engines have none for `in_proj_b` and
`in_proj_a`."""
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""The linear layers of a feed-forward layer, of each expert, and of the expert that all tokens use."""
MODULES = (*ATTENTION, *FEED_FORWARD)
"""The linear layers of Llama's decoder layers, which most models have."""
KINDS = (*ATTENTION, *LINEAR_ATTENTION, *FEED_FORWARD)
"""The linear layers of all decoder layers."""
HEAD = "lm_head"
"""The output layer. As in PEFT, `all-linear` leaves it out."""
EXPERTS, SHARED_EXPERT = "mlp.experts", "mlp.shared_expert"
"""The blocks of the experts of a layer, and of the expert that all tokens use."""
_BLOCKS: Mapping[str, Sequence[str]] = {
    "self_attn": ATTENTION,
    "linear_attn": LINEAR_ATTENTION,
    "mlp": FEED_FORWARD,
    EXPERTS: FEED_FORWARD,
    SHARED_EXPERT: FEED_FORWARD,
}
"""The blocks of decoder layers with their linear layers."""
_MEGATRON_BLOCKS: Mapping[str, str] = {
    "self_attn": "self_attention",
    "linear_attn": "self_attention",
    SHARED_EXPERT: "mlp.shared_experts",
}
"""The blocks that have another name in Megatron."""
MEGATRON_NAMES: Mapping[str, Sequence[str]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z"),
    "out_proj": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "output_layer": (HEAD,),
}
"""The linear layers under the names that Megatron-Bridge, and with it verl, ROLL and Miles, give them."""
LOADED_TOGETHER: Mapping[str, Sequence[str]] = {
    "q_proj": ["v_proj"],
    "k_proj": ["q_proj", "v_proj"],
    "v_proj": ["q_proj"],
    "in_proj_qkv": ["in_proj_z"],
    "in_proj_z": ["in_proj_qkv"],
    "up_proj": ["gate_proj"],
}
"""The layers without whose adapters SGLang 0.5.20 refuses or ignores the adapter of a layer, because it joins them."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
IN_ENGINES: Mapping[str, str] = {"in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz"}
"""What SGLang calls a layer, if it has another name than the checkpoint for it."""
_PREFIXES, _MEGATRON_PREFIXES = ("model.", "model.language_model."), ("", "language_model.")
"""What precedes the names of decoder layers; models that also take images have the second ones."""
_MOST = 128
"""Layers, and experts of a layer, with which targets are compared before the model is known."""


def is_name(target: str) -> bool:
    """Whether a target is the name of a layer, such as `q_proj`, and neither a longer name nor a pattern."""
    return re.fullmatch(r"[\w-]+", target) is not None


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a model that can have an adapter."""

    hidden: int
    vocabulary: int
    layers: tuple[Mapping[str, int], ...]
    """The linear layers of each decoder layer, such as `self_attn.q_proj`, or `mlp.experts.gate_proj` for one of each
    expert. The number is the width of the side that tensor-parallel ranks divide. The other side has `hidden`."""
    experts: int = 0
    """Experts of each layer."""
    alternates: bool = False
    """Whether the model has experts like those of gpt-oss: outputs of gate and up projections alternate, and tensors of
    the checkpoint have the inputs of a layer before its outputs."""

    def widest(self) -> Mapping[str, int]:
        """The linear layers that some decoder layer has. Engines have buffers for all of them in every layer."""
        return {path: width for layer in self.layers for path, width in layer.items()}


@dataclass(frozen=True, slots=True)
class Targets:
    """The linear layers that get adapters.

    An entry of `chosen` or `excluded` chooses the layers whose name it is, or ends with, as in a list of PEFT. It may
    also be a pattern of whole names, as Megatron-Bridge and Miles (`*` stands for any text) or PEFT (a regular
    expression) take it. Names are those of the checkpoint, such as `model.layers.0.self_attn.q_proj`, or Megatron's,
    such as `decoder.layers.0.self_attention.linear_qkv`.

    A pattern is read as a regular expression only if it chooses nothing with `*` for any text. As a regular expression,
    `model.layers.1.*` would choose the layers 10 to 19, too.
    """

    chosen: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The kinds of layers that can be chosen in any model, in the order of `KINDS`, with `HEAD` at the end.

        Raises UserError if an entry chooses nothing in any model, or if nothing is left.
        """
        return _modules(self)

    def by_layer(self, model: LinearLayers) -> list[list[str]]:
        """The linear layers that are chosen in each decoder layer, named as in `LinearLayers`.

        Raises UserError if an entry chooses some of the experts of a layer.
        """
        return [
            [path for path in layer if self._has(path, number, model.experts)]
            for number, layer in enumerate(model.layers)
        ]

    def of_model(self, model: LinearLayers) -> tuple[str, ...]:
        """The entries of PEFT's `target_modules`: each is the end of the names of one or more layers.

        Raises UserError if an entry chooses nothing in the model, if nothing is left, or if it is something that PEFT
        or the engines cannot load.
        """
        for entry in self.chosen:
            if not any(_matches(entry, *candidate) for candidate in self._candidates_of(model)):
                raise UserError(
                    f"lora_target_modules: {entry} matches no linear layer of the model: remove it, or use a pattern "
                    "of names such as model.layers.0.self_attn.q_proj"
                )
        chosen = self.by_layer(model)
        names = [name for kind in KINDS for name in _entries(kind, chosen, model)]
        names += [HEAD] if self._has(HEAD, 0, 0) else []
        if not names:
            raise _nothing_left()
        return tuple(names)

    def _has(self, path: str, number: int, experts: int) -> bool:
        found = {self._has_one(path, number, expert) for expert in self._experts(path, experts)}
        if len(found) > 1:
            raise UserError(
                f"lora_target_modules chooses {_kind(path)} of some of the experts of layer {number}: use a pattern "
                "that chooses all of them, or none"
            )
        return found.pop()

    def _experts(self, path: str, experts: int) -> Sequence[int | None]:
        """The experts with which entries are compared; None stands for a layer outside of experts.

        A pattern can only tell experts apart whose numbers it has, or by how many digits their numbers have.
        """
        if not path.startswith(f"{EXPERTS}."):
            return [None]
        digits = {int(one) for entry in (*self.chosen, *self.excluded) for one in re.findall(r"\d+", entry)}
        return sorted({0, experts - 1} | {one for one in digits if one < experts})

    def _candidates_of(self, model: LinearLayers) -> Iterator[tuple[str, int, int | None]]:
        """Arguments of `_matches`: where the model has a linear layer."""
        for number, layer in enumerate(model.layers):
            for path in layer:
                yield from ((path, number, expert) for expert in self._experts(path, model.experts))
        yield HEAD, 0, None

    def _has_one(self, path: str, number: int, expert: int | None) -> bool:
        def matched(entries: Iterable[str]) -> bool:
            return any(_matches(entry, path, number, expert) for entry in entries)

        return matched(self.chosen) and not matched(self.excluded)


def _entries(kind: str, chosen: Sequence[Sequence[str]], model: LinearLayers) -> Iterator[str]:
    """The entries of PEFT's `target_modules` for layers of one kind, of those that are `chosen` in each layer."""
    all_paths = [[path for path in layer if _kind(path) == kind] for layer in model.layers]
    own_paths = [[path for path in layer if _kind(path) == kind] for layer in chosen]
    if all_paths == own_paths:
        if any(all_paths):
            yield kind
        return
    for path in dict.fromkeys(path for layer in own_paths for path in layer):
        own = [number for number, paths in enumerate(own_paths) if path in paths]
        having = [number for number, paths in enumerate(all_paths) if path in paths]
        block, is_everywhere = path.rpartition(".")[0], own == having
        if block == EXPERTS:
            if not is_everywhere:
                raise UserError(
                    f"lora_target_modules: PEFT loads adapters of experts for all layers only, and {kind} is chosen in "
                    f"{len(own)} of {len(having)}: choose all of them, or none"
                )
            # The name of the layer alone would choose the expert that all tokens use, too.
            yield from (f"experts.{expert}.{kind}" for expert in range(model.experts))
        elif is_everywhere:
            yield f"{block.rpartition('.')[2]}.{kind}"
        else:
            yield from (f"layers.{number}.{path}" for number in own)


def _kind(path: str) -> str:
    return path.rpartition(".")[2]


def select_modules(targets: Sequence[str], excluded: Sequence[str] = ()) -> tuple[str, ...]:
    """The chosen kinds of linear layers. See `Targets.modules`."""
    return Targets(tuple(targets), tuple(excluded)).modules


def buffered_modules(modules: Sequence[str]) -> list[str]:
    """The layers for whose adapters SGLang has buffers if these layers have adapters."""
    joined = {name for group in _JOINED if not {*group}.isdisjoint(modules) for name in group}
    return [name for name in (*KINDS, HEAD) if name in joined or name in modules]


def joins_gate_and_up(modules: Iterable[str], *, alternates: bool) -> bool:
    """Whether the gate and up projections of experts get one A of twice the rank in engines.

    See `adapters/weights/engine_adapter.py`; `alternates` is that of `LinearLayers`.
    """
    return alternates and not {*FEED_FORWARD}.isdisjoint(kinds_of(modules))


def engine_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Kinds of layers, or entries of PEFT's `target_modules`, with the names that SGLang has for them."""
    parts = (name.rpartition(".") for name in modules)
    return tuple(dict.fromkeys(f"{block}{dot}{IN_ENGINES.get(kind, kind)}" for block, dot, kind in parts))


def kinds_of(modules: Iterable[str]) -> tuple[str, ...]:
    """The kinds of layers among the entries of PEFT's `target_modules`, in the order of `KINDS`."""
    kinds = {_kind(name) for name in modules}
    return tuple(kind for kind in (*KINDS, HEAD) if kind in kinds)


def adapted(layers: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Those of the layers with these names that the entries of PEFT's `target_modules` choose."""
    ends = tuple(f".{one}" for one in modules)
    return [layer for layer in layers if f".{layer}".endswith(ends)]


@lru_cache
def _modules(targets: Targets) -> tuple[str, ...]:
    known = (*KINDS, HEAD)
    candidates = _anywhere(targets)
    for entry in (*targets.chosen, *targets.excluded):
        if not any(_matches(entry, *candidate) for candidate in candidates):
            others = f"use {ALL_LINEAR}, or some of {', '.join(known)}"
            if is_name(entry):
                raise UserError(f"{entry} is not a linear layer that can have an adapter: {others}")
            raise UserError(
                f"{entry} matches no linear layer that can have an adapter: {others}, or a pattern of names such as "
                "model.layers.0.self_attn.q_proj"
            )
    found = {_kind(candidate[0]) for candidate in candidates if targets._has_one(*candidate)}
    if not found:
        raise _nothing_left()
    return tuple(kind for kind in known if kind in found)


def _nothing_left() -> UserError:
    return UserError("no linear layer is left to adapt: set lora_target_modules, or shorten lora_exclude_modules")


def _matches(entry: str, path: str, number: int, expert: int | None = None) -> bool:
    """Whether an entry chooses a linear layer of a decoder layer with this number, or `HEAD`."""
    if entry == ALL_LINEAR:
        return path != HEAD
    if is_name(entry):
        return _kind(path) in MEGATRON_NAMES.get(entry, (entry,))
    pattern = _pattern(entry)
    return pattern is not None and _fits(pattern, path, number, expert)


def _fits(pattern: re.Pattern[str], path: str, number: int, expert: int | None) -> bool:
    return any(pattern.fullmatch(name) for name in _names(path, number, expert))


@lru_cache
def _pattern(entry: str) -> re.Pattern[str] | None:
    """An entry as the end of a name, with `*` for any text, or as a regular expression: the first of these that chooses
    a layer in some model. None if none does."""
    candidates = _anywhere(Targets((entry,)))
    for reading in (rf"(?:.*\.)?{re.escape(entry)}", re.escape(entry).replace(r"\*", ".*"), entry):
        try:
            pattern = re.compile(reading)
        except re.error:
            continue
        if any(_fits(pattern, *candidate) for candidate in candidates):
            return pattern
    return None


def _anywhere(targets: Targets) -> list[tuple[str, int, int | None]]:
    """Arguments of `_matches`: where any model may have a layer."""
    layer = {f"{block}.{kind}": 0 for block, kinds in _BLOCKS.items() for kind in kinds}
    return [*targets._candidates_of(LinearLayers(0, 0, (layer,) * _MOST, _MOST))]


@lru_cache(None)
def _names(path: str, number: int, expert: int | None) -> list[str]:
    """The names of a layer. `expert` is the number of the expert that it belongs to."""
    block, _, kind = path.rpartition(".")
    in_megatron = [name for name, kinds in MEGATRON_NAMES.items() if kind in kinds]
    if path == HEAD:
        return [HEAD, *(f"{prefix}{name}" for prefix in _MEGATRON_PREFIXES for name in in_megatron)]
    blocks = [_MEGATRON_BLOCKS.get(block, block)]
    if expert is not None:
        block, blocks = f"{block}.{expert}", [block, f"{block}.local_experts.{expert}"]
    return [
        *(f"{prefix}layers.{number}.{block}.{kind}" for prefix in _PREFIXES),
        *(
            f"{prefix}decoder.layers.{number}.{one}.{name}"
            for prefix in _MEGATRON_PREFIXES
            for one in blocks
            for name in in_megatron
        ),
    ]

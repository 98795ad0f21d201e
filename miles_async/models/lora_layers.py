"""Which linear layers of a model get LoRA adapters: by name, by the end of a name, or by a pattern of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from miles_async.errors import UserError

ALL_LINEAR = "all-linear"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer. If it has experts, the last three are those of each expert."""
HEAD = "lm_head"
"""The output layer. As in PEFT, `all-linear` leaves it out."""
FEED_FORWARD = MODULES[4:]
MEGATRON_NAMES: Mapping[str, Sequence[str]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "output_layer": (HEAD,),
}
"""The linear layers under the names that Megatron-Bridge, and with it verl, ROLL and Miles, give them."""
LOADED_TOGETHER = {"q_proj": ["v_proj"], "k_proj": ["q_proj", "v_proj"], "v_proj": ["q_proj"], "up_proj": ["gate_proj"]}
"""The layers without whose adapters SGLang 0.5.20 refuses or ignores the adapter of a layer, because it joins them."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PREFIXES, _MEGATRON_PREFIXES = ("model.", "model.language_model."), ("", "language_model.")
"""What precedes the names of decoder layers; models that also take images have the second ones."""
_MOST = 128
"""Layers, and experts of a layer, with which targets are compared before the model is known."""


def is_name(target: str) -> bool:
    """Whether a target is the name of a layer, such as `q_proj`, and neither a longer name nor a pattern."""
    return re.fullmatch(r"[\w-]+", target) is not None


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
        """The kinds of layers that can be chosen in any model, in the order of `MODULES`, with `HEAD` at the end.

        Raises UserError if an entry chooses nothing in any model, or if nothing is left.
        """
        return _modules(self)

    def in_layer(self, number: int, experts: int | None = None) -> tuple[str, ...]:
        """The kinds of layers that are chosen in a decoder layer, which are those of all its experts if it has some.

        Raises UserError if an entry chooses some of the experts.
        """
        return tuple(kind for kind in MODULES if self._has(kind, number, experts))

    def of_model(self, layers: int, experts: int | None = None) -> tuple[str, ...]:
        """The entries of PEFT's `target_modules`: each is the end of the names of one or more layers.

        `experts` is the number of experts of each layer. Raises UserError if an entry chooses nothing in the model, if
        nothing is left, or if it is something that PEFT or the engines cannot load.
        """
        for entry in self.chosen:
            candidates = (
                candidate for kind in (*MODULES, HEAD) for candidate in self._candidates(kind, layers, experts)
            )
            if not any(_matches(entry, *candidate) for candidate in candidates):
                raise UserError(
                    f"lora_target_modules: {entry} matches no linear layer of the model: remove it, or use a pattern "
                    "of names such as model.layers.0.self_attn.q_proj"
                )
        by_layer = [self.in_layer(number, experts) for number in range(layers)]
        names = []
        for kind in MODULES:
            own = [number for number, kinds in enumerate(by_layer) if kind in kinds]
            if experts is not None and kind in FEED_FORWARD and len(own) not in (0, layers):
                raise UserError(
                    f"lora_target_modules: PEFT loads adapters of experts for all layers only, and {kind} is chosen in "
                    f"{len(own)} of {layers}: choose all of them, or none"
                )
            block = "mlp" if kind in FEED_FORWARD else "self_attn"
            names += [kind] if len(own) == layers else [f"layers.{number}.{block}.{kind}" for number in own]
        names += [HEAD] if self._has(HEAD, 0, None) else []
        if not names:
            raise _nothing_left()
        return tuple(names)

    def _has(self, kind: str, number: int, experts: int | None) -> bool:
        found = {self._has_one(kind, number, expert) for expert in self._experts(kind, experts)}
        if len(found) > 1:
            raise UserError(
                f"lora_target_modules chooses {kind} of some of the experts of layer {number}: use a pattern that "
                "chooses all of them, or none"
            )
        return found.pop()

    def _experts(self, kind: str, experts: int | None) -> Sequence[int | None]:
        """The experts with which entries are compared; None stands for a layer without experts.

        A pattern can only tell experts apart whose numbers it has, or by how many digits their numbers have.
        """
        if experts is None or kind not in FEED_FORWARD:
            return [None]
        digits = {int(one) for entry in (*self.chosen, *self.excluded) for one in re.findall(r"\d+", entry)}
        return sorted({0, experts - 1} | {one for one in digits if one < experts})

    def _candidates(self, kind: str, layers: int, experts: int | None) -> Iterator[tuple[str, int, int | None]]:
        """Arguments of `_matches`: where a model may have a layer of this kind."""
        for number in range(1 if kind == HEAD else layers):
            for expert in self._experts(kind, experts):
                yield kind, number, expert

    def _has_one(self, kind: str, number: int, expert: int | None) -> bool:
        def matched(entries: Iterable[str]) -> bool:
            return any(_matches(entry, kind, number, expert) for entry in entries)

        return matched(self.chosen) and not matched(self.excluded)


def select_modules(targets: Sequence[str], excluded: Sequence[str] = ()) -> tuple[str, ...]:
    """The chosen kinds of linear layers. See `Targets.modules`."""
    return Targets(tuple(targets), tuple(excluded)).modules


def buffered_modules(modules: Sequence[str]) -> list[str]:
    """The layers for whose adapters SGLang has buffers if these layers have adapters."""
    joined = {name for group in _JOINED if not {*group}.isdisjoint(modules) for name in group}
    return [name for name in (*MODULES, HEAD) if name in joined or name in modules]


def kinds_of(modules: Iterable[str]) -> tuple[str, ...]:
    """The kinds of layers among the entries of PEFT's `target_modules`, in the order of `MODULES`."""
    kinds = {name.rpartition(".")[2] for name in modules}
    return tuple(kind for kind in (*MODULES, HEAD) if kind in kinds)


def adapted(layers: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Those of the layers with these names that the entries of PEFT's `target_modules` choose."""
    ends = tuple(f".{one}" for one in modules)
    return [layer for layer in layers if f".{layer}".endswith(ends)]


@lru_cache
def _modules(targets: Targets) -> tuple[str, ...]:
    known = (*MODULES, HEAD)
    candidates = _anywhere(targets)
    for entry in (*targets.chosen, *targets.excluded):
        if not any(_matches(entry, *candidate) for candidate in candidates):
            others = f"use {ALL_LINEAR}, or some of {', '.join(known)}"
            if is_name(entry):
                raise UserError(f"{entry} is no linear layer that can have an adapter: {others}")
            raise UserError(
                f"{entry} matches no linear layer that can have an adapter: {others}, or a pattern of names such as "
                "model.layers.0.self_attn.q_proj"
            )
    found = tuple(
        kind for kind in known if any(targets._has_one(*candidate) for candidate in candidates if candidate[0] == kind)
    )
    if not found:
        raise _nothing_left()
    return found


def _nothing_left() -> UserError:
    return UserError("no linear layer is left to adapt: set lora_target_modules, or shorten lora_exclude_modules")


def _matches(entry: str, kind: str, number: int, expert: int | None = None) -> bool:
    if entry == ALL_LINEAR:
        return kind != HEAD
    if is_name(entry):
        return kind in MEGATRON_NAMES.get(entry, (entry,))
    pattern = _pattern(entry)
    return pattern is not None and _fits(pattern, kind, number, expert)


def _fits(pattern: re.Pattern[str], kind: str, number: int, expert: int | None) -> bool:
    return any(pattern.fullmatch(name) for name in _names(kind, number, expert))


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
    return [
        candidate
        for kind in (*MODULES, HEAD)
        for experts in (None, _MOST)
        for candidate in targets._candidates(kind, _MOST, experts)
    ]


@lru_cache(None)
def _names(kind: str, number: int, expert: int | None) -> list[str]:
    """The names of a layer. `expert` is the number of the expert that it belongs to."""
    in_megatron = [name for name, kinds in MEGATRON_NAMES.items() if kind in kinds]
    if kind == HEAD:
        return [HEAD, *(f"{prefix}{name}" for prefix in _MEGATRON_PREFIXES for name in in_megatron)]
    block, blocks = "self_attn", ["self_attention"]
    if kind in FEED_FORWARD:
        block, blocks = "mlp", ["mlp"]
        if expert is not None:
            block, blocks = f"mlp.experts.{expert}", ["mlp.experts", f"mlp.experts.local_experts.{expert}"]
    return [
        *(f"{prefix}layers.{number}.{block}.{kind}" for prefix in _PREFIXES),
        *(
            f"{prefix}decoder.layers.{number}.{one}.{name}"
            for prefix in _MEGATRON_PREFIXES
            for one in blocks
            for name in in_megatron
        ),
    ]

"""The engine's own layout of the weights: which slice of which Hugging Face tensor lies where in which parameter.

SGLang joins the query, key and value projections into `qkv_proj` and the gate and up projections into `gate_up_proj`,
pads the vocabulary, and gives each tensor-parallel rank its part: output features of column-parallel layers, input
features of row-parallel ones, rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from miles_async.adapters.weights.writer import NamedTensors
from miles_async.errors import Fatal

_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
"""Projection: the parameter it is part of, its place in it, and how many parts that has."""
_ROW_PARALLEL = {"o_proj", "down_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter of one rank, `[offset, offset + numel)` in the staging buffer, in elements."""

    rank: int
    parameter: str
    offset: int
    numel: int


class FusedStaging:
    """A buffer that holds the weights as the engine's ranks hold them.

    `sizes` gives the number of elements per parameter, one mapping per tensor-parallel rank.
    """

    def __init__(self, sizes: Sequence[Mapping[str, int]], dtype: torch.dtype) -> None:
        self.sizes = [dict(rank) for rank in sizes]
        self.pieces: list[Piece] = []
        offset = 0
        for rank, parameters in enumerate(self.sizes):
            for parameter, numel in parameters.items():
                self.pieces.append(Piece(rank, parameter, offset, numel))
                offset += numel
        self.buffer = torch.zeros(offset, dtype=dtype)
        self._views = {
            (piece.rank, piece.parameter): self.buffer[piece.offset : piece.offset + piece.numel]
            for piece in self.pieces
        }

    @torch.no_grad()
    def fill(self, named_tensors: NamedTensors) -> None:
        """Copy full Hugging Face tensors in, in whatever order they come; parts of a fused one wait for each other.

        Raises Fatal when a parameter of the engine stays without weights or a tensor does not fit.
        """
        missing = set(self._views)
        waiting: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in named_tensors:
            module, _, kind = name.rpartition(".")
            path, _, layer = module.rpartition(".")
            fused, place, parts = _FUSED.get(layer, (layer, 0, 1))
            target = f"{path}.{fused}.{kind}" if path else f"{fused}.{kind}"
            if target not in self.sizes[0]:
                if layer in _VOCABULARY:
                    continue  # a tied output layer has no memory of its own in the engine
                raise Fatal(f"the engine has no parameter {target} for {name}; set weight_transfer to broadcast")
            together = waiting.setdefault(target, {})
            together[place] = tensor
            if len(together) == parts:
                del waiting[target]
                self._place(target, layer, [together[part] for part in range(parts)])
                missing -= {(rank, target) for rank in range(len(self.sizes))}
        if missing:
            _, parameter = min(missing)
            raise Fatal(f"the learner exported nothing for the engine's parameter {parameter}")

    def _place(self, target: str, layer: str, tensors: Sequence[torch.Tensor]) -> None:
        for rank in range(len(self.sizes)):
            view, offset = self._views[rank, target], 0
            for tensor in tensors:
                shard = self._shard(layer, tensor, rank, view.numel())
                view[offset : offset + shard.numel()].view_as(shard).copy_(shard)
                offset += shard.numel()
            if offset != view.numel() and layer not in _VOCABULARY:
                raise Fatal(
                    f"{target} has {view.numel()} elements in the engine and {offset} in the learner; "
                    "set weight_transfer to broadcast, where the engine splits the weights itself"
                )

    def _shard(self, layer: str, tensor: torch.Tensor, rank: int, numel: int) -> torch.Tensor:
        """Rank's part of a full tensor; `numel` is the size of the whole parameter on that rank."""
        ranks = len(self.sizes)
        if layer in _VOCABULARY:
            rows = numel // tensor.shape[1]
            return tensor[rank * rows : (rank + 1) * rows]
        if ranks == 1 or (tensor.dim() == 1 and layer not in _FUSED):
            return tensor
        return tensor.chunk(ranks, dim=1 if layer in _ROW_PARALLEL else 0)[rank]

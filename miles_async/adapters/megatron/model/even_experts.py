"""Experts that all get equally many tokens, for fake tensors, which have no contents to decide where a token goes."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily


class EvenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Keeps what Megatron's all-to-all dispatcher keeps for the backward pass.

    Expert-parallel ranks exchange equally many tokens, which changes no shape, so they exchange none. Ranks that share
    an expert gather the tokens of each other.
    """

    def __init__(self, layer: MoELayer) -> None:
        usual = layer.token_dispatcher
        groups = ProcessGroupCollection(ep=usual.ep_group, expt_tp=usual.tp_group, tp_ep=usual.tp_ep_group)
        super().__init__(layer.config, groups)
        self._experts = layer.num_local_experts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[t * active, h] and [t * active] from `hidden_states` [t, 1, h] and `probs` [t, experts]."""
        self._shape = hidden_states.shape
        tokens = hidden_states.view(-1, self._shape[-1])
        self._order = torch.empty(len(tokens) * self.config.moe_router_topk, dtype=torch.int64)
        return tokens.index_select(0, self._order), probs.T.contiguous().view(-1).index_select(0, self._order)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of this rank's experts, the number of each expert's, and the rows' weights."""
        rows = len(hidden_states) * self.tp_size
        bounds = [rows * expert // self._experts for expert in range(self._experts + 1)]
        with unset_fake_temporarily():
            counts = torch.tensor(bounds).diff()
        return hidden_states.repeat(self.tp_size, 1), counts, probs.repeat(self.tp_size)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[: len(self._order)].clone()

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns [t, 1, h] from `hidden_states` [t * active, h]."""
        order = self._order[:, None].expand_as(hidden_states)
        combined = hidden_states.new_zeros(self._shape).view(-1, self._shape[-1])
        return combined.scatter_add_(0, order, hidden_states).view(self._shape)


def distribute_evenly(chunk: torch.nn.Module) -> None:
    """Let all experts of a chunk get equally many tokens."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher = EvenDispatcher(module)

"""The columns of a micro-batch from which losses are computed: one entry per trained token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Inputs of the loss, [m] each: one entry per trained token of a micro-batch. Log-probabilities are in nats."""

    old_logprobs: Tensor
    """Under the weights before the first optimizer step on the batch."""
    rollout_log_probs: Tensor
    """As the engines reported them."""
    advantages: Tensor
    rewards: Tensor
    """Of the token's sample, with the penalty on its length."""
    loss_weights: Tensor
    """Factor of each token in the sum over tokens. All ones give the mean over tokens."""
    sequences: Tensor
    """Number of the token's sequence in the micro-batch, ascending."""
    staleness: Tensor
    """Weight version of the learner minus the version that sampled the token."""
    reference_logprobs: Tensor | None = None
    """Under the frozen reference model; None if there is none."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[m, ...] the entries of each token column of a plug-in, by name (`miles_async/columns/column.py`)."""

    def take(self, indices: Tensor | slice) -> TokenColumns:
        """The entries of the tokens at `indices`, ascending."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(TokenColumns) if entry.name != "columns"}
        taken: dict[str, Any] = {name: None if values is None else values[indices] for name, values in own.items()}
        return TokenColumns(**taken, columns={name: values[indices] for name, values in self.columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens(TokenColumns):
    """What a function of the form `fn(args, tokens)` gets. `old_logprobs` carry no gradient."""

    logprobs: Tensor
    """[m] under the weights being trained; with a gradient."""
    entropy: Tensor
    """[m] of the distribution from which the token was sampled; with a gradient."""

    @classmethod
    def of(cls, logprobs: Tensor, entropy: Tensor, columns: TokenColumns) -> LossTokens:
        """The columns with the results of the forward pass."""
        values = {entry.name: getattr(columns, entry.name) for entry in fields(TokenColumns)}
        values["old_logprobs"] = columns.old_logprobs.detach()
        return cls(logprobs=logprobs, entropy=entropy, **values)

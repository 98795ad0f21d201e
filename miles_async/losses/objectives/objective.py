"""What an objective of the policy update provides.

An objective is a subclass of `Objective` (see `miles_async/plugins.py`), which `--policy-objective` selects:

    [project.entry-points."miles_async.losses.objectives"]
    my_objective = "my_package:MyObjective"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from miles_async.plugins import Kind, Plugin

if TYPE_CHECKING:
    from torch import Tensor

LossAggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The trained tokens of a micro-batch, as an objective takes them. Tensors are [m]; log-probabilities are in nats.

    The tokens of a sequence are always complete, whatever the parallel layout.
    """

    logprobs: Tensor
    """Under the weights being trained; with a gradient."""
    ratio: Tensor
    """Probability under the weights being trained divided by that before the first optimizer step on the batch; with a
    gradient. Tokens that the off-policy correction leaves out have a ratio of 1 without a gradient."""
    old_logprobs: Tensor
    """Under the weights before the first optimizer step on the batch."""
    rollout_log_probs: Tensor
    """As the engines reported them."""
    advantages: Tensor
    rewards: Tensor
    """Of the token's sample, with the penalty on its length."""
    sequences: Tensor
    """Number of the token's sequence in the micro-batch, ascending."""
    clip: tuple[float, float]
    """Lower and upper clip range; zeros if the objective has none and none is set."""
    prepared: Any = None
    """What `Objective.prepare_step` returned for the optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The n trained tokens of an optimizer step on all ranks. Tensors are [n], without gradients, in any order."""

    logprobs: Tensor
    """Under the weights before the step."""
    old_logprobs: Tensor
    """Under the weights before the first optimizer step on the batch."""
    rollout_log_probs: Tensor
    """As the engines reported them."""
    advantages: Tensor


class Objective(Plugin):
    """How far a token may move away from the policy before the step, or from the policy that sampled it.

    The class variables are what the authors of the objective used. Settings that are unset have these values.
    """

    paper: ClassVar[str | None] = None
    """The paper and its section. Settings that are far from the values below are noted; None turns this off."""
    aggregation: ClassVar[LossAggregation | None] = None
    """Mean over tokens; None for sequence_mean where the paper does not insist on one."""
    clip: ClassVar[tuple[float, float] | None] = None
    """Lower and upper clip range; None if the objective does not use `eps_clip` and `eps_clip_high`."""
    clip_is_published: ClassVar[bool] = True
    """Whether the paper names the clip range."""
    clips_log_ratios: ClassVar[bool] = False
    """Whether the clip range is one of log-ratios instead of ratios."""
    corrects: ClassVar[bool] = False
    """Whether the ratio is to the policy that sampled, so that an off-policy correction would count it twice."""
    ratio_of_sequence: ClassVar[bool] = False
    """Whether a sequence has one ratio, so that every token moves all tokens of its sequence."""
    scales_with_advantage: ClassVar[bool] = False
    """Whether a token without an advantage has neither an objective nor any influence on other tokens. Samples without
    an advantage then need no pass through the model."""
    reads_step: ClassVar[bool] = False
    """Whether `prepare_step` is called before each optimizer step. It costs a forward pass."""

    def compute(self, tokens: PolicyTokens, settings: Any) -> tuple[Tensor, Tensor]:
        """Return the objective [m] of each token, which is maximized, and [m] 1 where a bound changed it, else 0.

        The importance weight of the off-policy correction is multiplied later. `settings` is an instance of `Settings`.
        """
        raise NotImplementedError

    def prepare_step(self, tokens: StepTokens, settings: Any) -> Any:
        """Return what `compute` needs to know of the whole optimizer step. All ranks are given the same tokens."""


OBJECTIVES = Kind("policy objective", Objective, "miles_async.losses.objectives")

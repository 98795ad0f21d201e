"""The learning rate of every optimizer step, with the shapes and names of Megatron's scheduler.

Megatron's `OptimizerParamScheduler` is not used because its first step has a rate of 0, which wastes one batch, it
drops to the floor when an inverse square root reaches `decay_steps`, and it advances by state inside an optimizer. Here
the rate is a function of the step number alone, so a resumed run needs nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
AnnealStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then decay to `floor` in the shape of `style`.

    The first step has the rate `peak / warmup_steps`. The rate reaches `floor` at step `decay_steps` and stays there.
    `WSD` (warm-up, stable, decay: MiniCPM, arXiv 2404.06395) stays at the peak until `wsd_decay_steps` before the end
    and then decays in the shape of `wsd_decay_style`. `inverse-square-root` (Vaswani et al. 2017, arXiv 1706.03762)
    ignores `decay_steps` and decays until it reaches the floor.
    """

    peak: float
    decay_steps: int
    """Optimizer step, counted from 0, at which the decay ends."""
    warmup_steps: int = 0
    style: DecayStyle = "constant"
    floor: float = 0.0
    wsd_decay_steps: int = 1
    wsd_decay_style: AnnealStyle = "linear"

    def at(self, step: int, of_run: int | None = None) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        If a run trains several adapters, `step` counts those of one adapter, which are its warm-up, and `of_run` those
        of all, with which the rate decays. So each adapter reaches the floor at the end of the run, whatever its share.
        """
        decayed = self._decayed(step if of_run is None else of_run)
        return min(decayed, self.peak * (step + 1) / self.warmup_steps) if step < self.warmup_steps else decayed

    def _decayed(self, step: int) -> float:
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        start = self.decay_steps - self.wsd_decay_steps if self.style == "WSD" else self.warmup_steps
        progress = min(1.0, max(0.0, (step - start) / max(self.decay_steps - start, 1)))
        shape = self.wsd_decay_style if self.style == "WSD" else self.style
        return self.floor + (self.peak - self.floor) * _remaining(shape, progress)


def _remaining(shape: str, progress: float) -> float:
    """Fraction of the distance from peak to floor that remains at `progress`, which goes from 0 to 1."""
    if shape == "cosine":
        return (math.cos(math.pi * progress) + 1) / 2
    if shape == "exponential":
        return 2 * math.exp2(-progress) - 1
    if shape == "minus_sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


def learning_rate(config: RunConfig) -> LearningRate:
    """The policy's learning rate. It decays until the end of the run unless `lr_decay_steps` is set."""
    learner = config.learner
    decay_steps = learner.lr_decay_steps or config.rollout.num_rollout * config.steps_per_rollout
    fraction = learner.lr_warmup_fraction
    warmup = learner.lr_warmup_steps if fraction is None else int(fraction * decay_steps)
    return LearningRate(
        peak=learner.lr,
        floor=learner.min_lr,
        warmup_steps=warmup,
        style=learner.lr_decay_style,
        decay_steps=decay_steps,
        wsd_decay_steps=learner.lr_wsd_decay_steps or max(1, decay_steps // 10),
        wsd_decay_style=learner.lr_wsd_decay_style,
    )


def critic_learning_rate(config: RunConfig) -> LearningRate:
    """The critic's learning rate: the policy's schedule with the critic's peak and warm-up."""
    peak, warmup = config.algorithm.critic_lr or config.learner.lr, config.algorithm.critic_lr_warmup_steps
    return replace(learning_rate(config), peak=peak, warmup_steps=warmup)

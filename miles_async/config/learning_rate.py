"""The learning rate of every optimizer step, in the shapes and under the names of Megatron's scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
AnnealStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Up in a straight line, then down in the shape of `style`, from `peak` to `floor`.

    Step 0 already learns, at `peak / warmup_steps`; `floor` is reached at step `decay_steps` and kept. `WSD` stays at
    the peak until `wsd_decay_steps` before it (warm-up, stable, decay: MiniCPM, arXiv 2404.06395) and then falls in the
    shape of `wsd_decay_style`; `inverse-square-root` goes on falling (Vaswani et al. 2017, arXiv 1706.03762).
    """

    peak: float
    decay_steps: int
    warmup_steps: int = 0
    style: DecayStyle = "constant"
    floor: float = 0.0
    wsd_decay_steps: int = 1
    wsd_decay_style: AnnealStyle = "linear"

    def at(self, step: int) -> float:
        """Of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        start = self.decay_steps - self.wsd_decay_steps if self.style == "WSD" else self.warmup_steps
        done = min(1.0, max(0.0, (step - start) / max(self.decay_steps - start, 1)))
        shape = self.wsd_decay_style if self.style == "WSD" else self.style
        return self.floor + (self.peak - self.floor) * _left(shape, done)


def _left(shape: str, done: float) -> float:
    """What is left of the way down, from 1 to 0, when `done` of its steps are."""
    if shape == "cosine":
        return (math.cos(math.pi * done) + 1) / 2
    if shape == "exponential":
        return 2 * math.exp2(-done) - 1
    if shape == "minus_sqrt":
        return 1 - math.sqrt(done)
    return 1 - done

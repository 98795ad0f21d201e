"""An environment of `verifiers`: name the largest of some digits.

python train_async.py --config configs/verifiers-cpu.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Largest"]


class DigitsData(vf.TaskData):
    answer: str


class Digits(vf.Task[DigitsData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def is_a_digit(self, trace: vf.Trace) -> float:
        reply = trace.last_reply.strip()
        return float(len(reply) == 1 and reply.isdigit())


class LargestConfig(vf.TasksetConfig):
    digits: int = 5
    """Digits per task."""


class Largest(vf.Taskset[Digits, LargestConfig]):
    INFINITE = True

    def load(self) -> Iterator[Digits]:
        draw = random.Random(0)
        while True:
            digits = draw.choices("0123456789", k=self.config.digits)
            yield Digits(DigitsData(prompt=" ".join(digits), answer=max(digits)), self.config.task)

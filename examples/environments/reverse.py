"""An environment of `verifiers`: write a word backwards.

python train_async.py --config configs/verifiers-cpu.yaml
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import zip_longest

import verifiers.v1 as vf

__all__ = ["Reverse"]


class WordData(vf.TaskData):
    answer: str


class Word(vf.Task[WordData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        """The fraction of letters in the right place."""
        pairs = list(zip_longest(trace.last_reply.strip(), self.data.answer))
        return sum(written == right for written, right in pairs) / len(pairs)


class ReverseConfig(vf.TasksetConfig):
    letters: int = 4
    """Letters per word."""


class Reverse(vf.Taskset[Word, ReverseConfig]):
    INFINITE = True

    def load(self) -> Iterator[Word]:
        draw = random.Random(0)
        while True:
            word = "".join(draw.choices(string.ascii_lowercase, k=self.config.letters))
            yield Word(WordData(prompt=word, answer=word[::-1]), self.config.task)
